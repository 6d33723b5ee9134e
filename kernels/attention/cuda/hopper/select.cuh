#pragma once

// Which params of forgetting attention the kernels for Hopper (compute capability 9.0a) take, and
// the tiles of the backward ones. What does not depend on the params, whether the device is of that
// capability, the library has code for it and a block may have kHopperSharedBytes, is asked by
// has_hopper_code (forgetting_attention_cuda.cu). The forward kernel's tiles are in
// forward_tiles.cuh.

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

/// What a block may use on Hopper. Tests that set shared_bytes_limit below it get the portable
/// kernels.
constexpr int kHopperSharedBytes = 227 * 1024;

/// A row of the backward kernel's table: the head dimension, padded, and the queries and keys of a
/// tile.
struct HopperBackwardTile {
  int dim;
  int queries, keys;
  // Up to a head dimension of 128, dk and dv of 128 keys are divided among two warpgroups by keys.
  // Above, not even those of 64 keys fit the registers of one: then one has dv, the other one dk.
  [[nodiscard]] constexpr bool has_roles() const { return dim > 128; }
  // dq of a tile is divided by rows or, where there are 64, by columns.
  [[nodiscard]] constexpr bool dq_by_rows() const { return queries == 128; }
  [[nodiscard]] constexpr int sum_columns() const {
    return dq_by_rows() ? 64 : dim <= 128 ? 128 : dim;
  }
};
/// The table: calls f.template operator()<kTile>() with the tile of a head dimension up to 192.
template <class F>
cudaError_t with_hopper_backward_tile(int64_t dim, const F& f) {
  // A row is {dim, queries, keys}. Tiles of 128 queries, whose scores are taken 64 at a time, wait
  // at half as many barriers.
  constexpr HopperBackwardTile kD64 = {64, 128, 128};
  // In two stages, so many queries and their dO would not fit in shared memory with the keys.
  constexpr HopperBackwardTile kD96 = {96, 64, 128}, kD128 = {128, 64, 128};
  // 64 keys fill shared memory (216 KB), and their dk and dv the registers of two warpgroups.
  constexpr HopperBackwardTile kD192 = {192, 64, 64};
  return dim <= 64    ? f.template operator()<kD64>()
         : dim <= 96  ? f.template operator()<kD96>()
         : dim <= 128 ? f.template operator()<kD128>()
                      : f.template operator()<kD192>();
}

/// Whether a backward pass on Hopper has a kernel of its own for short-range heads
/// (short_range.cuh), whose tiles have 128 columns.
inline bool hopper_takes_short_range(const ForgettingAttentionParams& p) {
  return p.prune > 0 && p.head_dim > 64 && p.head_dim <= 128;
}

template <class Data>
struct HopperBackwardUnit {
  /// Does what AttentionBackwardUnit::launch does, for heads of all ranges.
  static cudaError_t launch(const TensorAttention& work, const GateGradientChunks& gates,
                            const DeviceLimits& limits, cudaStream_t stream);
};

/// Whether the copy engine takes a tensor: not one whose rows share elements, as those of an
/// expanded one do (a stride of zero), nor one that steps by 2^40 bytes.
inline bool copy_engine_takes(const HeadSeries& t, const SequenceLayout& layout, int64_t heads,
                              int64_t head_dim) {
  const auto takes = [&](int64_t stride, int64_t count) {
    return count <= 1 || (stride >= head_dim && stride < (int64_t{1} << 39));
  };
  return takes(t.stride_h, heads) && takes(t.stride_t, layout.time) &&
         takes(t.stride_b, layout.batch);
}

/// Whether the copy engine takes the queries, keys and values.
inline bool copies_inputs(const ForgettingAttentionParams& p) {
  return copy_engine_takes(p.q, p.layout, p.heads, p.head_dim) &&
         copy_engine_takes(p.k, p.key_layout, p.key_heads, p.head_dim) &&
         copy_engine_takes(p.v, p.key_layout, p.key_heads, p.head_dim);
}

/// Scores start from constants divided by the scale: from this one down, its reciprocal would be
/// near fp32's end.
inline constexpr double kLeastScale = 1e-20;

/// Whether every sequence of a forward pass is one tile of the portable kernel, which is faster
/// then (docs/lab/attention.md). Up to a head dimension of 64 that has 128 queries and 128 keys,
/// where the Hopper kernel's has 192 and 96: a third of its math warpgroups would be without
/// queries, and the others would go through two tiles of keys. Up to 64 queries, all but one would
/// be in either.
inline bool is_one_portable_tile(const ForgettingAttentionParams& p) {
  return p.head_dim <= 64 && p.layout.offsets == nullptr && p.layout.time > 64 &&
         p.layout.time <= 128 && p.key_layout.time <= 128;
}

/// Whether a forward pass takes the Hopper kernel, where the device can. The portable ones keep
/// heads of up to 32, for which half of the smallest tile would be padding, sequences that are one
/// of their tiles, scales of at most kLeastScale, and tensors that the copy engine does not take.
inline bool hopper_forward_takes(const ForgettingAttentionParams& p) {
  return p.head_dim > 32 && !is_one_portable_tile(p) && p.scale > kLeastScale && copies_inputs(p);
}

/// Whether a backward pass takes the Hopper kernels, where the device can. The portable ones keep:
///   - a head dimension up to 32, of which half the products would be padding, or above 192: dk and
///     dv of 64 keys leave no registers for scores, whatever the roles;
///   - a deterministic pass that prunes. A block's turn at a tile of queries is the number of tiles
///     of later keys that the tile sees. While c falls, pruning keeps that count: where it leaves
///     keys to a query, it leaves later ones too. With a gate above 0, which only debug mode
///     refuses, it may leave earlier keys without later ones, and their block would wait for ever;
///   - a scale of at most kLeastScale;
///   - tensors that the copy engine does not take.
inline bool hopper_backward_takes(const ForgettingAttentionBackwardParams& params) {
  const ForgettingAttentionParams& p = params.forward;
  const bool prunes = p.prune > 0;
  return p.head_dim > 32 && p.head_dim <= 192 && !(prunes && p.deterministic) &&
         p.scale > kLeastScale && p.layout.time > 0 && copies_inputs(p) &&
         copy_engine_takes(params.d_o, p.layout, p.heads, p.head_dim);
}

}  // namespace tidegate::kernels::attention
