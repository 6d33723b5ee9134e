#pragma once

// Blocks whose activations are computed again in the backward pass instead of being kept.

#include "tidegate/models/block.h"

#include <functional>
#include <optional>
#include <tuple>

namespace tidegate::models {

/// Calls block.forward(x, {}, gamma, cu_seqlens), of which autograd keeps x, gamma and the offsets
/// alone. Gradients are the same bits: autocast and, where the block draws numbers in training, the
/// generators are set back to what they were. They cannot be differentiated again.
std::tuple<torch::Tensor, nn::MixerState> forward_recomputed(
    BlockImpl& block, const torch::Tensor& x, const std::optional<torch::Tensor>& gamma,
    const std::optional<torch::Tensor>& cu_seqlens);

}  // namespace tidegate::models
