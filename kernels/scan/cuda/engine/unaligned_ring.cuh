#pragma once

// How rows travel that begin at any element (unaligned.cuh). A thread owns two channels as ever,
// and a warp's row is 128 bytes. Copies of 16 bytes ask for addresses that are multiples of 16 in
// both memories, so
//   a warp copies the 16-byte pieces that cover its row, nine for 128 bytes, into a row of shared
//     memory that is one piece longer; the last piece is cut where the channel tile ends;
//   a thread finds its channels there at the row's own shift, which is its address modulo 16, and
//     takes them one by one;
//   outputs go straight to memory, as a pack where that happens to be aligned.

#include <limits>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/scan/cuda/engine/ring.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/cuda/engine/shared_tails.h"

namespace tidegate::kernels::scan {

constexpr int kPieceBytes = 16;  // of a copy

/// Copies the first `bytes` of sixteen, and writes zeros for the others, which are not read.
__device__ inline void copy_piece_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

template <class T, int kVec>
class Rows<Unaligned<T>, kVec> : Rows<T, kVec> {
  static_assert(kVec == 1 || kVec == 2);
  using Base = Rows<T, kVec>;
  using Bits = typename BitsOf<sizeof(T)>::type;
  using Packed = Pack<Unaligned<T>, kVec>;

 public:
  /// Bytes of a row in a slot of shared memory.
  static constexpr int kSlotRow = kWarpSize * kVec * sizeof(T) + kPieceBytes;

  Rows() = default;

  __device__ Rows(const TimeSeries& series, const Sequence& seq, bool backwards,
                  const Channels& channels)
      : Base(series, seq, backwards, channels),
        in_tile_(channels.in_tile * static_cast<int>(sizeof(T))),
        tile_(channels.tile * static_cast<int>(sizeof(T))),
        single_(channels.single) {}

  __device__ void store(int k, int i, const Packed& p, int shift = 0) const {
    char* const to = Base::further(Base::at(k), i) + shift;
    if constexpr (kVec == 2 && sizeof(T) == 2) {
      store_two(to, p.bits, low_bits(to) % sizeof(p.bits) == 0 && !single_);
    } else {
      T elements[kVec];
      memcpy(elements, &p.bits, sizeof(elements));
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        if (v == 0 || !single_) {
          reinterpret_cast<T*>(to)[v] = elements[v];
        }
      }
    }
  }

  /// Reads this thread's channels of row k from device memory. A channel that does not exist is
  /// zero.
  __device__ Packed load(int k) const {
    const char* const from = Base::at(k);
    T elements[kVec] = {};
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (v == 0 || !single_) {
        elements[v] = reinterpret_cast<const T*>(from)[v];
      }
    }
    return of(elements);
  }

  /// Starts the copy of the 16 bytes of row k that lie `piece` bytes after the first piece's begin,
  /// to as many bytes after `row`; where sequences share the tile, the first piece is the
  /// sequence's, `part` bytes further on. Bytes past the channel tile are not read, and zero in
  /// shared memory. `shift`: bytes further on in the row.
  __device__ void copy_piece(char* row, int k, int part, int piece, int shift) const {
    const char* const at = Base::at(k) + (part + piece + shift - in_tile_);
    const int phase = static_cast<int>(low_bits(at) % kPieceBytes);
    const int bytes = min(max(phase + tile_ - piece, 0), kPieceBytes);
    copy_piece_async(row + (part + piece), at - phase, bytes);
  }

  /// Reads this thread's channels of row k from where copy_piece has put the row.
  __device__ Packed take(const char* row, int k, int shift) const {
    const unsigned start = low_bits(Base::base_) + static_cast<unsigned>(k * Base::stride_) +
                           static_cast<unsigned>(shift - in_tile_);
    const char* const from = row + start % kPieceBytes + in_tile_;
    T elements[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      elements[v] = reinterpret_cast<const T*>(from)[v];
    }
    return of(elements);
  }

 private:
  static __device__ unsigned low_bits(const void* p) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p));
  }
  static __device__ Packed of(const T (&elements)[kVec]) {
    Packed p;
    memcpy(&p.bits, elements, sizeof(elements));
    return p;
  }

  /// Stores both channels by one instruction, or each by its own. The PTX is written out, since
  /// three branches a row cost the compiler as much time as the rest of an unrolled chunk.
  __device__ void store_two(char* to, uint32_t bits, bool together) const {
    asm volatile(
        "{\n"
        ".reg .pred together, second;\n"
        ".reg .b16 low, high;\n"
        "setp.ne.b32 together, %2, 0;\n"
        "setp.ne.b32 second, %3, 0;\n"
        "mov.b32 {low, high}, %1;\n"
        "@together st.global.b32 [%0], %1;\n"
        "@!together st.global.b16 [%0], low;\n"
        "@second st.global.b16 [%0+2], high;\n"
        "}" ::"l"(to),
        "r"(bits), "r"(static_cast<int>(together)), "r"(static_cast<int>(!together && !single_))
        : "memory");
  }

  int in_tile_ = 0, tile_ = 0;  // bytes
  bool single_ = false;
};

