#pragma once

// What products of a few rows have in common: a warp's ring of weights, and its products by tensor
// cores.

#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/product/cuda/fused_rows.cuh"

namespace tidegate::kernels::product {

template <class E>
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<E, __half>) {
    mma_f16(d, a, b0, b1);
  } else {
    mma_bf16(d, a, b0, b1);
  }
}

/// A warp's share of a block's tiles: every eighth chunk of inner channels of each.
struct WarpItems {
  int warp, lane;
  int chunks;  // of a tile
  int items;   // the chunks of the first tile, then of the next one

  __device__ WarpItems(const Shape& shape, int tiles)
      : warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32) {
    chunks = (shape.chunks - warp + kWarps - 1) / kWarps;
    chunks = chunks > 0 ? chunks : 0;
    items = tiles * chunks;
  }
};

/// Where a row of w begins, or one of the further weights (`more`).
template <class E, bool kMore>
__device__ inline const E* weight_row(const FusedProductParams& p, int64_t channel) {
  const void* w = p.product.w;
  int64_t stride = p.product.stride_w, first = 0;
  if constexpr (kMore) {
#pragma unroll
    for (int i = 0; i < FusedProductParams::kMore; ++i) {
      if (p.more[i].w != nullptr && channel >= p.more[i].first) {
        w = p.more[i].w;
        stride = p.more[i].stride_w;
        first = p.more[i].first;
      }
    }
  }
  return static_cast<const E*>(w) + (channel - first) * stride;
}

/// A warp's ring of weights. An item is 16 channels by 64 inner ones, in rows of 128 bytes;
/// `rows(tile, row)` is where a tile's row of w lies, or null.
template <class E, class Rows>
struct WeightRing {
  const FusedProductParams& p;
  const Shape& shape;
  const WarpItems& work;
  Rows rows;
  unsigned base;                                 // address of the warp's ring in shared memory
  int tile = 0, chunk = 0, slot = 0, asked = 0;  // of the next item to ask for

  /// Asks for the next item. Past the last one, commits an empty group, as waits count groups.
  __device__ void ask() {
    if (asked < work.items) {
      const int pack = work.lane % 8;
      const int64_t inner =
          static_cast<int64_t>(chunk * kWarps + work.warp) * kChunk + pack * kPack;
      const bool exists = inner < p.product.inner;
      const unsigned item = base + static_cast<unsigned>(slot * kItemBytes);
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const int row = i * 4 + work.lane / 8;
        const E* const from = rows(tile, row);
        if (from == nullptr) continue;
        copy_async_or_zero(item + place_in_item(row, pack), exists ? from + inner : from, exists);
      }
      ++asked;
      slot = after(slot);
      if (++chunk == work.chunks) {
        chunk = 0;
        ++tile;
      }
    }
    commit_copies();
  }
  /// The place after `at` in the ring.
  __device__ int after(int at) const { return at + 1 == shape.stages ? 0 : at + 1; }
  /// Commits as many groups as a ring can have, some of them empty, so that all waits count alike.
  __device__ void fill() {
    for (int i = 0; i < kStages; ++i) {
      if (i < shape.stages) {
        ask();
      } else {
        commit_copies();
      }
    }
  }
};

/// A warp's sums of a tile, of kGroups groups of eight rows of x.
template <class E, int kGroups>
struct Products {
  // Two chains of sums, since each product waits for the one before.
  float d[2][kGroups][4];

  __device__ void clear() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[0][g][i] = d[1][g][i] = 0.0f;
    }
  }

  /// The item's weights times the rows of x, of which `x` is the address of the chunk's first
  /// element. Past the last row the first one stands in: nobody reads the sums of such rows.
  __device__ void add(unsigned item, unsigned x, int x_stride, int rows, int lane) {
    const int matrix = lane / 8, within = lane % 8;
    const int left_row = (matrix & 1) * 8 + within;
#pragma unroll
    for (int pair = 0; pair < kChunk / 32; ++pair) {
      uint32_t left[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        load_matrices(left[k], item + place_in_item(left_row, 4 * pair + 2 * k + matrix / 2));
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int row = g * kRowsOfMma + within;
        uint32_t right[4];
        load_matrices(right, x + static_cast<unsigned>((row < rows ? row : 0) * x_stride +
                                                       (4 * pair + matrix) * 16));
        multiply<E>(d[0][g], left[0], right[0], right[1]);
        multiply<E>(d[1][g], left[1], right[2], right[3]);
      }
    }
  }

  __device__ void leave(float* sums, int rows, const WarpItems& work) const {
    const int channel = work.lane / 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = g * kRowsOfMma + work.lane % 4 * 2 + i % 2;
        if (row < rows) {
          sums[(work.warp * rows + row) * kTile + channel + i / 2 * 8] = d[0][g][i] + d[1][g][i];
        }
      }
    }
  }
};

/// A warp's products of a tile, as its items land, from place `slot` of the ring on, which moves
/// on. `x`: address of the rows.
template <int kGroups, class E, class Rows>
__device__ __forceinline__ Products<E, kGroups> multiply_tile(WeightRing<E, Rows>& ring,
                                                              const WarpItems& items, unsigned x,
                                                              int rows, int& slot) {
  Products<E, kGroups> products;
  products.clear();
  for (int c = 0; c < items.chunks; ++c) {
    // The ring has kStages groups under way where all its stages are in use, and where they are
    // fewer all items were among the first: the oldest has landed either way.
    wait_for_copies<kStages - 1>();
    __syncwarp();
    products.add(ring.base + static_cast<unsigned>(slot * kItemBytes),
                 x + static_cast<unsigned>((c * kWarps + items.warp) * kRowBytes),
                 ring.shape.x_stride, rows, items.lane);
    __syncwarp();
    ring.ask();
    slot = ring.after(slot);
  }
  return products;
}

}  // namespace tidegate::kernels::product
