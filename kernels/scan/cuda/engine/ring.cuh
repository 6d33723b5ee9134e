#pragma once

// How inputs travel: a warp's ring of stages in shared memory, each of which holds a chunk of
// steps, or waits for one whose copies are under way. A step's slot holds a row of every input.

#include <type_traits>

#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"

namespace tidegate::kernels::scan {

/// A warp's ring of chunks in shared memory.
template <class Op>
class Ring {
 public:
  static constexpr int kSlotBytes = sizeof(typename Op::Raw) * kWarpSize;
  static constexpr int kChunkInputBytesPerWarp = Op::kChunkInputBytes * kWarpSize;
  static constexpr int kStageBytes = kSlotBytes * Op::kSteps + kChunkInputBytesPerWarp;
  static constexpr int kBytes = kStageBytes * Op::kStages;

  // Wide copies are for inputs that are all packs of four bytes, a row of which is 128 bytes.
  // Others (an fp32 gate beside 16-bit data) are copied thread by thread, whatever the plan's
  // wide_rows says.
  using Wide = WideFetchSource<4, Op::kPrefetchNeighbourLine>;
  static constexpr bool kCanBeWide = Op::kPackBytes == 4 && Op::kSteps % Wide::kStepsAtOnce == 0;

  __device__ Ring(char* shared, int warp, int lane, bool wide, int /*sharing*/)
      : base_(shared + warp * kBytes), lane_(lane), wide_(wide) {}

