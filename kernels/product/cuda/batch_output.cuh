#pragma once

// The epilogue of a batch's fused product: the blocks' sums meet, and y is made of them. See
// batch_product.cu.

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/product/cuda/batch_shape.cuh"

namespace tidegate::kernels::product {

/// Makes y of the rows whose sums the block gets, four channels of a row at a time.
template <class E>
struct BatchOutput {
  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  int rows, first_row;     // of the block, that exist
  int channel0, channels;  // of y, of the pass
  int fours;               // of a row

  static constexpr int kVec = 4;
  using Four = Pack<E, kVec>;

  __device__ BatchOutput(const FusedProductParams& params, const BatchShape& shape,
                         const BatchWork& own, int first_tile, int tiles)
      : p(params), s(shape), work(own) {
    const int each = kBatchRows >> s.log_blocks;
    first_row = work.rank * each;
    rows = max(0, min(each, static_cast<int>(p.product.rows) - first_row));
    channel0 = (work.first_tile + first_tile) * s.tile_channels;
    channels = min(tiles * s.tile_channels, static_cast<int>(p.product.outer) - channel0);
    fours = (channels + kVec - 1) / kVec;
  }

  /// What a thread makes, one after another.
  struct Place {
    int row, channel;
  };
  /// Below 2^12 items, of rows of below 2^7.
  __device__ Place place(int item, unsigned inverse) const {
    const int row = static_cast<int>(static_cast<unsigned>(item) * inverse >> 20);
    return {row, (item - row * fours) * kVec};
  }
  __device__ unsigned inverse() const {
    const auto count = static_cast<unsigned>(max(1, fours));
    return ((1u << 20) + count - 1) / count;
  }

  __device__ Four residual_at(Place at) const {
    const E* const from = static_cast<const E*>(p.residual) +
                          (first_row + at.row) * p.stride_residual + channel0 + at.channel;
    if (s.is_aligned) return {*reinterpret_cast<const typename Four::Bits*>(from)};
    E four[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      four[v] = at.channel + v < channels ? from[v] : narrow<E>(0.0f);
    }
    return pack_elements(four);
  }

  /// The sums of four columns, rounded.
  __device__ void sum(const float* parts, int row, int column, float factor, const E* bias,
                      int count, float (&total)[kVec]) const {
    const float* from = parts + row * s.part_stride + column;
    const int step = (kBatchRows >> s.log_blocks) * s.part_stride;
    total[0] = total[1] = total[2] = total[3] = 0.0f;
#pragma unroll 2
    for (int rank = 0; rank < s.blocks; ++rank, from += step) {
      const float4 part = *reinterpret_cast<const float4*>(from);
      total[0] += part.x;
      total[1] += part.y;
      total[2] += part.z;
      total[3] += part.w;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] *= factor;
    if (bias != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) total[v] += v < count ? widen(bias[v]) : 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] = widen(narrow<E>(total[v]));
  }

  __device__ void make(const float* parts, Place at, float factor, Four residual) const {
    const int64_t channel = channel0 + at.channel;
    const int count = channels - at.channel;
    const E* const bias =
        p.product.bias == nullptr ? nullptr : static_cast<const E*>(p.product.bias) + channel;
    const int column =
        p.is_glu ? at.channel / (kTile / 2) * kTile + at.channel % (kTile / 2) : at.channel;
    float y[kVec];
    sum(parts, at.row, column, factor, bias, count, y);
    if (p.is_glu) {
      using Math = GateMath<float, true>;
      float value[kVec];
      sum(parts, at.row, column + kTile / 2, factor,
          bias == nullptr ? nullptr : bias + p.product.outer, count, value);
#pragma unroll
      for (int v = 0; v < kVec; ++v) y[v] = norm::activated<Math>(p.activation, y[v]) * value[v];
    }
    if (p.residual != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) y[v] = residual.get(v) + widen(narrow<E>(y[v]));
    }
    E* const to =
        static_cast<E*>(p.product.y) + (first_row + at.row) * p.product.stride_y + channel;
    if (s.is_aligned) {
      *reinterpret_cast<typename Four::Bits*>(to) = pack<E, kVec>(y).bits;
      return;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (v < count) to[v] = narrow<E>(y[v]);
    }
  }

  /// `wait()` between asking for the first residual and the sums. `factors`: of rows, where they
  /// scale the sums.
  template <class Wait>
  __device__ void run(const float* parts, const float* factors, Wait wait) const {
    const unsigned over = inverse();
    const int items = rows * fours;
    Four residual = {};
    if (p.residual != nullptr && work.thread < items) {
      residual = residual_at(place(work.thread, over));
    }
    wait();
#pragma unroll 1
    for (int item = work.thread; item < items; item += kThreads) {
      const Place at = place(item, over);
      if (p.residual != nullptr && item != work.thread) residual = residual_at(at);
      make(parts, at, s.scales_sums ? factors[first_row + at.row] : 1.0f, residual);
    }
  }
};

/// Leaves a warp's sums of a pass where they are sent from: [row][column].
template <int kN>
__device__ void leave_sums(const float (&d)[kN / 8][4], const BatchShape& s, const BatchWork& work,
                           int columns, float* staged) {
  const int row = work.warp % 4 * 16 + work.lane / 4, first = work.group * kN;
  float* const to = staged + row * s.part_stride + first + work.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    if (first + 8 * j < columns) {
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[j][0], d[j][1]);
      *reinterpret_cast<float2*>(to + 8 * s.part_stride + 8 * j) = make_float2(d[j][2], d[j][3]);
    }
  }
}

/// cluster_sync() in its two halves.
__device__ inline void cluster_arrive() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Copies bytes of this block's shared memory into that of another one, whose barrier counts them.
__device__ inline void send(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
#if TIDEGATE_HOPPER_CODE
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

/// Sends each block the sums of its rows.
__device__ inline void send_sums(const FusedProductParams& p, const BatchShape& s,
                                 const BatchWork& work, unsigned staged, unsigned parts,
                                 unsigned barrier) {
  const int to = work.thread;
  if (to >= s.blocks) return;
  const int each = kBatchRows >> s.log_blocks;
  const int rows = min(each, static_cast<int>(p.product.rows) - to * each);
  if (rows <= 0) return;
  const int block_bytes = each * s.part_stride * 4;
  send(address_in_block(parts + static_cast<unsigned>(work.rank * block_bytes), to),
       staged + static_cast<unsigned>(to * block_bytes),
       static_cast<unsigned>(rows * s.part_stride * 4), address_in_block(barrier, to));
}

}  // namespace tidegate::kernels::product
