#pragma once

// States at the boundaries of chunks, from one walk over time each way.
//
// Forward,  S_end = diag(tot) S_start + sum_t (k_t suf(t)) v_t^T: what a chunk starts from.
// Adjoint,  D_start = diag(tot) D_end + sum_t (q_t pre(t)) do_t^T: the loss's gradient with respect
// to the state that a chunk leaves behind. pre(t) is the product of the chunk's decays up to t,
// suf(t) of those after t, tot of all: products of decays only.
//
// A warp owns 16 channels: it makes their factors, and keeps 16 x (columns of the tile) of the
// state in its accumulators, in fp32 from one end of time to the other. Where (sequences x heads)
// are few, time is cut into segments: a first launch walks every segment from zero,
// combine_segments_kernel strings the results together, and a second launch walks again from the
// right states.

#include "kernels/gla/cuda/chunk_tiles.cuh"
#include "kernels/gla/cuda/cuts.cuh"

namespace tidegate::kernels {

/// Columns of a state that a block keeps; more are shared among blocks.
constexpr int kStateColumns = 128;

enum class StateDirection : uint8_t { kForward, kAdjoint };

struct StatePass {
  GlaParams params = {};
  HeadSeries d_o = {};
  const void* dh_final = nullptr;
  void* dh0 = nullptr;
  Cuts chunks = {};
  Cuts segments = {};
  int first_direction = 0, directions = 2;
  bool split = false;               // states start from segment_states instead of h0 and dh_final
  bool map_only = false;            // walk from zero and write segment_states and segment_decays
  ChunkStates states[2] = {};       // [direction], at the boundaries where the walk enters a chunk
  float* segment_states = nullptr;  // [direction][slot][H][K][V]
  float* segment_decays = nullptr;  // [direction][slot][H][K]

  __host__ __device__ int column_tiles() const {
    return static_cast<int>((params.value_dim + kStateColumns - 1) / kStateColumns);
  }
  __device__ float* segment_state(int direction, int64_t slot, int64_t head) const {
    return segment_states + ((direction * segments.slots + slot) * params.heads + head) *
                                params.key_dim * params.value_dim;
  }
  __device__ float* segment_decay(int direction, int64_t slot, int64_t head) const {
    return segment_decays +
           ((direction * segments.slots + slot) * params.heads + head) * params.key_dim;
  }
};

/// Shared memory of a block: two stages of what a chunk needs. A 16-bit gate and q (or k) lie in
/// tiles of the slices, and give way to the factors that are made of them.
struct StatePassShared {
  int pitch;        // of a row of values
  int value_bytes;  // of a stage
  int tile_bytes;   // of one tensor's tiles
  int tensors;      // in tiles

  __host__ __device__ StatePassShared(int64_t key_dim, int64_t value_dim, bool data, bool gates)
      : pitch(RowTile::pitch_of(
            static_cast<int>(value_dim < kStateColumns ? value_dim : kStateColumns))),
        value_bytes(kChunk * pitch),
        tile_bytes(static_cast<int>(key_dim) / kBlock * kBlocks * kTileBytes),
        tensors(data && gates ? 2 : 1) {}

  __host__ __device__ int stage_bytes() const { return value_bytes + tensors * tile_bytes; }
  __host__ __device__ int bytes() const { return 2 * stage_bytes(); }

  __device__ RowTile values(char* memory, int stage) const {
    return {memory + stage * stage_bytes(), pitch};
  }
  __device__ char* tiles(char* memory, int stage, int tensor, int slice) const {
    return memory + stage * stage_bytes() + value_bytes + tensor * tile_bytes +
           slice * kBlocks * kTileBytes;
  }
};

/// Whether gates are copied to tiles: 16-bit ones of channels. Others are read where they are used.
__host__ __device__ inline bool gates_in_tiles(const GlaParams& p) {
  return p.gate.dtype != DType::kFloat32 && !p.gate_per_head;
}

/// Two channels of one block's 16 tokens, as lane 8b + p sees them: channels 2p and 2p + 1 of block
/// b. Tokens from `count` on do not exist.
template <class T, bool kTiled>
struct PassInputs {
  const GlaParams& p;
  char* data;          // tiles of q or k; their factors take this place
  char* gates;         // tiles, where gates lie in them
  NearRows gate_rows;  // from the block's first token
  int channel;
  int count;
  int even[4], odd;  // where the lane's pair of tokens 0, 2, 4, 6 lies; token 2i + 1 from there

