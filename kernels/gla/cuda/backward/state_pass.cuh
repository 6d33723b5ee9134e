#pragma once

// States at the boundaries of all chunks, by one scan over time in either direction.
//
//   forward   for each sub-chunk            S = diag(tot) S + K^T v
//   adjoint   for each, from the last one   D = diag(tot) D + Q^T do
//
// D is dL/dS at a chunk's end e through what comes later only, diag(f_{e+1}) dS_{e+1}. Q = q pre,
// K = k suf and tot are the sub-chunk's: products of its decays up to a token, after it, and of all
// (chunk_factors.cuh). Only the states at chunk boundaries are kept.
//
// The tile: a block of threads has one head of a segment and up to 128 columns of V; each of its
// K / 16 warps keeps a K-slice of the state, 16 x 128, as fp32 accumulators from one end of time to
// the other. What the scan meets at a chunk is rounded to f16, in units of its rows, for
// chunk_backward_kernel, and the rounding does not accumulate. A chunk's operands arrive by
// cp.async in one of two stages, a chunk ahead; one __syncthreads a chunk passes the stages on.
//
// Where sequences x heads are few, time is divided into segments: a first launch scans every
// segment from zero (map_only), compose_segments puts the maps together in the order of time, and a
// second launch scans again from the right states.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/backward/chunk_layout.cuh"

namespace tidegate::kernels::gla {

constexpr int kDirections = 2;  // 0: states, forward; 1: their gradients, adjoint

struct StatePass {
  GlaParams params = {};
  HeadSeries d_o = {};
  const void* dh_final = nullptr;
  void* dh0 = nullptr;
  TimeTiles chunks = {};
  TimeTiles segments = {};
  bool divided = false;   // segments start in segment_states instead of h0 and dh_final
  bool map_only = false;  // scan from zero and write segment_states and segment_decays
  ChunkFactors factors = {};
  ChunkStates states[kDirections] = {};  // at the boundaries where the scan enters a chunk
  float* segment_states = nullptr;       // [direction][segment][H][K][V]
  float* segment_decays = nullptr;       // [direction][segment][H][K]

  __host__ __device__ int column_tiles() const {
    return ChunkStates::column_tiles(static_cast<int>(params.value_dim) / kSlice);
  }
  __device__ float* segment_state(int direction, int64_t segment_index, int64_t head) const {
    return segment_states + ((direction * segments.count + segment_index) * params.heads + head) *
                                params.key_dim * params.value_dim;
  }
  __device__ float* segment_decay(int direction, int64_t segment_index, int64_t head) const {
    return segment_decays +
           ((direction * segments.count + segment_index) * params.heads + head) * params.key_dim;
  }
};

/// Shared memory of a block of threads: two stages of what a chunk needs.
struct StatePassShared {
  static constexpr int kSliceTiles = kSubChunks * kTileBytes;
  static constexpr int kSliceBytes = kSliceTiles + ChunkFactors::kSliceDecays * 4;

  int pitch;        // of a row of values
  int value_bytes;  // of a stage
  int stage_bytes;

  __host__ __device__ StatePassShared(int64_t key_dim, int64_t value_dim)
      : pitch(RowTile::pitch_of(
            static_cast<int>(value_dim < kStateColumns ? value_dim : kStateColumns))),
        value_bytes(kChunk * pitch),
        stage_bytes(value_bytes + static_cast<int>(key_dim) / kSlice * kSliceBytes) {}

  __host__ __device__ int bytes() const { return 2 * stage_bytes; }

