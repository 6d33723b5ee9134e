#include "kernels/scan/scan.h"

namespace tidegate::kernels {
namespace {

// A gate may come in the data's type or in the wider type of the state.
bool gate_dtype_fits(DType gate, DType data) { return gate == data || gate == state_dtype(data); }

// The kernels count steps, and the bytes from one row to the next, in 32 bits.
constexpr int64_t kMaxTime = int64_t{1} << 30;
constexpr int64_t kMaxRowBytes = int64_t{1} << 31;

bool rows_too_far_apart(const TimeSeries& t) {
  const int64_t bytes = t.stride_t * element_size(t.dtype);
  return bytes >= kMaxRowBytes || bytes <= -kMaxRowBytes;
}

const char* layout_unsupported(const SequenceLayout& layout) {
  if (layout.time > kMaxTime) {
    return "more than 2^30 time steps";
  }
  if (layout.batch < 0 || layout.time < 0 || layout.sequences < 0) {
    return "negative sizes";
  }
  if (layout.offsets != nullptr && layout.batch != 1) {
    return "packed sequences need a batch of one";
  }
  return nullptr;
}

}  // namespace

const char* linear_scan_unsupported(const LinearScanParams& params) {
  if (!gate_dtype_fits(params.a.dtype, params.x.dtype)) {
    return "a must have x's dtype or the dtype of the state";
  }
  if (params.h.dtype != params.x.dtype) {
    return "h must have x's dtype";
  }
  if (rows_too_far_apart(params.x) || rows_too_far_apart(params.a) ||
      rows_too_far_apart(params.h)) {
    return "rows of the time axis are 2^31 bytes or more apart";
  }
  return layout_unsupported(params.layout);
}

const char* hgru_unsupported(const HgruParams& params) {
  if (is_complex(params.c.dtype) || is_complex(params.f.dtype)) {
    return "c and f must be real; complex values are passed as [Re | Im] with theta";
  }
  if (!gate_dtype_fits(params.f.dtype, params.c.dtype)) {
    return "f must have c's dtype or the dtype of the state";
  }
  if (params.h.dtype != params.c.dtype) {
    return "h must have c's dtype";
  }
  if (rows_too_far_apart(params.c) || rows_too_far_apart(params.f) ||
      rows_too_far_apart(params.h)) {
    return "rows of the time axis are 2^31 bytes or more apart";
  }
  return layout_unsupported(params.layout);
}

}  // namespace tidegate::kernels
