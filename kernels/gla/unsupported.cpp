#include "kernels/common/limits.h"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {
namespace {

bool is_head_dim(int64_t dim) { return dim >= 1 && dim <= kMaxHeadDim; }

/// Kernels step from row to row by 32-bit distances.
const char* far_rows(const GlaParams& params) {
  if (rows_too_far_apart(params.q)) {
    return "q: rows of the time axis are 2^31 bytes or more apart";
  }
  if (rows_too_far_apart(params.k)) {
    return "k: rows of the time axis are 2^31 bytes or more apart";
  }
  if (rows_too_far_apart(params.v)) {
    return "v: rows of the time axis are 2^31 bytes or more apart";
  }
  if (rows_too_far_apart(params.gate)) {
    return "the gate: rows of the time axis are 2^31 bytes or more apart";
  }
  if (rows_too_far_apart(params.o)) {
    return "o: rows of the time axis are 2^31 bytes or more apart";
  }
  return nullptr;
}

}  // namespace

const char* gla_unsupported(const GlaParams& params) {
  const bool logit = params.gate_kind == GateKind::kLogit;
  if (!is_head_dim(params.key_dim) || !is_head_dim(params.value_dim)) {
    return "K and V must be from 1 to 512";
  }
  if (params.channels != params.heads * params.key_dim) {
    return "channels must be H * K";
  }
  if (is_complex(params.q.dtype)) {
    return "q must be real";
  }
  if (params.v.dtype != params.q.dtype || (!logit && params.k.dtype != params.q.dtype)) {
    return "k and v must have q's dtype";
  }
  if (!gate_dtype_fits(params.gate.dtype, params.q.dtype)) {
    return "the gate must have q's dtype or the dtype of the state";
  }
  if (logit && params.gate_per_head) {
    return "logits are per channel";
  }
  if (!logit && (params.gamma != nullptr || params.q_activation != InputActivation::kNone ||
                 params.v_activation != InputActivation::kNone)) {
    return "bounds and activations belong to logits";
  }
  if (const char* why = far_rows(params); why != nullptr) {
    return why;
  }
  return params.heads < 0 ? "negative sizes" : layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels::gla
