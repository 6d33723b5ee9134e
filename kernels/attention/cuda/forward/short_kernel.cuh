#pragma once

// The forward pass over short sequences of heads whose rows are no whole pieces of 16 bytes, in one
// launch. For the other kernels q, k and v would be copied into padded rows first, gates added up,
// and o copied back: three launches more, which take longer than the attention between them.
//
// A block has one head of one sequence: its queries, keys and values are one tile each. It reads
// rows word by word, of 2, 4 or 8 bytes, as their alignment allows, and makes channels past the
// last one zero; adds up the gates while they come; and writes o word by word.

#include "kernels/attention/cuda/forward/forward_kernel.cuh"

namespace tidegate::kernels::attention {

/// Calls f.template operator()<kWord>().
template <class F>
__device__ __forceinline__ void with_word_bytes(int bytes, const F& f) {
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
/// neighbouring threads.
template <int kColumns, int kRows, int kThreads, int kWord>
class TileWords {
  using Tile = Tile16Bit<kColumns>;
  using Word = typename BitsOf<kWord>::type;
  static constexpr int kWordsOfRow = Tile::kRowBytes / kWord;
  static constexpr int kWords = kRows * kWordsOfRow / kThreads;  // of a thread
  static constexpr int kAtOnce = kWords < 16 ? kWords : 16;      // that wait in registers
  static_assert(kWords % kAtOnce == 0);

 public:
  /// `global`: the first row; `limit` rows are there, of `bytes` bytes each.
  __device__ TileWords(unsigned char* tile, char* global, int row_bytes, int limit, int bytes,
                       int thread)
      : tile_(tile),
        global_(global),
        row_bytes_(row_bytes),
        limit_(limit),
        bytes_(bytes),
        thread_(thread) {}

  /// Into the tile; what is not there becomes zero. To be waited for as other copies are.
  __device__ __forceinline__ void load() const {
    if constexpr (kWord >= 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        asm volatile(
            "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(in_tile(i))),
            "l"(in_global(i)), "n"(kWord), "r"(exists(i) ? kWord : 0)
            : "memory");
      }
    } else {  // too narrow for such copies
#pragma unroll 1
      for (int first = 0; first < kWords; first += kAtOnce) {
        Word x[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          x[i] = exists(first + i) ? *in_global(first + i) : Word{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          *in_tile(first + i) = x[i];
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
        if (exists(first + i)) {
          *in_global(first + i) = x[i];
        }
      }
    }
  }

 private:
  __device__ int row(int i) const { return (thread_ + i * kThreads) / kWordsOfRow; }
  __device__ int byte(int i) const { return (thread_ + i * kThreads) % kWordsOfRow * kWord; }
  __device__ bool exists(int i) const { return row(i) < limit_ && byte(i) < bytes_; }
  __device__ Word* in_tile(int i) const {
    return reinterpret_cast<Word*>(tile_ + Tile::offset(row(i), byte(i) / 16) + byte(i) % 16);
  }
  __device__ Word* in_global(int i) const {
    return reinterpret_cast<Word*>(global_ + static_cast<int64_t>(row(i)) * row_bytes_ + byte(i));
  }

  unsigned char* tile_;
  char* global_;
  int row_bytes_, limit_, bytes_, thread_;
};

/// The block's queries, keys and values.
template <class Shape>
__device__ __forceinline__ void load_words(const ForwardBlock<Shape>& at, int word_bytes) {
  with_word_bytes(word_bytes, [&]<int kWord>() {
    const int bytes = static_cast<int>(at.p.head_dim) * 2;
    const auto load = [&]<int kRows>(unsigned char* tile, const HeadSeries& from,
                                     const Sequence& sequence, int64_t head, int first, int rows) {
      TileWords<Shape::kDim, kRows, Shape::kThreads, kWord>(
          tile, row_address<2>(from, sequence, head, first), row_stride<2>(from), rows, bytes,
          at.thread)
          .load();
    };
    load.template operator()<Shape::kRows>(at.shared.queries, at.p.q, at.queries, at.head,
                                           at.place.tile.first, at.rows);
    load.template operator()<Shape::kKeys>(at.shared.keys(0), at.p.k, at.keys, at.key_head, 0,
                                           at.keys.length);
    load.template operator()<Shape::kKeys>(at.shared.values(0), at.p.v, at.keys, at.key_head, 0,
                                           at.keys.length);
  });
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

/// What forgetting_attention_forward_kernel does with kPart keys of a tile, which both would share
/// but for the order of its instructions. A warp without queries only takes part in the vote.
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

/// `word_bytes`: of what rows of all tensors consist, and to which they are aligned.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    short_forward_kernel(const __grid_constant__ TensorAttention w, int word_bytes) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  wait_for_kernels_before();
  const ForwardShared<Shape> shared(shared_bytes);
  const TileAndHead place(w.tiles, w.params.forward.heads, w.side_by_side, blockIdx.x, true);
  if (place.tile.tokens == 0) {
    return;
  }
  const ForwardBlock<Shape> at(w, shared, place);
  load_words(at, word_bytes);
  commit_copies();
  add_up_gates(at);

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
  with_word_bytes(word_bytes, [&]<int kWord>() {
    TileWords<Shape::kDim, Shape::kWarpRows, 32, kWord>(
        own, row_address<2>(o, at.queries, at.head, at.place.tile.first + warp.row),
        row_stride<2>(o), at.rows - warp.row, static_cast<int>(at.p.head_dim) * 2, at.lane)
        .store();
  });
}

// ---- The launch ----

template <class Data>
cudaError_t AttentionShortForwardUnit<Data>::launch(TensorAttention work, cudaStream_t stream) {
  using Shape = ShortForwardShape<Data>;
  constexpr auto* kKernel = &short_forward_kernel<Shape>;
  const ForgettingAttentionParams& p = work.params.forward;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(Shape::kSharedBytes));
  work.tiles = time_tiles(p.layout, Shape::kRows);
  const auto words_have = [&](int bytes) {
    return p.head_dim * 2 % bytes == 0 && rows_aligned(p.q, bytes) && rows_aligned(p.k, bytes) &&
           rows_aligned(p.v, bytes) && rows_aligned(p.o, bytes);
  };
  const int word_bytes = words_have(8) ? 8 : words_have(4) ? 4 : 2;
  return launch_early<kKernel>(work.tiles.count * p.heads, Shape::kThreads, Shape::kSharedBytes,
                               stream, work, word_bytes);
}

}  // namespace tidegate::kernels::attention
