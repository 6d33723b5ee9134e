#pragma once

// The forward pass on tensor cores: a block of threads takes a tile of queries of one head and
// walks over its tiles of keys, from the diagonal to the left, with the running maximum and sum of
// every row in registers.
//
// Scores are kept in units of log2. Away from the diagonal c enters as
//   c_i - c_j = (c_i - c_ref) + (c_ref - c_j),   ref = the block's first query:
// a constant of the row and one of the key, both at most zero, so each has its digits wherever the
// weight is not zero anyway. On edge tiles (the diagonal, the window's far end) the difference is
// taken pair by pair, from split floats.

#include <cmath>

#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"

namespace tidegate::kernels::attention {

/// How a head dimension is cut: kWarps warps of 16 * kRowTiles queries; kKeys keys a copy, of which
/// kPart at a time are in registers; kBlocks blocks a multiprocessor; kKeep: queries and addresses
/// stay in registers, where there are enough.
template <class Data, int kHeadDim, int kRowTilesAWarp, int kWarpsABlock, int kKeysACopy,
          int kKeysAtOnce, int kBlocksPerSm, bool kKeepQueries = false>
struct ForwardShape {
  using T = Data;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowTiles = kRowTilesAWarp;
  static constexpr int kWarps = kWarpsABlock;
  static constexpr int kKeys = kKeysACopy;
  static constexpr int kPart = kKeysAtOnce;
  static constexpr int kBlocks = kBlocksPerSm;
  static constexpr bool kKeep = kKeepQueries;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kQueryBytes = HalfTile<kDim>::bytes(kRows);
  static constexpr int kKeyBytes = HalfTile<kDim>::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kKeyBytes;  // keys, values
  static constexpr int kSharedBytes =
      kQueryBytes + 2 * kStageBytes + (2 * 2 * kKeys + 2 * kRows + 16) * int{sizeof(float)};
};

/// What only a copy of the next tile needs: kept in shared memory, since the loop has no registers
/// left.
struct BlockConstants {
  const char *k, *v;
  const double* gates;
  double reference;
  int last_key;
};

/// The shared memory of a block.
template <class Shape>
struct ForwardShared {
  unsigned char* queries;
  unsigned char* stages;  // two of keys and values
  float* key_gates;       // [2][2][kKeys]: c_ref - c_j, high and low parts
  float* row_gates;       // [2][kRows]: c_i - c_ref
  int* norm;              // largest squared norm of a query, as ordered bits
  BlockConstants* constants;

  __device__ explicit ForwardShared(unsigned char* shared)
      : queries(shared),
        stages(queries + Shape::kQueryBytes),
        key_gates(reinterpret_cast<float*>(stages + 2 * Shape::kStageBytes)),
        row_gates(key_gates + 4 * Shape::kKeys),
        norm(reinterpret_cast<int*>(row_gates + 2 * Shape::kRows)),
        constants(reinterpret_cast<BlockConstants*>(norm + 2)) {}

  __device__ unsigned char* keys(int stage) const { return stages + stage * Shape::kStageBytes; }
  __device__ unsigned char* values(int stage) const { return keys(stage) + Shape::kKeyBytes; }
};

/// One warp's rows: scores of the tile at hand, and outputs so far.
template <class Shape>
struct ForwardWarp {
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kPart = Shape::kPart;
  static constexpr int kStats = 2 * kRowTiles;  // rows of a lane: 8 apart

