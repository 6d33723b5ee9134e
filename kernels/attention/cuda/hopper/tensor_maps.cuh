#pragma once

// Descriptions of tensors for the copy engine, as hopper::copy_box wants them, made on the host.

#include <cuda.h>

#include "kernels/common/cuda/device.h"
#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::hopper {

/// Describes rows of a [B, T, H, D] tensor of 16-bit elements, 128-byte swizzled: boxes of `rows`
/// tokens of one head and 64 channels. cudaErrorNotSupported where the copy engine does not take
/// the tensor (a stride of zero, say).
inline cudaError_t tensor_map_of_rows(const HeadSeries& t, int64_t batch, int64_t time,
                                      int64_t heads, int64_t dim, int rows, CUtensorMap* map) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;  // the same for all threads
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) {
      return cudaErrorNotSupported;
    }
    encode = reinterpret_cast<Encode>(found);
  }
  // A dimension of one is never stepped along; its stride may be anything but must look right.
  const auto bytes = [&](int64_t stride, int64_t count) {
    return static_cast<cuuint64_t>(count == 1 ? dim * 2 : stride * 2);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(time), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {bytes(t.stride_h, heads), bytes(t.stride_t, time),
                                 bytes(t.stride_b, batch)};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult status =
      encode(map,
             t.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             4, t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace tidegate::kernels::hopper
