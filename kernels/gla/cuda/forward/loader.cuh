#pragma once

// The loader warp of the forward pass: rows of device memory into stages, wherever they begin, and
// how a producer finds them there.
//
// The loader warp copies sub-chunks from device to shared memory, as far ahead as there are free
// stages. It does nothing else, so that no arithmetic waits for device memory, and whole rows are
// asked for at once.

#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/forward/stage.cuh"

namespace tidegate::kernels::gla {

/// Copies the first `bytes` of sixteen, and makes the rest zero without reading it.
__device__ inline void copy_async_part(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

/// Rows of one tensor, kPieces of 16 bytes each, into a tile: a lane has the same piece of every
/// kRowsAtOnce-th row. Channels past the last one become zero.
///
/// A row that does not begin at a multiple of 16 bytes is copied from the one before, and lies late
/// in the tile, by as many bytes, until a producer moves it (LateRows).
template <int kPieces>
class TileRows {
 public:
  static constexpr int kRowsAtOnce = 32 / kPieces;

  __device__ TileRows(const HeadSeries& series, const WorkTile& work, bool backwards, int first,
                      int channels, int element_bytes, bool whole_pieces, int lane)
      : whole_pieces_(whole_pieces) {
    const HeadRows rows(series, work.segment.sequence, backwards, work.head);
    piece_ = lane % kPieces;
    row_ = lane / kPieces;
    step_ = work.segment.first + row_;
    at_ = rows.row(step_) + static_cast<int64_t>(first) * element_bytes + piece_ * 16;
    stride_ = kRowsAtOnce * int64_t{rows.stride_bytes()};
    bytes_ = channels * element_bytes - piece_ * 16;
    // A whole piece past the last channel never exists; of others, their bytes say so.
    end_ = !whole_pieces || bytes_ > 0 ? work.segment.end() : 0;
  }

  /// The next 16 rows.
  template <class Tile>
  __device__ void copy(Tile& tile) {
    if (!whole_pieces_) {
      copy_parts(tile);
      return;
    }
#pragma unroll
    for (int i = 0; i < kSubChunk / kRowsAtOnce; ++i) {
      copy_async_or_zero(tile.at(row_ + i * kRowsAtOnce, piece_), at_, step_ < end_);
      at_ += stride_;
      step_ += kRowsAtOnce;
    }
  }

 private:
  template <class Tile>
  __device__ void copy_parts(Tile& tile) {
#pragma unroll 4
    for (int i = 0; i < kSubChunk / kRowsAtOnce; ++i) {
      const int late = static_cast<int>(reinterpret_cast<uintptr_t>(at_) & 15);
      const int bytes = step_ < end_ ? min(max(bytes_ + late, 0), 16) : 0;
      copy_async_part(tile.at(row_ + i * kRowsAtOnce, piece_), at_ - late, bytes);
      at_ += stride_;
      step_ += kRowsAtOnce;
    }
  }

  const bool whole_pieces_;
  const char* at_;
  int64_t stride_;
  int piece_, row_, step_, end_;
  int bytes_;  // of the row, from the lane's piece on
};

/// By how many bytes TileRows leaves each row of a sub-chunk late in its tile.
class LateRows {
 public:
  LateRows() = default;
  __device__ LateRows(const HeadSeries& series, const WorkTile& work, bool backwards) {
    const HeadRows rows(series, work.segment.sequence, backwards, work.head);
    first_ = static_cast<int>(reinterpret_cast<uintptr_t>(rows.row(work.segment.first)) & 15);
    stride_ = rows.stride_bytes() & 15;
  }

  __device__ bool any() const { return (first_ | stride_) != 0; }

  /// Moves the rows to their places, by all lanes of a warp.
  template <class Tile>
  __device__ void move(Tile& tile, int lane) const {
    constexpr int kPieces = Tile::kPieces;
    const int piece = lane % kPieces;
#pragma unroll 1
    for (int row = lane / kPieces; row < kSubChunk; row += 32 / kPieces) {
      uint4* const at = tile.at(row, piece);
      const uint4 own = *at;
      const uint4 next = piece + 1 < kPieces ? *tile.at(row, piece + 1) : uint4{};
      __syncwarp();  // all lanes have read
      *at = moved(own, next, (first_ + row * stride_) & 15);
    }
  }

 private:
  /// Sixteen of 32 bytes, from byte `late`, an even number, on.
  static __device__ uint4 moved(const uint4& own, const uint4& next, int late) {
    uint32_t x[8] = {own.x, own.y, own.z, own.w, next.x, next.y, next.z, next.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      x[i] = (late & 8) != 0 ? x[i + 2] : x[i];
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      x[i] = (late & 4) != 0 ? x[i + 1] : x[i];
    }
    const unsigned bits = (late & 2) * 8;
    return {__funnelshift_r(x[0], x[1], bits), __funnelshift_r(x[1], x[2], bits),
            __funnelshift_r(x[2], x[3], bits), __funnelshift_r(x[3], x[4], bits)};
  }

  int first_ = 0, stride_ = 0;
};

/// What the loader copies into a stage. kMaps: no queries.
template <class Data, class Gate, GateKind kKind, int kKeys, bool kMaps>
class Loader {
 public:
  // hgrn2's keys are one minus its gates, and have no memory of their own. 16-bit logits are copied
  // to where keys will be, which are made from them in place; wider ones have a place beside it.
  static constexpr bool kGateIsKey = kKind == GateKind::kLogit && sizeof(Gate) == 2;
  using Stage =
      std::conditional_t<kGateIsKey, SubChunkStage<kKeys>, SubChunkStageWithGate<Gate, kKeys>>;

  __device__ Loader(const TensorForward& w, const WorkTile& work, int lane)
      : per_head_(w.params.gate_per_head),
        q_(rows_of_keys<Data>(w, kForwardQ, w.params.q, work, lane)),
        k_(rows_of_keys<Data>(w, kGateIsKey ? kForwardGate : kForwardK,
                              kGateIsKey ? w.params.gate : w.params.k, work, lane)),
        v_(w.params.v, work, w.params.layout.reverse, work.first_value, work.values, sizeof(Data),
           w.whole_pieces[kForwardV], lane),
        gate_(rows_of_keys<Gate>(w, kForwardGate, w.params.gate, work, lane)) {}

  /// Starts the copies of the next sub-chunk.
  __device__ void copy(Stage& stage) {
    if constexpr (!kMaps) {
      q_.copy(stage.query);
    }
    if constexpr (kKind == GateKind::kLogDecay || kGateIsKey) {
      k_.copy(stage.key);
    }
    if constexpr (!kGateIsKey) {
      if (!per_head_) {
        gate_.copy(stage.gate);
      }
    }
    v_.copy(stage.value);
  }

 private:
  template <class T>
  using KeyRows = TileRows<GateTile<T, kKeys>::kPieces>;

  template <class T>
  static __device__ KeyRows<T> rows_of_keys(const TensorForward& w, ForwardRow which,
                                            const HeadSeries& series, const WorkTile& work,
                                            int lane) {
    return {series,    work,      w.params.layout.reverse, work.first_key,
            work.keys, sizeof(T), w.whole_pieces[which],   lane};
  }

  const bool per_head_;
  KeyRows<Data> q_, k_;
  TileRows<TokenTile<kValueTile>::kPieces> v_;
  KeyRows<Gate> gate_;
};

}  // namespace tidegate::kernels::gla
