#pragma once

// Tensors in the form that kernels take them: raw pointers, strides, dtype codes. None of these
// owns memory: the tensors must outlive the launch, which KernelInputs sees to.

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"
#include "src/ops/checks.h"

namespace tidegate::ops {

kernels::DType kernel_dtype(at::ScalarType dtype);

/// `tensor` in `dtype`. Where it is so already, asking torch for it would take half a microsecond.
inline at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

/// `tensor` itself, or a contiguous copy when its last stride is not one (or its rows are further
/// apart than the kernels reach).
at::Tensor in_rows(const at::Tensor& tensor);

/// In which dtype kernels take a gate of `data`-typed data: its own where that is the data's or the
/// state's. One that is narrower (float32 beside float64) or real beside complex data is copied to
/// the data's.
at::ScalarType gate_dtype(const at::Tensor& gate, at::ScalarType data);

/// The gate in that dtype and in rows.
at::Tensor gate_in_rows(const at::Tensor& gate, at::ScalarType data);

/// `tensor` contiguous and in `dtype`, without a copy where it is so already; undefined if absent.
at::Tensor contiguous_as(const OptionalTensor& tensor, at::ScalarType dtype);

/// `tensor` contiguous; undefined if absent.
at::Tensor contiguous_or_none(const OptionalTensor& tensor);

/// Whether kernels that access 16 bytes at a time can read the rows of `tensor`, or of the copy
/// that in_rows makes of it.
bool rows_begin_aligned(const at::Tensor& tensor);

/// Whether the elements of a row of `tensor`, which has at least one dimension, lie side by side.
inline bool has_unit_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1;
}

/// A [B, T, channels] tensor with a unit last stride.
kernels::TimeSeries time_series(const at::Tensor& tensor);

/// A [B, T, H, channels] tensor with a unit last stride; no data when undefined.
kernels::HeadSeries head_series(const at::Tensor& tensor);

/// A [channels] row with a unit stride, seen at every step of every sequence.
kernels::TimeSeries constant_series(const at::Tensor& tensor);

/// How the [B, T, channels] tensor `data` divides into sequences; `cu_seqlens` is contiguous.
kernels::SequenceLayout sequence_layout(const at::Tensor& data, const at::Tensor& cu_seqlens,
                                        bool reverse);

/// The data pointer, or null for an undefined tensor.
void* data_or_null(const at::Tensor& tensor);

/// What a kernel reads, brought into its form one argument at a time. It keeps the copies that this
/// takes, so it must live until the launch.
class KernelInputs {
 public:
  /// `data` decides the types of gates and states.
  explicit KernelInputs(const at::Tensor& data) : data_(data.scalar_type()) { kept_.reserve(16); }

  kernels::TimeSeries rows(const at::Tensor& tensor) { return time_series(keep(in_rows(tensor))); }
  kernels::TimeSeries gate(const at::Tensor& tensor) {
    return time_series(keep(gate_in_rows(tensor, data_)));
  }
  kernels::HeadSeries head_rows(const at::Tensor& tensor) {
    return head_series(keep(in_rows(tensor)));
  }
  kernels::HeadSeries head_gate(const at::Tensor& tensor) {
    return head_series(keep(gate_in_rows(tensor, data_)));
  }

  /// A state, a state's gradient or a parameter: contiguous, in the state's type; null if absent.
  void* state(const OptionalTensor& tensor) {
    return data_or_null(keep(contiguous_as(tensor, state_dtype(data_))));
  }

  /// How `tensor` [B, T, ..] divides into sequences.
  kernels::SequenceLayout layout(const at::Tensor& tensor, const OptionalTensor& cu_seqlens,
                                 bool reverse) {
    return sequence_layout(tensor, keep(contiguous_or_none(cu_seqlens)), reverse);
  }

  /// Any other tensor.
  at::Tensor keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

 private:
  at::ScalarType data_;
  std::vector<at::Tensor> kept_;
};

}  // namespace tidegate::ops
