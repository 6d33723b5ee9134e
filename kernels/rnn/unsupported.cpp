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

}  // namespace

const char* gated_rnn_unsupported(const GatedRnnParams& params) {
  if (is_complex(params.x.dtype) || is_complex(params.z.dtype)) {
    return "z and x must be real";
  }
  if (!gate_dtype_fits(params.z.dtype, params.x.dtype)) {
    return "z must have x's dtype or the dtype of the state";
  }
  if (params.h.dtype != params.x.dtype) {
    return "h must have x's dtype";
  }
  if (!is_contiguous(params.h, params) ||
      (params.logits.data != nullptr && !is_contiguous(params.logits, params))) {
    return "h and the gate's logits must be contiguous";
  }
  if (rows_too_far_apart(params.z) || rows_too_far_apart(params.x)) {
    return "rows of the time axis are 2^31 bytes or more apart";
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels::rnn
