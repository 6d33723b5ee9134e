#pragma once

// The scans of state_pass.cuh where its blocks of threads, which have a whole state each, are too
// few to fill the device. A row of a state knows nothing of the other rows, so a block takes
// kSlices K-slices only, and goes through all of time: unlike segments, nothing is scanned twice.
// All blocks of a head read the same values, from L2 but for the first.
//
// What bounds such a scan is how long a chunk takes, one after the other. So other warps copy
// operands, kStages - 1 chunks ahead, than multiply them; and a K-slice has kParts warps, each with
// some of the columns, which tell each other the largest numbers of their rows. One barrier a chunk
// passes both on, stages and numbers.

#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/gla/cuda/backward/state_pass.cuh"

namespace tidegate::kernels::gla {

struct NarrowScan {
  static constexpr int kSlices = 2, kParts = 2, kStages = 4;
  static constexpr int kLoaders = 4;  // warps, the first ones; two for each K-slice's factors
  static constexpr int kLoaderThreads = kLoaders * 32;
  static constexpr int kThreads = kLoaderThreads + kSlices * kParts * 32;
  static constexpr int kColumns = kStateColumns / kParts;  // of a warp

  // A stage has values, then each K-slice's factors, then each K-slice's decays.
  static constexpr int kPitch = kStateColumns * 2 + 16;  // RowTile::pitch_of(kStateColumns)
  static constexpr int kFactors = kChunk * kPitch;
  static constexpr int kSliceBytes = StatePassShared::kSliceBytes;
  static constexpr int kStageBytes = kFactors + kSlices * kSliceBytes;
  // Behind the stages: the largest numbers, [parity of a chunk][slice][row][part].
  static constexpr int kLargest = kStages * kStageBytes;
  static constexpr int kBytes = kLargest + 2 * kSlices * kSlice * kParts * 4;

  static bool fits(const GlaParams& p) {
    return p.key_dim % (kSlices * kSlice) == 0 && p.value_dim % kStateColumns == 0;
  }
  /// Blocks of threads that have the K-slices of a head and column tile.
  static __host__ __device__ int groups(int64_t key_dim) {
    return static_cast<int>(key_dim) / (kSlices * kSlice);
  }
};

/// What a loader's thread copies of a chunk: some pieces of values, and of the factors of a
/// K-slice. It steps from chunk to chunk in the order of the scan.
template <bool kAdjoint>
class NarrowCopies {
 public:
  using Scan = NarrowScan;
  static constexpr int kRowsAtOnce = Scan::kLoaderThreads / (kStateColumns / 8);
  static constexpr int kTiles = kSubChunks * Scan::kSlices / Scan::kLoaders;  // a warp

  /// From chunk `chunk` of the sequence on.
  __device__ NarrowCopies(const StatePass& pass, const TimeTile& sequence, int first_chunk,
                          int chunk, int head, int column0, int group)
      : values_(kAdjoint ? pass.d_o : pass.params.v, sequence.sequence, pass.params.layout.reverse,
                head),
        factors_(pass.factors.rows(kAdjoint ? kQueries : kKeys, sequence.sequence,
                                   pass.params.layout.reverse, head)),
        pass_(pass),
        column0_(column0),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_(chunk * kChunk),
        end_(sequence.tokens) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int row = thread / (kStateColumns / 8), pack = thread % (kStateColumns / 8);
    value_to_ = row * Scan::kPitch + pack * 16;
    value_ = values_.row(first_ + token_of_row(row)) + (column0 + pack * 8) * 2;
    constexpr int kWarps = Scan::kLoaders / Scan::kSlices;  // of a K-slice
    const int block_slice = thread / 32 / kWarps, part = thread / 32 % kWarps;
    slice_ = group * Scan::kSlices + block_slice;
    first_tile_ = part * kTiles;
    slice_to_ = Scan::kFactors + block_slice * Scan::kSliceBytes + lane_ * 16;
    const NearRows rows = factors_.of_chunk(first_, kChunk);
    factor_ = pass.factors.tile(rows, slice_, first_tile_, lane_ * 16);
    to_next_tile_ = rows.stride << (kTileBits - pass.factors.piece_bits);
    constexpr int kStep = kAdjoint ? -kChunk : kChunk;
    factor_step_ = int64_t{kStep} * rows.stride;
    value_step_ = int64_t{kStep} * values_.stride_bytes();
    has_decays_ = part == 0 && lane_ < ChunkFactors::kSliceDecays / 4;
    decays_ = pass.factors.slice_decays(first_chunk + chunk, head, slice_) + lane_ * 4;
    decay_step_ = (kAdjoint ? -1 : 1) * pass.factors.heads * pass.factors.key_slices *
                  ChunkFactors::kSliceDecays;
  }