  __device__ RowTile values(char* memory, int stage) const {
    return {memory + stage * stage_bytes, pitch};
  }
  /// The K-slice's factors of every sub-chunk, and behind them the sub-chunks' decays.
  __device__ char* slice(char* memory, int stage, int slice) const {
    return memory + stage * stage_bytes + value_bytes + slice * kSliceBytes;
  }
};

/// A K-slice x the column tile of a state: accumulator n has columns 8n..8n+7; its
/// rows are the slice's columns (channel_of_column).
class SliceState {
 public:
  static constexpr int kTiles = kStateColumns / kSlice;
  static constexpr int kHigherRow = 1;  // channels from a lane's one row to the other

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum_[n][e] = 0;
      }
    }
  }
  /// Between fp32 in memory ([channels][value_dim], at the slice's first channel and the tile's
  /// first column) and registers.
  __device__ void load(const float* from, int64_t value_dim, int columns, int lane) {
    from += channel_of_column(lane / 4) * value_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 x = {0.0f, 0.0f};
        if (n * 8 < columns) {
          x = *reinterpret_cast<const float2*>(from + h * kHigherRow * value_dim + n * 8);
        }
        sum_[n][2 * h] = x.x;
        sum_[n][2 * h + 1] = x.y;
      }
    }
  }
  __device__ void store(float* to, int64_t value_dim, int columns, int lane) const {
    to += channel_of_column(lane / 4) * value_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (n * 8 < columns) {
          *reinterpret_cast<float2*>(to + h * kHigherRow * value_dim + n * 8) =
              make_float2(sum_[n][2 * h], sum_[n][2 * h + 1]);
        }
      }
    }
  }

  /// As ChunkStates has them: `units` are those of the K-slice.
  __device__ void store_rounded(uint4* tiles, uint16_t* units, int columns, int lane) const {
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        if (n * 8 < columns) {
          largest = fmaxf(largest, fmaxf(fabsf(sum_[n][2 * h]), fabsf(sum_[n][2 * h + 1])));
        }
      }
      // The largest becomes 2^14 to 2^15; 2^126 is the largest scale whose inverse is normal.
      const int exponent = __float_as_int(quad_max(largest)) >> 23;
      const int scaling = min(127 + 14 + 127 - exponent, 253);
      scale[h] = __int_as_float(scaling << 23);
      if (lane % 4 == 0) {
        units[lane / 4 + 8 * h] = static_cast<uint16_t>((254 - scaling) << 7);
      }
    }
#pragma unroll
    for (int v = 0; v < kTiles; ++v) {
      if (v * kSlice < columns) {
        const float (&lo)[4] = sum_[2 * v];
        const float (&hi)[4] = sum_[2 * v + 1];
        const auto pair = [&](const float (&x)[4], int h) {
          return pack_f16(x[2 * h] * scale[h], x[2 * h + 1] * scale[h]);
        };
        tiles[v * 32 + lane] = make_uint4(pair(lo, 0), pair(hi, 0), pair(lo, 1), pair(hi, 1));
      }
    }
  }

  /// Over a chunk's four sub-chunks, in scan order: state = diag(decay) state + factors^T values.
  /// `total` is multiplied by the decays of the lane's two rows.
  template <bool kAdjoint>
  __device__ void advance(const char* slice, const RowTile& values, int columns, int lane,
                          float2& total) {
    const MatrixLane left = MatrixLane::across(lane), right(lane);
    const char* factors = slice + tile_offset(left.row, left.half);
    const auto* decays =
        reinterpret_cast<const float*>(slice + StatePassShared::kSliceTiles) + lane / 4;
    const char* value = values.at(0, 0, right);
#pragma unroll
    for (int i = 0; i < kSubChunks; ++i) {
      const int b = kAdjoint ? kSubChunks - 1 - i : i;
      const float d0 = decays[b * kSlice], d1 = decays[b * kSlice + 8];
      total = {total.x * d0, total.y * d1};
      uint32_t a[4];
      load_matrices_transposed(a, factors + b * kTileBytes);
#pragma unroll
      for (int v = 0; v < kTiles; ++v) {
        if (v * kSlice < columns) {
          uint32_t m[4];
          load_matrices_transposed(m, value + b * kSubChunk * values.pitch + v * (kSlice * 2));
#pragma unroll
          for (int n = 2 * v; n < 2 * v + 2; ++n) {
            sum_[n][0] *= d0;
            sum_[n][1] *= d0;
            sum_[n][2] *= d1;
            sum_[n][3] *= d1;
          }
          mma_bf16(sum_[2 * v], a, m[0], m[1]);
          mma_bf16(sum_[2 * v + 1], a, m[2], m[3]);
        }
      }
    }
  }

 private:
  float sum_[2 * kTiles][4];
};

