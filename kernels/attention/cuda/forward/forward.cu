// The forward pass on tensor cores: what it takes, and what follows what.

#include <algorithm>

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/paths.h"
#include "kernels/attention/cuda/preprocess.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/cuda/workspace.cuh"
#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {
namespace {

constexpr int64_t kLargestGrid = (int64_t{1} << 31) - 1;
// Rows of a block, queries or keys. Not the least of all: S192 of tile_configs.cuh has 32 queries.
constexpr int64_t kLeastTile = 64;

template <class T>
cudaError_t launch(const TensorAttention& work, cudaStream_t stream) {
  return work.params.forward.head_dim <= kLargestSmallHeadDim
             ? AttentionForwardUnit<T, HeadDims::kSmall>::launch(work, stream)
             : AttentionForwardUnit<T, HeadDims::kLarge>::launch(work, stream);
}

/// Wide tiles, of twice as many queries and of more keys at a time, pay where there are many of
/// both; a block must be allowed as much shared memory.
bool is_wide(const ForgettingAttentionParams& p, const DeviceLimits& limits) {
  constexpr int64_t kManyKeys = 8192;
  if (p.prune > 0 || (p.window > 0 && p.window < kManyKeys) ||
      p.key_layout.time < kManyKeys * p.layout.sequences) {
    return false;
  }
  bool wide = false;
  const auto look = [&]<class Shape>() {
    wide = p.layout.time >= Shape::kRows * p.layout.sequences &&
           Shape::kSharedBytes <= limits.shared_bytes;
    return cudaSuccess;
  };
  const cudaError_t status =
      p.head_dim <= kLargestSmallHeadDim
          ? with_forward_shape<__nv_bfloat16, HeadDims::kSmall>(p.head_dim, true, look)
          : with_forward_shape<__nv_bfloat16, HeadDims::kLarge>(p.head_dim, true, look);
  return status == cudaSuccess && wide;
}

}  // namespace

/// The last condition leaves calls with more than 65535 heads, those of all batch rows together, to
/// the plain path.
bool tensor_cores_take(const ForgettingAttentionParams& p) {
  const int64_t blocks = p.heads * std::max(time_tiles(p.layout, kLeastTile).count,
                                            time_tiles(p.key_layout, kLeastTile).count);
  return is_16_bit(p.q.dtype) && p.head_dim % 8 == 0 && p.head_dim >= 16 &&
         p.head_dim <= kMaxAttentionHeadDim && rows_aligned(p.q, 16) && rows_aligned(p.k, 16) &&
         rows_aligned(p.v, 16) && rows_aligned(p.o, 16) && blocks <= kLargestGrid &&
         p.window < kLargestGrid && p.layout.batch * p.heads <= 65535;
}

int64_t score_bounds_bytes(const ForgettingAttentionParams& p, bool of_queries) {
  const int64_t heads = p.key_heads + (of_queries ? p.heads : 0);
  return p.prune > 0 ? (p.layout.batch * heads + 3) / 4 * 16 : 0;
}

cudaError_t find_key_norms(const TensorAttention& work, cudaStream_t stream) {
  const ForgettingAttentionParams& p = work.params.forward;
  return with_row_kernels(p, [&]<class T, int kPieces>() {
    return launch_unless_empty(&key_norms_kernel<T, kPieces>, row_blocks(p.key_layout, p.key_heads),
                               kRowThreads, 0, stream, work,
                               const_cast<unsigned*>(work.score_bounds));
  });
}

cudaError_t tensor_forward_plan(const ForgettingAttentionParams& p, ForgettingAttentionPlan* plan) {
  if (!tensor_cores_take(p)) {
    return cudaErrorNotSupported;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *plan = {.path = AttentionPath::kTensorCore, .tile = is_wide(p, limits) ? 1 : 0};
  plan->workspace_bytes = ForwardWorkspace(p).bytes;
  return cudaSuccess;
}

cudaError_t tensor_forward(const ForgettingAttentionParams& p, cudaStream_t stream) {
  const ForwardWorkspace workspace(p);
  TensorAttention work;
  work.params.forward = p;
  work.gate_sums = workspace.gate_sums;
  TIDEGATE_RETURN_IF_CUDA_ERROR(scan_gates(p, workspace.gate_sums, stream));
  if (p.prune > 0) {
    work.score_bounds = workspace.score_bounds;
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(workspace.score_bounds, 0, score_bounds_bytes(p, false), stream));
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_key_norms(work, stream));
  }
  return dispatch_16_bit(p.q.dtype, [&]<class T>() { return launch<T>(work, stream); });
}

}  // namespace tidegate::kernels::attention
