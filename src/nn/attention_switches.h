// Resolving the options that Attention and ForgettingAttention share.
#pragma once

#include "tidegate/nn/softmax_attention.h"

#include <algorithm>

#include "src/nn/common.h"

namespace tidegate::nn {

/// The options with every default filled in. Throws c10::ValueError, naming the owner, for those
/// that are unknown or do not fit each other.
template <typename Options>
SoftmaxAttentionSwitches resolve_switches(const char* owner, const Options& options) {
  check_positive(owner, "dim", options.dim());
  const int64_t heads = options.num_heads().value_or(std::max<int64_t>(options.dim() / 64, 1));
  check_positive(owner, "num_heads", heads);
  TORCH_CHECK_VALUE(options.dim() % heads == 0, owner,
                    ": num_heads: expected a divisor of dim=", options.dim(), "; got ", heads);
  const int64_t kv_heads = options.num_kv_heads().value_or(heads);
  check_positive(owner, "num_kv_heads", kv_heads);
  TORCH_CHECK_VALUE(heads % kv_heads == 0, owner,
                    ": num_kv_heads: expected a divisor of num_heads=", heads, "; got ", kv_heads);
  check_choice(owner, "preset", options.preset(), {"llama", "pro"});
  check_choice(owner, "output_activation", options.output_activation(), kOutputActivations);
  TORCH_CHECK_VALUE(options.rope().value_or(1.0) > 0, owner,
                    ": rope: expected a positive number; got ", *options.rope());
  const int64_t width = options.dim() / heads;
  TORCH_CHECK_VALUE(!options.rope() || width % 2 == 0, owner,
                    ": num_heads: expected an even number of channels a head, which rope turns in "
                    "pairs; got ",
                    width);
  if (options.window()) check_positive(owner, "window", *options.window());
  check_eps(owner, "norm_eps", options.norm_eps());
  if (options.qk_norm_eps()) check_eps(owner, "qk_norm_eps", *options.qk_norm_eps());
  const bool is_pro = options.preset() == "pro";
  return {.owner = owner,
          .dim = options.dim(),
          .num_heads = heads,
          .num_kv_heads = kv_heads,
          .head_dim = width,
          .qk_norm = options.qk_norm().value_or(is_pro),
          .qk_norm_shared = options.qk_norm_shared(),
          .output_gate = options.output_gate().value_or(is_pro),
          .output_norm = options.output_norm().value_or(is_pro),
          .kv_shift = options.kv_shift().value_or(is_pro),
          .output_activation = options.output_activation(),
          .rope = options.rope(),
          .window = options.window(),
          .norm_eps = options.norm_eps(),
          .qk_norm_eps = options.qk_norm_eps().value_or(options.norm_eps()),
          .placement = options.placement()};
}

}  // namespace tidegate::nn