  float o[kRowTiles][kDim / 8][4] = {};
  float s[kRowTiles][kPart / 8][4];
  float row_max[kStats];  // of the scores; the sum and o are relative to it, or up to 2^8 times
                          // larger
  float sum[kStats];
  float deferred_bias[kStats];  // what the scores of the tile at hand lack
  float row_offset[kStats];     // what is subtracted from them

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      row_max[i] = -INFINITY;
      sum[i] = 0;
    }
  }

  /// s = scale s + c_ref - c_j, and deferred_bias = c_i - c_ref. `gates`: of the lane's first two
  /// keys; `rows`: of its first row.
  __device__ __forceinline__ void add_bias(float scale, const float* gates, const float* rows) {
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      add_key_bias(scale, j, *reinterpret_cast<const float2*>(gates + 8 * j));
    }
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      deferred_bias[i] = rows[8 * i];
    }
  }

  /// The same relative to the warp's first row, whose own gates are `own`: for keys after the
  /// block's first query, but none after the warp's.
  __device__ __forceinline__ void add_bias_near_diagonal(float scale, const float* gates,
                                                         const float* rows, const float* own) {
    const float high = own[0], low = own[Shape::kRows];
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
      add_key_bias(scale, j, {(x.x + high) + (y.x + low), (x.y + high) + (y.y + low)});
    }
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      deferred_bias[i] = (rows[8 * i] - high) + (rows[Shape::kRows + 8 * i] - low);
    }
  }

  /// s = scale s + c_i - c_j, or -infinity where the pair does not count; nothing is lacking.
  __device__ __forceinline__ void add_bias_and_mask(float scale, const float* gates,
                                                    const float* rows, PairMask mask, int position,
                                                    int key) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      const float high = rows[8 * i], low = rows[Shape::kRows + 8 * i];
      const PairMask::Row row = mask.row(position + 8 * i, key);
      deferred_bias[i] = 0;
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
        const float2 x = read_pair(gates + 8 * j), y = read_pair(gates + kKeys + 8 * j);
        float* const pair = s[i / 2][j] + i % 2 * 2;
        const float first = fmaf(pair[0], scale, (high + x.x) + (low + y.x));
        const float second = fmaf(pair[1], scale, (high + x.y) + (low + y.y));
        pair[0] = row.sees(8 * j) ? first : -INFINITY;
        pair[1] = row.sees(8 * j + 1) ? second : -INFINITY;
      }
    }
  }

  /// Brings `row_max`, and with it the outputs so far, up to the tile's scores. While a row's
  /// largest score grows by less than 2^8, nothing is rescaled: every warp would do so for one of
  /// its rows at most tiles.
  __device__ __forceinline__ void update_row_max() {
    constexpr float kSlack = 8;
    float tile_max[kStats];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      float x = -INFINITY;
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
        x = fmaxf(x, fmaxf(s[i / 2][j][i % 2 * 2], s[i / 2][j][i % 2 * 2 + 1]));
      }
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      tile_max[i] = x + deferred_bias[i];
      grows |= tile_max[i] > row_max[i] + kSlack;
    }
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
      for (int i = 0; i < kStats; ++i) {
        const float next = fmaxf(row_max[i], tile_max[i]);
        const float factor = exp2_approx(row_max[i] - finite_or_zero(next));
        row_max[i] = next;
        sum[i] *= factor;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          o[i / 2][j][i % 2 * 2] *= factor;
          o[i / 2][j][i % 2 * 2 + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      row_offset[i] = finite_or_zero(row_max[i]) - deferred_bias[i];
    }
  }

  /// o += P V with P = exp2(s - row_offset).
  __device__ __forceinline__ void accumulate_pv(const OperandReader<kDim>& tile) {
    constexpr int kChunks = kPart / 16, kPairs = kDim / 16;
    uint32_t b[2][4], a[kChunks][kRowTiles][4];
    tile.transposed(b[0], 0, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      compute_p(chunk);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&x)[4] = s[i][2 * chunk + half];
          a[chunk][i][2 * half] = pack_pair<T>(x[0], x[1]);
          a[chunk][i][2 * half + 1] = pack_pair<T>(x[2], x[3]);
        }
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int at = chunk * kPairs + pair;
        if (at + 1 < kChunks * kPairs) {
          tile.transposed(b[(at + 1) % 2], (at + 1) / kPairs * 16, (at + 1) % kPairs);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            mma<T>(o[i][2 * pair + half], a[chunk][i], b[at % 2][2 * half],
                   b[at % 2][2 * half + 1]);
          }
        }
      }
    }
  }

  /// Adds the infinite and NaN elements of a tile of values to the rows that see them.
  __device__ __forceinline__ void add_non_finite(const unsigned char* tile, PairMask mask,
                                                 int position, int key, int lane) {
    for (int row = 0; row < kPart; ++row) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const auto pair = *reinterpret_cast<const Pack<T, 2>*>(
            tile + HalfTile<kDim>::offset(row, j) + lane % 4 * 4);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = pair.get(e);
          if (fabsf(x) < INFINITY) {
            continue;
          }
#pragma unroll
          for (int i = 0; i < kStats; ++i) {
            if (mask.sees(position + 8 * i, key + row)) {
              o[i / 2][j][i % 2 * 2 + e] += x;
            }
          }
        }
      }
    }
  }

  /// Adds up what the four lanes of a row have, and divides. Afterwards sum is the log2 of the sum
  /// of all weights.
  __device__ __forceinline__ void normalize() {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      const float factor = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        o[i / 2][j][i % 2 * 2] *= factor;
        o[i / 2][j][i % 2 * 2 + 1] *= factor;
      }
      sum[i] = sum[i] == 0.0f ? -INFINITY : row_max[i] + log2f(sum[i]);
    }
  }

  /// Writes the outputs over the warp's queries in shared memory.
  __device__ __forceinline__ void store_smem(unsigned char* rows, int lane) const {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(rows + HalfTile<kDim>::offset(8 * i + lane / 4, j) +
                                     lane % 4 * 4) =
            pack_pair<T>(o[i / 2][j][i % 2 * 2], o[i / 2][j][i % 2 * 2 + 1]);
      }
    }
  }

 private:
  __device__ __forceinline__ void add_key_bias(float scale, int j, float2 gate) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      s[i][j][0] = fmaf(s[i][j][0], scale, gate.x);
      s[i][j][1] = fmaf(s[i][j][1], scale, gate.y);
      s[i][j][2] = fmaf(s[i][j][2], scale, gate.x);
      s[i][j][3] = fmaf(s[i][j][3], scale, gate.y);
    }
  }

  static __device__ float finite_or_zero(float x) { return x == -INFINITY ? 0.0f : x; }

  /// Of a chunk of 16 keys.
  __device__ __forceinline__ void compute_p(int chunk) {
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        float& x = s[i / 2][2 * chunk + at / 2][i % 2 * 2 + at % 2];
        x = exp2_approx(x - row_offset[i]);
        sum[i] += x;
      }
    }
  }
};

