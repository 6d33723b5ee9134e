// The forward pass on tensor cores: what it takes, and what follows what.

#include <algorithm>

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/paths.h"
#include "kernels/attention/cuda/preprocess.cuh"
#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {
namespace {

constexpr int64_t kLargestGrid = (int64_t{1} << 31) - 1;
constexpr int64_t kLeastTile = 64;  // rows of a block, queries or keys

template <class T>
cudaError_t launch(const TensorAttention& work, cudaStream_t stream) {
  return work.params.forward.head_dim <= kLargestSmallHeadDim
             ? AttentionForwardUnit<T, HeadDims::kSmall>::launch(work, stream)
             : AttentionForwardUnit<T, HeadDims::kLarge>::launch(work, stream);
}

}  // namespace

bool tensor_forward_fits(const ForgettingAttentionParams& p) {
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
  const int64_t blocks = row_blocks(p.key_layout, p.key_heads);
  return with_row_kernels(p, [&]<class T, int kPieces>() {
    return launch_unless_empty(&key_norms_kernel<T, kPieces>, static_cast<unsigned>(blocks),
                               kRowThreads, 0, stream, work,
                               const_cast<unsigned*>(work.score_bounds));
  });
}

cudaError_t tensor_forward_plan(const ForgettingAttentionParams& p, ForgettingAttentionPlan* plan) {
  *plan = {.path = AttentionPath::kTensorCore};
  plan->workspace_bytes = (gate_sums_count(p) + 1) / 2 * 16 + score_bounds_bytes(p, false);
  return cudaSuccess;
}

cudaError_t tensor_forward(const ForgettingAttentionParams& p, cudaStream_t stream) {
  if (p.layout.sequences == 0 || p.layout.time == 0 || p.heads == 0) {
    return cudaSuccess;
  }
  TensorAttention work;
  work.params.forward = p;
  double* const c = static_cast<double*>(p.workspace);
  work.gate_sums = c;
  TIDEGATE_RETURN_IF_CUDA_ERROR(gate_sums(p, c, stream));
  if (p.prune > 0) {
    auto* const bounds = reinterpret_cast<unsigned*>(c + (gate_sums_count(p) + 1) / 2 * 2);
    work.score_bounds = bounds;
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(bounds, 0, score_bounds_bytes(p, false), stream));
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_key_norms(work, stream));
  }
  return dispatch_16_bit(p.q.dtype, [&]<class T>() { return launch<T>(work, stream); });
}

}  // namespace tidegate::kernels::attention
