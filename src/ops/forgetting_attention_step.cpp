// forgetting_attention_step: one query a sequence over a cache of keys, values and gates. It writes
// nothing but its result: the caller puts each token into the cache.

#include <ATen/ops/arange.h>
#include <ATen/ops/linalg_vector_norm.h>

#include "src/ops/attention.h"
#include "src/ops/capture.h"
#include "src/ops/gla.h"
#include "src/ops/kernel_sets.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/views.h"
#include "tidegate/ops/forgetting_attention.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/attention/attention_step_cuda.h"
#endif

namespace tidegate::ops {
namespace {

struct ForgettingAttentionStep {
  static constexpr std::string_view kSchema =
      "forgetting_attention_step(Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "gate_cache, Tensor lengths, float? scale=None, int? window=None, float? prune=None, "
      "Tensor? key_norms=None) -> Tensor";
  static constexpr std::string_view kData = "q";
  /// A cache keeps its type, and decides: casting it would be reading and writing all of it.
  static constexpr CastRule kCasts[] = {{"q", Cast::kToTypeOf, "k_cache"}};

  const at::Tensor &q, &k_cache, &v_cache, &gate_cache, &lengths;
  std::optional<double> scale;
  std::optional<int64_t> window;
  std::optional<double> prune;
  const OptionalTensor& key_norms;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

at::Tensor ForgettingAttentionStep::meta() const {
  constexpr const char* kOp = kOpName<ForgettingAttentionStep>;
  const Reference data{kOp, "q", q};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 3, "[B, Hq, D]");
  check_attention_keys(data, {"k_cache", "v_cache", "gate_cache"}, k_cache, v_cache, gate_cache,
                       "[B, Tmax, Hkv, D]", "[B, Tmax, Hq]");
  const at::ScalarType wide = state_dtype(q.scalar_type());
  TORCH_CHECK(gate_cache.scalar_type() == wide, kOp, ": gate_cache must be ", dtype_name(wide),
              " (q is ", dtype_name(q.scalar_type()), "), got ",
              dtype_name(gate_cache.scalar_type()));
  check_device(data, "lengths", lengths);
  TORCH_CHECK(lengths.scalar_type() == at::kInt, kOp, ": lengths must be int32, got ",
              dtype_name(lengths.scalar_type()));
  check_shape(kOp, "lengths", lengths, "[B]", {q.sym_size(0)});
  check_attention_options(kOp, scale, window);
  check_prune(kOp, prune);
  TORCH_CHECK(prune.value_or(0) == 0 || is_given(key_norms), kOp, ": prune = ", *prune,
              " needs key_norms, which say how long the keys are that are not read; got None");
  if (is_given(key_norms)) {
    check_device(data, "key_norms", *key_norms);
    TORCH_CHECK(key_norms->scalar_type() == wide, kOp, ": key_norms must be ", dtype_name(wide),
                " (q is ", dtype_name(q.scalar_type()), "), got ",
                dtype_name(key_norms->scalar_type()));
    check_shape(kOp, "key_norms", *key_norms, "[B, Hkv]", {q.sym_size(0), k_cache.sym_size(2)});
  }
  return new_like(q);
}

/// In debug mode: lengths are from 0 to Tmax, no gate that is read is above 0, and no key is longer
/// than its head's `key_norms`, where these are given.
void check_attention_step_values(const at::Tensor& q, const at::Tensor& keys,
                                 const at::Tensor& gates, const at::Tensor& lengths,
                                 const OptionalTensor& key_norms) {
  if (!debug_checks_enabled() || is_capturing(lengths.device()) || lengths.numel() == 0) {
    return;
  }
  const int64_t capacity = gates.size(1), low = lengths.min().item<int64_t>(),
                high = lengths.max().item<int64_t>();
  TORCH_CHECK(low >= 0 && high <= capacity, kOpName<ForgettingAttentionStep>,
              ": lengths must lie in [0, Tmax = ", capacity, "], got values from ", low, " to ",
              high);
  const at::Tensor places = at::arange(capacity, lengths.options()).view({1, -1, 1});
  const at::Tensor unread = places.ge(lengths.view({-1, 1, 1}));
  check_log_decay_values({kOpName<ForgettingAttentionStep>, "q", q}, "gate_cache",
                         gates.masked_fill(unread, 0));
  if (!is_given(key_norms)) return;
  const at::Tensor norms = at::linalg_vector_norm(keys, 2, at::IntArrayRef{-1}, /*keepdim=*/false,
                                                  key_norms->scalar_type());
  // A hundred-thousandth less than what is added up here is the caller's other order of additions.
  const at::Tensor least = norms.masked_fill(unread, 0).mul(1 - 1e-5);
  TORCH_CHECK(!least.gt(key_norms->unsqueeze(1)).any().item<bool>(),
              kOpName<ForgettingAttentionStep>,
              ": key_norms must be at least the length of each head's longest key, got less");
}

at::Tensor ForgettingAttentionStep::kernel() const {
  constexpr const char* kOp = kOpName<ForgettingAttentionStep>;
  at::Tensor o = meta();
  check_attention_step_values(q, k_cache, gate_cache, lengths, key_norms);
  check_attention_head_dim(kOp, q.size(2));
  const at::Tensor query = q.unsqueeze(1);
  KernelInputs read(q);
  kernels::attention::ForgettingAttentionStepParams params;
  params.layout = read.layout(query, std::nullopt, /*reverse=*/false);
  params.heads = q.size(1);
  params.key_heads = k_cache.size(2);
  params.head_dim = q.size(2);
  params.channels = params.heads * params.head_dim;
  params.capacity = k_cache.size(1);
  params.scale = attention_scale(scale, params.head_dim);
  params.window = attention_window(window, params.capacity);
  params.q = read.head_rows(query);
  params.k = read.head_rows(k_cache);
  params.v = read.head_rows(v_cache);
  params.log_f = attention_gates(gate_cache);
  params.prune = prune.value_or(0);
  if (is_given(key_norms)) params.key_norms = attention_gates(key_norms->unsqueeze(1));
  params.lengths = read.keep(lengths.contiguous()).const_data_ptr<int32_t>();
  params.o = head_series(o.unsqueeze(1));
  Launch launch(kOp, &params, o);
#ifdef TIDEGATE_WITH_CUDA
  namespace attention = kernels::attention;
  if (SettledStatesGuard::is_active() && o.is_cuda() && o.numel() > 0) {
    check_launch(
        kOp, "launch",
        attention::attention_step(params, /*cache_is_settled=*/true, current_stream(o.device())));
    return o;
  }
#endif
  launch.run();
  return o;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) { register_step<ForgettingAttentionStep>(m); }

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor forgetting_attention_step(const at::Tensor& q, const at::Tensor& k_cache,
                                     const at::Tensor& v_cache, const at::Tensor& gate_cache,
                                     const at::Tensor& lengths, std::optional<double> scale,
                                     std::optional<int64_t> window, std::optional<double> prune,
                                     const std::optional<at::Tensor>& key_norms) {
  return ops::call_public<ops::ForgettingAttentionStep>(q, k_cache, v_cache, gate_cache, lengths,
                                                        scale, window, prune, key_norms);
}

}  // namespace tidegate
