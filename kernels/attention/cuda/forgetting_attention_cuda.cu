// The entry points of forgetting_attention_cuda.h, which say which kernels take a set of params;
// the scans of gates as launches of their own; and the path on tensor cores: its plans, which
// kernel follows which, and two small kernels of its backward pass (clear_kernel,
// key_extents_kernel). In the backward pass on tensor cores the scans share launches, with
// clear_kernel, delta_kernel and convert_dq_kernel.

#include <algorithm>

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/hopper/forward_tiles.cuh"
#include "kernels/attention/cuda/hopper/select.cuh"
#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/tile_configs.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {

// ---- The entry points ----

namespace {

/// Whether there is nothing to compute (the op looks too: src/ops/launch.h). A backward pass
/// without queries still has gradients of keys, which are zero; a forward pass looks for that
/// itself.
template <class Params>
bool is_empty(const Params& p) {
  return p.layout.sequences == 0 || p.channels == 0;
}

/// Tensor cores where they take the params, unless another path is asked for.
template <class Params>
cudaError_t choose_path(AttentionPath asked, ForgettingAttentionPlan* plan, const Params& params,
                        cudaError_t (*tensor_plan)(const Params&, ForgettingAttentionPlan*),
                        void (*plain_plan)(const Params&, ForgettingAttentionPlan*)) {
  if (asked != AttentionPath::kPlain) {
    const cudaError_t status = tensor_plan(params, plan);
    if (status != cudaErrorNotSupported || asked == AttentionPath::kTensorCore) {
      return status;
    }
  }
  plain_plan(params, plan);
  return cudaSuccess;
}

}  // namespace

cudaError_t forgetting_attention_forward_plan(const ForgettingAttentionParams& params,
                                              ForgettingAttentionPlan* plan) {
  return choose_path(params.path, plan, params, &tensor_forward_plan,
                     &plain_attention_forward_plan);
}

cudaError_t forgetting_attention_backward_plan(const ForgettingAttentionBackwardParams& params,
                                               ForgettingAttentionPlan* plan) {
  return choose_path(params.forward.path, plan, params, &tensor_backward_plan,
                     &plain_attention_backward_plan);
}

cudaError_t forgetting_attention_step_plan(const ForgettingAttentionStepParams& params,
                                           ForgettingAttentionPlan* plan) {
  return attention_step_plan(params, plan);
}

cudaError_t forgetting_attention_forward(const ForgettingAttentionParams& params,
                                         cudaStream_t stream) {
  if (is_empty(params) || params.layout.time == 0) {
    return cudaSuccess;
  }
  return params.plan.path == AttentionPath::kTensorCore ? tensor_forward(params, stream)
                                                        : plain_attention_forward(params, stream);
}

cudaError_t forgetting_attention_backward(const ForgettingAttentionBackwardParams& params,
                                          cudaStream_t stream) {
  if (is_empty(params.forward)) {
    return cudaSuccess;
  }
  return params.forward.plan.path == AttentionPath::kTensorCore
             ? tensor_backward(params, stream)
             : plain_attention_backward(params, stream);
}

cudaError_t forgetting_attention_step(const ForgettingAttentionStepParams& params,
                                      cudaStream_t stream) {
  return is_empty(params) ? cudaSuccess : attention_step(params, stream);
}

// ---- The two scans over time as launches of their own ----

namespace {

int64_t count_of(const ForgettingAttentionParams& p) {
  return p.key_layout.batch * p.heads * p.key_layout.time;
}

template <class Scan>
cudaError_t run(const Scan& scan, double* totals, cudaStream_t stream) {
  const GateChunks<Scan> chunks(scan, totals);
  if (chunks.adds_up_alone()) {
    return launch_early<&whole_gate_scan_kernel<Scan>>(dim3(chunks.blocks()), kGateChunk, 0, stream,
                                                       chunks);
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&gate_totals_kernel<Scan>, chunks.blocks(),
                                                    kGateChunk, 0, stream, chunks));
  return launch_unless_empty(&gate_scan_kernel<Scan>, chunks.blocks(), kGateChunk, 0, stream,
                             chunks);
}

}  // namespace

int64_t gate_totals_count(const ForgettingAttentionParams& p) {
  return time_tiles(p.key_layout, kGateChunk).count * p.heads;
}

int64_t gate_sums_count(const ForgettingAttentionParams& p) {
  return count_of(p) + gate_totals_count(p);
}

cudaError_t scan_gates(const ForgettingAttentionParams& p, double* c, cudaStream_t stream,
                       unsigned* counter) {
  return run(GateSumScan{p, c, counter}, c + count_of(p), stream);
}

