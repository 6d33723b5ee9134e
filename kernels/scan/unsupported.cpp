#include "kernels/common/limits.h"
#include "kernels/scan/scan.h"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

const char* linear_scan_unsupported(const LinearScanParams& params) {
  if (!gate_dtype_fits(params.a.dtype, params.x.dtype)) {
    return "a must have x's dtype or the dtype of the state";
  }
  if (params.h.dtype != params.x.dtype) {
    return "h must have x's dtype";
  }
  if (rows_too_far_apart(params.x)) {
    return "rows of x are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.a)) {
    return "rows of a are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.h)) {
    return "rows of h are 2^31 bytes or more apart along the time axis";
  }
  return layout_unsupported(params.layout);
}

const char* hgru_unsupported(const HgruParams& params) {
  if (is_complex(params.c.dtype)) {
    return "c must be real; complex values are passed as [Re | Im] with theta";
  }
  if (is_complex(params.f.dtype)) {
    return "f must be real; complex values are passed as [Re | Im] with theta";
  }
  if (!gate_dtype_fits(params.f.dtype, params.c.dtype)) {
    return "f must have c's dtype or the dtype of the state";
  }
  if (params.h.dtype != params.c.dtype) {
    return "h must have c's dtype";
  }
  if (rows_too_far_apart(params.c)) {
    return "rows of c are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.f)) {
    return "rows of f are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.h)) {
    return "rows of h are 2^31 bytes or more apart along the time axis";
  }
  return layout_unsupported(params.layout);
}

const char* lru_unsupported(const LruParams& params) {
  if (is_complex(params.x.dtype)) {
    return "x must be real; complex values are passed as [Re | Im] with theta_log";
  }
  if (params.h.dtype != params.x.dtype) {
    return "h must have x's dtype";
  }
  if (rows_too_far_apart(params.x)) {
    return "rows of x are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.h)) {
    return "rows of h are 2^31 bytes or more apart along the time axis";
  }
  return layout_unsupported(params.layout);
}

const char* wkv4_unsupported(const Wkv4Params& params) {
  if (is_complex(params.k.dtype)) {
    return "k must be real";
  }
  if (params.v.dtype != params.k.dtype) {
    return "v must have k's dtype";
  }
  if (params.layout.reverse) {
    return "layout.reverse must be false: sequences are scanned forwards only";
  }
  if (rows_too_far_apart(params.k)) {
    return "rows of k are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.v)) {
    return "rows of v are 2^31 bytes or more apart along the time axis";
  }
  if (rows_too_far_apart(params.o)) {
    return "rows of o are 2^31 bytes or more apart along the time axis";
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels::scan
