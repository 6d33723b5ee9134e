#include "kernels/common/limits.h"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {
namespace {

bool is_head_dim(int64_t dim) { return dim >= 1 && dim <= kMaxHeadDim; }

}  // namespace

const char* gla_unsupported(const GlaParams& params) {
  const bool logit = params.gate_kind == GateKind::kLogit;
  if (!is_head_dim(params.key_dim) || !is_head_dim(params.value_dim)) {
    return unsupported("K and V must be from 1 to %lld, got %lld and %lld",
                       static_cast<long long>(kMaxHeadDim), static_cast<long long>(params.key_dim),
                       static_cast<long long>(params.value_dim));
  }
  if (params.channels != params.heads * params.key_dim) {
    return unsupported("channels must be H * K = %lld, got %lld",
                       static_cast<long long>(params.heads * params.key_dim),
                       static_cast<long long>(params.channels));
  }
  if (const char* why = complex_unsupported("q", params.q.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("v", params.v.dtype, "q", params.q.dtype)) {
    return why;
  }
  if (!logit) {
    if (const char* why = dtype_unsupported("k", params.k.dtype, "q", params.q.dtype)) {
      return why;
    }
  }
  if (const char* why = gate_unsupported("the gate", params.gate.dtype, "q", params.q.dtype)) {
    return why;
  }
  if (logit && params.gate_per_head) {
    return "logits are per channel";
  }
  if (!logit && (params.gamma != nullptr || params.q_activation != InputActivation::kNone ||
                 params.v_activation != InputActivation::kNone)) {
    return "bounds and activations belong to logits";
  }
  if (const char* why = rows_unsupported("q", params.q)) {
    return why;
  }
  if (const char* why = rows_unsupported("k", params.k)) {
    return why;
  }
  if (const char* why = rows_unsupported("v", params.v)) {
    return why;
  }
  if (const char* why = rows_unsupported("the gate", params.gate)) {
    return why;
  }
  if (const char* why = rows_unsupported("o", params.o)) {
    return why;
  }
  if (params.heads < 0) {
    return unsupported("H must not be negative, got %lld", static_cast<long long>(params.heads));
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels::gla
