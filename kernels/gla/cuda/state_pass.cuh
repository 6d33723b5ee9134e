#pragma once

// States at the boundaries of chunks, from one walk over time each way.
//
// Forward,  S_end = diag(tot) S_start + sum_t (k_t suf(t)) v_t^T: what a chunk starts from.
// Adjoint,  D_start = diag(tot) D_end + sum_t (q_t pre(t)) do_t^T: the loss's gradient with respect
// to the state that a chunk leaves behind. pre(t) is the product of the chunk's decays up to t,
// suf(t) of those after t, tot of all: products of decays only.
//
// A warp owns a slice of 16 channels, whose factors chunk_factors.cuh has made a block of 16 tokens
// at a time: it keeps 16 x (columns of the tile) of the state in its accumulators, in fp32 from one
// end of time to the other. Where (sequences x heads) are few, time is cut into segments: a first
// launch walks every segment from zero, combine_segments_kernel strings the results together, and a
// second launch walks again from the right states.

#include <type_traits>

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/gla/cuda/chunk_place.cuh"

namespace tidegate::kernels::gla {

/// Columns of a state that a block keeps; more are shared among blocks.
constexpr int kStateColumns = 128;

constexpr int kDirections = 2;  // of a walk: states forwards, their gradients backwards

struct StatePass {
  GlaParams params = {};
  HeadSeries d_o = {};
  const void* dh_final = nullptr;
  void* dh0 = nullptr;
  TimeTiles chunks = {};
  TimeTiles segments = {};
  bool split = false;     // states start from segment_states instead of h0 and dh_final
  bool map_only = false;  // walk from zero and write segment_states and segment_decays
  ChunkFactors factors = {};
  ChunkStates states[kDirections] =
      {};                           // [direction], at the boundaries where the walk enters a chunk
  float* segment_states = nullptr;  // [direction][slot][H][K][V]
  float* segment_decays = nullptr;  // [direction][slot][H][K]

  __host__ __device__ int column_tiles() const {
    return static_cast<int>((params.value_dim + kStateColumns - 1) / kStateColumns);
  }
  __device__ float* segment_state(int direction, int64_t slot, int64_t head) const {
    return segment_states + ((direction * segments.count + slot) * params.heads + head) *
                                params.key_dim * params.value_dim;
  }
  __device__ float* segment_decay(int direction, int64_t slot, int64_t head) const {
    return segment_decays +
           ((direction * segments.count + slot) * params.heads + head) * params.key_dim;
  }
};

/// Shared memory of a block: two stages of what a chunk needs.
struct StatePassShared {
  static constexpr int kSliceTiles = kBlocks * kTileBytes;
  static constexpr int kSliceBytes = kSliceTiles + ChunkFactors::kSliceDecays * 4;

  int pitch;        // of a row of values
  int value_bytes;  // of a stage
  int stage_bytes;

  __host__ __device__ StatePassShared(int64_t key_dim, int64_t value_dim)
      : pitch(RowTile::pitch_of(
            static_cast<int>(value_dim < kStateColumns ? value_dim : kStateColumns))),
        value_bytes(kChunk * pitch),
        stage_bytes(value_bytes + static_cast<int>(key_dim) / kBlock * kSliceBytes) {}

  __host__ __device__ int bytes() const { return 2 * stage_bytes; }

  __device__ RowTile values(char* memory, int stage) const {
    return {memory + stage * stage_bytes, pitch};
  }
  /// The slice's factors of every block, and behind them the blocks' decays.
  __device__ char* slice(char* memory, int stage, int slice) const {
    return memory + stage * stage_bytes + value_bytes + slice * kSliceBytes;
  }
};

/// A slice of channels x the tile's columns of a state: accumulator n has columns 8n..8n+7; its
/// rows are the slice's columns (channel_of_column).
class SliceState {
 public:
  static constexpr int kTiles = kStateColumns / kBlock;
  static constexpr int kHigherRow = 2;  // channels from a lane's one row to the other

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

  __device__ void store_rounded(uint4* tiles, int columns, int lane) const {
#pragma unroll
    for (int v = 0; v < kTiles; ++v) {
      if (v * kBlock < columns) {
        const float (&lo)[4] = sum_[2 * v];
        const float (&hi)[4] = sum_[2 * v + 1];
        tiles[v * 32 + lane] = make_uint4(pack_bf16(lo[0], lo[1]), pack_bf16(hi[0], hi[1]),
                                          pack_bf16(lo[2], lo[3]), pack_bf16(hi[2], hi[3]));
      }
    }
  }