  /// Starts copying the next chunk to a stage.
  __device__ void start(char* stage) {
    if (first_ + kChunk <= end_) {
      const int stride = values_.stride_bytes();
#pragma unroll
      for (int row = 0; row < kChunk; row += kRowsAtOnce) {
        copy_async<16>(stage + value_to_ + row * Scan::kPitch,
                       value_ + int64_t{token_of_row(row)} * stride);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        copy_async<16>(stage + slice_to_ + (first_tile_ + i) * kTileBytes,
                       factor_ + int64_t{i} * to_next_tile_);
      }
    } else {
      start_last(stage);
    }
    if (has_decays_) {
      copy_async<16>(stage + slice_to_ + StatePassShared::kSliceTiles, decays_);
    }
    value_ += value_step_;
    factor_ += factor_step_;
    decays_ += decay_step_;
    first_ += kAdjoint ? -kChunk : kChunk;
  }

 private:
  /// A sequence's last chunk, where it is shorter.
  __device__ void start_last(char* stage) const {
    const int tokens = end_ - first_;
    copy_rows_async({stage, Scan::kPitch}, NearRows(values_, first_), tokens, column0_,
                    kStateColumns, Scan::kLoaderThreads);
    const NearRows rows = factors_.of_chunk(first_, tokens);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int tile = first_tile_ + i;
      copy_async<16>(stage + slice_to_ + tile * kTileBytes,
                     pass_.factors.tile(rows, slice_, tile, lane_ * 16));
    }
  }

  HeadRows values_;
  FactorRows factors_;
  const StatePass& pass_;
  const int column0_, lane_;
  int first_;      // token of the next chunk
  const int end_;  // of the sequence
  int slice_, first_tile_;
  int value_to_, slice_to_;
  const char *value_, *factor_;
  int to_next_tile_;
  int64_t value_step_, factor_step_, decay_step_;
  bool has_decays_;
  const float* decays_;
};

/// One direction's scan of a sequence and head, for a column tile and a group of K-slices, as a
/// block of threads has it.
template <class T, bool kAdjoint>
class NarrowDirection {
 public:
  using Scan = NarrowScan;

  __device__ NarrowDirection(const StatePass& pass, const TimeTile& sequence, int head,
                             int column_tile, int group, char* shared)
      : pass_(pass),
        sequence_(sequence),
        head_(head),
        column_tile_(column_tile),
        group_(group),
        chunks_((sequence.tokens + kChunk - 1) / kChunk),
        start_(kAdjoint ? chunks_ - 1 : 0),
        first_chunk_(first_tile_index(pass.chunks, static_cast<int>(sequence.sequence.index))),
        shared_(shared) {}

  /// The loaders' part: operands to stages.
  __device__ void load() const {
    NarrowCopies<kAdjoint> copies(pass_, sequence_, first_chunk_, start_, head_,
                                  column_tile_ * kStateColumns, group_);
#pragma unroll
    for (int i = 0; i < Scan::kStages - 1; ++i) {
      if (i < chunks_) {
        copies.start(shared_ + i * Scan::kStageBytes);
      }
      commit_copies();
    }
    int at = 0;
#pragma unroll 1
    for (int i = 0; i < chunks_; ++i) {
      wait_for_copies<Scan::kStages - 2>();
      const int chunk = kAdjoint ? chunks_ - 1 - i : i;
      finish_rows<T>({shared_ + at * Scan::kStageBytes, Scan::kPitch},
                     kAdjoint ? InputActivation::kNone : pass_.params.v_activation,
                     min(kChunk, sequence_.tokens - chunk * kChunk), kStateColumns,
                     Scan::kLoaderThreads);
      pass_on();
      if (i + Scan::kStages - 1 < chunks_) {
        copies.start(shared_ + (at == 0 ? Scan::kStages - 1 : at - 1) * Scan::kStageBytes);
      }
      commit_copies();
      at = at == Scan::kStages - 1 ? 0 : at + 1;
    }
  }

