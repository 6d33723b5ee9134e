#include "kernels/common/limits.h"
#include "kernels/scan/scan.h"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

const char* linear_scan_unsupported(const LinearScanParams& params) {
  if (const char* why = gate_unsupported("a", params.a.dtype, "x", params.x.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("h", params.h.dtype, "x", params.x.dtype)) {
    return why;
  }
  if (const char* why = rows_unsupported("x", params.x)) {
    return why;
  }
  if (const char* why = rows_unsupported("a", params.a)) {
    return why;
  }
  if (const char* why = rows_unsupported("h", params.h)) {
    return why;
  }
  return layout_unsupported(params.layout);
}

const char* hgru_unsupported(const HgruParams& params) {
  if (is_complex(params.c.dtype)) {
    return unsupported("c must be real, got %s; complex values are passed as [Re | Im] with theta",
                       dtype_name(params.c.dtype));
  }
  if (is_complex(params.f.dtype)) {
    return unsupported("f must be real, got %s; complex values are passed as [Re | Im] with theta",
                       dtype_name(params.f.dtype));
  }
  if (const char* why = gate_unsupported("f", params.f.dtype, "c", params.c.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("h", params.h.dtype, "c", params.c.dtype)) {
    return why;
  }
  if (const char* why = rows_unsupported("c", params.c)) {
    return why;
  }
  if (const char* why = rows_unsupported("f", params.f)) {
    return why;
  }
  if (const char* why = rows_unsupported("h", params.h)) {
    return why;
  }
  return layout_unsupported(params.layout);
}

const char* lru_unsupported(const LruParams& params) {
  if (is_complex(params.x.dtype)) {
    return unsupported(
        "x must be real, got %s; complex values are passed as [Re | Im] with theta_log",
        dtype_name(params.x.dtype));
  }
  if (const char* why = dtype_unsupported("h", params.h.dtype, "x", params.x.dtype)) {
    return why;
  }
  if (const char* why = rows_unsupported("x", params.x)) {
    return why;
  }
  if (const char* why = rows_unsupported("h", params.h)) {
    return why;
  }
  return layout_unsupported(params.layout);
}

const char* wkv4_unsupported(const Wkv4Params& params) {
  if (const char* why = complex_unsupported("k", params.k.dtype)) {
    return why;
  }
  if (const char* why = dtype_unsupported("v", params.v.dtype, "k", params.k.dtype)) {
    return why;
  }
  if (params.layout.reverse) {
    return "layout.reverse must be false, got true: sequences are scanned forwards only";
  }
  if (const char* why = rows_unsupported("k", params.k)) {
    return why;
  }
  if (const char* why = rows_unsupported("v", params.v)) {
    return why;
  }
  if (const char* why = rows_unsupported("o", params.o)) {
    return why;
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels::scan