  __device__ PassInputs(const GlaParams& p, char* data, char* gates, const NearRows& gate_rows,
                        int slice, int count, int lane)
      : p(p),
        data(data),
        gates(gates),
        gate_rows(gate_rows),
        channel(slice * kBlock + lane % 8 * 2),
        count(count) {
    const int block = lane / 8, half = lane / 4 % 2, pair = lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      even[i] = block * kTileBytes + tile_offset(block, 2 * i, half) + pair;
    }
    odd = tile_offset(block, 1, half) - tile_offset(block, 0, half);
  }

  __device__ char* at(char* tiles, int t) const {
    return tiles + even[t / 2 % 4] + (t % 2 == 0 ? 0 : odd) + t / 8 * (kTileBytes / 2);
  }
  __device__ float2 data_pair(int t) const {
    return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(at(data, t)));
  }
  __device__ float2 gate_pair(int t) const {
    if constexpr (kTiled) {
      return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(at(gates, t)));
    }
    const char* row = gate_rows.row(min(t, count - 1));
    if (!p.gate_per_head) {
      return *reinterpret_cast<const float2*>(row + channel * 4);
    }
    const float x = p.gate.dtype == DType::kFloat32 ? *reinterpret_cast<const float*>(row)
                                                    : widen(*reinterpret_cast<const T*>(row));
    return {x, x};
  }
};

/// Makes the factors of one slice of channels: k suf or q pre of each block, into the slice's four
/// tiles. Returns the block's decays of the lane's two channels.
template <class T, GateKind kKind, bool kAdjoint, bool kTiled>
__device__ inline float2 make_state_factors(const PassInputs<T, kTiled>& in, float2 gamma,
                                            int lane) {
  constexpr bool kHasData = kAdjoint || kKind == GateKind::kLogDecay;
  constexpr int kGroup = 4;  // tokens at a time
  float2 total = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < kBlock; i += kGroup) {
    const int first = kAdjoint ? i : kBlock - kGroup - i;
    float x[2 * kGroup] = {};
    if constexpr (kHasData) {
#pragma unroll
      for (int t = 0; t < kGroup; ++t) {
        const float2 data = in.data_pair(first + t);
        x[2 * t] = data.x;
        x[2 * t + 1] = data.y;
      }
    }
    if constexpr (kAdjoint) {
      activate_all(in.p.q_activation, static_cast<float>(in.p.scale), x);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int t = kAdjoint ? j : kGroup - 1 - j;
      const float2 gate = in.gate_pair(first + t);
      const LogitGate<float> a = channel_gate<kKind>(gate.x, x[2 * t], gamma.x);
      const LogitGate<float> b = channel_gate<kKind>(gate.y, x[2 * t + 1], gamma.y);
      const bool live = first + t < in.count;
      const float2 before = total;
      total.x *= live ? a.decay : 1.0f;
      total.y *= live ? b.decay : 1.0f;
      const float low = kAdjoint ? x[2 * t] * total.x : a.key * before.x;
      const float high = kAdjoint ? x[2 * t + 1] * total.y : b.key * before.y;
      *reinterpret_cast<uint32_t*>(in.at(in.data, first + t)) = live ? pack_bf16(low, high) : 0;
    }
  }
  return total;
}

