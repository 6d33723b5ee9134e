#include "src/ops/attention.h"

#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "kernels/attention/forgetting_attention.h"
#include "src/ops/views.h"

namespace tidegate::ops {
namespace {

void check_head_counts(const char* op, const char* name, const c10::SymInt& heads,
                       const c10::SymInt& key_heads) {
  TORCH_CHECK(key_heads.sym_ge(1).expect_true(__FILE__, __LINE__) &&
                  (heads % key_heads).sym_eq(0).expect_true(__FILE__, __LINE__),
              op, ": q's heads must be a multiple of ", name, "'s, got Hq = ", heads,
              " and Hkv = ", key_heads);
}

}  // namespace

void check_attention_options(const char* op, std::optional<double> scale,
                             std::optional<int64_t> window) {
  if (scale) {
    check_scale(op, *scale);
  }
  TORCH_CHECK(!window || *window >= 1, op, ": window must be at least 1, got ", window.value_or(0));
}

void check_prune(const char* op, std::optional<double> prune) {
  TORCH_CHECK(!prune || (*prune >= 0 && *prune < 1), op, ": prune must lie in [0, 1), got ",
              prune.value_or(0));
}

void check_attention_keys(const Reference& q, const char* const (&names)[3], const at::Tensor& k,
                          const at::Tensor& v, const at::Tensor& gates, const char* key_shape,
                          const char* gate_shape) {
  check_same_type(q, names[0], k);
  check_rank({q.op, names[0], k}, 4, key_shape);
  const c10::SymInt heads = q.tensor.sym_size(-2), time = k.sym_size(1);
  check_shape(q.op, names[0], k, key_shape,
              {q.tensor.sym_size(0), time, k.sym_size(2), q.tensor.sym_size(-1)},
              ", batch and head dimension like q");
  check_head_counts(q.op, names[0], heads, k.sym_size(2));
  check_like({q.op, names[0], k}, names[1], v);
  check_device(q, names[2], gates);
  check_shape(q.op, names[2], gates, gate_shape, {q.tensor.sym_size(0), time, heads},
              ", one gate a token and query head");
}

void check_attention_head_dim(const char* op, int64_t head_dim) {
  TORCH_CHECK(head_dim >= 1 && head_dim <= kernels::attention::kMaxAttentionHeadDim, op,
              ": D must be from 1 to ", kernels::attention::kMaxAttentionHeadDim,
              ", got q with D = ", head_dim);
}

double attention_scale(std::optional<double> scale, int64_t head_dim) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
}

int64_t attention_window(std::optional<int64_t> window, int64_t keys) {
  return window && *window < keys ? *window : 0;
}

kernels::HeadSeries attention_gates(const at::Tensor& gates) {
  return head_series(gates.unsqueeze(-1));
}

}  // namespace tidegate::ops