/// Whether a thread's share of a tile holds an infinity or a NaN.
template <class T, int kThreads>
__device__ inline bool has_non_finite(const unsigned char* tile, int bytes, int thread) {
  constexpr uint32_t kExponents = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;
  constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u;
  uint32_t found = 0;
  for (int at = thread * 16; at < bytes; at += kThreads * 16) {
    const uint4 x = *reinterpret_cast<const uint4*>(tile + at);
    // An exponent of ones carries into the sign.
    found |= ((x.x & kExponents) + kOne) | ((x.y & kExponents) + kOne) |
             ((x.z & kExponents) + kOne) | ((x.w & kExponents) + kOne);
  }
  return (found & 0x80008000u) != 0;
}

template <class T, int kThreads>
__device__ inline void zero_non_finite(unsigned char* tile, int bytes, int thread) {
  constexpr unsigned kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  for (int at = thread * 2; at < bytes; at += kThreads * 2) {
    auto* const x = reinterpret_cast<unsigned short*>(tile + at);
    if ((*x & kExponent) == kExponent) {
      *x = 0;
    }
  }
}

/// The largest squared norm of the tile's queries, the same for every thread.
template <class Shape>
__device__ inline float largest_query(const ForwardShared<Shape>& shared, int thread) {
  using T = typename Shape::T;
  if (thread == 0) {
    *shared.norm = 0;
  }
  __syncthreads();
  for (int row = thread; row < Shape::kRows; row += Shape::kThreads) {
    float square = 0;
    for (int piece = 0; piece < Shape::kDim / 8; ++piece) {
      const auto x = *reinterpret_cast<const Pack<T, 8>*>(
          shared.queries + HalfTile<Shape::kDim>::offset(row, piece));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        square = fmaf(x.get(e), x.get(e), square);
      }
    }
    atomicMax(shared.norm, __float_as_int(square) & 0x7fffffff);  // NaN is the largest
  }
  __syncthreads();
  return __int_as_float(*shared.norm);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    forgetting_attention_forward_kernel(const __grid_constant__ TensorAttention w) {
  using T = typename Shape::T;
  constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kPart = Shape::kPart;
  constexpr int kThreads = Shape::kThreads;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const ForwardShared<Shape> shared(shared_bytes);
  const ForgettingAttentionParams& p = w.params.forward;
  const TileAndHead place(w.tiles, p.heads, w.side_by_side, blockIdx.x, true);
  const int rows = place.tile.tokens, head = place.head;
  if (rows == 0) {
    return;
  }
  const Sequence& queries = place.tile.sequence;
  const Sequence keys = find_sequence(p.key_layout, queries.index);
  const int64_t key_head = head / (p.heads / p.key_heads);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first = place.tile.first + keys.length - queries.length;  // positions of the rows
  const int last = first + rows - 1;
  const PairMask mask = {static_cast<int>(p.window)};
  const GateSums gates(w, keys, head);
  KeyTileRange tiles = KeyTileRange::of<kKeys>(first, last, mask.window);
  const int pieces = static_cast<int>(p.head_dim / 8);

  volatile BlockConstants& constants = *shared.constants;
  if (thread == 0) {
    constants.k = row_address<2>(p.k, keys, key_head, 0);
    constants.v = row_address<2>(p.v, keys, key_head, 0);
    constants.gates = gates.data();
    constants.reference = gates.at(first);
    constants.last_key = keys.length - 1;
  }
  __syncthreads();
  const auto load_keys = [&](int tile, int stage) {
    const int64_t row = int64_t{tile} * kKeys;
    const int thread = fresh_thread_index();
    const int limit = constants.last_key + 1 - tile * kKeys;
    const char* const k = const_cast<const char*>(constants.k);
    const char* const v = const_cast<const char*>(constants.v);
    const unsigned to = shared_address(shared.keys(stage));
    load_tile<kDim, kKeys, kThreads>(to, k + row * row_stride<2>(p.k), row_stride<2>(p.k), limit,
                                     pieces, thread);
    load_tile<kDim, kKeys, kThreads>(to + Shape::kKeyBytes, v + row * row_stride<2>(p.v),
                                     row_stride<2>(p.v), limit, pieces, thread);
  };
  const double reference = gates.at(first);
  const auto store_key_gate = [&](double c, int stage) {
    const SplitGate gate = SplitGate::of(constants.reference - c);
    float* const to = shared.key_gates + stage * 2 * kKeys + fresh_thread_index();
    to[0] = gate.high;
    to[kKeys] = gate.low;
  };

  load_tile<kDim, Shape::kRows, kThreads>(shared_address(shared.queries),
                                          row_address<2>(p.q, queries, head, place.tile.first),
                                          row_stride<2>(p.q), rows, pieces, thread);
  if (tiles.end > tiles.begin) {
    load_keys(tiles.end - 1, 0);
    if (thread < kKeys) {
      store_key_gate(gates.at((tiles.end - 1) * kKeys + thread), 0);
    }
  }
  commit_copies();
  for (int row = thread; row < Shape::kRows; row += kThreads) {
    const SplitGate gate = SplitGate::of(gates.at(first + row) - reference);
    shared.row_gates[row] = gate.high;
    shared.row_gates[Shape::kRows + row] = gate.low;
  }
  if (p.prune > 0 && tiles.end > tiles.begin && first > 0) {
    wait_for_copies<0>();
    __syncthreads();
    // lse_i is at least the score of the key at the query itself.
    const double fall = largest_fall(p, keys.length,
                                     2 * largest_score(p, largest_query<Shape>(shared, thread),
                                                       ScoreBounds::key(w, keys.batch, head)));
    tiles.begin = max(tiles.begin, gates.first_not_above(reference + fall, first, lane) / kKeys);
  }

  ForwardWarp<Shape> state;
  state.start();
  const int warp_row = warp * Shape::kWarpRows;
  const int warp_first = first + warp_row, warp_last = warp_first + Shape::kWarpRows - 1;
  const float scale = static_cast<float>(p.scale) * kLog2E;

  const unsigned own_queries = shared_address(shared.queries) + HalfTile<kDim>::bytes(warp_row);
  RegisterOperand<Shape::kRowTiles, Shape::kKeep ? kDim / 16 : 1> kept;
  if constexpr (Shape::kKeep) {
    wait_for_copies<0>();
    __syncthreads();
    kept.fill(OperandReader<kDim>::a(own_queries, lane));
  }

  int stage = 0;
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and all are done with the one before it
    double next_gate = 0;
    const bool more = tile > tiles.begin;
    if (more) {
      load_keys(tile - 1, stage ^ 1);
      const int key = (tile - 1) * kKeys + fresh_thread_index();
      next_gate =
          fresh_thread_index() < kKeys ? constants.gates[min(key, constants.last_key)] : 0.0;
    }
    commit_copies();
#pragma unroll 1
    for (int part = kKeys / kPart - 1; part >= 0; --part) {
      const int key = tile * kKeys + part * kPart;
      const bool edge = key + kPart - 1 > first || (mask.window > 0 && key <= last - mask.window);
      const bool seen =
          key <= warp_last && (mask.window == 0 || key + kPart > warp_first - mask.window + 1);
      const int lane = Shape::kKeep ? thread % 32 : fresh_thread_index() % 32;
      const float* const key_gates =
          shared.key_gates + stage * 2 * kKeys + part * kPart + lane % 4 * 2;
      const float* const row_gates = shared.row_gates + warp_row + lane / 4;
      const unsigned keys_at =
          shared_address(shared.keys(stage)) + HalfTile<kDim>::bytes(part * kPart);
      if (seen) {
        const auto keys_reader = OperandReader<kDim>::b(keys_at, lane);
        if constexpr (Shape::kKeep) {
          multiply<T, false, false, kDim / 16, true>(state.s, kept, keys_reader);
        } else {
          multiply<T, false, false, kDim / 16, true>(
              state.s, OperandReader<kDim>::a(own_queries, lane), keys_reader);
        }
        if (!edge) {
          state.add_bias(scale, key_gates, row_gates);
        } else if (key + kPart - 1 <= warp_first &&
                   (mask.window == 0 || key > warp_last - mask.window)) {
          state.add_bias_near_diagonal(scale, key_gates, row_gates, shared.row_gates + warp_row);
        } else {
          state.add_bias_and_mask(scale, key_gates, row_gates, mask, warp_first + lane / 4,
                                  key + lane % 4 * 2);
        }
        state.update_row_max();
      }
      if (edge) {  // weights of zero must not meet what is not finite
        unsigned char* const values = shared.values(stage) + HalfTile<kDim>::bytes(part * kPart);
        constexpr int kBytes = HalfTile<kDim>::bytes(kPart);
        const bool found = has_non_finite<T, kThreads>(values, kBytes, fresh_thread_index());
        if (__syncthreads_or(found ? 1 : 0)) {
          if (seen) {
            state.add_non_finite(values, mask, warp_first + lane / 4, key, lane);
          }
          __syncthreads();
          zero_non_finite<T, kThreads>(values, kBytes, fresh_thread_index());
          __syncthreads();
        }
      }
      if (seen) {
        state.accumulate_pv(OperandReader<kDim>::b_transposed(keys_at + Shape::kKeyBytes, lane));
      }
    }
    if (more && fresh_thread_index() < kKeys) {
      store_key_gate(next_gate, stage ^ 1);
    }
  }

  if (tiles.end <= tiles.begin) {  // the queries that stand where outputs go have not landed
    wait_for_copies<0>();
    __syncthreads();
  }
  state.normalize();
  if (p.lse != nullptr && lane % 4 == 0) {
    float* const lse = static_cast<float*>(p.lse) +
                       (queries.batch * p.heads + head) * p.layout.time + queries.start +
                       place.tile.first;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kRowTiles; ++i) {
      const int row = warp_row + 8 * i + lane / 4;
      if (row < rows) {
        lse[row] = state.sum[i] * kLn2;
      }
    }
  }
  unsigned char* const own = shared.queries + HalfTile<kDim>::bytes(warp_row);
  __syncwarp();
  state.store_smem(own, lane);
  __syncwarp();
  char* const o = row_address<2>(p.o, queries, head, place.tile.first);
  store_tile<kDim, Shape::kWarpRows, 32>(o + static_cast<int64_t>(warp_row) * row_stride<2>(p.o),
                                         row_stride<2>(p.o), own, rows - warp_row, pieces, lane);
}

}  // namespace tidegate::kernels::attention