/// Which sequences and channels a block scans, where rows are unaligned.
struct UnalignedChain {
  unsigned sequence;  // the first one
  unsigned tile;
  int sharing;  // the tile holds the last channels of 2^sharing sequences; 0: channels of one

  /// Chain `index` of a launch: ScanChains says in which order chains stand, and the launch's
  /// `sharing`.
  template <class Launch>
  __device__ UnalignedChain(int64_t index, const Launch& launch) : sharing(0) {
    const auto chain = static_cast<unsigned>(index);
    const auto tiles = static_cast<unsigned>(launch.channel_tiles);
    const unsigned shared_tiles = launch.sharing > 0 ? 1 : 0;
    const unsigned of_group = (tiles << launch.sharing) + shared_tiles;
    const unsigned group = chain / of_group, in_group = chain % of_group;
    sequence = group << launch.sharing;
    tile = tiles;
    if (in_group < shared_tiles) {
      sharing = launch.sharing;
    } else {
      sequence += (in_group - shared_tiles) / tiles;
      tile = (in_group - shared_tiles) % tiles;
    }
  }
  /// How many lanes each sequence has.
  __device__ int lanes() const { return kWarpSize >> sharing; }
  /// Where there are fewer than 2^sharing, lanes left over repeat the last one.
  __device__ int64_t sequence_of(int lane, const SequenceLayout& layout) const {
    return min(sequence + static_cast<unsigned>(lane / lanes()),
               static_cast<unsigned>(layout.sequences) - 1);
  }

  /// The channels of a thread. D may be odd, so that the last threads of a narrow row or of a tail
  /// share a channel, and a tail of one channel has the one before it, too. Of a D of one, a
  /// thread's second channel does not exist.
  template <int kVec>
  __device__ Channels channels_of(int lane, int64_t channels) const {
    constexpr int64_t kTileChannels = kWarpSize * kVec;
    const int64_t last_first = max(channels - kTileChannels, int64_t{0});
    int64_t tile_first = min(int64_t{tile} * kTileChannels, last_first);
    int width = static_cast<int>(min(channels, kTileChannels));
    if (sharing > 0) {
      tile_first = max(min(int64_t{tile} * kTileChannels, channels - kVec), int64_t{0});
      width = static_cast<int>(channels - tile_first);
    }
    const int lane_of_part = lane & (lanes() - 1);
    const int part = (lane - lane_of_part) * kVec;  // where the sequence's begins in the row
    const int in_part = min(lane_of_part * kVec, max(width - kVec, 0));
    return {tile_first + in_part, channels, part + in_part, width, width < kVec};
  }
};

// Sources (rows.cuh): eight threads copy a step's row, four steps at once, but for the last piece
// of each row; those pieces are copied by as many threads as there are steps, one each. Where
// sequences share the tile, each one's lanes copy its part of the row, of which the last piece is
// one like the others.

/// Which copies a thread makes. A ring keeps them as one word, since registers are short.
class UnalignedCopies {
  static constexpr int kThreadsARow = 8;

 public:
  static constexpr int kStepsAtOnce = kWarpSize / kThreadsARow;

