#include "kernels/common/limits.h"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {
namespace {

bool is_contiguous(const TimeSeries& t, const GatedRnnParams& params) {
  const int64_t time = params.layout.time;
  if (time == 0 || params.channels == 0) return true;
  return (time == 1 || t.stride_t == params.channels) &&
         (params.layout.batch <= 1 || t.stride_b == time * params.channels);
}

const char* stride_unsupported(const char* name, const TimeSeries& t,
                               const GatedRnnParams& params) {
  return is_contiguous(t, params)
             ? nullptr
             : unsupported(
                   "%s must be contiguous, got rows %lld elements apart, and batch rows %lld", name,
                   static_cast<long long>(t.stride_t), static_cast<long long>(t.stride_b));
}

}  // namespace

const char* gated_rnn_unsupported(const GatedRnnParams& params) {
  if (const char* why = complex_unsupported("x", params.x.dtype)) {
    return why;
  }
  if (const char* why = complex_unsupported("z", params.z.dtype)) {
    return why;
  }
  if (const char* why = gate_unsupported("z", params.z.dtype, "x", params.x.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("h", params.h.dtype, "x", params.x.dtype)) {
    return why;
  }
  if (const char* why = stride_unsupported("h", params.h, params)) {
    return why;
  }
  if (params.logits.data != nullptr) {
    if (const char* why = stride_unsupported("the gate's logits", params.logits, params)) {
      return why;
    }
  }
  if (const char* why = rows_unsupported("z", params.z)) {
    return why;
  }
  if (const char* why = rows_unsupported("x", params.x)) {
    return why;
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels::rnn
