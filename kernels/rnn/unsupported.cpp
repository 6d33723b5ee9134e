#include "kernels/common/limits.h"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels {

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
  if (rows_too_far_apart(params.z) || rows_too_far_apart(params.x) ||
      rows_too_far_apart(params.h) || rows_too_far_apart(params.a)) {
    return "rows of the time axis are 2^31 bytes or more apart";
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels
