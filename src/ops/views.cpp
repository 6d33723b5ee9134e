#include "src/ops/views.h"

#include <c10/util/Exception.h>

#include <cstdint>

#include "kernels/common/limits.h"

namespace tidegate::ops {

kernels::DType kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::DType::kFloat32;
    case at::kDouble:
      return kernels::DType::kFloat64;
    case at::kBFloat16:
      return kernels::DType::kBFloat16;
    case at::kHalf:
      return kernels::DType::kFloat16;
    case at::kComplexFloat:
      return kernels::DType::kComplex64;
    case at::kComplexDouble:
      return kernels::DType::kComplex128;
    default:
      TORCH_CHECK(false, "tidegate: no kernel takes tensors of type ", dtype);
  }
}

at::Tensor in_rows(const at::Tensor& tensor) {
  // The stride of a dimension of size one, or of an empty tensor, is never used.
  const bool unit = tensor.numel() == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1;
  const bool reachable = tensor.dim() < 3 || tensor.size(1) <= 1 ||
                         tensor.stride(1) * tensor.element_size() < kernels::kMaxRowDistance;
  return unit && reachable ? tensor : tensor.contiguous();
}

at::ScalarType gate_dtype(const at::Tensor& gate, at::ScalarType data) {
  return gate.scalar_type() == state_dtype(data) ? gate.scalar_type() : data;
}

at::Tensor gate_in_rows(const at::Tensor& gate, at::ScalarType data) {
  return in_rows(in_dtype(gate, gate_dtype(gate, data)));
}

at::Tensor contiguous_as(const OptionalTensor& tensor, at::ScalarType dtype) {
  return is_given(tensor) ? in_dtype(*tensor, dtype).contiguous() : at::Tensor();
}

at::Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return is_given(tensor) ? tensor->contiguous() : at::Tensor();
}

bool rows_begin_aligned(const at::Tensor& tensor) {
  constexpr int64_t kBytes = 16;
  if (tensor.dim() == 0 || tensor.stride(-1) != 1) {
    return true;
  }
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    aligned &= tensor.size(i) <= 1 || tensor.stride(i) * tensor.element_size() % kBytes == 0;
  }
  return aligned;
}

kernels::TimeSeries time_series(const at::Tensor& tensor) {
  // Dimensions of size one may carry any stride; the plain one keeps alignment checks meaningful.
  const int64_t stride_t = tensor.size(1) > 1 ? tensor.stride(1) : tensor.size(2);
  const int64_t stride_b = tensor.size(0) > 1 ? tensor.stride(0) : stride_t * tensor.size(1);
  return {tensor.data_ptr(), stride_b, stride_t, kernel_dtype(tensor.scalar_type())};
}

kernels::HeadSeries head_series(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  const int64_t stride_h = tensor.size(2) > 1 ? tensor.stride(2) : tensor.size(3);
  const int64_t stride_t = tensor.size(1) > 1 ? tensor.stride(1) : stride_h * tensor.size(2);
  const int64_t stride_b = tensor.size(0) > 1 ? tensor.stride(0) : stride_t * tensor.size(1);
  return {tensor.data_ptr(), stride_b, stride_t, stride_h, kernel_dtype(tensor.scalar_type())};
}

kernels::TimeSeries constant_series(const at::Tensor& tensor) {
  return {tensor.data_ptr(), 0, 0, kernel_dtype(tensor.scalar_type())};
}

kernels::SequenceLayout sequence_layout(const at::Tensor& data, const at::Tensor& cu_seqlens,
                                        bool reverse) {
  kernels::SequenceLayout layout;
  layout.batch = data.size(0);
  layout.time = data.size(1);
  layout.sequences = cu_seqlens.defined() ? cu_seqlens.numel() - 1 : data.size(0);
  layout.offsets = data_or_null(cu_seqlens);
  layout.offsets_are_int64 = cu_seqlens.defined() && cu_seqlens.scalar_type() == at::kLong;
  layout.reverse = reverse;
  return layout;
}

void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

}  // namespace tidegate::ops