  __device__ UnalignedCopies(int lane, int sharing) {
    const int threads = kThreadsARow >> sharing, lane_of_part = lane & ((kWarpSize >> sharing) - 1);
    const int step = lane_of_part / threads, piece = lane_of_part % threads;
    word_ = step | piece * kPieceBytes | (lane - lane_of_part) << 8 | sharing << 16;
  }
  /// Returns these copies with a word that the compiler has to take apart anew.
  __device__ UnalignedCopies unpacked() const {
    UnalignedCopies copies = *this;
    asm volatile("" : "+r"(copies.word_));  // or its parts are kept from chunk to chunk
    return copies;
  }

  /// The step that the thread copies for, of kStepsAtOnce.
  __device__ int step() const { return word_ & 3; }
  /// Whether the row's last piece is copied beside the others.
  __device__ bool has_last_piece() const { return word_ < 1 << 16; }

  /// Calls copy(part, piece) for its pieces of a row of so many bytes: they lie so many bytes from
  /// the begin of the sequence's part, and that from the row's.
  template <int kRowBytes, class Copy>
  __device__ void for_each_piece(const Copy& copy) const {
    constexpr int kAtOnce = kThreadsARow * kPieceBytes;
    const int part = (word_ >> 8 & 31) * (kRowBytes / kWarpSize);
    const int first = word_ & (kAtOnce - kPieceBytes);
#pragma unroll
    for (int i = 0; i < kRowBytes / kAtOnce; ++i) {
      copy(part, first + i * (kAtOnce >> (word_ >> 16)));
    }
  }

 private:
  int word_;
};

/// Starts the copies of one thread of those that copy a row. Thread by thread, `k` is the step that
/// the thread copies for, and `slot` that step's slot.
struct UnalignedFetchSource {
  char* slot;
  const UnalignedCopies& copies;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>&, const Rows<T, kVec>& rows, int k, int shift = 0) {
    copies.for_each_piece<Rows<T, kVec>::kSlotRow - kPieceBytes>(
        [&](int part, int piece) { rows.copy_piece(slot, k, part, piece, shift); });
    slot += rows.kSlotRow;
  }
};

/// Starts the copies of the last pieces of a step's rows.
struct LastPieceSource {
  char* slot;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>&, const Rows<T, kVec>& rows, int k, int shift = 0) {
    constexpr int kPiece = Rows<T, kVec>::kSlotRow - kPieceBytes;
    rows.copy_piece(slot, k, 0, kPiece, shift);
    slot += rows.kSlotRow;
  }
};

/// Takes step k's inputs from its slot.
struct UnalignedSlotSource {
  const char* slot;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>& pack, const Rows<T, kVec>& rows, int k, int shift = 0) {
    pack = rows.take(slot, k, shift);
    slot += rows.kSlotRow;
  }
};
/// Takes step k's inputs, and keeps the packs one behind the other.
struct UnalignedCollectSource {
  UnalignedSlotSource from;
  uint32_t* packs;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>& pack, const Rows<T, kVec>& rows, int k, int shift = 0) {
    from(pack, rows, k, shift);
    *packs++ = pack.bits;
  }
};

/// Takes inputs that Ring::put_in_place has moved.
struct PlacedSlotSource {
  const char* slot;
  int lane;

  template <class T, int kVec>
  __device__ void operator()(Pack<T, kVec>& pack, const Rows<T, kVec>& rows, int, int = 0) {
    pack.bits = reinterpret_cast<const decltype(pack.bits)*>(slot)[lane];
    slot += rows.kSlotRow;
  }
};

/// What a gather for that source is told the last step was: a row further on (h_{t-1} backward) is
/// then taken at the shift of the step after k, which is wrong for the last step alone, whose
/// h_{t-1} is not read.
constexpr int kNoLastStep = std::numeric_limits<int>::max();

// ---- Rings ----

/// Starts the copies of kSteps steps' rows into their slots. `copy(i, source)` gathers step i of
/// the chunk.
template <int kSteps, class Slot, class Copy>
__device__ __forceinline__ void copy_unaligned_rows(const UnalignedCopies& packed, int lane,
                                                    const Slot& slot, const Copy& copy) {
  const UnalignedCopies copies = packed.unpacked();
  constexpr int kStepsAtOnce = UnalignedCopies::kStepsAtOnce;
  static_assert(kSteps % kStepsAtOnce == 0 && kSteps <= kWarpSize);
  __syncwarp();  // the place is free only when all threads have taken what they need from it
#pragma unroll
  for (int first = 0; first < kSteps; first += kStepsAtOnce) {
    const int i = first + copies.step();
    copy(i, UnalignedFetchSource{slot(i), copies});
  }
  if (lane < kSteps && copies.has_last_piece()) {
    copy(lane, LastPieceSource{slot(lane)});
  }
}

