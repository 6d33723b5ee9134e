// The engine below generate() and Decoder: rows of a batch that go on, step by step, on their
// device.
#pragma once

#include "tidegate/models/causal_lm.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "src/models/device_work.h"
#include "src/models/row_states.h"
#include "src/models/sampling.h"

namespace tidegate::models {

struct RowsOptions {
  int64_t rows = 1;
  int64_t capacity = 0;  // tokens a sequence, for layers that keep them; it grows
  int64_t window = 16;   // tokens a row that wait for the host at most
  int64_t stops = 1;     // tokens that end a row, at most
  bool log_probs = false;
  // On the CPU, a step takes one row after another, which then has the same bits wherever it
  // stands: torch's functions there take the last elements of a tensor in another way than those
  // before.
  bool row_by_row = false;
};

/// Tokens of the first rows on their way to the host.
struct RowTokens {
  int64_t rows, steps;
  HostCopy tokens, log_probs;  // `[rows, window]`, rings: column drawn % window
  HostCopy lengths;            // `[layers, rows]`, of layers that keep tokens
  int64_t capacity;            // of these

  /// Waits for the tokens. Throws where a layer had no room for one that the steps have read.
  const torch::Tensor& wait();
};

/// Rows of a batch. A step draws every row's next token from its logits and reads it: sampling,
/// embedding, layers, head, stop conditions, as one CUDA graph for each number of rows. Everything
/// that a step reads or writes is on the device, and stays where it is.
class DecoderRows {
 public:
  DecoderRows(CausalLMImpl& model, const RowsOptions& options);
  ~DecoderRows();
  DecoderRows(const DecoderRows&) = delete;
  DecoderRows& operator=(const DecoderRows&) = delete;

  /// Whether these serve for what `options` ask, by graphs that are still true: of the model's
  /// parameters of now.
  bool fit(const CausalLMImpl& model, const RowsOptions& options) const;
  /// Computes anew what steps keep of the parameters: the lower bounds. Steps do so where the
  /// parameters' versions say that they have been trained in place.
  void refresh();

  /// Rows from `first` on begin: the logits after the prompts, their states, how many tokens these
  /// hold, how to go on; `seen` as SampledRows::write() takes it.
  void begin(int64_t first, const torch::Tensor& logits, const ModelState& state,
             const std::vector<int64_t>& lengths, const std::vector<RowSettings>& settings,
             const torch::Tensor& seen);
  /// Row `to` becomes what row `from` is.
  void copy_row(int64_t from, int64_t to);
  /// The row's state and logits `[1, vocab]`, memory of their own.
  std::pair<ModelState, torch::Tensor> read_row(int64_t row) const;
  /// The row goes on from where it is, by other settings.
  void restart_row(int64_t row, const RowSettings& settings, const torch::Tensor& seen);

  /// Until the device is done with all steps.
  void wait() const { stream_.wait(); }
  /// False once a step has failed midway: some layers have read a token that others have not.
  bool is_trusted() const { return is_trusted_; }

  /// Makes a row of tokens seen before part of every step.
  void ask_for_penalties();

  /// So many steps of the first `count` rows, at most `window` between two fetches, of which those
  /// from `active` on are idle. Returns before the device is done.
  void advance(int64_t count, int64_t steps, int64_t active);
  RowTokens fetch(int64_t count, int64_t steps) const;

  int64_t capacity() const { return states_.capacity(); }
  bool keeps_tokens() const { return states_.keeps_tokens(); }
  int64_t bytes() const;
  at::Device device() const { return device_; }
  const RowsOptions& options() const { return options_; }

 private:
  struct Steps {
    ModelState views;
    CapturedWork one;
    CapturedWork several;  // whose states are written by the last one (ops::DeferredStates)
    bool defers = false;   // several are faster than as many times one
  };

  void keep_logits_of(const torch::Tensor& logits);
  void step(int64_t count, const ModelState& state);
  /// So many steps; whether they would have been faster had they deferred states.
  bool step_deferred(int64_t count, const ModelState& state, int64_t steps);
  void follow_training();
  void make_room(int64_t count, int64_t steps, int64_t active);
  void forget_graphs();

  CausalLMImpl& model_;
  const RowsOptions options_;
  const at::Device device_;
  std::vector<std::pair<const void*, at::ScalarType>> parameters_;
  OwnStream stream_;
  RowStates states_;
  SampledRows sampled_;
  torch::Tensor logits_;  // `[rows, vocab]`
  std::vector<std::optional<torch::Tensor>> bounds_;
  std::vector<int64_t> bounds_versions_;  // of what they were computed from
  bool is_trusted_ = true;
  std::vector<int64_t> lengths_;    // a bound on the tokens that a row holds
  std::map<int64_t, Steps> steps_;  // by the number of rows
};

/// The rows that a model's last generate() used, for the next one that asks for as many: their
/// graphs need not be captured again.
class KeptRows {
 public:
  std::unique_ptr<DecoderRows> take(const CausalLMImpl& model, const RowsOptions& options);
  /// Keeps them unless they are a large part of the device's memory.
  void put(std::unique_ptr<DecoderRows> rows);

 private:
  std::mutex lock_;
  std::unique_ptr<DecoderRows> rows_;
};

/// Throws c10::ValueError, beginning with `owner`, where the rows need more memory than there is;
/// nothing is allocated. `rows_name`: the owner's argument that says how many rows there are.
void check_memory(const char* owner, const char* rows_name, const CausalLMImpl& model,
                  const RowsOptions& wanted);

}  // namespace tidegate::models