cudaError_t gate_gradients(const ForgettingAttentionBackwardParams& p, const double* row_sums,
                           const double* column_sums, double* totals, cudaStream_t stream) {
  return run(GateGradientScan<double>{p.forward, p.dlog_f, row_sums, column_sums}, totals, stream);
}

// ---- The forward pass ----

namespace {

constexpr int64_t kLargestGrid = (int64_t{1} << 31) - 1;
// Rows of a block, queries or keys, by which the blocks of a grid are bounded. S192 of
// tile_configs.cuh has 32 queries: there launch_unless_empty refuses a grid that is too large.
constexpr int64_t kLeastTile = 64;

/// Whether the device runs code for 9.0a, this build has it, and a block may have what it needs.
cudaError_t has_hopper_code(const DeviceLimits& limits, bool* has_code) {
  int version = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(compiled_for<&gate_scan_kernel<GateSumScan>>(&version));
  *has_code = limits.major == 9 && version == 90 && limits.shared_bytes >= kHopperSharedBytes;
  return cudaSuccess;
}

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

bool tensor_cores_take(const ForgettingAttentionParams& p) {
  const int64_t blocks = p.heads * std::max(time_tiles(p.layout, kLeastTile).count,
                                            time_tiles(p.key_layout, kLeastTile).count);
  return is_16_bit(p.q.dtype) && p.head_dim % 8 == 0 && p.head_dim >= 16 &&
         p.head_dim <= kMaxAttentionHeadDim && rows_aligned(p.q, 16) && rows_aligned(p.k, 16) &&
         rows_aligned(p.v, 16) && rows_aligned(p.o, 16) && blocks <= kLargestGrid &&
         p.window < kLargestGrid;
}

namespace {

/// Whether the kernel of forward/single_tile_kernel.cuh takes the inputs and o. It drops no keys
/// where `prune` would allow it.
bool single_tile_takes(const ForgettingAttentionParams& p) {
  return is_16_bit(p.q.dtype) && p.head_dim <= kSingleTileHeadDim &&
         p.layout.time <= kSingleTileTime && p.key_layout.time <= kSingleTileTime &&
         p.heads * time_tiles(p.layout, kSingleTileTime).count <= kLargestGrid &&
         p.window < kLargestGrid;
}

}  // namespace

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
    if (!single_tile_takes(p)) {
      return cudaErrorNotSupported;
    }
    *plan = {.path = AttentionPath::kTensorCore, .tile = AttentionTile::kSingleTile};
    return cudaSuccess;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  bool hopper = false;
  if (hopper_forward_takes(p)) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(has_hopper_code(limits, &hopper));
  }
  *plan = {.path = AttentionPath::kTensorCore,
           .tile = hopper               ? AttentionTile::kHopper
                   : is_wide(p, limits) ? AttentionTile::kWide
                                        : AttentionTile::kUsual};
  plan->workspace_bytes = ForwardWorkspace(p).bytes;
  return cudaSuccess;
}

cudaError_t tensor_forward(const ForgettingAttentionParams& p, cudaStream_t stream) {
  TensorAttention work;
  work.params.forward = p;
  if (p.plan.tile == AttentionTile::kSingleTile) {
    return dispatch_16_bit(p.q.dtype, [&]<class T>() {
      return AttentionSingleTileForwardUnit<T>::launch(work, stream);
    });
  }
  const ForwardWorkspace workspace(p);
  work.gate_sums = workspace.gate_sums;
  const bool hopper = p.plan.tile == AttentionTile::kHopper;
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      scan_gates(p, workspace.gate_sums, stream, hopper ? workspace.next_item : nullptr));
  if (p.prune > 0) {
    work.score_bounds = workspace.score_bounds;
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(workspace.score_bounds, 0, score_bounds_bytes(p, false), stream));
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_key_norms(work, stream));
  }
  if (hopper) {
    return dispatch_16_bit(p.q.dtype, [&]<class T>() {
      return HopperForwardUnit<T>::launch({.attention = work, .next_item = workspace.next_item},
                                          stream);
    });
  }
  return dispatch_16_bit(p.q.dtype, [&]<class T>() { return launch<T>(work, stream); });
}

// ---- The backward pass ----

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

// Which queries pruning leaves to the keys, found before the pass: a warp for every 64 keys and
// query head. Blocks of the pass then start with one load where they would search.

constexpr int kExtentWarps = 8;  // of a block

/// Keys with fewer queries than this, on average over a sequence, are better off in small tiles;
/// see also TensorAttention::has_short_range.
constexpr double kShortRangeTokens = 256;

int64_t extent_blocks(const KeyExtents& extents, int64_t heads) {
  return (extents.keys.count * heads + kExtentWarps - 1) / kExtentWarps;
}