  /// Over a chunk's four blocks, in the walk's order: state = diag(decay) state + factors^T values.
  /// `total` is multiplied by the decays of the lane's two rows.
  template <bool kBackwards>
  __device__ void advance(const char* slice, const RowTile& values, int columns, int lane,
                          float2& total) {
    const MatrixLane left = MatrixLane::across(lane), right(lane);
    const char* factors = slice + tile_offset(left.row, left.half);
    const auto* decays =
        reinterpret_cast<const float*>(slice + StatePassShared::kSliceTiles) + lane / 4;
    const char* value = values.at(0, 0, right);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int b = kBackwards ? kBlocks - 1 - i : i;
      const float d0 = decays[b * kBlock], d1 = decays[b * kBlock + 8];
      total = {total.x * d0, total.y * d1};
      uint32_t a[4];
      load_matrices_transposed(a, factors + b * kTileBytes);
#pragma unroll
      for (int v = 0; v < kTiles; ++v) {
        if (v * kBlock < columns) {
          uint32_t m[4];
          load_matrices_transposed(m, value + b * kBlock * values.pitch + v * (kBlock * 2));
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

/// kWhole: the tile has all its kStateColumns.
template <class T, bool kAdjoint, bool kWhole>
__device__ inline void walk_states(const StatePass& pass, const TimeTile& segment, int slot,
                                   int head, int column_tile, char* shared) {
  constexpr int kDirection = kAdjoint ? 1 : 0;
  const GlaParams& p = pass.params;
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(threadIdx.x) / 32;
  const int column0 = column_tile * kStateColumns;
  const int columns =
      kWhole ? kStateColumns : min(kStateColumns, static_cast<int>(p.value_dim) - column0);
  const int chunks = (segment.tokens + kChunk - 1) / kChunk;
  const int first_chunk = first_tile_index(pass.chunks, static_cast<int>(segment.sequence.index)) +
                          segment.first / kChunk;
  const int64_t corner = (slice * kBlock) * p.value_dim + column0;  // of this warp's state
  const int64_t state =
      (segment.sequence.index * p.heads + head) * p.key_dim * p.value_dim + corner;

  SliceState sum;
  const auto* start = static_cast<const float*>(kAdjoint ? pass.dh_final : p.h0);
  if (pass.map_only || (!pass.split && start == nullptr)) {
    sum.clear();
  } else {
    sum.load(pass.split ? pass.segment_state(kDirection, slot, head) + corner : start + state,
             p.value_dim, columns, lane);
  }

  const StatePassShared sh(p.key_dim, kWhole ? kStateColumns : p.value_dim);
  const HeadRows values(kAdjoint ? pass.d_o : p.v, segment.sequence, p.layout.reverse, head);
  const FactorRows factors =
      pass.factors.rows(kAdjoint ? kQueries : kKeys, segment.sequence, p.layout.reverse, head);
  const int end = segment.first + segment.tokens;
  const auto chunk_of = [&](int i) { return kAdjoint ? chunks - 1 - i : i; };
  const auto fetch = [&](int i) {
    const int chunk = chunk_of(i), first = segment.first + chunk * kChunk;
    copy_rows_async(sh.values(shared, i & 1), NearRows(values, first), min(kChunk, end - first),
                    column0, columns);
    const NearRows rows = factors.of_chunk(first, min(kChunk, end - first));
    char* to = sh.slice(shared, i & 1, slice) + lane * 16;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      copy_async<16>(to + b * kTileBytes, pass.factors.tile(rows, slice, b, lane * 16));
    }
    if (lane < ChunkFactors::kSliceDecays / 4) {
      copy_async<16>(to + StatePassShared::kSliceTiles,
                     pass.factors.slice_decays(first_chunk + chunk, head, slice) + lane * 4);
    }
    commit_copies();
  };

  if (chunks > 0) {
    fetch(0);
  }
  float2 total = {1.0f, 1.0f};  // decays of the lane's two rows
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int chunk = chunk_of(i);
    const RowTile stage = sh.values(shared, i & 1);
    wait_for_copies<0>();
    finish_rows<T>(stage, kAdjoint ? InputActivation::kNone : p.v_activation,
                   min(kChunk, end - segment.first - chunk * kChunk), columns);
    __syncthreads();  // the copies are seen, and nobody reads the other stage any more
    if (i + 1 < chunks) {
      fetch(i + 1);
    }
    if (!pass.map_only) {
      sum.store_rounded(
          pass.states[kDirection].tile(first_chunk + chunk, head, slice, column0 / kBlock), columns,
          lane);
    }
    sum.template advance<kAdjoint>(sh.slice(shared, i & 1, slice), stage, columns, lane, total);
  }

  if (pass.map_only) {
    sum.store(pass.segment_state(kDirection, slot, head) + corner, p.value_dim, columns, lane);
    if (lane % 4 == 0 && column_tile == 0) {
      float* to =
          pass.segment_decay(kDirection, slot, head) + slice * kBlock + channel_of_column(lane / 4);
      to[0] = total.x;
      to[SliceState::kHigherRow] = total.y;
    }
  } else if (kAdjoint && segment.index == 0 && pass.dh0 != nullptr) {
    sum.store(static_cast<float*>(pass.dh0) + state, p.value_dim, columns, lane);
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxSlices * 32, 1)
    state_pass_kernel(const __grid_constant__ StatePass pass) {
  extern __shared__ __align__(16) char shared[];
  // All walks of one direction first: a multiprocessor then has one of each.
  const int heads = static_cast<int>(pass.params.heads);
  const int walks = static_cast<int>(gridDim.x) / kDirections;
  const int direction = static_cast<int>(blockIdx.x) < walks ? 1 : 0;
  int index = static_cast<int>(blockIdx.x) - (direction == 1 ? 0 : walks);
  const int column_tile = index % pass.column_tiles();
  index /= pass.column_tiles();
  const int head = index % heads, slot = index / heads;
  const TimeTile segment = find_time_tile(pass.segments, slot);
  if (!segment.exists()) {
    return;
  }
  const auto walk = [&](auto adjoint, auto whole) {
    walk_states<T, adjoint, whole>(pass, segment, slot, head, column_tile, shared);
  };
  const bool whole = (column_tile + 1) * kStateColumns <= pass.params.value_dim;
  using std::bool_constant;
  if (direction == 0) {
    whole ? walk(bool_constant<false>(), bool_constant<true>())
          : walk(bool_constant<false>(), bool_constant<false>());
  } else {
    whole ? walk(bool_constant<true>(), bool_constant<true>())
          : walk(bool_constant<true>(), bool_constant<false>());
  }
}

constexpr int kCombineThreads = 256;

/// Turns the states that segments make from zero into those they start from, in the order of the
/// walk: a thread an element of a sequence's state.
template <class State>
__global__ void __launch_bounds__(kCombineThreads)
    combine_segments_kernel(const __grid_constant__ StatePass pass) {
  const GlaParams& p = pass.params;
  const int64_t size = p.key_dim * p.value_dim;
  const int64_t blocks = (size + kCombineThreads - 1) / kCombineThreads;
  const int64_t element = blockIdx.x % blocks * kCombineThreads + threadIdx.x;
  const int64_t head = blockIdx.x / blocks % p.heads, n = blockIdx.x / blocks / p.heads;
  const auto direction = static_cast<int>(blockIdx.y);
  if (element >= size) {
    return;
  }
  const Sequence seq = find_sequence(p.layout, n);
  const int64_t slot0 = first_tile_index(pass.segments, static_cast<int>(n));
  const int pieces = tiles_of(pass.segments, seq);
  const auto* start = static_cast<const State*>(direction == 0 ? p.h0 : pass.dh_final);
  State run = start == nullptr ? State(0) : start[(n * p.heads + head) * size + element];
  for (int i = 0; i < pieces; ++i) {
    const int64_t slot = slot0 + (direction == 0 ? i : pieces - 1 - i);
    State* state = pass.segment_state(direction, slot, head) + element;
    const State decay = pass.segment_decay(direction, slot, head)[element / p.value_dim];
    const State local = *state;
    *state = run;
    run = fmaf(decay, run, local);
  }
}

}  // namespace tidegate::kernels::gla
