#pragma once

// What a block of threads that has a chunk and a head works on: where their rows lie, and what the
// passes before have left for them.

#include "kernels/common/cuda/cuts.cuh"
#include "kernels/gla/cuda/chunk_tiles.cuh"

namespace tidegate::kernels {

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

/// Factors of every chunk, made once for all kernels that follow: with pre(t) and suf(t) as
/// products of the decays of a block of 16 tokens, Q = q pre and K = k suf in bf16, the blocks'
/// decays, and the scores of the tokens of a block.
struct ChunkFactors {
  char* tiles = nullptr;    // [slot][head][K / 16][8]: Q of block 0, K of 0 to 3, Q of 1 to 3
  float* decays = nullptr;  // [slot][head][K / 16][4][16]
  uint4* scores = nullptr;  // [slot][head][4] tiles
  int64_t heads = 0;
  int key_slices = 0;

  static constexpr int kTiles = 2 * kBlocks;
  static constexpr int kSliceBytes = kTiles * kTileBytes;
  static constexpr int kSliceDecays = kBlocks * kBlock;
  static __host__ __device__ constexpr int query_tile(int block) {
    return block == 0 ? 0 : kBlocks + block;
  }
  static __host__ __device__ constexpr int key_tile(int block) { return 1 + block; }

  int64_t tile_bytes(int64_t slots) const { return slots * heads * key_slices * kSliceBytes; }
  int64_t decay_bytes(int64_t slots) const { return slots * heads * key_slices * kSliceDecays * 4; }
  int64_t score_bytes(int64_t slots) const { return slots * heads * kBlocks * kTileBytes; }

  __device__ char* slice(int slot, int head, int slice) const {
    return tiles + ((slot * heads + head) * key_slices + slice) * kSliceBytes;
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
  Cuts chunks = {};
  ChunkFactors factors = {};
  ChunkStates states = {};     // at every chunk's start
  ChunkStates gradients = {};  // of the state at every chunk's end
};

/// Where the chunk's rows lie, found once for the whole block: lane i of the first warp finds those
/// of tensor i.
struct ChunkRows {
  NearRows q, k, v, gate, d_o, dq, dk, dv, dgate;
  int tokens;  // of the chunk; 0: nothing to do

  __device__ void find(const ChunkBackward& a, int slot, int head, int lane) {
    if (lane < kChunkTensors) {
      const Cut cut = find_cut(a.chunks, slot);
      (&q)[lane] = NearRows(HeadRows(a.tensors[lane], cut.sequence, a.chunks.layout.reverse, head),
                            cut.first);
      if (lane == 0) {
        tokens = cut.exists() ? cut.tokens : 0;
      }
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

}  // namespace tidegate::kernels