/// A warp's ring of chunks of unaligned rows (Ring, ring.cuh).
template <class Op>
  requires kIsUnaligned<typename Op::Data>
class Ring<Op> {
 public:
  static constexpr int kSlotBytes =
      static_cast<int>(sizeof(typename Op::Raw)) * kWarpSize + Op::kInputs * kPieceBytes;
  static constexpr int kChunkInputBytesPerWarp = Op::kChunkInputBytes * kWarpSize;
  static constexpr int kStageBytes = kSlotBytes * Op::kSteps + kChunkInputBytesPerWarp;
  // Outputs that leave by way of the ring have a place of their own, where each thread's part is
  // its own: threads that share a channel read the same bytes of a slot.
  static constexpr int kOutputBytes = Op::kPackBytes * kWarpSize;
  static constexpr int kStagedBytes = Op::kStagedOutputs * Op::kSteps * kOutputBytes;
  static constexpr int kBytes = kStageBytes * Op::kStages + kStagedBytes;

  __device__ Ring(char* shared, int warp, int lane, bool, int sharing)
      : base_(shared + warp * kBytes), lane_(lane), copies_(lane, sharing) {}

  __device__ void fetch(const Op& op, int stage, int k, int end) const {
    if constexpr (kChunkInputBytesPerWarp > 0) {
      op.fetch_chunk_inputs(chunk_inputs(stage), lane_, k, end);
    }
    copy_unaligned_rows<Op::kSteps>(
        copies_, lane_, [&](int i) { return slot(stage, i); },
        [&](int i, auto source) { op.gather(source, min(k + i, end - 1), end - 1); });
  }

  template <int kChunks = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kChunks>();
    __syncwarp();
  }

  /// Step i of the chunk that begins at step k, or at any multiple of as many steps as bring back
  /// every shift, as all chunks of such a length do.
  __device__ typename Op::Raw take(const Op& op, int stage, int i, int k) const {
    return op.gather(UnalignedSlotSource{slot(stage, i)}, k + i, kNoLastStep);
  }
  __device__ typename Op::Raw take(const Op& op, int stage, int i) const {
    if constexpr (Op::kTakesOften) {
      return op.gather(PlacedSlotSource{slot(stage, i), lane_}, 0, kNoLastStep);
    } else {
      return take(op, stage, i, any_chunk());
    }
  }

  /// Moves the inputs of a chunk that has come to where a thread's pack is one word, at its lane's
  /// place in the row. To take a pack from where it was copied to takes seven instructions.
  __device__ void put_in_place(const Op& op, int stage) const {
    if constexpr (Op::kTakesOften) {
      static_assert(Op::kPackBytes == sizeof(uint32_t));
      uint32_t packs[Op::kSteps][Op::kInputs];
      const int chunk = any_chunk();
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.gather(UnalignedCollectSource{{slot(stage, i)}, packs[i]}, chunk + i, kNoLastStep);
      }
      __syncwarp();  // all threads have their packs
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
#pragma unroll
        for (int input = 0; input < Op::kInputs; ++input) {
          char* const row = slot(stage, i) + input * (kSlotBytes / Op::kInputs);
          reinterpret_cast<uint32_t*>(row)[lane_] = packs[i][input];
        }
      }
    }
  }
  __device__ char* chunk_inputs(int stage) const { return slot(stage, Op::kSteps); }
  __device__ int lane() const { return lane_; }

  /// Keeps step i's output number `output`, or one of its channels.
  template <class T, int kVec>
  __device__ void stage_output(int, int i, int output, const Pack<T, kVec>& p) const {
    *reinterpret_cast<typename Pack<T, kVec>::Bits*>(staged(i, output)) = p.bits;
  }
  template <class T>
  __device__ void stage_output_channel(int, int i, int output, int c, T x) const {
    reinterpret_cast<T*>(staged(i, output))[c] = x;
  }
  /// Stores them, from step k of the scan on.
  template <class T, int kVec>
  __device__ void store_outputs(int, int output, const Rows<T, kVec>& rows, int k, int end) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if (k + i < end) {
        Pack<T, kVec> p;
        p.bits = *reinterpret_cast<const typename Pack<T, kVec>::Bits*>(staged(i, output));
        rows.store(k, i, p);
      }
    }
  }

 private:
  /// The first step of a chunk, whose steps have the shifts of any other's.
  static __device__ int any_chunk() {
    static_assert(Op::kSteps % (kPieceBytes / sizeof(typename Op::Data)) == 0);
    int chunk = 0;
    asm volatile("" : "+r"(chunk));  // or the shifts of all steps are found once, and spill
    return chunk;
  }
  __device__ char* slot(int stage, int i) const {
    return base_ + stage * kStageBytes + i * kSlotBytes;
  }
  __device__ char* staged(int i, int output) const {
    return base_ + kStageBytes * Op::kStages + (output * Op::kSteps + i) * kOutputBytes +
           lane_ * Op::kPackBytes;
  }

  char* base_;
  int lane_;
  UnalignedCopies copies_;
};

