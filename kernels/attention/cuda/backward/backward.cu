// The backward pass on tensor cores: what it takes, its workspace, and what follows what.

#include "kernels/attention/cuda/backward/key_extents.cuh"
#include "kernels/attention/cuda/backward/tile_configs.cuh"
#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/paths.h"
#include "kernels/attention/cuda/preprocess.cuh"
#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {
namespace {

/// Clears `pieces` of 16 bytes, kClearedPieces a block; the first blocks add up chunks of gates.
constexpr int kClearedPieces = 16 * kGateChunk;

__global__ void __launch_bounds__(kGateChunk)
    clear_kernel(const __grid_constant__ GateChunks<GateSumScan> gates, uint4* cleared,
                 int64_t pieces) {
  if (blockIdx.x < gates.blocks()) {
    gates.add_up(blockIdx.x);
    return;
  }
  const int64_t first = int64_t{blockIdx.x - gates.blocks()} * kClearedPieces + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kClearedPieces; i += kGateChunk) {
    if (first + i < pieces) {
      cleared[first + i] = uint4{};
    }
  }
}

int64_t query_rows(const ForgettingAttentionParams& p) {
  return p.layout.batch * p.heads * p.layout.time;
}
int64_t key_rows(const ForgettingAttentionParams& p) {
  return p.key_layout.batch * p.heads * p.key_layout.time;
}

template <class T>
cudaError_t launch(const TensorAttention& work, const GateGradientChunks& gates,
                   const DeviceLimits& limits, cudaStream_t stream) {
  return work.params.forward.head_dim <= kLargestSmallHeadDim
             ? AttentionBackwardUnit<T, HeadDims::kSmall>::launch(work, gates, limits, stream)
             : AttentionBackwardUnit<T, HeadDims::kLarge>::launch(work, gates, limits, stream);
}

/// Rows of a tile of queries, and columns of its dq_sums.
struct QueryTile {
  int rows = 0, columns = 0;
};

cudaError_t find_query_tile(const ForgettingAttentionParams& p, const DeviceLimits& limits,
                            QueryTile* tile) {
  const auto take = [&]<class Shape, class ShortRangeShape, class QueryShape>() {
    *tile = {Shape::kRows, Shape::kDim};
    return cudaSuccess;
  };
  return p.head_dim <= kLargestSmallHeadDim
             ? with_backward_shapes<__nv_bfloat16, HeadDims::kSmall>(p.head_dim, limits, take)
             : with_backward_shapes<__nv_bfloat16, HeadDims::kLarge>(p.head_dim, limits, take);
}

/// The workspace, in order; each part starts at a multiple of 16 bytes.
struct Parts {
  int64_t gate_sums, extent_ends, short_range, delta, column_sums, score_bounds, long_range,
      row_sums, dq_sums, totals, all;

  Parts(const ForgettingAttentionParams& p, const TimeTiles& query_tiles, const QueryTile& tile) {
    int64_t at = 0;
    const auto part = [&](int64_t* start, int64_t bytes) {
      *start = at;
      at += (bytes + 15) / 16 * 16;
    };
    part(&gate_sums, gate_sums_count(p) * 8);
    const bool pruned = p.prune > 0;
    part(&extent_ends,
         pruned ? time_tiles(p.key_layout, KeyExtents::kKeys).count * p.heads * 4 : 0);
    part(&short_range, pruned ? p.key_layout.sequences * p.heads * 4 : 0);
    part(&delta, query_rows(p) * 4);
    part(&column_sums, key_rows(p) * 4);
    part(&score_bounds, score_bounds_bytes(p, true));  // from here on, cleared together
    part(&long_range, pruned ? 2 * 4 : 0);
    part(&row_sums, query_rows(p) * 4);
    part(&dq_sums,
         p.deterministic ? 0 : query_tiles.count * p.heads * tile.rows * tile.columns * int64_t{4});
    totals = gate_sums;  // c is not read any more
    all = at;
  }
};

}  // namespace

cudaError_t tensor_backward_fits(const ForgettingAttentionBackwardParams& params, bool* fits) {
  const ForgettingAttentionParams& p = params.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  QueryTile tile;
  *fits = tensor_forward_fits(p) && rows_aligned(params.d_o, 16) && rows_aligned(params.dq, 16) &&
          rows_aligned(params.dk, 16) && rows_aligned(params.dv, 16) &&
          find_query_tile(p, limits, &tile) == cudaSuccess;
  return cudaSuccess;
}

