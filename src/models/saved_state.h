// The state of one sequence as named tensors, which a safetensors file holds.
#pragma once

#include "tidegate/models/causal_lm.h"
#include "tidegate/models/safetensors.h"

#include <cstdint>
#include <vector>

namespace tidegate::models {

struct SavedState {
  ModelState state;             // of one sequence
  torch::Tensor logits;         // `[1, vocab]` after its last token
  std::vector<int64_t> tokens;  // what it has read
};

/// layers.{k}.{i}, logits, tokens: contiguous, on the CPU. And config: the bytes of the JSON text
/// of what the state depends on of the configuration, which is all but what training alone reads.
TensorMap pack_state(const SavedState& saved, const LMConfig& config);

/// The reverse, on the model's device. Throws c10::ValueError, beginning with `owner`, for what is
/// not a state of this model: where `config` says that a model of another configuration made it
/// (states of HGRN and LRU have the same shapes, and those of windows, whatever they are), or a
/// tensor is not as the model makes it. What has no `config`, as from before 2026-11, is looked at
/// tensor by tensor alone.
SavedState unpack_state(const char* owner, const TensorMap& saved, const CausalLMImpl& model,
                        at::Device device);

}  // namespace tidegate::models
