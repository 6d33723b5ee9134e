#pragma once

// The epilogue of a batch's fused product: a block reads all blocks' sums of its rows, from their
// shared memory, and makes y of them. See batch_product.cu.

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/product/cuda/batch_shape.cuh"

namespace tidegate::kernels::product {

/// Reads numbers of another block of the cluster, at an address that address_in_block() gave.
__device__ inline float4 load_four_from(unsigned address) {
  float4 four = {};
#if TIDEGATE_HOPPER_CODE
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
#endif
  return four;
}
__device__ inline float load_from(unsigned address) {
  float value = 0.0f;
#if TIDEGATE_HOPPER_CODE
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}

/// Makes y of the block's rows, four channels of a row at a time.
template <class E>
struct BatchOutput {
  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  unsigned parts, squares;  // addresses: [row][column], [row]
  int rows, first_row;      // of the block, that exist
  int channel0, channels;   // of y, of the pass
  int fours;                // of a row

  static constexpr int kVec = 4;
  using Four = Pack<E, kVec>;

  __device__ BatchOutput(const FusedProductParams& params, const BatchShape& shape,
                         const BatchWork& own, const float* parts, const float* squares,
                         int first_tile, int tiles)
      : p(params),
        s(shape),
        work(own),
        parts(shared_address(parts)),
        squares(shared_address(squares)) {
    const int each = kBatchRows >> s.log_blocks;
    first_row = work.rank * each;
    rows = max(0, min(each, static_cast<int>(p.product.rows) - first_row));
    channel0 = (work.first_tile + first_tile) * s.tile_channels;
    channels = min(tiles * s.tile_channels, static_cast<int>(p.product.outer) - channel0);
    fours = (channels + kVec - 1) / kVec;
  }

  /// The items that a thread makes, one after another. An item is four channels of a row.
  struct Place {
    int row, channel;
  };
  /// Division by the reciprocal, exact below 2^12 items of rows of fewer than 2^7 items.
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

  /// The blocks' sums of four channels of a row, added up in the blocks' order.
  struct Sums {
    float z[kVec] = {}, value[kVec] = {};  // of a GLU: its gate, its values
    float square = 0.0f;                   // where a norm's factor scales the sums
  };

  /// Reads four columns of a row from kAtOnce blocks at once.
  template <int kAtOnce>
  __device__ void load(int row, int column, int first, float4 (&parts_of)[kAtOnce]) const {
    const unsigned from =
        parts + static_cast<unsigned>(((first_row + row) * s.part_stride + column) * 4);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      parts_of[r] = float4{};
      if (first + r < s.blocks) parts_of[r] = load_four_from(address_in_block(from, first + r));
    }
  }
  template <int kAtOnce>
  __device__ static void add(const float4 (&parts_of)[kAtOnce], float (&total)[kVec]) {
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      total[0] += parts_of[r].x;
      total[1] += parts_of[r].y;
      total[2] += parts_of[r].z;
      total[3] += parts_of[r].w;
    }
  }
  template <int kAtOnce, bool kGlu>
  __device__ __forceinline__ void add_blocks(int row, int column, int first, Sums& sums) const {
    float4 gates[kAtOnce], values[kGlu ? kAtOnce : 1];
    float part[kAtOnce] = {};
    load(row, column, first, gates);
    if constexpr (kGlu) load(row, column + kTile / 2, first, values);
    if (s.scales_sums) {
      const unsigned from = squares + static_cast<unsigned>((first_row + row) * 4);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (first + r < s.blocks) part[r] = load_from(address_in_block(from, first + r));
      }
    }
    add(gates, sums.z);
    if constexpr (kGlu) add(values, sums.value);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) sums.square += part[r];
  }
  /// Reads from all blocks at once where registers allow, as a second round of reading takes as
  /// long as the first.
  __device__ __forceinline__ void gather(int row, int column, Sums& sums) const {
    constexpr int kHalf = kMostClusterBlocks / 2;
    if (!p.is_glu) {
      return s.blocks <= kHalf ? add_blocks<kHalf, false>(row, column, 0, sums)
                               : add_blocks<kMostClusterBlocks, false>(row, column, 0, sums);
    }
#pragma unroll 1
    for (int first = 0; first < s.blocks; first += kHalf) {
      add_blocks<kHalf, true>(row, column, first, sums);
    }
  }

  /// z = u w^T + bias, from the sums over the blocks, rounded.
  __device__ static void finish(float factor, const E* bias, int count, float (&total)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] *= factor;
    if (bias != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) total[v] += v < count ? widen(bias[v]) : 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] = widen(narrow<E>(total[v]));
  }

  __device__ void make(Place at, Four residual) const {
    const int64_t channel = channel0 + at.channel;
    const int count = channels - at.channel;
    const E* const bias =
        p.product.bias == nullptr ? nullptr : static_cast<const E*>(p.product.bias) + channel;
    const int column =
        p.is_glu ? at.channel / (kTile / 2) * kTile + at.channel % (kTile / 2) : at.channel;
    Sums sums;
    gather(at.row, column, sums);
    float (&y)[kVec] = sums.z, (&value)[kVec] = sums.value;
    // The norm's factor, where it scales the sums instead of the rows.
    const float factor =
        s.scales_sums
            ? rsqrtf(sums.square / static_cast<float>(p.product.inner) + static_cast<float>(p.eps))
            : 1.0f;
    finish(factor, bias, count, y);
    if (p.is_glu) {
      using Math = GateMath<float, true>;
      finish(factor, bias == nullptr ? nullptr : bias + p.product.outer, count, value);
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

  /// Makes all of the thread's items. Calls wait() once it has asked for the first residual and
  /// before it reads the sums.
  template <class Wait>
  __device__ void run(Wait wait) const {
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
      make(at, residual);
    }
  }
};

/// Leaves a warp's sums of a pass, of `columns` columns from `first` on, where the blocks read
/// them: [row][column].
template <int kN>
__device__ void leave_sums(const float (&d)[kN / 8][4], const BatchShape& s, const BatchWork& work,
                           int first, int columns, float* parts) {
  const int row = work.warp % 4 * 16 + work.lane / 4;
  float* const to = parts + row * s.part_stride + first + work.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    if (first + 8 * j < columns) {
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[j][0], d[j][1]);
      *reinterpret_cast<float2*>(to + 8 * s.part_stride + 8 * j) = make_float2(d[j][2], d[j][3]);
    }
  }
}

}  // namespace tidegate::kernels::product
