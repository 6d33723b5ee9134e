#include "kernels/common/cuda/tensor_map.h"

#include <algorithm>
#include <atomic>

#include "kernels/common/cuda/device.h"

namespace tidegate::kernels {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, found at run time, so that a program that links this library runs where
/// there is no driver.
cudaError_t find_encode(Encode* encode) {
  // It is one function for every thread and device, whoever finds it first.
  static std::atomic<Encode> known = nullptr;
  *encode = known.load(std::memory_order_relaxed);
  if (*encode != nullptr) {
    return cudaSuccess;
  }
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    return cudaErrorNotSupported;
  }
  *encode = reinterpret_cast<Encode>(found);
  known.store(*encode, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace

cudaError_t tensor_map_of_rows(const HeadSeries& tensor, const SequenceLayout& layout,
                               int64_t heads, int64_t head_dim, int rows, CUtensorMap* map) {
  Encode encode = nullptr;
  TIDEGATE_RETURN_IF_CUDA_ERROR(find_encode(&encode));
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(std::max<int64_t>(x, 1)); };
  // A dimension of one element may have any stride: 16 bytes is one that is always taken.
  const auto stride = [](int64_t x, int64_t count) {
    return static_cast<cuuint64_t>(count > 1 ? 2 * x : 16);
  };
  const cuuint64_t sizes[] = {size(head_dim), size(heads), size(layout.time), size(layout.batch)};
  const cuuint64_t strides[] = {stride(tensor.stride_h, heads),
                                stride(tensor.stride_t, layout.time),
                                stride(tensor.stride_b, layout.batch)};
  for (const cuuint64_t bytes : strides) {
    if (bytes == 0 || bytes % 16 != 0 || bytes >= (cuuint64_t{1} << 40)) {
      return cudaErrorNotSupported;
    }
  }
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(rows), 1}, steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, tensor.data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace tidegate::kernels
