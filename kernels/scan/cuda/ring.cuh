#pragma once

// How inputs travel: copies of runs that are under way, in shared memory.

#include <type_traits>

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/scan/cuda/rows.cuh"
#include "kernels/scan/cuda/walk_op.cuh"

namespace tidegate::kernels::scan {

/// A warp's ring of runs in shared memory.
template <class Op>
class Ring {
 public:
  static constexpr int kSlotBytes = sizeof(typename Op::Raw) * kWarpSize;
  static constexpr int kRunBytes = Op::kRunInputBytes * kWarpSize;
  static constexpr int kStageBytes = kSlotBytes * Op::kSteps + kRunBytes;
  static constexpr int kBytes = kStageBytes * Op::kStages;

  // All inputs must be packs of four bytes, a row of which is 128 bytes, for wide copies.
  using Wide = WideFetchSource<4, Op::kBringsNeighbours>;
  static constexpr bool kCanBeWide = Op::kPackBytes == 4 && Op::kSteps % Wide::kStepsAtOnce == 0;

  __device__ Ring(char* shared, int warp, int lane, bool wide)
      : base_(shared + warp * kBytes), lane_(lane), wide_(wide) {}

  /// Starts copying the run from step k into a stage. Steps past the end repeat the last one: that
  /// is memory which exists, and nothing that comes of it is used.
  __device__ void fetch(const Op& op, int stage, int k, int end) const {
    if constexpr (kRunBytes > 0) {
      op.fetch_run(run_inputs(stage), lane_, k, end);
    }
    if constexpr (kCanBeWide) {
      if (wide_) {
        __syncwarp();  // the place is free only when all threads have taken what they need from it
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          op.gather(Wide{slot(stage, i), lane_}, min(k + i, end - 1), end - 1);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.gather(FetchSource{slot(stage, i), lane_}, min(k + i, end - 1), end - 1);
    }
  }

  /// Waits until the oldest run under way has come, or the kRuns oldest. Every fetch, or its
  /// absence, is followed by commit_copies, so that groups count runs.
  template <int kRuns = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kRuns>();
    __syncwarp();
  }

  __device__ typename Op::Raw take(const Op& op, int stage, int i) const {
    return op.gather(SlotSource{slot(stage, i), lane_}, 0, 0);
  }
  /// What Op::fetch_run was given to fill.
  __device__ char* run_inputs(int stage) const { return slot(stage, Op::kSteps); }
  __device__ int lane() const { return lane_; }

  // Outputs may leave by way of the ring (wkv4_forward.cuh), in the places of inputs that have been
  // taken: rows are then stored like they are fetched, several at once.

  /// Step i's output in the place of its input number `input`; or one of its channels.
  template <class T, int kVec>
  __device__ void put(int stage, int i, int input, const Pack<T, kVec>& p) const {
    *reinterpret_cast<Pack<T, kVec>*>(place(stage, i, input) + lane_ * Op::kPackBytes) = p;
  }
  template <class T>
  __device__ void put_channel(int stage, int i, int input, int c, T x) const {
    reinterpret_cast<T*>(place(stage, i, input) + lane_ * Op::kPackBytes)[c] = x;
  }
  /// Stores what was put in the places of that input, from step k of the walk on.
  template <class T, int kVec>
  __device__ void store(int stage, int input, const Rows<T, kVec>& rows, int k, int end) const {
    if constexpr (kCanBeWide) {
      if (wide_ && k + Op::kSteps <= end) {
        __syncwarp();
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          const int offset = lane_ % Wide::kThreadsARow * 16;
          *reinterpret_cast<uint4*>(rows.at(k + i) + (offset - lane_ * Op::kPackBytes)) =
              *reinterpret_cast<const uint4*>(place(stage, i, input) + offset);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if (k + i < end) {
        const char* from = place(stage, i, input) + lane_ * Op::kPackBytes;
        rows.store(k, i, *reinterpret_cast<const Pack<T, kVec>*>(from));
      }
    }
  }

 private:
  __device__ char* slot(int stage, int i) const {
    return base_ + stage * kStageBytes + i * kSlotBytes;
  }
  __device__ char* place(int stage, int i, int input) const {
    return slot(stage, i) + input * Op::kPackBytes * kWarpSize;
  }

  char* base_;
  int lane_;
  bool wide_;
};

/// A warp's ring where runs are split (LookAhead::kSplits). What a fold reads lies there kStages
/// runs deep, what only the outputs read one run less: it is needed a round later.
template <class Op>
class SplitRing {
  static constexpr int kOtherStages = Op::kStages - 1;
  static constexpr int kFoldSlotBytes = Op::kFoldBytes * kWarpSize;
  static constexpr int kOtherSlotBytes = Op::kOtherBytes * kWarpSize;
  using Raw = typename Op::Raw;
  using Wide = typename Ring<Op>::Wide;
  static constexpr bool kCanBeWide = Ring<Op>::kCanBeWide;

