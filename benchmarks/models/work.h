// What is measured of one model: a training step, decoding, and attention by itself.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include "tidegate/models/causal_lm.h"

#include <cstdint>
#include <optional>
#include <string>

#include "benchmarks/models/split.h"

namespace tidegate::benchmarks {

/// How everything is measured.
struct Setup {
  c10::Device device = c10::kCPU;
  bool is_bf16 = false;  // autocast in training, the model itself in decoding
  int64_t tokens = 0;    // of a training step, and held by the batch that decodes
  int64_t steps = 5;     // timed, after one that is not
  int64_t decode_tokens = 32;
  std::string recompute = "none";    // of training, as Backbone has it
  bool has_narrow_residual = false;  // a residual stream of bf16 in training
  double seconds = 5.0;  // of one measurement's steps: fewer are timed where they take longer

  int64_t batch(int64_t context) const { return tokens / context; }
};

struct TrainResult {
  double step = 0, forward = 0, backward = 0, optimizer = 0;  // seconds, medians
  int64_t steps = 0;
  double first_loss = 0, last_loss = 0;
  std::optional<int64_t> peak_bytes;
  StepSplit split;   // of one step more
  double floor = 0;  // seconds: see Speeds
};

struct DecodeResult {
  double prefill = 0, token = 0;  // seconds; of a token for each sequence of the batch, a median
  int64_t state_bytes = 0;        // of the batch
  double error = 0;               // of a step's logits against those of the parallel form
};

/// A model on the setup's device. Its numbers are as good as drawn ones: the first block's are
/// drawn, the other blocks have the same, since 360M numbers from one generator take seconds.
models::CausalLM make_model(const models::LMConfig& config, const Setup& setup);

/// Steps of fused AdamW on one batch [tokens / context, context] of random ids: forward, backward,
/// optimiser. Throws c10::Error where the loss is not finite.
TrainResult measure_training(models::CausalLM& model, const Setup& setup, int64_t context,
                             const Speeds& speeds);

/// Reads prompts [tokens / context, context], then goes on token by token. Throws c10::Error where
/// steps do not give what the parallel form gives.
DecodeResult measure_decoding(models::CausalLM& model, const Setup& setup, int64_t context);

/// Attention itself, forward and backward, in the shapes, strides and dtype of the model's
/// training step: seconds of one layer's.
struct AttentionResult {
  std::string op;
  int64_t heads = 0, head_dim = 0;
  double forward = 0, backward = 0;
};
AttentionResult measure_attention(const models::LMConfig& config, const Setup& setup,
                                  int64_t context);

}  // namespace tidegate::benchmarks
