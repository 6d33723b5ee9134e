#pragma once

// The forward pass over batch rows of at most 128 tokens, of heads up to 63 whose rows the other
// kernels would need padded (a D that is no multiple of 8 or less than 16, or rows that begin
// anywhere), in one launch. For those q, k and v would be copied into padded rows first, gates
// added up, and o copied back: three launches more, which take longer than the attention between
// them.
//
// A block has one head of one sequence: its queries, keys and values are one tile each. It reads
// rows word by word, of 4 or 8 bytes, and makes channels past the last one zero; adds up the gates
// while they come; and writes o word by word.

#include "kernels/attention/cuda/forward/forward_kernel.cuh"

namespace tidegate::kernels::attention {

/// Calls f.template operator()<kAligned>() with 2, 4 or 8.
template <class F>
__device__ __forceinline__ void with_alignment(int bytes, const F& f) {
  switch (bytes) {
    case 8:
      return f.template operator()<8>();
    case 4:
      return f.template operator()<4>();
    default:
      return f.template operator()<2>();
  }
}

/// A thread's words of a tile of kRows rows that kThreads threads copy, neighbouring words by
/// neighbouring threads. Rows in device memory are aligned to kAligned bytes.
///
/// Words have 4 bytes at least. A row that is aligned to 2 only is taken from the word that it
/// begins in the middle of: it is misaligned by one element in the tile until realign(). Then a
/// warp has a row, and every lane one of its words.
template <int kColumns, int kRows, int kThreads, int kAligned>
class TileWords {
  using Tile = Tile16Bit<kColumns>;
  static constexpr int kWord = kAligned < 4 ? 4 : kAligned;
  using Word = typename BitsOf<kWord>::type;
  static constexpr bool kMayBeMisaligned = kAligned < 4;
  static constexpr int kWordsOfRow = Tile::kRowBytes / kWord;
  static constexpr int kWords = kRows * kWordsOfRow / kThreads;  // of a thread
  static constexpr int kAtOnce = 8;                              // that wait in registers
  static_assert(kThreads % kWordsOfRow == 0 && kWords % kAtOnce == 0);
  static_assert(!kMayBeMisaligned || kWordsOfRow == 32);

 public:
  /// `global`: the first row; `limit` rows are there, of `bytes` bytes each.
  __device__ TileWords(unsigned char* tile, char* global, int row_bytes, int limit, int bytes,
                       int thread)
      : tile_(tile),
        global_(global + thread / kWordsOfRow * int64_t{row_bytes}),
        row_bytes_(row_bytes),
        row_(thread / kWordsOfRow),
        limit_(limit),
        byte_(thread % kWordsOfRow * kWord),
        bytes_(bytes) {}

