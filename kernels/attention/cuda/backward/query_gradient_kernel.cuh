#pragma once

// dq and the sums of dS over rows without atomics: a block of threads takes a tile of queries, as
// in the forward pass, and computes S, dP and dS again, with dq in registers.

#include "kernels/attention/cuda/backward/scores.cuh"
#include "kernels/attention/cuda/backward/tile_configs.cuh"

namespace tidegate::kernels::attention {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    query_gradient_kernel(const __grid_constant__ TensorAttention w) {
  using T = typename Shape::T;
  constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kThreads = Shape::kThreads;
  constexpr int kRows = Shape::kRows, kRowTiles = Shape::kRowTiles, kColumnTiles = kKeys / 8;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  unsigned char* const shared_queries = shared_bytes;
  unsigned char* const shared_d_o = shared_queries + Shape::kRowBytes;
  unsigned char* const stages = shared_d_o + Shape::kRowBytes;
  float* const all_key_gates = reinterpret_cast<float*>(stages + 2 * Shape::kStageBytes);
  float* const row_stats = all_key_gates + 4 * kKeys;  // [4][kRows], see write_row_stats

  const ForgettingAttentionParams& p = w.params.forward;
  const TileAndHead place(w.tiles, p.heads, w.side_by_side, blockIdx.x, true);
  const int rows = place.tile.tokens, head = place.head;
  if (rows == 0) {
    return;
  }
  const Sequence& queries = place.tile.sequence;
  const Sequence keys = find_sequence(p.key_layout, queries.index);
  const int64_t key_head = head / (p.heads / p.key_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first = place.tile.first + keys.length - queries.length;  // positions of the rows
  const int last = first + rows - 1;
  const PairMask mask = {static_cast<int>(p.window)};
  const GateSums gates(w, keys, head);
  KeyTileRange tiles = KeyTileRange::of<kKeys>(first, last, mask.window);
  const int pieces = static_cast<int>(p.head_dim / 8);
  const double reference = gates.at(first);
  if (p.prune > 0 && first > 0) {
    const double fall = largest_fall(p, keys.length, ScoreBounds::score(w, keys.batch, head));
    const int oldest = gates.first_not_above(reference + fall, first, fresh_thread_index() % 32);
    tiles.begin = max(tiles.begin, oldest / kKeys);
  }

  const char* const k = row_address<2>(p.k, keys, key_head, 0);
  const char* const v = row_address<2>(p.v, keys, key_head, 0);
  const auto load_keys = [&](int tile, int stage) {
    const int64_t row = int64_t{tile} * kKeys;
    const int thread = fresh_thread_index(), limit = keys.length - tile * kKeys;
    const unsigned to = shared_address(stages) + stage * Shape::kStageBytes;
    load_tile<kDim, kKeys, kThreads>(to, k + row * row_stride<2>(p.k), row_stride<2>(p.k), limit,
                                     pieces, thread);
    load_tile<kDim, kKeys, kThreads>(to + Shape::kKeyBytes, v + row * row_stride<2>(p.v),
                                     row_stride<2>(p.v), limit, pieces, thread);
  };
  const auto store_key_gate = [&](double c, int stage) {
    const SplitGate gate = SplitGate::of(reference - c);
    float* const to = all_key_gates + stage * 2 * kKeys + fresh_thread_index();
    to[0] = gate.high;
    to[kKeys] = gate.low;
  };

  const int64_t first_row =
      (queries.batch * p.heads + head) * p.layout.time + queries.start + place.tile.first;
  {
    const int thread = fresh_thread_index();
    load_tile<kDim, kRows, kThreads>(shared_address(shared_queries),
                                     row_address<2>(p.q, queries, head, place.tile.first),
                                     row_stride<2>(p.q), rows, pieces, thread);
    load_tile<kDim, kRows, kThreads>(shared_address(shared_d_o),
                                     row_address<2>(w.params.d_o, queries, head, place.tile.first),
                                     row_stride<2>(w.params.d_o), rows, pieces, thread);
    if (tiles.end > tiles.begin) {
      load_keys(tiles.end - 1, 0);
      if (thread < kKeys) {
        store_key_gate(gates.at((tiles.end - 1) * kKeys + thread), 0);
      }
    }
    commit_copies();
    for (int row = thread; row < kRows; row += kThreads) {
      const bool exists = row < rows;
      write_row_stats<kRows>(
          row_stats + row,
          {gates.at(first + row),
           exists ? static_cast<const float*>(p.lse)[first_row + row] : -INFINITY,
           exists ? w.delta[first_row + row] : 0.0f},
          reference);
    }
  }

  float dq[kRowTiles][kDim / 8][4] = {};
  float sums[2 * kRowTiles] = {};
  const int warp_row = warp * Shape::kWarpRows;
  const int warp_first = first + warp_row, warp_last = warp_first + Shape::kWarpRows - 1;
  const float scale = static_cast<float>(p.scale) * kLog2E;

  int stage = 0;
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and all are done with the one before it
    double next_gate = 0;
    const bool more = tile > tiles.begin;
    if (more) {
      load_keys(tile - 1, stage ^ 1);
      const int thread = fresh_thread_index();
      next_gate = thread < kKeys ? gates.at((tile - 1) * kKeys + thread) : 0.0;
    }
    commit_copies();
    const int key = tile * kKeys;
    if (key <= warp_last && (mask.window == 0 || key + kKeys > warp_first - mask.window + 1)) {
      const int lane = fresh_thread_index() % 32;
      const float* const key_gates = all_key_gates + stage * 2 * kKeys + lane % 4 * 2;
      const float* const stats = row_stats + warp_row + lane / 4;
      const unsigned keys_at = shared_address(stages) + stage * Shape::kStageBytes;
      const int own = HalfTile<kDim>::bytes(warp_row);
      float s[kRowTiles][kColumnTiles][4], dp[kRowTiles][kColumnTiles][4];
      multiply<T, false, false, kDim / 16, true>(
          s, OperandReader<kDim>::a(shared_address(shared_queries) + own, lane),
          OperandReader<kDim>::b(keys_at, lane));
      if (key + kKeys - 1 > first || (mask.window > 0 && key <= last - mask.window)) {
        compute_log2_p<kRows, kKeys>(s, scale, key_gates, stats, mask, warp_first + lane / 4,
                                     key + lane % 4 * 2);
      } else {
        compute_log2_p<kRows>(s, scale, key_gates, stats);
      }
      compute_p_and_dp<T, kRows, kDim / 16>(
          s, dp, stats, OperandReader<kDim>::a(shared_address(shared_d_o) + own, lane),
          OperandReader<kDim>::b(keys_at + Shape::kKeyBytes, lane));
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = dp[i / 2][j][i % 2 * 2 + e];
            x *= s[i / 2][j][i % 2 * 2 + e];
            sums[i] += x;
          }
        }
      }
      const auto reader = OperandReader<kDim>::b_transposed(keys_at, lane);
#pragma unroll
      for (int chunk = 0; chunk < kKeys / 16; ++chunk) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float (&x)[4] = dp[i][2 * chunk + half];
            a[i][2 * half] = pack_pair<T>(x[0], x[1]);
            a[i][2 * half + 1] = pack_pair<T>(x[2], x[3]);
          }
        }
