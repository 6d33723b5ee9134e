#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/limits.h"

namespace tidegate::kernels::attention {
namespace {

/// What both directions and the step have.
template <class Params>
const char* heads_unsupported(const Params& params) {
  if (params.head_dim < 1 || params.head_dim > kMaxAttentionHeadDim) {
    return "D must be from 1 to 256";
  }
  if (params.heads < 0 || params.key_heads < 1 || params.heads % params.key_heads != 0) {
    return "Hq must be a multiple of Hkv";
  }
  if (params.channels != params.heads * params.head_dim) {
    return "channels must be Hq * D";
  }
  if (is_complex(params.q.dtype)) {
    return "q must be real";
  }
  if (params.k.dtype != params.q.dtype || params.v.dtype != params.q.dtype) {
    return "k and v must have q's dtype";
  }
  if (!(params.scale > 0)) {
    return "scale must be positive";
  }
  if (params.window < 0) {
    return "the window must not be negative";
  }
  if (rows_too_far_apart(params.q) || rows_too_far_apart(params.k) ||
      rows_too_far_apart(params.v) || rows_too_far_apart(params.log_f) ||
      rows_too_far_apart(params.o)) {
    return "rows of the time axis are 2^31 bytes or more apart";
  }
  return layout_unsupported(params.layout);
}

}  // namespace

const char* forgetting_attention_unsupported(const ForgettingAttentionParams& params) {
  if (!gate_dtype_fits(params.log_f.dtype, params.q.dtype)) {
    return "log_f must have q's dtype or the dtype of the state";
  }
  if (params.layout.reverse || params.key_layout.reverse) {
    return "time runs forward";
  }
  if (params.layout.batch != params.key_layout.batch ||
      params.layout.sequences != params.key_layout.sequences ||
      (params.layout.offsets == nullptr) != (params.key_layout.offsets == nullptr)) {
    return "queries and keys must have the same sequences";
  }
  if (!(params.prune >= 0 && params.prune < 1)) {
    return "the bound of pruning must lie in [0, 1)";
  }
  if (const char* why = layout_unsupported(params.key_layout)) {
    return why;
  }
  return heads_unsupported(params);
}

const char* forgetting_attention_step_unsupported(const ForgettingAttentionStepParams& params) {
  if (params.log_f.dtype != state_dtype(params.q.dtype)) {
    return "the gate cache must have the dtype of the state";
  }
  if (params.capacity < 0 || params.capacity > kMaxTime) {
    return "the cache holds more than 2^30 tokens";
  }
  return heads_unsupported(params);
}

}  // namespace tidegate::kernels::attention