/// Sixteen channels x the tile's columns of a state: accumulator n has columns 8n..8n+7.
class SliceState {
 public:
  static constexpr int kTiles = kStateColumns / kBlock;

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
    from += lane / 4 * value_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 x = {0.0f, 0.0f};
        if (n * 8 < columns) {
          x = *reinterpret_cast<const float2*>(from + h * 8 * value_dim + n * 8);
        }
        sum_[n][2 * h] = x.x;
        sum_[n][2 * h + 1] = x.y;
      }
    }
  }
  __device__ void store(float* to, int64_t value_dim, int columns, int lane) const {
    to += lane / 4 * value_dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (n * 8 < columns) {
          *reinterpret_cast<float2*>(to + h * 8 * value_dim + n * 8) =
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
  /// Lane 8b + p brings the decays of channels 2p and 2p + 1 over block b.
  template <bool kBackwards>
  __device__ void advance(float2 decays, const char* tiles, const RowTile& values, int columns,
                          int lane) {
    const MatrixLane left = MatrixLane::across(lane), right(lane);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int b = kBackwards ? kBlocks - 1 - i : i;
      const int low = 8 * b + lane / 8, high = low + 4;  // who has channels lane / 4, lane / 4 + 8
      const float low_x = __shfl_sync(~0u, decays.x, low), low_y = __shfl_sync(~0u, decays.y, low);
      const float high_x = __shfl_sync(~0u, decays.x, high);
      const float high_y = __shfl_sync(~0u, decays.y, high);
      const float d0 = lane & 4 ? low_y : low_x, d1 = lane & 4 ? high_y : high_x;
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        sum_[n][0] *= d0;
        sum_[n][1] *= d0;
        sum_[n][2] *= d1;
        sum_[n][3] *= d1;
      }
      uint32_t a[4];
      load_matrices_transposed(a, tiles + b * kTileBytes + tile_offset(b, left.row, left.half));
#pragma unroll
      for (int v = 0; v < kTiles; ++v) {
        if (v * kBlock < columns) {
          uint32_t m[4];
          load_matrices_transposed(m, values.at(b * kBlock, v * kBlock, right));
          mma_bf16(sum_[2 * v], a, m[0], m[1]);
          mma_bf16(sum_[2 * v + 1], a, m[2], m[3]);
        }
      }
    }
  }

 private:
  float sum_[2 * kTiles][4];
};

