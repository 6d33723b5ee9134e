#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/limits.h"

namespace tidegate::kernels::attention {
namespace {

/// What both directions and the step have.
template <class Params>
const char* heads_unsupported(const Params& params) {
  if (params.head_dim < 1 || params.head_dim > kMaxAttentionHeadDim) {
    return unsupported("D must be from 1 to %lld, got %lld",
                       static_cast<long long>(kMaxAttentionHeadDim),
                       static_cast<long long>(params.head_dim));
  }
  if (params.heads < 0 || params.key_heads < 1 || params.heads % params.key_heads != 0) {
    return unsupported("Hq must be a multiple of Hkv, got %lld and %lld",
                       static_cast<long long>(params.heads),
                       static_cast<long long>(params.key_heads));
  }
  if (params.channels != params.heads * params.head_dim) {
    return unsupported("channels must be Hq * D = %lld, got %lld",
                       static_cast<long long>(params.heads * params.head_dim),
                       static_cast<long long>(params.channels));
  }
  if (const char* why = complex_unsupported("q", params.q.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("k", params.k.dtype, "q", params.q.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("v", params.v.dtype, "q", params.q.dtype)) {
    return why;
  }
  if (!(params.scale > 0)) {
    return unsupported("scale must be positive, got %g", static_cast<double>(params.scale));
  }
  if (params.window < 0) {
    return unsupported("the window must not be negative, got %lld",
                       static_cast<long long>(params.window));
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
  if (const char* why = rows_unsupported("log_f", params.log_f)) {
    return why;
  }
  if (const char* why = rows_unsupported("o", params.o)) {
    return why;
  }
  return layout_unsupported(params.layout);
}

}  // namespace

const char* forgetting_attention_unsupported(const ForgettingAttentionParams& params) {
  if (const char* why = gate_unsupported("log_f", params.log_f.dtype, "q", params.q.dtype)) {
    return why;
  }
  if (params.layout.reverse || params.key_layout.reverse) {
    return "layout.reverse and key_layout.reverse must be false: attention runs forwards";
  }
  if (params.layout.batch != params.key_layout.batch ||
      params.layout.sequences != params.key_layout.sequences ||
      (params.layout.offsets == nullptr) != (params.key_layout.offsets == nullptr)) {
    return unsupported(
        "queries and keys must have the same sequences, got B = %lld and %lld, N = %lld and %lld",
        static_cast<long long>(params.layout.batch),
        static_cast<long long>(params.key_layout.batch),
        static_cast<long long>(params.layout.sequences),
        static_cast<long long>(params.key_layout.sequences));
  }
  if (!(params.prune >= 0 && params.prune < 1)) {
    return unsupported("prune must lie in [0, 1), got %g", static_cast<double>(params.prune));
  }
  if (const char* why = layout_unsupported(params.key_layout)) {
    return why;
  }
  return heads_unsupported(params);
}

const char* forgetting_attention_step_unsupported(const ForgettingAttentionStepParams& params) {
  if (params.log_f.dtype != state_dtype(params.q.dtype)) {
    return unsupported("the gate cache must have the dtype of the state, %s, got %s",
                       dtype_name(state_dtype(params.q.dtype)), dtype_name(params.log_f.dtype));
  }
  if (params.capacity < 0 || params.capacity > kMaxTime) {
    return unsupported("the cache must hold from 0 to 2^30 tokens, got %lld",
                       static_cast<long long>(params.capacity));
  }
  return heads_unsupported(params);
}

}  // namespace tidegate::kernels::attention