/// A warp's split ring of unaligned rows (SplitRing, ring.cuh).
template <class Op>
  requires kIsUnaligned<typename Op::Data>
class SplitRing<Op> {
  static constexpr int kOtherStages = Op::kStages - 1;
  static constexpr int kComposeSlotBytes =
      Op::kComposeBytes * kWarpSize + Op::kComposeInputs * kPieceBytes;
  static constexpr int kOtherSlotBytes =
      Op::kOtherBytes * kWarpSize + (Op::kInputs - Op::kComposeInputs) * kPieceBytes;
  using Raw = typename Op::Raw;

 public:
  static constexpr int kBytes =
      (kComposeSlotBytes * Op::kStages + kOtherSlotBytes * kOtherStages) * Op::kSteps;

  __device__ SplitRing(char* shared, int warp, int lane, bool, int sharing)
      : base_(shared + warp * kBytes), lane_(lane), copies_(lane, sharing) {}

  __device__ void fetch(const Op& op, int iteration, int k, int end, int stride) const {
    if (iteration * stride < end) {
      copy_unaligned_rows<Op::kSteps>(
          copies_, lane_, [&](int i) { return compose_slot(iteration, i); },
          [&](int i, auto source) {
            Raw raw;
            op.gather_for_compose(source, raw, min(k + i, end - 1));
          });
    }
    if (iteration > 0 && (iteration - 1) * stride < end) {
      copy_unaligned_rows<Op::kSteps>(
          copies_, lane_, [&](int i) { return other_slot(iteration - 1, i); },
          [&](int i, auto source) {
            Raw raw;
            op.gather_others(source, raw, min(k - stride + i, end - 1), end - 1);
          });
    }
  }

  template <int kIterations = 1>
  __device__ void wait() const {
    wait_for_copies<Op::kStages - kIterations>();
    __syncwarp();
  }

  __device__ Raw take_for_compose(const Op& op, int iteration, int i, int k) const {
    Raw raw;
    UnalignedSlotSource from{compose_slot(iteration, i)};
    op.gather_for_compose(from, raw, k + i);
    return raw;
  }
  __device__ Raw take(const Op& op, int iteration, int i, int k) const {
    Raw raw = take_for_compose(op, iteration, i, k);
    UnalignedSlotSource from{other_slot(iteration, i)};
    op.gather_others(from, raw, k + i, kNoLastStep);
    return raw;
  }

 private:
  __device__ char* compose_slot(int iteration, int i) const {
    return base_ + (iteration % Op::kStages * Op::kSteps + i) * kComposeSlotBytes;
  }
  __device__ char* other_slot(int iteration, int i) const {
    return base_ + Op::kStages * Op::kSteps * kComposeSlotBytes +
           (iteration % kOtherStages * Op::kSteps + i) * kOtherSlotBytes;
  }

  char* base_;
  int lane_;
  UnalignedCopies copies_;
};

}  // namespace tidegate::kernels::scan
