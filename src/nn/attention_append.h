// What a step of decoding does with its projections before attention, in one launch.
#pragma once

#include "tidegate/nn/softmax_attention.h"

namespace tidegate::nn {

/// A token of each of B sequences, before it is in the cache.
struct AppendedToken {
  torch::Tensor projected;  // `[B, (H + 2 Hkv) D or more]`: q, k, v
  torch::Tensor mixes;      // logits of KV-shift `[B, 2 Hkv]`; undefined without
  NormImpl* q_norm = nullptr;
  NormImpl* k_norm = nullptr;
  double theta = 0;  // of rotary positions; zero without
  TokenGate gate;
};

/// Whether append_token() takes tokens and states like these: on CUDA, in one dtype of at most 32
/// bits, outside autocast, of heads of up to 256 channels.
bool can_append_token(const torch::Tensor& x, const AttentionState& state);

/// Puts the token into the state, but for `room`, and returns its queries `[B, H, D]`; undefined,
/// with the state as it was, where a tensor does not fit (a bias or bound of another dtype).
torch::Tensor append_token(const AppendedToken& token, const AttentionState& state, int64_t heads);

}  // namespace tidegate::nn
