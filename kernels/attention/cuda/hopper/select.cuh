#pragma once

// Which passes of forgetting attention take the kernels for Hopper (compute capability 9.0a), and
// the shapes of these: the one place where that is decided.

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

/// The tile of a plan that stands for the Hopper kernel.
constexpr int kHopperTile = 2;

/// What a block may use on Hopper. Tests that set shared_bytes_limit below it get the portable
/// kernels.
constexpr int kHopperSharedBytes = 227 * 1024;

/// A row of the backward kernel's table: the head dimension, padded, and the queries of a tile.
struct HopperBackwardTile {
  int dim;
  int queries;
  // dq of a tile is divided among two warpgroups, by rows or, where there are 64, by columns.
  [[nodiscard]] constexpr bool dq_by_rows() const { return queries == 128; }
  [[nodiscard]] constexpr int sum_columns() const { return dq_by_rows() ? 64 : 128; }
};
/// Calls f.template operator()<kTile>() with that of a head dimension up to 128.
template <class F>
cudaError_t with_hopper_backward_tile(int64_t dim, const F& f) {
  return dim <= 64   ? f.template operator()<HopperBackwardTile{64, 128}>()
         : dim <= 96 ? f.template operator()<HopperBackwardTile{96, 64}>()
                     : f.template operator()<HopperBackwardTile{128, 64}>();
}

template <class Data>
struct HopperBackwardUnit {
  /// As AttentionBackwardUnit::launch, for heads of all ranges.
  static cudaError_t launch(const TensorAttention& work, const GateGradientChunks& gates,
                            const DeviceLimits& limits, cudaStream_t stream);
};

/// Whether rows of a tensor share elements, as those of an expanded one do (a stride of zero): the
/// copy engine takes no such tensor.
inline bool rows_overlap(const HeadSeries& t, const SequenceLayout& layout, int64_t heads,
                         int64_t head_dim) {
  return (t.stride_h < head_dim && heads > 1) || (t.stride_t < head_dim && layout.time > 1) ||
         (t.stride_b < head_dim && layout.batch > 1);
}

/// Whether the copy engine takes the queries, keys and values.
inline bool copies_inputs(const ForgettingAttentionParams& p) {
  return !rows_overlap(p.q, p.layout, p.heads, p.head_dim) &&
         !rows_overlap(p.k, p.key_layout, p.key_heads, p.head_dim) &&
         !rows_overlap(p.v, p.key_layout, p.key_heads, p.head_dim);
}

/// Whether a forward pass takes the Hopper kernel, where the device can. The portable ones keep
/// heads of up to 32, for which half of the smallest tile would be padding.
inline bool hopper_forward_takes(const ForgettingAttentionParams& p) {
  return p.head_dim > 32 && copies_inputs(p);
}

/// Whether a backward pass takes the Hopper kernel, where the device can. The portable ones keep:
///   - a pass that prunes: short-range heads are better off in smaller tiles;
///   - a head dimension above 128: dk and dv of 128 keys do not fit the registers;
///   - tensors whose rows overlap.
inline bool hopper_backward_takes(const ForgettingAttentionBackwardParams& params) {
  const ForgettingAttentionParams& p = params.forward;
  return p.prune == 0 && p.head_dim <= 128 && p.layout.time > 0 && copies_inputs(p) &&
         !rows_overlap(params.d_o, p.layout, p.heads, p.head_dim);
}

}  // namespace tidegate::kernels::attention
