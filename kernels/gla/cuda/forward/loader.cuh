#pragma once

// The loader warp copies sub-chunks from device to shared memory, as far ahead as there are free
// stages. It does nothing else, so that no arithmetic waits for device memory, and whole rows are
// asked for at once.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/gla/cuda/forward/schedule.cuh"
#include "kernels/gla/cuda/forward/stage.cuh"
#include "kernels/gla/cuda/head_inputs.cuh"

namespace tidegate::kernels::gla {

/// Rows of one tensor, kPieces of 16 bytes each, into a tile: a lane has the same piece of every
/// kRowsAtOnce-th row.
template <int kPieces>
class TileRows {
 public:
  static constexpr int kRowsAtOnce = 32 / kPieces;

  __device__ TileRows(const HeadSeries& series, const WorkTile& work, bool backwards, int first,
                      int channels, int element_bytes, int lane) {
    const HeadRows rows(series, work.segment.sequence, backwards, work.head);
    piece_ = lane % kPieces;
    row_ = lane / kPieces;
    step_ = work.segment.first + row_;
    at_ = rows.row(step_) + static_cast<int64_t>(first) * element_bytes + piece_ * 16;
    stride_ = kRowsAtOnce * int64_t{rows.stride_bytes()};
    // A piece past the last channel never exists.
    end_ = piece_ * 16 < channels * element_bytes ? work.segment.end() : 0;
  }

  /// The next 16 rows.
  template <class Tile>
  __device__ void copy(Tile& tile) {
#pragma unroll
    for (int i = 0; i < kSubChunk / kRowsAtOnce; ++i) {
      copy_async_or_zero(tile.at(row_ + i * kRowsAtOnce, piece_), at_, step_ < end_);
      at_ += stride_;
      step_ += kRowsAtOnce;
    }
  }

 private:
  const char* at_;
  int64_t stride_;
  int piece_, row_, step_, end_;
};

/// What the loader copies into a stage. kMaps: no queries.
template <class Data, class Gate, GateKind kKind, int kKeys, bool kMaps>
class Loader {
 public:
  static constexpr bool kGateIsKey = kKind == GateKind::kLogit && sizeof(Gate) == 2;
  using Stage =
      std::conditional_t<kGateIsKey, SubChunkStage<kKeys>, SubChunkStageWithGate<Gate, kKeys>>;

  __device__ Loader(const GlaParams& p, const WorkTile& work, int lane)
      : per_head_(p.gate_per_head),
        q_(p.q, work, p.layout.reverse, work.first_key, work.keys, sizeof(Data), lane),
        k_(kKind == GateKind::kLogit ? p.gate : p.k, work, p.layout.reverse, work.first_key,
           work.keys, sizeof(Data), lane),
        v_(p.v, work, p.layout.reverse, work.first_value, work.values, sizeof(Data), lane),
        gate_(p.gate, work, p.layout.reverse, work.first_key, work.keys, sizeof(Gate), lane) {}

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
  const bool per_head_;
  TileRows<TokenTile<kKeys>::kPieces> q_, k_;
  TileRows<TokenTile<kValueTile>::kPieces> v_;
  TileRows<GateTile<Gate, kKeys>::kPieces> gate_;
};

}  // namespace tidegate::kernels::gla