/// The warp's part of the state in which a scan starts: zero for a map. It lies at `corner` of a
/// segment's state, at `state` of h0 or dh_final.
template <bool kAdjoint>
__device__ inline void load_start(const StatePass& pass, int segment_index, int head,
                                  int64_t corner, int64_t state, int columns, int lane,
                                  SliceState& sum) {
  const GlaParams& p = pass.params;
  const auto* start = static_cast<const float*>(kAdjoint ? pass.dh_final : p.h0);
  if (pass.map_only || (!pass.divided && start == nullptr)) {
    sum.clear();
  } else {
    sum.load(
        pass.divided ? pass.segment_state(kAdjoint, segment_index, head) + corner : start + state,
        p.value_dim, columns, lane);
  }
}

/// What a scan reads chunk by chunk, and the two stages it arrives in.
template <bool kAdjoint>
struct ScanInputs {
  const StatePass& pass;
  char* shared;
  StatePassShared sh;
  HeadRows values;
  FactorRows factors;

  __device__ ScanInputs(const StatePass& pass, const TimeTile& segment, int head, int64_t value_dim,
                        char* shared)
      : pass(pass),
        shared(shared),
        sh(pass.params.key_dim, value_dim),
        values(kAdjoint ? pass.d_o : pass.params.v, segment.sequence, pass.params.layout.reverse,
               head),
        factors(pass.factors.rows(kAdjoint ? kQueries : kKeys, segment.sequence,
                                  pass.params.layout.reverse, head)) {}

  /// Starts copying a chunk, which begins at token `first` of the sequence, into a stage: its
  /// values by all warps, its factors and decays by the warp that has their K-slice.
  __device__ void fetch(int stage, int chunk_index, int first, int tokens, int head, int slice,
                        int lane, int column0, int columns) const {
    copy_rows_async(sh.values(shared, stage), NearRows(values, first), tokens, column0, columns,
                    static_cast<int>(blockDim.x));
    const NearRows rows = factors.of_chunk(first, tokens);
    char* to = sh.slice(shared, stage, slice) + lane * 16;
#pragma unroll
    for (int b = 0; b < kSubChunks; ++b) {
      copy_async<16>(to + b * kTileBytes, pass.factors.tile(rows, slice, b, lane * 16));
    }
    if (lane < ChunkFactors::kSliceDecays / 4) {
      copy_async<16>(to + StatePassShared::kSliceTiles,
                     pass.factors.slice_decays(chunk_index, head, slice) + lane * 4);
    }
    commit_copies();
  }
};