__global__ void __launch_bounds__(kExtentWarps * 32)
    key_extents_kernel(const __grid_constant__ TensorAttention w) {
  const ForgettingAttentionParams& p = w.params.forward;
  const int64_t at = int64_t{blockIdx.x} * kExtentWarps + threadIdx.x / 32;
  const int64_t tile_index = at / p.heads;
  if (tile_index >= w.extents.keys.count) {
    return;
  }
  const int head = static_cast<int>(at % p.heads), lane = static_cast<int>(threadIdx.x) % 32;
  const TimeTile tile = find_time_tile(w.extents.keys, static_cast<int>(tile_index));
  const Sequence& keys = tile.sequence;
  const auto mark_long = [&] {
    w.extents.is_long[keys.index * p.heads + head] = 1;
    w.extents.long_range[0] = 1;
  };
  if (tile.tokens == 0) {
    // A sequence without keys may have queries, which iterating over tiles of keys would miss.
    if (tile.exists() && lane == 0 && find_sequence(p.layout, keys.index).length > 0) {
      mark_long();
    }
    return;
  }
  // c falls with time, so of the tile's keys the last one is dropped last: from the first query on
  // whose c has fallen `fall` below that key's. Query i is at position i + shift.
  const GateSums gates(w, keys, head);
  const double fall = largest_fall(p, keys.length, ScoreBounds::score(w, keys.batch, head));
  const double last = gates.at(tile.first + tile.tokens - 1);
  const int shift = keys.length - find_sequence(p.layout, keys.index).length;
  const int end = gates.first_known_not_above(last - fall, keys.length, lane) - shift;
  if (lane == 0) {
    w.extents.ends[at] = max(end, 0);
    if (w.has_short_range) {
      const int64_t windowed = p.window > 0 ? tile.end() + p.window - 1 : keys.length;
      if (shift < 0 || min(int64_t{end} + shift, windowed) > tile.first + 2 * KeyExtents::kKeys) {
        mark_long();
      }
    } else if (tile.index == 0) {
      const double whole = gates.at(0) - gates.at(keys.length - 1);
      if (!(fall * keys.length < whole * kShortRangeTokens)) {
        mark_long();
      }
    }
  }
}

template <class T>
cudaError_t launch(const TensorAttention& work, const GateGradientChunks& gates,
                   const DeviceLimits& limits, cudaStream_t stream) {
  if (work.params.forward.plan.tile == AttentionTile::kHopper) {
    return HopperBackwardUnit<T>::launch(work, gates, limits, stream);
  }
  return work.params.forward.head_dim <= kLargestSmallHeadDim
             ? AttentionBackwardUnit<T, HeadDims::kSmall>::launch(work, gates, limits, stream)
             : AttentionBackwardUnit<T, HeadDims::kLarge>::launch(work, gates, limits, stream);
}

/// What the host must know of the shapes that a plan's tile stands for.
struct TileNeeds {
  bool adds = false;             // dq by additions
  bool has_short_range = false;  // short-range heads without
  int rows = 0, columns = 0;     // of a tile of queries, of its dq sums
  int shared_bytes = 0;          // of a block

  [[nodiscard]] BackwardWorkspace workspace(const ForgettingAttentionParams& p) const {
    return {p, rows, columns, adds, !has_short_range};
  }
};

cudaError_t find_needs(const ForgettingAttentionParams& p, AttentionTile tile,
                       const DeviceLimits& limits, TileNeeds* needs) {
  if (tile == AttentionTile::kHopper) {
    return with_hopper_backward_tile(p.head_dim, [&]<HopperBackwardTile kTile>() {
      *needs = {true, hopper_takes_short_range(p), kTile.queries, kTile.sum_columns(),
                kHopperSharedBytes};
      return cudaSuccess;
    });
  }
  const auto look = [&]<class Shapes>() {
    using Keys = typename Shapes::Keys;
    *needs = {!p.deterministic, false, Keys::kRows, Keys::kDim,
              std::max(Keys::shared_bytes(limits), Shapes::Queries::kSharedBytes)};
    return cudaSuccess;
  };
  return p.head_dim <= kLargestSmallHeadDim ? with_backward_shapes<__nv_bfloat16, HeadDims::kSmall>(
                                                  p.head_dim, tile == AttentionTile::kSmall, look)
                                            : with_backward_shapes<__nv_bfloat16, HeadDims::kLarge>(
                                                  p.head_dim, tile == AttentionTile::kSmall, look);
}

