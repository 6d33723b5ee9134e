#pragma once

// What the warps of the Hopper forward kernel share: items, stages and barriers.

#include "kernels/attention/cuda/hopper/forward_tiles.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/hopper.cuh"

namespace tidegate::kernels::attention {

/// What a block is told of one item; written by the loader.
struct ForwardItem {
  int rows;  // queries, as many as there are; negative: there are no more items
  int head;
  int key_head;
  int first;       // position of the first query
  int begin, end;  // tiles of keys, from the last one down to the first; with pruning, the first
                   // is known later: see first_tile
  int key_length;  // of the sequence
  int batch;
  int query_token;      // of the first query, in the tensor's time
  int key_token;        // of the sequence's first key
  const double* gates;  // c of the sequence's keys
};

/// Two stages, so that the next is brought while one is in use; of queries, where there is room
/// (HopperForwardShape::kQueryStages). No waiter may skip a phase (kernels/common/cuda/hopper.cuh).
struct ForwardBarriers {
  // Known to the producers; with its gates; with the first tile that pruning leaves.
  uint64_t item_known[2], item_ready[2], item_bounded[2], item_empty[2];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[2], k_empty[2];  // keys with their gates
  // Landed: values of an edge tile, to be inspected before they are full. Its phases are those of
  // edge tiles alone, so the inspector counts them itself.
  uint64_t v_full[2], v_landed[2], v_empty[2];
};

/// The shared memory of a block.
template <class Shape>
class HopperForwardShared {
 public:
  __device__ explicit HopperForwardShared(unsigned char* base) : base_(base) {}

  __device__ unsigned char* queries(int stage) const { return base_ + stage * Shape::kQueryBytes; }
  __device__ unsigned char* keys(int stage) const {
    return queries(Shape::kQueryStages) + stage * Shape::kKeyBytes;
  }
  __device__ unsigned char* values(int stage) const { return keys(2 + stage); }
  /// The keys' gates. A tile on the diagonal has c_ref - c_j in high and low parts, [2][kKeys]; any
  /// other has (c_ref - c_j) / scale of pairs of keys, twice, as two rows of accumulators begin:
  /// [kKeys / 2][4].
  __device__ float* key_gates(int stage) const {
    return reinterpret_cast<float*>(values(2)) + stage * 2 * kKeys;
  }
  /// [2][kRows]: c_i - c_ref, high and low parts.
  __device__ float* row_gates(int slot) const { return key_gates(2) + slot * 2 * kRows; }
  __device__ ForwardItem& item(int slot) const {
    return reinterpret_cast<ForwardItem*>(row_gates(2))[slot];
  }
  __device__ volatile int& not_finite(int stage) const { return flags()[stage]; }
  __device__ volatile int& bound(int slot) const { return flags()[2 + slot]; }
  __device__ ForwardBarriers& barriers() const {
    return *reinterpret_cast<ForwardBarriers*>(const_cast<int*>(flags()) + 4);
  }

 private:
  static constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows;

  __device__ volatile int* flags() const { return reinterpret_cast<volatile int*>(&item(2)); }

  unsigned char* base_;
};

/// Whether a tile of keys needs masks. On the diagonal gates go pair by pair, since keys come after
/// the first query; at the window's far end only the masks are more than any other tile needs.
enum class TileEdge : uint8_t { kNone, kFarEnd, kDiagonal };
/// Queries begin at position `first`, `last` is the last of them.
template <int kKeys>
__device__ inline TileEdge edge_of(int tile, int first, int last, int window) {
  return tile * kKeys + kKeys - 1 > first              ? TileEdge::kDiagonal
         : window > 0 && tile * kKeys <= last - window ? TileEdge::kFarEnd
                                                       : TileEdge::kNone;
}

/// The first of the tiles that an item takes whatever is pruned: two, so that the second is on its
/// way while the queries are looked at.
__device__ inline int first_sure_tile(const ForwardItem& item) {
  return max(item.begin, item.end - 2);
}

/// The first tile of an item's keys, asked for when the sure ones have been dealt with. With
/// pruning it is known when the queries have been looked at (ForwardRowGates::prune).
template <class Shape>
__device__ inline int first_tile(const HopperForwardShared<Shape>& shared, hopper::RingCount<> slot,
                                 bool pruned) {
  const ForwardItem& item = shared.item(slot.stage());
  if (!pruned || first_sure_tile(item) == item.begin) {
    return item.begin;
  }
  mbarrier_wait(&shared.barriers().item_bounded[slot.stage()], slot.phase());
  return shared.bound(slot.stage());
}

}  // namespace tidegate::kernels::attention