  /// The other warps' part: the states.
  __device__ void scan() const {
    constexpr int kDirection = kAdjoint ? 1 : 0;
    const GlaParams& p = pass_.params;
    const int thread = static_cast<int>(threadIdx.x) - Scan::kLoaderThreads;
    const int lane = thread % 32, warp = thread / 32;
    const int block_slice = warp / Scan::kParts, part = warp % Scan::kParts;
    const int slice = group_ * Scan::kSlices + block_slice;
    const int column = part * Scan::kColumns;
    const int first_column = column_tile_ * kStateColumns + column;
    // Of the warp's part, in h0 and the like.
    const int64_t state =
        ((sequence_.sequence.index * p.heads + head_) * p.key_dim + int64_t{slice} * kSlice) *
            p.value_dim +
        first_column;
    SliceState<Scan::kColumns / kSlice> sum;
    const auto* from = static_cast<const float*>(kAdjoint ? pass_.dh_final : p.h0);
    sum.clear();
    if (from != nullptr) {
      sum.load(from + state, p.value_dim, Scan::kColumns, lane);
    }

    const ChunkStates& states = pass_.states[kDirection];
    uint4* tiles = states.tile(first_chunk_ + start_, head_, slice, first_column / kSlice);
    uint16_t* units =
        part == 0 && lane % 4 == 0
            ? states.units_of(first_chunk_ + start_, head_, column_tile_) + slice * kSlice
            : nullptr;
    const int64_t tile_step =
        (kAdjoint ? -1 : 1) * states.heads * states.key_slices * states.value_slices * 32;
    const int64_t unit_step =
        units == nullptr ? 0
                         : (kAdjoint ? -1 : 1) * states.heads * p.key_dim * pass_.column_tiles();
    // The largest numbers of the lane's lower row; those of the higher one are eight rows further.
    constexpr int kRowBytes = Scan::kParts * 4, kParityBytes = Scan::kSlices * kSlice * kRowBytes;
    char* const largest_at =
        shared_ + Scan::kLargest + (block_slice * kSlice + lane / 4) * kRowBytes;
    const auto tell_largest = [&](int parity) {
      const float2 own = sum.largest(Scan::kColumns);
      if (lane % 4 == 0) {
        char* const to = largest_at + parity * kParityBytes + part * 4;
        *reinterpret_cast<float*>(to) = own.x;
        *reinterpret_cast<float*>(to + 8 * kRowBytes) = own.y;
      }
    };
    const auto find_largest = [&](int parity, int row) {
      static_assert(Scan::kParts == 2);
      const auto* const of_row =
          reinterpret_cast<const float2*>(largest_at + parity * kParityBytes + row * kRowBytes);
      return fmaxf(of_row->x, of_row->y);
    };

    tell_largest(0);
    int at = 0;
#pragma unroll 1
    for (int i = 0; i < chunks_; ++i) {
      char* const stage = shared_ + at * Scan::kStageBytes;
      const RowTile values = {stage + column * 2, Scan::kPitch};
      pass_on();
      const float2 largest = make_float2(find_largest(i & 1, 0), find_largest(i & 1, 8));
      sum.store_rounded(largest, tiles, units, Scan::kColumns, lane);
      tiles += tile_step;
      units += unit_step;
      float2 total = {1.0f, 1.0f};
      sum.template advance<kAdjoint>(stage + Scan::kFactors + block_slice * Scan::kSliceBytes,
                                     values, Scan::kColumns, lane, total);
      tell_largest(~i & 1);
      at = at == Scan::kStages - 1 ? 0 : at + 1;
    }
    if (kAdjoint && pass_.dh0 != nullptr) {
      sum.store(static_cast<float*>(pass_.dh0) + state, p.value_dim, Scan::kColumns, lane);
    }
  }

 private:
  /// Once a chunk, by all warps: its operands and largest numbers are there, and nobody reads those
  /// of the chunk before.
  static __device__ void pass_on() {
    asm volatile("bar.sync 1, %0;" ::"n"(Scan::kThreads) : "memory");
  }

  const StatePass& pass_;
  const TimeTile& sequence_;
  const int head_, column_tile_, group_;
  const int chunks_, start_;  // of the sequence; the one at which the scan starts
  const int first_chunk_;     // the sequence's first one's index
  char* const shared_;
};

/// A block of threads is a direction, a sequence, a head, a column tile and a group of K-slices.
template <class T>
__global__ void __launch_bounds__(NarrowScan::kThreads, 2)
    narrow_scan_kernel(const __grid_constant__ StatePass pass) {
  extern __shared__ __align__(16) char shared[];
  wait_for_kernels_before();
  const int scans = static_cast<int>(gridDim.x) / kDirections;
  const int direction = static_cast<int>(blockIdx.x) < scans ? 1 : 0;
  int index = static_cast<int>(blockIdx.x) - (direction == 1 ? 0 : scans);
  const int groups = NarrowScan::groups(pass.params.key_dim), group = index % groups;
  index /= groups;
  const int column_tile = index % pass.column_tiles();
  index /= pass.column_tiles();
  const auto heads = static_cast<int>(pass.params.heads);
  const int head = index % heads;
  const TimeTile sequence = find_time_tile(pass.segments, index / heads);
  if (!sequence.exists()) {
    return;
  }
  const auto run = [&](const auto& scan) {
    threadIdx.x < NarrowScan::kLoaderThreads ? scan.load() : scan.scan();
  };
  if (direction == 0) {
    run(NarrowDirection<T, false>(pass, sequence, head, column_tile, group, shared));
  } else {
    run(NarrowDirection<T, true>(pass, sequence, head, column_tile, group, shared));
  }
}

}  // namespace tidegate::kernels::gla