  /// Into the tile; what is not there becomes zero. To be waited for as other copies are.
  __device__ __forceinline__ void load() const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      asm volatile(
          "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(in_tile(i))),
          "l"(in_global(i)), "n"(kWord), "r"(existing(i))
          : "memory");
    }
  }

  /// Moves rows that are misaligned by one element to where they belong in the tile, when the
  /// thread's copies have landed.
  __device__ __forceinline__ void realign() const {
    if constexpr (kMayBeMisaligned) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t own = *in_tile(i);
        const uint32_t next = __shfl_down_sync(0xffffffffu, own, 1);
        if (misaligned_bytes(i) != 0) {
          *in_tile(i) = __funnelshift_r(own, byte_ + kWord < Tile::kRowBytes ? next : 0u, 16);
        }
      }
    }
  }

  /// From the tile.
  __device__ __forceinline__ void store() const {
#pragma unroll 1
    for (int first = 0; first < kWords; first += kAtOnce) {
      Word x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        x[i] = *in_tile(first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if constexpr (kMayBeMisaligned) {
          store_misaligned(first + i, x[i]);
        } else if (existing(first + i) > 0) {
          *in_global(first + i) = x[i];
        }
      }
    }
  }

 private:
  static constexpr int kStep = kThreads / kWordsOfRow;  // rows from a thread's word to its next

  /// By how many bytes row i of the thread is misaligned: 0 or 2.
  __device__ int misaligned_bytes(int i) const {
    return kMayBeMisaligned ? static_cast<int>(reinterpret_cast<uintptr_t>(row_in_global(i)) & 2)
                            : 0;
  }
  /// Bytes of the word that are the row's, or before it.
  __device__ int existing(int i) const {
    const int left = kMayBeMisaligned ? min(max(bytes_ + misaligned_bytes(i) - byte_, 0), kWord)
                                      : (byte_ < bytes_ ? kWord : 0);
    return row_ + i * kStep < limit_ ? left : 0;
  }
  __device__ Word* in_tile(int i) const {
    return reinterpret_cast<Word*>(tile_ + Tile::offset(row_ + i * kStep, byte_ / 16) + byte_ % 16);
  }
  __device__ char* row_in_global(int i) const {
    return global_ + static_cast<int64_t>(i * kStep) * row_bytes_;
  }
  __device__ Word* in_global(int i) const {
    return reinterpret_cast<Word*>(row_in_global(i) + byte_ - misaligned_bytes(i));
  }

  /// `own`: the thread's word of row i in the tile.
  __device__ __forceinline__ void store_misaligned(int i, uint32_t own) const {
    const uint32_t before = __shfl_up_sync(0xffffffffu, own, 1);
    const uint32_t x = misaligned_bytes(i) != 0 ? __funnelshift_l(before, own, 16) : own;
    const int exist = existing(i);
    auto* const halves = reinterpret_cast<unsigned short*>(in_global(i));
    if (exist == kWord && byte_ >= misaligned_bytes(i)) {
      *in_global(i) = x;
    } else if (exist == kWord) {  // the row begins with the second half
      halves[1] = static_cast<unsigned short>(x >> 16);
    } else if (exist > 0 && byte_ >= misaligned_bytes(i)) {
      halves[0] = static_cast<unsigned short>(x);
    }
  }

  unsigned char* tile_;
  char* global_;  // the thread's first row
  int row_bytes_, row_, limit_, byte_, bytes_;
};

/// Calls f with the words of the block's queries, of its keys and of its values.
template <int kAligned, class Shape, class F>
__device__ __forceinline__ void for_inputs(const ForwardBlock<Shape>& at, const F& f) {
  const int bytes = static_cast<int>(at.p.head_dim) * 2;
  const auto words = [&]<int kRows>(unsigned char* tile, const HeadSeries& from,
                                    const Sequence& sequence, int64_t head, int first, int rows) {
    f(TileWords<Shape::kDim, kRows, Shape::kThreads, kAligned>(
        tile, row_address<2>(from, sequence, head, first), row_stride<2>(from), rows, bytes,
        at.thread));
  };
  words.template operator()<Shape::kRows>(at.shared.queries, at.p.q, at.queries, at.head,
                                          at.place.tile.first, at.rows);
  words.template operator()<Shape::kKeys>(at.shared.keys(0), at.p.k, at.keys, at.key_head, 0,
                                          at.keys.length);
  words.template operator()<Shape::kKeys>(at.shared.values(0), at.p.v, at.keys, at.key_head, 0,
                                          at.keys.length);
}

/// c of the keys, as the scan of scan_gates has it, and from it the gates of keys and of rows.
template <class Shape>
__device__ __forceinline__ void add_up_gates(const ForwardBlock<Shape>& at) {
  static_assert(Shape::kThreads == kGateChunk && Shape::kThreads == Shape::kKeys + Shape::kRows);
  __shared__ double c[Shape::kKeys], warp_sums[kGateWarps];
  const int thread = at.thread;
  const bool exists = thread < min(at.keys.length, Shape::kKeys);
  const double sum =
      block_scan(exists ? log_gate(at.p, at.keys, thread, at.head) : 0.0, 0.0, warp_sums);
  if (exists) {
    c[thread] = sum;
  }
  __syncthreads();
  const GateSums gates(c, at.keys.length);
  const double reference = gates.at(at.first);
  float* const key_gates = at.shared.key_gates;
  float* const row_gates = at.shared.row_gates;
  if (thread < Shape::kKeys) {
    const SplitGate gate = SplitGate::of(reference - gates.at(thread));
    key_gates[thread] = gate.high;
    key_gates[Shape::kKeys + thread] = gate.low;
  } else {
    const int row = thread - Shape::kKeys;
    const SplitGate gate = SplitGate::of(gates.at(at.first + row) - reference);
    row_gates[row] = gate.high;
    row_gates[Shape::kRows + row] = gate.low;
  }
}