/// Clears what is added to; the first step of the scan that makes c.
cudaError_t clear_sums(const BackwardWorkspace& workspace, const GateChunks<GateSumScan>& gates,
                       cudaStream_t stream) {
  const int64_t pieces = workspace.cleared_bytes / 16;
  const int64_t clearing = (pieces + kClearedPieces - 1) / kClearedPieces;
  return launch_unless_empty(&clear_kernel, clearing + int64_t{gates.blocks()}, kGateChunk, 0,
                             stream, gates, reinterpret_cast<uint4*>(workspace.score_bounds),
                             pieces);
}

/// delta - dlse, and bounds of the queries' scores where keys are pruned; the second step of c's
/// scan.
cudaError_t compute_delta(const TensorAttention& work, const GateChunks<GateSumScan>& gates,
                          const BackwardWorkspace& workspace, cudaStream_t stream) {
  const ForgettingAttentionParams& p = work.params.forward;
  const bool pruned = p.prune > 0;
  unsigned* const excesses =
      pruned ? workspace.score_bounds + p.layout.batch * p.key_heads : nullptr;
  return with_row_kernels(p, [&]<class T, int kPieces>() {
    return launch_unless_empty(
        pruned ? &delta_kernel<T, kPieces, true> : &delta_kernel<T, kPieces, false>,
        row_blocks(p.layout, p.heads) + int64_t{gates.blocks()}, kRowThreads, 0, stream, work,
        excesses, gates);
  });
}

}  // namespace

cudaError_t tensor_backward_plan(const ForgettingAttentionBackwardParams& params,
                                 ForgettingAttentionPlan* plan) {
  const ForgettingAttentionParams& p = params.forward;
  if (!tensor_cores_take(p) || !rows_aligned(params.d_o, 16) || !rows_aligned(params.dq, 16) ||
      !rows_aligned(params.dk, 16) || !rows_aligned(params.dv, 16)) {
    return cudaErrorNotSupported;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  bool on_hopper = false;
  if (hopper_backward_takes(params)) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(has_hopper_code(limits, &on_hopper));
  }
  for (const auto tile : {AttentionTile::kHopper, AttentionTile::kUsual, AttentionTile::kSmall}) {
    if (tile == AttentionTile::kHopper && !on_hopper) {
      continue;
    }
    TileNeeds needs;
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_needs(p, tile, limits, &needs));
    if (needs.shared_bytes <= limits.shared_bytes) {
      *plan = {.path = AttentionPath::kTensorCore, .tile = tile};
      plan->workspace_bytes = needs.workspace(p).bytes;
      return cudaSuccess;
    }
  }
  return cudaErrorNotSupported;
}

cudaError_t tensor_backward(const ForgettingAttentionBackwardParams& params, cudaStream_t stream) {
  const ForgettingAttentionParams& p = params.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  TileNeeds needs;
  TIDEGATE_RETURN_IF_CUDA_ERROR(find_needs(p, p.plan.tile, limits, &needs));
  const BackwardWorkspace workspace = needs.workspace(p);

  TensorAttention work;
  work.params = params;
  work.query_tiles = time_tiles(p.layout, needs.rows);
  work.gate_sums = workspace.gate_sums;
  work.delta_minus_dlse = workspace.delta_minus_dlse;
  work.row_sums = workspace.row_sums;
  work.column_sums = workspace.column_sums;
  work.dq_sums = workspace.dq_sums;
  work.turns = workspace.turns;
  work.has_short_range = needs.has_short_range;
  const GateChunks<GateSumScan> gates({p, workspace.gate_sums}, workspace.gate_sums + key_rows(p));
  TIDEGATE_RETURN_IF_CUDA_ERROR(clear_sums(workspace, gates, stream));
  if (p.prune > 0) {
    work.score_bounds = workspace.score_bounds;
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_key_norms(work, stream));
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(compute_delta(work, gates, workspace, stream));
  if (p.prune > 0) {
    work.extents = {time_tiles(p.key_layout, KeyExtents::kKeys), workspace.extent_ends,
                    workspace.is_long, workspace.long_range};
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&key_extents_kernel,
                                                      extent_blocks(work.extents, p.heads),
                                                      kExtentWarps * 32, 0, stream, work));
  }
  const GateGradientChunks gradients({p, params.dlog_f, work.row_sums, work.column_sums},
                                     workspace.totals);
  TIDEGATE_RETURN_IF_CUDA_ERROR(dispatch_16_bit(
      p.q.dtype, [&]<class T>() { return launch<T>(work, gradients, limits, stream); }));
  return launch_unless_empty(&gate_scan_kernel<GateGradientScan<float>>,
                             int64_t{gradients.blocks()}, kGateChunk, 0, stream, gradients);
}

}  // namespace tidegate::kernels::attention