template <class T, GateKind kKind, bool kTiled, bool kAdjoint>
__device__ inline void walk_states(const StatePass& pass, const Cut& segment, int64_t slot,
                                   int64_t head, int column_tile, char* shared) {
  constexpr int kDirection = kAdjoint ? 1 : 0;
  const GlaParams& p = pass.params;
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(threadIdx.x) / 32;
  const int column0 = column_tile * kStateColumns;
  const int columns = min(kStateColumns, static_cast<int>(p.value_dim) - column0);
  const int chunks = (segment.tokens + kChunk - 1) / kChunk;
  const int64_t chunk_slot =
      first_slot(pass.chunks, static_cast<int>(segment.sequence.index)) + segment.first / kChunk;
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

  constexpr bool kHasData = kAdjoint || kKind == GateKind::kLogDecay;
  const StatePassShared sh(p.key_dim, p.value_dim, kHasData, kTiled);
  const HeadRows values(kAdjoint ? pass.d_o : p.v, segment.sequence, p.layout.reverse, head);
  const HeadRows data(kAdjoint ? p.q : p.k, segment.sequence, p.layout.reverse, head);
  const HeadRows gates(p.gate, segment.sequence, p.layout.reverse, head);
  const int block = lane / 8, channel = slice * kBlock + lane % 8 * 2;
  const float2 gamma = {bound_of(p, head, channel), bound_of(p, head, channel + 1)};
  const int end = segment.first + segment.tokens;
  const auto first_token = [&](int i) {
    return segment.first + (kAdjoint ? chunks - 1 - i : i) * kChunk;
  };
  const auto fetch = [&](int i) {
    const int first = first_token(i), tokens = min(kChunk, end - first);
    copy_rows_async(sh.values(shared, i & 1), NearRows(values, first), tokens, column0, columns);
    if constexpr (kHasData) {
      copy_tiles_async(sh.tiles(shared, i & 1, 0, slice), NearRows(data, first), tokens,
                       slice * kBlock, lane);
    }
    if constexpr (kTiled) {
      copy_tiles_async(sh.tiles(shared, i & 1, kHasData ? 1 : 0, slice), NearRows(gates, first),
                       tokens, slice * kBlock, lane);
    }
    commit_copies();
  };

  if (chunks > 0) {
    fetch(0);
  }
  float2 total = {1.0f, 1.0f};  // of the lane's block of every chunk
  for (int i = 0; i < chunks; ++i) {
    const int first = first_token(i), mine = first + block * kBlock;
    const RowTile stage = sh.values(shared, i & 1);
    char* tiles = sh.tiles(shared, i & 1, 0, slice);
    wait_for_copies<0>();
    finish_rows<T>(stage, kAdjoint ? InputActivation::kNone : p.v_activation,
                   min(kChunk, end - first), columns);
    __syncthreads();  // the copies are seen, and nobody reads the other stage any more
    if (i + 1 < chunks) {
      fetch(i + 1);
    }
    char* gate_tiles = sh.tiles(shared, i & 1, kHasData && kTiled ? 1 : 0, slice);
    const PassInputs<T, kTiled> inputs(p, tiles, gate_tiles, NearRows(gates, mine), slice,
                                       end - mine, lane);
    const float2 decays = make_state_factors<T, kKind, kAdjoint>(inputs, gamma, lane);
    total = {total.x * decays.x, total.y * decays.y};
    __syncwarp();
    if (!pass.map_only) {
      sum.store_rounded(pass.states[kDirection].tile(chunk_slot + (first - segment.first) / kChunk,
                                                     head, slice, column0 / kBlock),
                        columns, lane);
    }
    sum.template advance<kAdjoint>(decays, tiles, stage, columns, lane);
    __syncwarp();
  }

  if (pass.map_only) {
    sum.store(pass.segment_state(kDirection, slot, head) + corner, p.value_dim, columns, lane);
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
      total.x *= __shfl_xor_sync(~0u, total.x, lanes);
      total.y *= __shfl_xor_sync(~0u, total.y, lanes);
    }
    if (lane < 8 && column_tile == 0) {
      *reinterpret_cast<float2*>(pass.segment_decay(kDirection, slot, head) + channel) = total;
    }
  } else if (kAdjoint && segment.index == 0 && pass.dh0 != nullptr) {
    sum.store(static_cast<float*>(pass.dh0) + state, p.value_dim, columns, lane);
  }
}

/// kTiled: gates_in_tiles(params).
template <class T, GateKind kKind, bool kTiled>
__global__ void __launch_bounds__(kMaxSlices * 32, 1)
    state_pass_kernel(const __grid_constant__ StatePass pass) {
  extern __shared__ __align__(16) char shared[];
  auto index = static_cast<int>(blockIdx.x);
  const int heads = static_cast<int>(pass.params.heads);
  const int direction = index % pass.directions + pass.first_direction;
  index /= pass.directions;
  const int column_tile = index % pass.column_tiles();
  index /= pass.column_tiles();
  const int head = index % heads, slot = index / heads;
  const Cut segment = find_cut(pass.segments, slot);
  if (!segment.exists()) {
    return;
  }
  if (direction == 0) {
    walk_states<T, kKind, kTiled, false>(pass, segment, slot, head, column_tile, shared);
  } else {
    walk_states<T, kKind, kTiled, true>(pass, segment, slot, head, column_tile, shared);
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
  const int direction = static_cast<int>(blockIdx.y) + pass.first_direction;
  if (element >= size) {
    return;
  }
  const Sequence seq = find_sequence(p.layout, n);
  const int64_t slot0 = first_slot(pass.segments, static_cast<int>(n));
  const int pieces = pieces_of(pass.segments, seq);
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

}  // namespace tidegate::kernels
