#pragma once

// How the tensor-core kernels lay out a chunk of 64 tokens in shared memory, and states in device
// memory.

#include "kernels/common/cuda/mma.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/gla/cuda/gates.cuh"
#include "kernels/gla/cuda/head_rows.cuh"

namespace tidegate::kernels {

constexpr int kChunk = 64;
constexpr int kBlock = 16;  // tokens of a block, channels of a slice, columns of a value slice
constexpr int kBlocks = kChunk / kBlock;
constexpr int kMaxSlices = 16;  // of channels, one a warp

/// A tile: 16 tokens x 16 channels of bf16 in 512 bytes. Rows are permuted so that neither
/// load_matrices nor the stores below hit a bank twice: pairs or quads of lanes store a token's 32
/// bytes, of tokens 2r for four r, or of the same token in four blocks.
constexpr int kTileBytes = kBlock * kBlock * 2;

/// Where eight channels of a token start, in bytes.
__device__ inline int tile_offset(int block, int token, int half) {
  const int row = (((token >> 1) & 3) | ((token & 1) << 2) | (token & 8)) ^ block;
  return row * 32 + ((half ^ (row >> 2)) & 1) * 16;
}

/// Which row (of 16) and which half of it a lane points to in load_matrices, so that m[] becomes
/// A of (rows x columns). Loaded transposed: two B of (rows x columns), {m[0], m[1]} and {m[2],
/// m[3]}.
struct MatrixLane {
  int row, half;

  __device__ explicit MatrixLane(int lane) : row(lane % 16), half(lane / 16) {}
  __device__ MatrixLane(int row, int half) : row(row), half(half) {}

  /// Two B of (columns x rows), likewise. Loaded transposed: A of (columns x rows).
  static __device__ MatrixLane across(int lane) { return {lane % 8 + lane / 16 * 8, lane / 8 % 2}; }
};

/// A matrix of 64 rows of bf16, 16 bytes longer than its columns: eight rows have different banks.
struct RowTile {
  char* data;
  int pitch;  // bytes

  static __host__ __device__ int pitch_of(int columns) { return columns * 2 + 16; }

  __device__ char* at(int row, int column) const { return data + row * pitch + column * 2; }
  __device__ const char* at(int row, int column, const MatrixLane& l) const {
    return at(row + l.row, column + l.half * 8);
  }
};

/// One of a walk's rows and those after it, cheap to step through: rows are less than 2^31 bytes
/// apart (see gla_unsupported).
struct NearRows {
  char* base;
  int64_t stride;  // bytes

  NearRows() = default;
  __device__ NearRows(const HeadRows& rows, int first)
      : base(rows.row(first)), stride(rows.stride_bytes()) {}

  __device__ char* row(int k) const { return base + int64_t{k} * static_cast<int>(stride); }
};

/// Calls visit(row, column) for each group of eight columns that this thread copies.
template <class Visit>
__device__ inline void for_each_pack(int columns, Visit visit) {
  const int packs = columns / 8, shift = 32 - __clz(packs - 1);
  const auto thread = static_cast<int>(threadIdx.x);
  const int pack = thread & ((1 << shift) - 1);
  if (pack < packs) {
    for (int row = thread >> shift; row < kChunk; row += static_cast<int>(blockDim.x) >> shift) {
      visit(row, pack * 8);
    }
  }
}

/// Starts copying the first `tokens` rows into a tile; what lies past them is zero.
inline __device__ void copy_rows_async(const RowTile& tile, const NearRows& rows, int tokens,
                                       int column0, int columns) {
  for_each_pack(columns, [&](int row, int column) {
    char* to = tile.at(row, column);
    if (row < tokens) {
      copy_async<16>(to, rows.row(row) + (column0 + column) * 2);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
  });
}

/// Activates what copy_rows_async brought and makes it bf16, each thread its own share. Called once
/// the thread's copies have arrived.
template <class T>
__device__ inline void finish_rows(const RowTile& tile, InputActivation activation, int tokens,
                                   int columns) {
  if (std::is_same_v<T, __nv_bfloat16> && activation == InputActivation::kNone) {
    return;
  }
  for_each_pack(columns, [&](int row, int column) {
    if (row < tokens) {
      auto* place = reinterpret_cast<uint4*>(tile.at(row, column));
      const Pack<T, 8> raw = {*place};
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        using Math = GateMath<float, true>;
        out[i] = pack_bf16(activate<Math>(activation, raw.get(2 * i)),
                           activate<Math>(activation, raw.get(2 * i + 1)));
      }
      *place = make_uint4(out[0], out[1], out[2], out[3]);
    }
  });
}

/// States at chunk boundaries, in bf16: [slot][head][K / 16][V / 16][lane], the 16 bytes of a lane
/// as it needs them for two B of (columns x channels): {x, y} of channels 0-7, {z, w} of 8-15.
struct ChunkStates {
  uint4* data = nullptr;
  int64_t heads = 0;
  int key_slices = 0, value_slices = 0;

  __host__ __device__ int64_t elements(int64_t slots) const {
    return slots * heads * key_slices * value_slices * 32;
  }
  __device__ uint4* tile(int64_t slot, int64_t head, int key_slice, int value_slice) const {
    return data + (((slot * heads + head) * key_slices + key_slice) * value_slices + value_slice) *
                      int64_t{32};
  }
};

/// Copies one slice of channels of a chunk's `tokens` into a warp's four tiles.
inline __device__ void copy_tiles_async(char* tiles, const NearRows& rows, int tokens, int channel,
                                        int lane) {
#pragma unroll
  for (int i = 0; i < 2 * kChunk / 32; ++i) {
    const int token = i * kBlock + lane / 2, half = lane % 2;  // block i
    if (token < tokens) {
      copy_async<16>(tiles + i * kTileBytes + tile_offset(i, lane / 2, half),
                     rows.row(token) + (channel + half * 8) * 2);
    }
  }
}

/// x = scale * activate(x) for several at once: one branch for all of them.
template <int kCount>
__device__ inline void activate_all(InputActivation activation, float scale, float (&x)[kCount]) {
  using Math = GateMath<float, true>;
  if (activation != InputActivation::kNone) {
    const bool silu = activation == InputActivation::kSilu;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float e = Math::exp_minus_abs(x[i]);
      const float larger = Math::reciprocal(1.0f + e);
      x[i] = scale * (silu ? x[i] : 1.0f) * (x[i] > 0.0f ? larger : e * larger);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] *= scale;
    }
  }
}

/// Two elements of type T in a register.
template <class T>
__device__ inline float2 unpack_pair(uint32_t bits) {
  const Pack<T, 2> both = {bits};
  return {both.get(0), both.get(1)};
}

/// A log decay as a decay.
__device__ inline float decay_of_log(float log_f) {
  return exp2_approx(log_f * 1.4426950408889634f);
}

/// Key and decay of a channel and token. `key` is the tensor's, where there is one.
template <GateKind kKind>
__device__ inline LogitGate<float> channel_gate(float gate, float key, float gamma) {
  if constexpr (kKind == GateKind::kLogit) {
    return logit_gate<GateMath<float, true>>(gate, gamma, 1.0f - gamma);
  } else {
    return {decay_of_log(gate), key};
  }
}

__device__ inline float bound_of(const GlaParams& p, int64_t head, int channel) {
  return p.gamma == nullptr ? 0.0f : static_cast<const float*>(p.gamma)[head * p.key_dim + channel];
}

}  // namespace tidegate::kernels