/// One direction's scan of a segment of one head, for the columns of a column tile, by a block of
/// threads. kFullTile: the tile has all its kStateColumns.
template <class T, bool kAdjoint, bool kFullTile>
__device__ inline void scan_states(const StatePass& pass, const TimeTile& segment,
                                   int segment_index, int head, int column_tile, char* shared) {
  constexpr int kDirection = kAdjoint ? 1 : 0;
  const GlaParams& p = pass.params;
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(threadIdx.x) / 32;
  const int column0 = column_tile * kStateColumns;
  const int columns =
      kFullTile ? kStateColumns : min(kStateColumns, static_cast<int>(p.value_dim) - column0);
  const int chunks = (segment.tokens + kChunk - 1) / kChunk;
  const int first_chunk = first_tile_index(pass.chunks, static_cast<int>(segment.sequence.index)) +
                          segment.first / kChunk;
  const int64_t corner = (slice * kSlice) * p.value_dim + column0;  // of this warp's state
  const int64_t state =
      (segment.sequence.index * p.heads + head) * p.key_dim * p.value_dim + corner;

  SliceState sum;
  load_start<kAdjoint>(pass, segment_index, head, corner, state, columns, lane, sum);

  const ScanInputs<kAdjoint> inputs(pass, segment, head, kFullTile ? kStateColumns : p.value_dim,
                                    shared);
  const int end = segment.first + segment.tokens;
  const auto chunk_of = [&](int i) { return kAdjoint ? chunks - 1 - i : i; };
  const auto fetch = [&](int i) {
    const int chunk = chunk_of(i), first = segment.first + chunk * kChunk;
    inputs.fetch(i & 1, first_chunk + chunk, first, min(kChunk, end - first), head, slice, lane,
                 column0, columns);
  };

  if (chunks > 0) {
    fetch(0);
  }
  float2 total = {1.0f, 1.0f};  // decays of the lane's two rows
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int chunk = chunk_of(i);
    const RowTile stage = inputs.sh.values(shared, i & 1);
    wait_for_copies<0>();
    finish_rows<T>(stage, kAdjoint ? InputActivation::kNone : p.v_activation,
                   min(kChunk, end - segment.first - chunk * kChunk), columns,
                   static_cast<int>(blockDim.x));
    __syncthreads();  // the copies are seen, and nobody reads the other stage any more
    if (i + 1 < chunks) {
      fetch(i + 1);
    }
    if (!pass.map_only) {
      const ChunkStates& states = pass.states[kDirection];
      sum.store_rounded(states.tile(first_chunk + chunk, head, slice, column0 / kSlice),
                        states.units_of(first_chunk + chunk, head, column_tile) + slice * kSlice,
                        columns, lane);
    }
    sum.template advance<kAdjoint>(inputs.sh.slice(shared, i & 1, slice), stage, columns, lane,
                                   total);
  }

  if (pass.map_only) {
    sum.store(pass.segment_state(kDirection, segment_index, head) + corner, p.value_dim, columns,
              lane);
    if (lane % 4 == 0 && column_tile == 0) {
      float* to = pass.segment_decay(kDirection, segment_index, head) + slice * kSlice +
                  channel_of_column(lane / 4);
      to[0] = total.x;
      to[SliceState::kHigherRow] = total.y;
    }
  } else if (kAdjoint && segment.index == 0 && pass.dh0 != nullptr) {
    sum.store(static_cast<float*>(pass.dh0) + state, p.value_dim, columns, lane);
  }
}

/// A block of threads is a direction, a segment, a head and a column tile.
template <class T>
__global__ void __launch_bounds__(kMaxKeySlices * 32, 1)
    state_pass_kernel(const __grid_constant__ StatePass pass) {
  extern __shared__ __align__(16) char shared[];
  wait_for_kernels_before();
  // All scans of one direction first: a multiprocessor then has one of each.
  const int heads = static_cast<int>(pass.params.heads);
  const int scans = static_cast<int>(gridDim.x) / kDirections;
  const int direction = static_cast<int>(blockIdx.x) < scans ? 1 : 0;
  int index = static_cast<int>(blockIdx.x) - (direction == 1 ? 0 : scans);
  const int column_tile = index % pass.column_tiles();
  index /= pass.column_tiles();
  const int head = index % heads, segment_index = index / heads;
  const TimeTile segment = find_time_tile(pass.segments, segment_index);
  if (!segment.exists()) {
    return;
  }
  const auto scan = [&]<bool kAdjoint, bool kFullTile>() {
    scan_states<T, kAdjoint, kFullTile>(pass, segment, segment_index, head, column_tile, shared);
  };
  const bool full = (column_tile + 1) * kStateColumns <= pass.params.value_dim;
  if (direction == 0) {
    full ? scan.template operator()<false, true>() : scan.template operator()<false, false>();
  } else {
    full ? scan.template operator()<true, true>() : scan.template operator()<true, false>();
  }
}

}  // namespace tidegate::kernels::gla
