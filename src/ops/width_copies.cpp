#include "src/ops/width_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

#include "src/ops/launch.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

namespace tidegate::ops {
namespace {

#ifdef TIDEGATE_WITH_CUDA

uint32_t bits_of(double value, at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return c10::BFloat16(static_cast<float>(value)).x;
    case at::kHalf:
      return c10::Half(static_cast<float>(value)).x;
    default:
      return std::bit_cast<uint32_t>(static_cast<float>(value));
  }
}

/// Sizes or strides of the three dimensions before the last one; what `tensor` has not got is
/// `none`.
void fill_outer(c10::IntArrayRef of, int64_t none, int64_t (&outer)[3]) {
  for (size_t i = 0; i < 3; ++i) {
    outer[i] = i + of.size() < 4 ? none : of[i + of.size() - 4];
  }
}

#endif

}  // namespace

at::Tensor WidthCopies::widened(const at::Tensor& tensor, int64_t width, double fill) {
  if (tensor.size(-1) == width && rows_begin_aligned(tensor)) {
    return tensor;
  }
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = width;
  at::Tensor wide = at::empty(sizes, tensor.options());
  add(tensor, wide, fill);
  return wide;
}

at::Tensor WidthCopies::widened_state(const at::Tensor& state, int64_t rows, int64_t width) {
  if (state.size(2) == rows) {
    return widened(state, width);
  }
  at::Tensor wide = at::empty({state.size(0), state.size(1), rows, width}, state.options());
  add(state, wide, 0);
  return wide;
}

void WidthCopies::narrow(const at::Tensor& from, const at::Tensor& to) { add(from, to, 0); }

at::Tensor WidthCopies::narrowed(const at::Tensor& tensor, int64_t width) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = width;
  at::Tensor narrow = at::empty(sizes, tensor.options());
  add(tensor, narrow, 0);
  return narrow;
}

#ifdef TIDEGATE_WITH_CUDA

void WidthCopies::add(const at::Tensor& from, const at::Tensor& to, double fill) {
  TORCH_INTERNAL_ASSERT(from.scalar_type() == to.scalar_type() && from.element_size() <= 4 &&
                            from.dim() == to.dim() && from.dim() <= 4 && has_unit_rows(to),
                        op_, ": a copy to another width of what it does not take");
  if (to.numel() == 0) {
    return;
  }
  if (work_.count == kernels::PaddedCopies::kMost) {
    run();
  }
  const at::Tensor& source = kept_.emplace_back(has_unit_rows(from) ? from : from.contiguous());
  kernels::PaddedCopy& copy = work_.copies[work_.count++];
  copy.from = source.const_data_ptr();
  copy.to = to.data_ptr();
  copy.element_bytes = static_cast<int>(to.element_size());
  copy.fill = bits_of(fill, to.scalar_type());
  fill_outer(to.sizes(), 1, copy.sizes);
  fill_outer(source.strides(), 0, copy.from_strides);
  fill_outer(to.strides(), 0, copy.to_strides);
  copy.from_rows = source.dim() < 2 ? 1 : source.size(-2);
  copy.from_width = source.size(-1);
  copy.to_width = to.size(-1);
  kept_.push_back(to);
}

void WidthCopies::run() {
  if (work_.count > 0) {
    const at::Device device = kept_.front().device();
    const c10::DeviceGuard guard(device);
    check_launch(op_, "copies to other widths",
                 kernels::copy_padded(work_, current_stream(device)));
  }
  work_.count = 0;
  kept_.clear();
}

#else

void WidthCopies::add(const at::Tensor&, const at::Tensor&, double) {
  TORCH_INTERNAL_ASSERT(false, op_, ": copies to other widths are made on GPUs alone");
}

void WidthCopies::run() {}

#endif

}  // namespace tidegate::ops
