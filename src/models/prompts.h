// Reading prompts, in passes of bounded memory.
#pragma once

#include "tidegate/models/causal_lm.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace tidegate::models {

/// What a pass leaves: of `count` prompts from number `first` on the logits after their last tokens
/// `[count, vocab]`, and their states.
struct ReadPrompts {
  int64_t first;
  torch::Tensor logits;
  ModelState state;
};

class PromptReader {
 public:
  /// chunk: tokens of a pass. is_alone: whether a pass has one prompt only.
  PromptReader(CausalLMImpl& model, int64_t chunk, bool is_alone = false)
      : model_(model), chunk_(chunk), is_alone_(is_alone) {}

  /// Prompts `[length]` each, none empty: short ones together, laid end to end, those of more than
  /// a chunk in pieces, one by one. `take` gets the passes' results in order.
  void read(const std::vector<torch::Tensor>& prompts,
            const std::function<void(const ReadPrompts&)>& take) const;
  /// One prompt after what `state`, of one sequence, has read.
  ReadPrompts read_after(const torch::Tensor& prompt, const ModelState& state) const;

 private:
  ReadPrompts read_together(int64_t first, const std::vector<torch::Tensor>& prompts) const;
  std::optional<ModelState> empty_state(int64_t count, int64_t capacity) const;

  CausalLMImpl& model_;
  int64_t chunk_;
  bool is_alone_;
};

}  // namespace tidegate::models
