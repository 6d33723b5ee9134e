#pragma once

// The weights of a batch's fused product on their way to a block, and its products. See
// batch_product.cu.

#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/product/cuda/batch_shape.cuh"

namespace tidegate::kernels::product {

/// A warpgroup's ring of weights: its rows of a chunk, in panels of rows of 128 bytes.
/// `weights(column)`: where the row of w lies that makes this column of the cluster, or null.
/// kShares: the warpgroups share the block's chunks, by turns, and have the same columns; otherwise
/// each has half of the columns.
template <class E, int kN, class Weights, bool kShares = false>
struct BatchRing {
  static constexpr int kOwn = kN / 16;  // rows of a thread

  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  Weights weights;
  unsigned base;  // of the ring in shared memory
  int items;
  int pass = 0, chunk = 0, slot = 0, asked = 0;
  const E* rows[kOwn] = {};  // of the pass; null: none

  __device__ unsigned item(int at) const {
    return base + static_cast<unsigned>((at * kWarpgroups + work.group) * kN * kRowBytes);
  }
  /// How many chunks of x the warpgroup has, and which chunk of the block's a given one is.
  __device__ int chunks() const {
    return kShares ? (work.chunks + kWarpgroups - 1 - work.group) / kWarpgroups : work.chunks;
  }
  __device__ int chunk_of_block(int own) const {
    return kShares ? own * kWarpgroups + work.group : own;
  }
  __device__ int row(int i) const { return i * 16 + work.thread % kGroupThreads / 8; }

  __device__ void find_rows() {
    const int first = kShares ? 0 : pass * kWarpgroups * kN + work.group * kN;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) rows[i] = weights(first + row(i));
  }

  __device__ void ask() {
    if (asked < items) {
      if (chunk == 0) find_rows();
      const int pack = work.thread % 8;
      const int inner = (work.first_chunk + chunk_of_block(chunk)) * kChunk + pack * kPack;
      const bool exists = inner < p.product.inner;
      const unsigned to = item(slot) + place_in_item(row(0), pack);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // The permutation of packs repeats after eight rows, so it is the same sixteen rows
        // further.
        if (rows[i] != nullptr) {
          copy_async_or_zero(to + static_cast<unsigned>(i * 16 * kRowBytes),
                             exists ? rows[i] + inner : rows[i], exists);
        }
      }
      ++asked;
      slot = slot + 1 == s.stages ? 0 : slot + 1;
      if (++chunk == chunks()) {
        chunk = 0;
        ++pass;
      }
    }
    commit_copies();
  }
};

/// Waits until what the ring and others have asked for has landed and the tensor cores see it.
/// Returns whether these are all of the ring's weights, as they mostly are: then no later barrier
/// is needed.
template <class Ring>
__device__ __forceinline__ bool wait_for_all(const Ring& ring) {
  const bool is_all = ring.asked == ring.items;
  wait_for_copies<0>();
  hopper::fence_async_proxy();
  __syncthreads();
  return is_all;
}

/// Waits for the oldest of `stages` groups of copies.
[[maybe_unused]] __device__ inline void wait_for_oldest(int stages) {
  switch (stages) {
    case 1:
      return wait_for_copies<0>();
    case 2:
      return wait_for_copies<1>();
    case 3:
      return wait_for_copies<2>();
    case 4:
      return wait_for_copies<3>();
    case 5:
      return wait_for_copies<4>();
    case 6:
      return wait_for_copies<5>();
    case 7:
      return wait_for_copies<6>();
    default:
      return wait_for_copies<kMostBatchStages - 1>();
  }
}

/// The sums of a warpgroup: of all rows by kN columns.
template <int kN>
using BatchSums = float[kN / 8][4];

/// Issues the products of all of a pass's chunks of x, at address `x`, with the ring's items from
/// place `slot` on, which moves on; the products are under way at the end. is_all: the ring holds
/// all of the warpgroup's weights, and they have landed.
template <class E, int kN, class Weights, bool kShares>
__device__ __forceinline__ void multiply_chunks(BatchRing<E, kN, Weights, kShares>& ring,
                                                unsigned x, bool is_all, int& slot,
                                                BatchSums<kN>& d) {
  const int stages = ring.s.stages;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
#pragma unroll 1
  for (int c = 0; c < ring.chunks(); ++c) {
    if (!is_all) {
      wait_for_oldest(stages);
      hopper::fence_async_proxy();
      hopper::named_barrier_sync(1 + ring.work.group, kGroupThreads);
    }
    const auto a = hopper::Operand::rows_inner(
        x + static_cast<unsigned>(ring.chunk_of_block(c) * kPanelBytes));
    const auto b = hopper::Operand::rows_inner(ring.item(slot));
    hopper::fence_products();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      hopper::Product<E, kN>::shared(d, a.advance(32 * k), b.advance(32 * k), true);
    }
    hopper::commit_products();
    slot = slot + 1 == stages ? 0 : slot + 1;
    if (is_all) continue;
    if (ring.asked < ring.items) {
      hopper::wait_for_products<0>();
      hopper::named_barrier_sync(1 + ring.work.group, kGroupThreads);
    }
    ring.ask();
  }
}

/// Panels of wgmma begin at multiples of 1024 bytes.
__device__ inline char* aligned_panels(char* dynamic) {
  return dynamic + ((1024u - (shared_address(dynamic) & 1023u)) & 1023u);
}

}  // namespace tidegate::kernels::product
