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

/// layers.{k}.{i}, logits, tokens: contiguous, on the CPU.
TensorMap pack_state(const SavedState& saved);

/// The reverse, on the model's device. Throws c10::ValueError, beginning with `owner`, for what is
/// not a state of this model.
SavedState unpack_state(const char* owner, const TensorMap& saved, const CausalLMImpl& model,
                        at::Device device);

}  // namespace tidegate::models