 public:
  static constexpr int kBytes =
      (kFoldSlotBytes * Op::kStages + kOtherSlotBytes * kOtherStages) * Op::kSteps;

  __device__ SplitRing(char* shared, int warp, int lane, bool wide)
      : base_(shared + warp * kBytes), lane_(lane), wide_(wide) {}

  /// Starts the copies that belong to a round: for the fold of its run, which begins at step k, and
  /// for the outputs of the run before, `stride` steps earlier. Of either only what there is.
  __device__ void fetch(const Op& op, int round, int k, int end, int stride) const {
    if (round * stride < end) {
      for_each_row(k, end, [&](int i, int step, auto source) {
        Raw raw;
        auto from = source(fold_slot(round, i));
        op.gather_for_fold(from, raw, step);
      });
    }
    if (round > 0 && (round - 1) * stride < end) {
      for_each_row(k - stride, end, [&](int i, int step, auto source) {
        Raw raw;
        auto from = source(other_slot(round - 1, i));
        op.gather_others(from, raw, step, end - 1);
      });
    }
  }

  /// Waits until the copies of the oldest round under way have come, or of the kRounds oldest.
  template <int kRounds = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kRounds>();
    __syncwarp();
  }

  /// What the fold reads of step i of a round's run.
  __device__ Raw take_for_fold(const Op& op, int round, int i) const {
    Raw raw;
    SlotSource from{fold_slot(round, i), lane_};
    op.gather_for_fold(from, raw, 0);
    return raw;
  }
  /// All of it.
  __device__ Raw take(const Op& op, int round, int i) const {
    Raw raw = take_for_fold(op, round, i);
    SlotSource from{other_slot(round, i), lane_};
    op.gather_others(from, raw, 0, 0);
    return raw;
  }

 private:
  /// For each row of the run from step k on that this thread copies (a part of): its place in the
  /// run, its step, and what makes a source of its slot. Ring::fetch is the same, written out:
  /// calling this there makes ptxas choose other registers in all kernels, and some spill.
  template <class Copy>
  __device__ void for_each_row(int k, int end, Copy copy) const {
    if constexpr (kCanBeWide) {
      if (wide_) {
        __syncwarp();  // the place is free only when all threads have taken what they need from it
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          copy(i, min(k + i, end - 1), [&](char* slot) { return Wide{slot, lane_}; });
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      copy(i, min(k + i, end - 1), [&](char* slot) { return FetchSource{slot, lane_}; });
    }
  }

  __device__ char* fold_slot(int round, int i) const {
    return base_ + (round % Op::kStages * Op::kSteps + i) * kFoldSlotBytes;
  }
  __device__ char* other_slot(int round, int i) const {
    return base_ + Op::kStages * Op::kSteps * kFoldSlotBytes +
           (round % kOtherStages * Op::kSteps + i) * kOtherSlotBytes;
  }

  char* base_;
  int lane_;
  bool wide_;
};

template <class Op>
using RingOf = std::conditional_t<Op::kLookAhead == LookAhead::kSplits, SplitRing<Op>, Ring<Op>>;

}  // namespace tidegate::kernels::scan