#pragma unroll
        for (int pair = 0; pair < kDim / 16; ++pair) {
          uint32_t b[4];
          reader.transposed(b, 16 * chunk, pair);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
              mma<T>(dq[i][2 * pair + half], a[i], b[2 * half], b[2 * half + 1]);
            }
          }
        }
      }
    }
    if (more && fresh_thread_index() < kKeys) {
      store_key_gate(next_gate, stage ^ 1);
    }
  }
  if (tiles.end <= tiles.begin) {  // the queries that stand where dq goes have not landed
    wait_for_copies<0>();
    __syncthreads();
  }

  const int lane = fresh_thread_index() % 32;
  unsigned char* const own = shared_queries + HalfTile<kDim>::bytes(warp_row);
  const float dq_scale = static_cast<float>(p.scale);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
    sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
    const int row = 8 * i + lane / 4;
    if (lane % 4 == 0 && warp_row + row < rows) {
      w.row_sums[first_row + warp_row + row] = sums[i];
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float* const x = dq[i / 2][j] + i % 2 * 2;
      *reinterpret_cast<uint32_t*>(own + HalfTile<kDim>::offset(row, j) + lane % 4 * 4) =
          pack_pair<T>(x[0] * dq_scale, x[1] * dq_scale);
    }
  }
  __syncwarp();
  store_tile<kDim, Shape::kWarpRows, 32>(
      row_address<2>(w.params.dq, queries, head, place.tile.first + warp_row),
      row_stride<2>(w.params.dq), own, rows - warp_row, pieces, lane);
}

}  // namespace tidegate::kernels::attention
