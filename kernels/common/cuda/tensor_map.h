#pragma once

// Descriptions of tensors for the copy engine of compute capability 9.0 (TMA).

#include <cuda.h>  // CUtensorMap; nothing of libcuda is linked
#include <cuda_runtime_api.h>

#include "kernels/common/time_series.h"

namespace tidegate::kernels {

/// Describes a tensor [B, T, heads, head_dim] of 16-bit elements, whose boxes are `rows` tokens of
/// one head and 64 columns, laid out as hopper::Panels has them. cudaErrorNotSupported where the
/// driver refuses it: strides of zero, for example, or too large.
[[nodiscard]] cudaError_t tensor_map_of_rows(const HeadSeries& tensor, const SequenceLayout& layout,
                                             int64_t heads, int64_t head_dim, int rows,
                                             CUtensorMap* map);

}  // namespace tidegate::kernels