cudaError_t tensor_backward_plan(const ForgettingAttentionBackwardParams& params,
                                 ForgettingAttentionPlan* plan) {
  const ForgettingAttentionParams& p = params.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  QueryTile tile;
  TIDEGATE_RETURN_IF_CUDA_ERROR(find_query_tile(p, limits, &tile));
  *plan = {.path = AttentionPath::kTensorCore};
  plan->workspace_bytes = Parts(p, time_tiles(p.layout, tile.rows), tile).all;
  return cudaSuccess;
}

cudaError_t tensor_backward(const ForgettingAttentionBackwardParams& params, cudaStream_t stream) {
  const ForgettingAttentionParams& p = params.forward;
  if (p.layout.sequences == 0 || p.heads == 0) {
    return cudaSuccess;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  QueryTile tile;
  TIDEGATE_RETURN_IF_CUDA_ERROR(find_query_tile(p, limits, &tile));

  TensorAttention work;
  work.params = params;
  work.query_tiles = time_tiles(p.layout, tile.rows);
  const Parts parts(p, work.query_tiles, tile);
  char* const scratch = static_cast<char*>(p.workspace);
  double* const c = reinterpret_cast<double*>(scratch + parts.gate_sums);
  work.gate_sums = c;
  work.delta = reinterpret_cast<float*>(scratch + parts.delta);
  work.row_sums = reinterpret_cast<float*>(scratch + parts.row_sums);
  work.column_sums = reinterpret_cast<float*>(scratch + parts.column_sums);
  auto* const bounds = reinterpret_cast<unsigned*>(scratch + parts.score_bounds);
  if (!p.deterministic) {
    work.dq_sums = reinterpret_cast<float*>(scratch + parts.dq_sums);
  }
  const GateChunks<GateSumScan> gates({p, c}, c + key_rows(p));
  const int64_t pieces = ((p.deterministic ? parts.row_sums : parts.all) - parts.score_bounds) / 16;
  const int64_t clearing = (pieces + kClearedPieces - 1) / kClearedPieces;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      launch_unless_empty(&clear_kernel, static_cast<unsigned>(clearing + gates.blocks()),
                          kGateChunk, 0, stream, gates, reinterpret_cast<uint4*>(bounds), pieces));
  if (p.prune > 0) {
    work.score_bounds = bounds;
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_key_norms(work, stream));
  }
  const auto blocks = static_cast<unsigned>(row_blocks(p.layout, p.heads) + gates.blocks());
  unsigned* const excesses = p.prune > 0 ? bounds + p.layout.batch * p.key_heads : nullptr;
  TIDEGATE_RETURN_IF_CUDA_ERROR(with_row_kernels(p, [&]<class T, int kPieces>() {
    return launch_unless_empty(
        p.prune > 0 ? &delta_kernel<T, kPieces, true> : &delta_kernel<T, kPieces, false>, blocks,
        kRowThreads, 0, stream, work, excesses, gates);
  }));
  if (p.prune > 0) {
    work.extents = {time_tiles(p.key_layout, KeyExtents::kKeys),
                    reinterpret_cast<int*>(scratch + parts.extent_ends),
                    reinterpret_cast<int*>(scratch + parts.short_range),
                    reinterpret_cast<unsigned*>(scratch + parts.long_range)};
    key_extents_kernel<<<static_cast<unsigned>(extent_blocks(work.extents, p.heads)),
                         kExtentWarps * 32, 0, stream>>>(work);
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  }
  const GateGradientChunks gradients({p, params.dlog_f, work.row_sums, work.column_sums},
                                     reinterpret_cast<double*>(scratch + parts.totals));
  TIDEGATE_RETURN_IF_CUDA_ERROR(dispatch_16_bit(
      p.q.dtype, [&]<class T>() { return launch<T>(work, gradients, limits, stream); }));
  return launch_unless_empty(&gate_scan_kernel<GateGradientScan<float>>, gradients.blocks(),
                             kGateChunk, 0, stream, gradients);
}

}  // namespace tidegate::kernels::attention