/// The loop body of forgetting_attention_forward_kernel for kPart keys, kept apart because sharing
/// it reorders that kernel's instructions. A warp without queries only takes part in the vote.
template <class Shape>
__device__ __forceinline__ void take_part(const ForwardBlock<Shape>& at,
                                          const ForwardWarp<Shape>& warp,
                                          OnlineSoftmax<Shape>& softmax,
                                          const typename ForwardWarp<Shape>::KeptQueries& kept,
                                          int part) {
  using Tile = Tile16Bit<Shape::kDim>;
  const PairMask mask = at.mask;
  const int key = part * Shape::kPart, end = key + Shape::kPart, lane = at.lane;
  const bool edge = end - 1 > at.first || (mask.window > 0 && key <= at.last - mask.window);
  const bool seen = warp.row < at.rows && key <= warp.last &&
                    (mask.window == 0 || end > warp.first - mask.window + 1);
  const unsigned keys_at = shared_address(at.shared.keys(0)) + Tile::bytes(key);
  if (seen) {
    warp.compute_scores(softmax, kept, mask, edge, 0, part, keys_at,
                        at.shared.key_gates + key + lane % 4 * 2,
                        at.shared.row_gates + warp.row + lane / 4, lane);
    softmax.update_row_max();
  }
  if (edge) {
    warp.move_non_finite(softmax, mask, seen, key, at.shared.values(0) + Tile::bytes(key), lane);
  }
  if (seen) {
    softmax.accumulate_pv(
        OperandReader<Shape::kDim>::b_transposed(keys_at + Shape::kKeyBytes, lane));
  }
}

/// Rows of all tensors are aligned to `aligned` bytes, and multiples of as many long.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    single_tile_forward_kernel(const __grid_constant__ TensorAttention w, int aligned) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  wait_for_kernels_before();
  const ForwardShared<Shape> shared(shared_bytes);
  const TileAndHead place(w.tiles, w.params.forward.heads, w.side_by_side, blockIdx.x, true);
  if (place.tile.tokens == 0) {
    return;
  }
  const ForwardBlock<Shape> at(w, shared, place);
  with_alignment(aligned, [&]<int kAligned>() {
    for_inputs<kAligned>(at, [](const auto& words) { words.load(); });
  });
  commit_copies();
  add_up_gates(at);
  if (aligned < 4) {
    wait_for_copies<0>();
    for_inputs<2>(at, [](const auto& words) { words.realign(); });
  }

  OnlineSoftmax<Shape> softmax;
  softmax.start();
  const ForwardWarp<Shape> warp(at, shared);
  typename ForwardWarp<Shape>::KeptQueries kept;
  warp.keep_queries(kept);  // waits for all copies and for the gates
#pragma unroll 1
  for (int part = at.tiles.end * (Shape::kKeys / Shape::kPart) - 1; part >= 0; --part) {
    take_part(at, warp, softmax, kept, part);
  }
  softmax.normalize();
  warp.store_lse(softmax);
  unsigned char* const own = shared.queries + Tile16Bit<Shape::kDim>::bytes(warp.row);
  softmax.store_smem(own, at.lane);
  __syncwarp();
  const HeadSeries& o = at.p.o;
  with_alignment(aligned, [&]<int kAligned>() {
    TileWords<Shape::kDim, Shape::kWarpRows, 32, kAligned>(
        own, row_address<2>(o, at.queries, at.head, at.place.tile.first + warp.row),
        row_stride<2>(o), at.rows - warp.row, static_cast<int>(at.p.head_dim) * 2, at.lane)
        .store();
  });
}

// ---- The launch ----

template <class Data>
cudaError_t AttentionSingleTileForwardUnit<Data>::launch(TensorAttention work,
                                                         cudaStream_t stream) {
  using Shape = SingleTileForwardShape<Data>;
  constexpr auto* kKernel = &single_tile_forward_kernel<Shape>;
  const ForgettingAttentionParams& p = work.params.forward;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = time_tiles(p.layout, Shape::kRows);
  const auto is_multiple = [&](int bytes) {
    return p.head_dim * 2 % bytes == 0 && rows_aligned(p.q, bytes) && rows_aligned(p.k, bytes) &&
           rows_aligned(p.v, bytes) && rows_aligned(p.o, bytes);
  };
  const int aligned = is_multiple(8) ? 8 : is_multiple(4) ? 4 : 2;
  return launch_early<kKernel>(work.tiles.count * p.heads, Shape::kThreads, Shape::kSharedBytes,
                               stream, work, aligned);
}

}  // namespace tidegate::kernels::attention