  /// Starts copying the chunk from step k into a stage. Steps past the end repeat the last one:
  /// that is memory which exists, and nothing that comes of it is used.
  __device__ void fetch(const Op& op, int stage, int k, int end) const {
    if constexpr (kChunkInputBytesPerWarp > 0) {
      op.fetch_chunk_inputs(chunk_inputs(stage), lane_, k, end);
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

  /// Waits until the oldest chunk under way has come, or the kChunks oldest. Every fetch, or its
  /// absence, is followed by commit_copies, so that groups count chunks.
  template <int kChunks = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kChunks>();
    __syncwarp();
  }

  /// Moves the inputs of a chunk that has come to where they are taken from. Aligned rows lie there
  /// already.
  __device__ void put_in_place(const Op&, int) const {}

  /// Takes step i of a chunk. The step of the scan with which that chunk begins matters only where
  /// rows are unaligned (unaligned_ring.cuh).
  __device__ typename Op::Raw take(const Op& op, int stage, int i, int = 0) const {
    return op.gather(SlotSource{slot(stage, i), lane_}, 0, 0);
  }
  /// The inputs of a chunk that Op::fetch_chunk_inputs was given to fill.
  __device__ char* chunk_inputs(int stage) const { return slot(stage, Op::kSteps); }
  __device__ int lane() const { return lane_; }

  // Outputs may leave by way of the ring (wkv4_forward.cuh), in the slots of inputs that have been
  // read: rows are then stored like they are fetched, several at once.

  /// Puts step i's output, or one channel of it, into the slot of the step's input number `input`.
  template <class T, int kVec>
  __device__ void stage_output(int stage, int i, int input, const Pack<T, kVec>& p) const {
    *reinterpret_cast<Pack<T, kVec>*>(slot_of_input(stage, i, input) + lane_ * Op::kPackBytes) = p;
  }
  template <class T>
  __device__ void stage_output_channel(int stage, int i, int input, int c, T x) const {
    reinterpret_cast<T*>(slot_of_input(stage, i, input) + lane_ * Op::kPackBytes)[c] = x;
  }
  /// Stores the outputs that lie in the slots of input number `input`, from step k of the scan on.
  template <class T, int kVec>
  __device__ void store_outputs(int stage, int input, const Rows<T, kVec>& rows, int k,
                                int end) const {
    if constexpr (kCanBeWide) {
      if (wide_ && k + Op::kSteps <= end) {
        __syncwarp();
#pragma unroll
        for (int first = 0; first < Op::kSteps; first += Wide::kStepsAtOnce) {
          const int i = first + lane_ / Wide::kThreadsARow;
          const int offset = lane_ % Wide::kThreadsARow * 16;
          *reinterpret_cast<uint4*>(rows.at(k + i) + (offset - lane_ * Op::kPackBytes)) =
              *reinterpret_cast<const uint4*>(slot_of_input(stage, i, input) + offset);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if (k + i < end) {
        const char* from = slot_of_input(stage, i, input) + lane_ * Op::kPackBytes;
        rows.store(k, i, *reinterpret_cast<const Pack<T, kVec>*>(from));
      }
    }
  }

 private:
  __device__ char* slot(int stage, int i) const {
    return base_ + stage * kStageBytes + i * kSlotBytes;
  }
  __device__ char* slot_of_input(int stage, int i, int input) const {
    return slot(stage, i) + input * Op::kPackBytes * kWarpSize;
  }

  char* base_;
  int lane_;
  bool wide_;
};

/// A warp's ring for Pipelining::kSplitRing. What compose reads lies there kStages chunks deep,
/// what only the outputs read one chunk less: it is needed an iteration later.
template <class Op>
class SplitRing {
  static constexpr int kOtherStages = Op::kStages - 1;
  static constexpr int kComposeSlotBytes = Op::kComposeBytes * kWarpSize;
  static constexpr int kOtherSlotBytes = Op::kOtherBytes * kWarpSize;
  using Raw = typename Op::Raw;
  using Wide = typename Ring<Op>::Wide;
  static constexpr bool kCanBeWide = Ring<Op>::kCanBeWide;

 public:
  static constexpr int kBytes =
      (kComposeSlotBytes * Op::kStages + kOtherSlotBytes * kOtherStages) * Op::kSteps;

  __device__ SplitRing(char* shared, int warp, int lane, bool wide, int /*sharing*/)
      : base_(shared + warp * kBytes), lane_(lane), wide_(wide) {}

  /// Starts the copies that belong to an iteration: for the map of its chunk, which begins at step
  /// k, and for the outputs of the chunk before, `stride` steps earlier, as far as these exist.
  __device__ void fetch(const Op& op, int iteration, int k, int end, int stride) const {
    if (iteration * stride < end) {
      for_each_row(k, end, [&](int i, int step, auto source) {
        Raw raw;
        auto from = source(compose_slot(iteration, i));
        op.gather_for_compose(from, raw, step);
      });
    }
    if (iteration > 0 && (iteration - 1) * stride < end) {
      for_each_row(k - stride, end, [&](int i, int step, auto source) {
        Raw raw;
        auto from = source(other_slot(iteration - 1, i));
        op.gather_others(from, raw, step, end - 1);
      });
    }
  }

  /// Waits until the copies of the oldest iteration under way have come, or of the kIterations
  /// oldest.
  template <int kIterations = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kIterations>();
    __syncwarp();
  }

  /// Takes what compose reads of step i of an iteration's chunk, which begins at step k.
  __device__ Raw take_for_compose(const Op& op, int iteration, int i, int /*k*/) const {
    Raw raw;
    SlotSource from{compose_slot(iteration, i), lane_};
    op.gather_for_compose(from, raw, 0);
    return raw;
  }
  /// Takes all inputs of the step.
  __device__ Raw take(const Op& op, int iteration, int i, int k) const {
    Raw raw = take_for_compose(op, iteration, i, k);
    SlotSource from{other_slot(iteration, i), lane_};
    op.gather_others(from, raw, 0, 0);
    return raw;
  }

 private:
  /// For each row of the chunk from step k on that this thread copies (a part of): its place in the
  /// chunk, its step, and what makes a source of its slot. Ring::fetch does this written out:
  /// calling a function there makes ptxas choose other registers in all kernels, and some spill.
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

  __device__ char* compose_slot(int iteration, int i) const {
    return base_ + (iteration % Op::kStages * Op::kSteps + i) * kComposeSlotBytes;
  }
  __device__ char* other_slot(int iteration, int i) const {
    return base_ + Op::kStages * Op::kSteps * kComposeSlotBytes +
           (iteration % kOtherStages * Op::kSteps + i) * kOtherSlotBytes;
  }

  char* base_;
  int lane_;
  bool wide_;
};

template <class Op>
using RingOf =
    std::conditional_t<Op::kPipelining == Pipelining::kSplitRing, SplitRing<Op>, Ring<Op>>;

}  // namespace tidegate::kernels::scan
