#pragma once

// What a block of threads that has a chunk and a head works on: where their rows lie, and what the
// passes before have left for them.

#include "kernels/common/cuda/time_tiles.cuh"
#include "kernels/gla/cuda/chunk_tiles.cuh"

namespace tidegate::kernels::gla {

/// The tensors of a call, by the name of a chunk's rows.
enum ChunkTensor : int {
  kRowsQ = 0,
  kRowsK,
  kRowsV,
  kRowsGate,
  kRowsDo,
  kRowsDq,
  kRowsDk,
  kRowsDv,
  kRowsDgate,
  kChunkTensors,
};

/// Which factors are meant.
enum FactorSide : int { kQueries = 0, kKeys, kFactorSides };

/// The rows that hold Q or K of one head of a sequence, a tile for every block and slice.
class FactorRows {
 public:
  __device__ FactorRows(const HeadRows& lent, char* own, int row_bytes)
      : lent_(lent), own_(own), row_bytes_(row_bytes) {}

  /// Those of the chunk that starts at `first`.
  __device__ NearRows of_chunk(int first, int tokens) const {
    return tokens == kChunk ? NearRows(lent_, first) : NearRows(own_, row_bytes_);
  }

 private:
  HeadRows lent_;
  char* own_;
  int row_bytes_;
};

/// Factors of every chunk, made once for all kernels that follow: with pre(t) and suf(t) as
/// products of the decays of a block of 16 tokens, Q = q pre and K = k suf in bf16, the blocks'
/// decays, and the scores of the tokens of a block.
///
/// Q and K take no memory of their own. A chunk's Q lie in its rows of dq, its K in those of dk, or
/// of dgate where keys come from logits: as many bytes, and chunk_backward_kernel writes gradients
/// there once it has read them. Only a chunk of less than 64 tokens, of which a sequence has at
/// most one, has too few rows, and is given others.
struct ChunkFactors {
  HeadSeries lent[kFactorSides] = {};
  char* others = nullptr;   // [sequence][head][side][64][K]
  float* decays = nullptr;  // [slot][head][K / 16][4][16]
  uint4* scores = nullptr;  // [slot][head][4] tiles
  int64_t heads = 0;
  int key_slices = 0;
  int piece = 0;  // piece_bits()

  static constexpr int kSliceDecays = kBlocks * kBlock;

  __host__ __device__ int row_bytes() const { return key_slices * kSliceRowBytes; }
  int64_t other_bytes(const SequenceLayout& layout) const {
    const bool some = layout.offsets != nullptr || layout.time % kChunk != 0;
    return some ? layout.sequences * heads * kFactorSides * kChunk * row_bytes() : 0;
  }
  int64_t decay_bytes(int64_t slots) const { return slots * heads * key_slices * kSliceDecays * 4; }
  int64_t score_bytes(int64_t slots) const { return slots * heads * kBlocks * kTileBytes; }

  __device__ FactorRows rows(FactorSide side, const Sequence& seq, bool backwards, int head) const {
    const int64_t at = (seq.index * heads + head) * kFactorSides + side;
    return {HeadRows(lent[side], seq, backwards, head), others + at * kChunk * row_bytes(),
            row_bytes()};
  }
  /// A tile lies in a piece of each of some rows, side by side with none or as long pieces of
  /// others: the largest power of two that divides a row, at most a tile. Its bytes, in log2.
  __host__ __device__ int piece_bits() const {
    int bits = kSliceRowBits;
    while (bits < kTileBits && row_bytes() % (2 << bits) == 0) {
      ++bits;
    }
    return bits;
  }
  /// How many slices lie below each other before the next pieces of the rows begin.
  __device__ int slices_across() const { return 1 << (piece - kSliceRowBits); }
  /// Byte `offset` of a tile.
  __device__ char* tile(const NearRows& rows, int slice, int block, int offset) const {
    const int across = piece - kSliceRowBits;
    const int first = ((slice & (slices_across() - 1)) * kBlocks + block) << (kTileBits - piece);
    return rows.row(first + (offset >> piece)) + (slice >> across << piece) +
           (offset & ((1 << piece) - 1));
  }
  __device__ float* slice_decays(int slot, int head, int slice) const {
    return decays + ((slot * heads + head) * key_slices + slice) * kSliceDecays;
  }
  __device__ uint4* block_scores(int slot, int head, int block) const {
    return scores + ((slot * heads + head) * kBlocks + block) * (kTileBytes / 16);
  }
};

struct ChunkBackward {
  GlaBackwardParams backward = {};
  HeadSeries tensors[kChunkTensors] = {};
  TimeTiles chunks = {};
  ChunkFactors factors = {};
  ChunkStates states = {};     // at every chunk's start
  ChunkStates gradients = {};  // of the state at every chunk's end
};

/// Where the chunk's rows lie, found once for the whole block: lane i of the first warp finds those
/// of tensor i.
struct ChunkRows {
  NearRows q, k, v, gate, d_o, dq, dk, dv, dgate;
  NearRows factors[kFactorSides];
  int tokens;  // of the chunk; 0: nothing to do

  __device__ void find(const ChunkBackward& a, int slot, int head, int lane) {
    if (lane >= kChunkTensors + kFactorSides) {
      return;
    }
    const TimeTile cut = find_time_tile(a.chunks, slot);
    const bool backwards = a.chunks.layout.reverse;
    if (lane < kChunkTensors) {
      (&q)[lane] = NearRows(HeadRows(a.tensors[lane], cut.sequence, backwards, head), cut.first);
    } else {
      const auto side = static_cast<FactorSide>(lane - kChunkTensors);
      factors[side] =
          a.factors.rows(side, cut.sequence, backwards, head).of_chunk(cut.first, cut.tokens);
    }
    if (lane == 0) {
      tokens = cut.exists() ? cut.tokens : 0;
    }
  }
};
static_assert(offsetof(ChunkRows, dgate) == kRowsDgate * sizeof(NearRows));

/// A chunk, a head, and this thread's place in the block.
struct ChunkPlace {
  int slot, head;
  const ChunkRows& rows;
  int tokens;
  int lane, warp, warps;
  int key_slices, value_slices;  // of 16

  __device__ ChunkPlace(const GlaParams& p, int slot, int head, const ChunkRows& rows)
      : slot(slot),
        head(head),
        rows(rows),
        tokens(rows.tokens),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        key_slices(static_cast<int>(p.key_dim) / kBlock),
        value_slices(static_cast<int>(p.value_dim) / kBlock) {}
};

}  // namespace tidegate::kernels::gla
