#pragma once

// Tensors in the form that kernels take them: raw pointers, strides, dtype codes.
// Nothing here owns memory; the tensors must outlive the launch.

#include <ATen/core/Tensor.h>

#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"
#include "src/ops/checks.h"

namespace tidegate::ops {

kernels::DType kernel_dtype(at::ScalarType dtype);

/// `tensor` itself, or a contiguous copy when its last stride is not one (or its rows are further
/// apart than the kernels reach).
at::Tensor in_rows(const at::Tensor& tensor);

/// A gate of `data`-typed data, in rows: kernels take it in that type or in the state's, so one
/// that is narrower (float32 beside float64) or real beside complex data is copied to the data's
/// type.
at::Tensor gate_in_rows(const at::Tensor& gate, at::ScalarType data);

/// `tensor` contiguous and in `dtype`, without a copy where it is so already; undefined if absent.
at::Tensor contiguous_as(const OptionalTensor& tensor, at::ScalarType dtype);

/// `tensor` contiguous; undefined if absent.
at::Tensor contiguous_or_none(const OptionalTensor& tensor);

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

}  // namespace tidegate::ops
