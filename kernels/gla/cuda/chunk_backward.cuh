#pragma once

// Gradients of one chunk of 64 tokens of one head, from its inputs and the states at its two ends.
// docs/numerics.md derives the sums; docs/kernels/gla_cuda.md says who computes what.
//
// In a block of 16 tokens, pre(t) is the product of the decays up to t, suf(t) of those after t;
// tot_b is the product of all 16 of block b. Inputs appear as Q = q pre and K = k suf, in bf16.

#include "kernels/gla/cuda/chunk_gates.cuh"
#include "kernels/gla/cuda/dyadic.cuh"

namespace tidegate::kernels {

/// use(i, load(i)) for i from 0 to count - 1, with kAhead loads under way.
template <int kAhead, class Load, class Use>
__device__ inline void for_each_ahead(int count, Load load, Use use) {
  decltype(load(0)) waiting[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) {
      waiting[i] = load(i);
    }
  }
#pragma unroll 1
  for (int first = 0; first < count; first += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < count) {
        const auto now = waiting[i];
        if (first + i + kAhead < count) {
          waiting[i] = load(first + i + kAhead);
        }
        use(first + i, now);
      }
    }
  }
}

/// Makes Q, K and the decays of this warp's block, of every `parts`-th slice, and the block's
/// scores: the diagonal ones of the matrix A(t, s) = sum over channels of q_t k_s times the decays
/// between them. Scores of parts other than the first wait in shared memory.
template <class T, GateKind kKind>
__device__ inline void make_factors(const ChunkBackward& a, const ChunkPlace& at,
                                    const ChunkShared& sh, float (&scores)[2][4]) {
  const GlaParams& p = a.backward.forward;
  const int block = at.warp % kBlocks, part = at.warp / kBlocks, parts = at.warps / kBlocks;
  const int r = at.lane / 4, c = at.lane % 4;
  const int token = block * kBlock + 2 * r;
  const int count = at.tokens - token;  // of this lane's two tokens and those after
  QuadInputs<T, kKind> inputs(p, at, token, count);
  DyadicScores sums;
  if (part < at.key_slices) {
    inputs.load(part * kBlock + 4 * c);
  }
  for (int s = part; s < at.key_slices; s += parts) {
    float q[2][4], k[2][4], f[2][4];
    inputs.get(s * kBlock + 4 * c, q, k, f);
    if (s + parts < at.key_slices) {
      inputs.load((s + parts) * kBlock + 4 * c);
    }
    float total[4];
    dyadic_step(q, k, f, at.lane, sums, total);
    char* key = sh.tile(s, kKeyTile + block);
    char* query = sh.tile(s, kQueryTile + max(block, 1) - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int offset = tile_offset(block, 2 * r + i, c / 2) + c % 2 * 8;
      *reinterpret_cast<uint2*>(key + offset) =
          make_uint2(pack_bf16(k[i][0], k[i][1]), pack_bf16(k[i][2], k[i][3]));
      if (block > 0) {
        *reinterpret_cast<uint2*>(query + offset) =
            make_uint2(pack_bf16(q[i][0], q[i][1]), pack_bf16(q[i][2], q[i][3]));
      }
    }
    if (r == 0) {
      *reinterpret_cast<float4*>(sh.decays(block) + s * kBlock + 4 * c) =
          make_float4(total[0], total[1], total[2], total[3]);
    }
  }
  sums.finish(scores, at.lane);
  if (part > 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = sh.partial(part - 1, block, 2 * r + i) + 4 * c;
      *reinterpret_cast<float4*>(to) =
          make_float4(scores[i][0], scores[i][1], scores[i][2], scores[i][3]);
    }
  }
}

/// Adds the parts up, in their order, and stores the scores of the diagonal blocks.
__device__ inline void store_diagonal_scores(const ChunkPlace& at, const ChunkShared& sh,
                                             float (&scores)[2][4]) {
  if (at.warp >= kBlocks) {
    return;
  }
  const int r = at.lane / 4, c = at.lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll 1
    for (int part = 1; part < at.warps / kBlocks; ++part) {
      const float4 more =
          *reinterpret_cast<const float4*>(sh.partial(part - 1, at.warp, 2 * r + i) + 4 * c);
      scores[i][0] += more.x;
      scores[i][1] += more.y;
      scores[i][2] += more.z;
      scores[i][3] += more.w;
    }
    char* to = sh.scores.at(at.warp * kBlock + 2 * r + i, at.warp * kBlock + 4 * c);
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(scores[i][0], scores[i][1]), pack_bf16(scores[i][2], scores[i][3]));
  }
}

/// What needs the decays of several blocks: K up to the chunk's end of blocks 0 to 2, and the
/// factors of the pairs between the chunk's halves that are a block farther apart.
__device__ inline void make_far_factors(const ChunkPlace& at, const ChunkShared& sh) {
  constexpr int kJobs = 5;
  for (int unit = at.warp; unit < kJobs * at.key_slices; unit += at.warps) {
    const int job = unit % kJobs, s = unit / kJobs;
    const int block = job == 4 ? 3 : job == 3 ? 0 : job;
    const char* from = sh.tile(s, job == 4 ? kQueryTile + 2 : kKeyTile + block);
    char* to = sh.tile(s, job == 4 ? kQueryFarTile : job == 3 ? kKeyFarTile : kKeyEndTile + block);
    const int half = at.lane / kBlock, offset = tile_offset(block, at.lane % kBlock, half);
    float factor[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const auto times = [&](int decayed) {
      const auto* d = reinterpret_cast<const float4*>(sh.decays(decayed) + s * kBlock + half * 8);
      const float4 lo = d[0], hi = d[1];
      const float d8[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        factor[i] *= d8[i];
      }
    };
    if (job == 0 || job == 3) {
      times(1);
    }
    if (job <= 1 || job == 4) {
      times(2);
    }
    if (job <= 2) {
      times(3);
    }
    uint4 bits = *reinterpret_cast<const uint4*>(from + offset);
    uint32_t* word = &bits.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair<__nv_bfloat16>(word[i]);
      word[i] = pack_bf16(pair.x * factor[2 * i], pair.y * factor[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(to + offset) = bits;
  }
}

/// Scores between two blocks, later i and earlier j, by the factors whose boundary divides them.
__device__ inline void store_far_scores(const ChunkPlace& at, const ChunkShared& sh) {
#pragma unroll 1
  for (int pair = at.warp; pair < 6; pair += at.warps) {
    // (1,0) (3,2) (2,0) (2,1) (3,0) (3,1)
    const int i = pair == 0 ? 1 : pair == 2 || pair == 3 ? 2 : 3;
    const int j = pair == 1 ? 2 : pair == 3 || pair == 5 ? 1 : 0;
    const int query = pair >= 4 ? kQueryFarTile : kQueryTile + i - 1;
    const int key = pair == 2 || pair == 4 ? kKeyFarTile : kKeyTile + j;
    const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
    const int query_at = tile_offset(i, l.row, l.half);
    const int key_at = tile_offset(j, across.row, across.half);
    float sum[2][4] = {};
#pragma unroll 2
    for (int s = 0; s < at.key_slices; ++s) {
      uint32_t q[4], k[4];
      load_matrices(q, sh.tile(s, query) + query_at);
      load_matrices(k, sh.tile(s, key) + key_at);
      mma_bf16(sum[0], q, k[0], k[1]);
      mma_bf16(sum[1], q, k[2], k[3]);
    }
    store_block(sh.scores, i, j, sum, at.lane);
  }
}

/// dv = K_end D_end + A^T do, each warp 16 columns.
template <class T>
__device__ inline void store_value_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                             const ChunkShared& sh) {
  const GlaParams& p = a.backward.forward;
  const NearRows out = at.rows.dv, raw = at.rows.v;
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
  for (int v = at.warp; v < at.value_slices; v += at.warps) {
    float sum[kBlocks][2][4] = {};
    const uint4* grads = a.gradients.tile(at.slot, at.head, 0, v) + at.lane;
    const int next = at.value_slices * 32;
    for_each_ahead<4>(
        at.key_slices, [&](int s) { return __ldg(grads + s * next); },
        [&](int s, const uint4& d) {
          const uint32_t b[4] = {transpose_matrix(d.x), transpose_matrix(d.z),
                                 transpose_matrix(d.y), transpose_matrix(d.w)};
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
            uint32_t k[4];
            const char* tile = sh.tile(s, j < 3 ? kKeyEndTile + j : kKeyTile + 3);
            load_matrices(k, tile + tile_offset(j, l.row, l.half));
            mma_bf16(sum[j][0], k, b[0], b[1]);
            mma_bf16(sum[j][1], k, b[2], b[3]);
          }
        });
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint32_t d_o[4];
      load_matrices_transposed(d_o, sh.d_o.at(i * kBlock, v * kBlock, l));
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        uint32_t score[4];
        load_matrices_transposed(score, sh.scores.at(i * kBlock, j * kBlock, across));
        mma_bf16(sum[j][0], score, d_o[0], d_o[1]);
        mma_bf16(sum[j][1], score, d_o[2], d_o[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = j * kBlock + at.lane / 4 + 8 * h;
        if (token < at.tokens) {
          const int bytes = (v * kBlock + at.lane % 4 * 2) * 2;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            float x[2] = {sum[j][n][2 * h], sum[j][n][2 * h + 1]};
            if (p.v_activation != InputActivation::kNone) {
              using Math = GateMath<float, true>;
              const float2 value = unpack_pair<T>(
                  *reinterpret_cast<const uint32_t*>(raw.row(token) + bytes + 16 * n));
              x[0] *= activation_slope<Math>(p.v_activation, value.x);
              x[1] *= activation_slope<Math>(p.v_activation, value.y);
            }
            *reinterpret_cast<uint32_t*>(out.row(token) + bytes + 16 * n) = pack<T, 2>(x).bits;
          }
        }
      }
    }
  }
}

/// dA = do v^T at and below the diagonal: in bf16, and the diagonal blocks in fp32 too.
__device__ inline void make_score_gradients(const ChunkPlace& at, const ChunkShared& sh) {
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
#pragma unroll 1
  for (int pair = at.warp; pair < 10; pair += at.warps) {
    const int i = pair >= 6 ? 3 : pair >= 3 ? 2 : pair >= 1 ? 1 : 0;
    const int j = pair - i * (i + 1) / 2;
    float sum[2][4] = {};
#pragma unroll 2
    for (int v = 0; v < at.value_slices; ++v) {
      uint32_t d_o[4], value[4];
      load_matrices(d_o, sh.d_o.at(i * kBlock, v * kBlock, l));
      load_matrices(value, sh.values.at(j * kBlock, v * kBlock, across));
      mma_bf16(sum[0], d_o, value[0], value[1]);
      mma_bf16(sum[1], d_o, value[2], value[3]);
    }
    if (i == j) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<float2*>(sh.partial(0, i, at.lane / 4 + 8 * h) + 8 * n +
                                     at.lane % 4 * 2) =
              make_float2(sum[n][2 * h], sum[n][2 * h + 1]);
        }
      }
    } else {
      store_block(sh.scores, i, j, sum, at.lane);
    }
  }
}

/// Sixteen tokens x 16 channels as two accumulators, of channels 0-7 and 8-15.
using BlockSum = float[2][4];

/// Multiplies channel by channel; d holds channels 2c, 2c + 1, 2c + 8, 2c + 9 of c = lane % 4.
__device__ inline void scale_channels(BlockSum& x, const float (&d)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] *= d[2 * n + e % 2];
    }
  }
}

/// sum[channel] += weight[channel] * sum over this lane's tokens of tile * x.
__device__ inline void add_column_sums(float (&sum)[4], const float (&weight)[4],
                                       const uint32_t (&tile)[4], const BlockSum& x) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 low = unpack_pair<__nv_bfloat16>(tile[2 * n]);
    const float2 high = unpack_pair<__nv_bfloat16>(tile[2 * n + 1]);
    sum[2 * n] = fmaf(weight[2 * n], fmaf(low.x, x[n][0], high.x * x[n][2]), sum[2 * n]);
    sum[2 * n + 1] =
        fmaf(weight[2 * n + 1], fmaf(low.y, x[n][1], high.y * x[n][3]), sum[2 * n + 1]);
  }
}

/// What this warp's channels have from outside the tokens' own blocks:
///   from_before[b] = S do at block b's tokens, S the state at block b's start,
///   from_after[b] = D v, D the gradient of the state at block b's end,
///   through[b]: of what enters before block b and leaves after it, the sum of all products without
///   block b's own decays, per channel, in every lane of a column.
struct BlockSums {
  BlockSum from_before[kBlocks];
  BlockSum from_after[kBlocks];
  float through[kBlocks][4];
};

__device__ inline void sum_over_blocks(const ChunkBackward& a, const ChunkPlace& at,
                                       const ChunkShared& sh, BlockSums& out) {
  const MatrixLane l(at.lane), across = MatrixLane::across(at.lane);
  const int slice = at.warp, c = at.lane % 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out.from_before[b][n][e] = out.from_after[b][n][e] = 0;
      }
    }
  }

  // From the chunk's ends: S_start do^T, D_end v^T, and the row sums of S_start o D_end.
  float ends[2] = {};
  const uint4* states = a.states.tile(at.slot, at.head, slice, 0) + at.lane;
  const uint4* grads = a.gradients.tile(at.slot, at.head, slice, 0) + at.lane;
  struct Ends {
    uint4 s, d;
  };
  for_each_ahead<2>(
      at.value_slices, [&](int v) { return Ends{__ldg(states + v * 32), __ldg(grads + v * 32)}; },
      [&](int v, const Ends& both) {
        const uint4 s = both.s, d = both.d;
        const uint32_t sw[4] = {s.x, s.y, s.z, s.w}, dw[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = unpack_pair<__nv_bfloat16>(sw[i]), y = unpack_pair<__nv_bfloat16>(dw[i]);
          ends[i / 2] = fmaf(x.x, y.x, fmaf(x.y, y.y, ends[i / 2]));
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t m[4];
          load_matrices(m, sh.d_o.at(b * kBlock, v * kBlock, l));
          mma_bf16(out.from_before[b][0], m, sw[0], sw[1]);
          mma_bf16(out.from_before[b][1], m, sw[2], sw[3]);
          load_matrices(m, sh.values.at(b * kBlock, v * kBlock, l));
          mma_bf16(out.from_after[b][0], m, dw[0], dw[1]);
          mma_bf16(out.from_after[b][1], m, dw[2], dw[3]);
        }
      });

  float d[kBlocks][4];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float2 low = *reinterpret_cast<const float2*>(sh.decays(b) + slice * kBlock + 2 * c);
    const float2 high = *reinterpret_cast<const float2*>(sh.decays(b) + slice * kBlock + 8 + 2 * c);
    d[b][0] = low.x;
    d[b][1] = low.y;
    d[b][2] = high.x;
    d[b][3] = high.y;
  }
  float (&through)[kBlocks][4] = out.through;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      through[b][e] = 0;
    }
  }

  // Later blocks: the gradient walks back over them, decaying and gathering dA^T Q.
#pragma unroll
  for (int j = 0; j < kBlocks - 1; ++j) {
    uint32_t key[4];
    load_matrices(key, sh.tile(slice, kKeyTile + j) + tile_offset(j, l.row, l.half));
#pragma unroll
    for (int i = j + 1; i < kBlocks; ++i) {  // what leaves from block j to the end, past block i
      float weight[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weight[e] = 1;
#pragma unroll
        for (int m = j + 1; m < kBlocks; ++m) {
          weight[e] *= m == i ? 1.0f : d[m][e];
        }
      }
      add_column_sums(through[i], weight, key, out.from_after[j]);
    }
#pragma unroll
    for (int i = kBlocks - 1; i > j; --i) {
      scale_channels(out.from_after[j], d[i]);
      uint32_t grad[4], query[4];
      load_matrices_transposed(grad, sh.scores.at(i * kBlock, j * kBlock, across));
      load_matrices_transposed(query,
                               sh.tile(slice, kQueryTile + i - 1) + tile_offset(i, l.row, l.half));
      mma_bf16(out.from_after[j][0], grad, query[0], query[1]);
      mma_bf16(out.from_after[j][1], grad, query[2], query[3]);
    }
  }

  // Earlier blocks: the state walks over them, decaying and gathering dA K. Before it takes block j
  // in, it is what passes block j on its way to block m.
#pragma unroll
  for (int m = 1; m < kBlocks; ++m) {
    uint32_t query[4];
    load_matrices(query, sh.tile(slice, kQueryTile + m - 1) + tile_offset(m, l.row, l.half));
#pragma unroll
    for (int j = 0; j < m; ++j) {
      float weight[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weight[e] = 1;
#pragma unroll
        for (int i = j + 1; i < m; ++i) {
          weight[e] *= d[i][e];
        }
      }
      add_column_sums(through[j], weight, query, out.from_before[m]);
      scale_channels(out.from_before[m], d[j]);
      uint32_t grad[4], key[4];
      load_matrices(grad, sh.scores.at(m * kBlock, j * kBlock, l));
      load_matrices_transposed(key, sh.tile(slice, kKeyTile + j) + tile_offset(j, l.row, l.half));
      mma_bf16(out.from_before[m][0], grad, key[0], key[1]);
      mma_bf16(out.from_before[m][1], grad, key[2], key[3]);
    }
  }

  // Add up over the rows' lanes; then what passes the whole chunk, whose sums lie by rows: channel
  // lane / 4 (+ 8).
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ends[i] += __shfl_xor_sync(~0u, ends[i], 1);
    ends[i] += __shfl_xor_sync(~0u, ends[i], 2);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float whole = __shfl_sync(~0u, ends[e / 2], (2 * c + e % 2) * 4);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      through[b][e] += __shfl_xor_sync(~0u, through[b][e], 4);
      through[b][e] += __shfl_xor_sync(~0u, through[b][e], 8);
      through[b][e] += __shfl_xor_sync(~0u, through[b][e], 16);
      float others = 1;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        others *= m == b ? 1.0f : d[m][e];
      }
      through[b][e] = fmaf(others, whole, through[b][e]);
    }
  }
}

/// Leaves the sums in shared memory, tokens by rows, for chunk_gates.cuh.
__device__ inline void store_block_sums(const ChunkPlace& at, const ChunkShared& sh,
                                        const BlockSums& sums) {
  const int r = at.lane / 4, c = at.lane % 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int place = sum_offset(b, r + 8 * h, 8 * n + 2 * c);
        *reinterpret_cast<float2*>(sh.before(at.warp) + place) =
            make_float2(sums.from_before[b][n][2 * h], sums.from_before[b][n][2 * h + 1]);
        *reinterpret_cast<float2*>(sh.after(at.warp) + place) =
            make_float2(sums.from_after[b][n][2 * h], sums.from_after[b][n][2 * h + 1]);
      }
      if (r == 0) {
        *reinterpret_cast<float2*>(sh.through(at.warp) + b * kBlock + 8 * n + 2 * c) =
            make_float2(sums.through[b][2 * n], sums.through[b][2 * n + 1]);
      }
    }
  }
}

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kMaxSlices * 32, 1)
    chunk_backward_kernel(const __grid_constant__ ChunkBackward a) {
  extern __shared__ __align__(16) char memory[];
  const GlaParams& p = a.backward.forward;
  __shared__ ChunkRows rows;
  const auto index = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.heads);
  const int slot = index / heads, head = index % heads;
  if (threadIdx.x < 32) {
    rows.find(a, slot, head, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  const ChunkPlace at(p, slot, head, rows);
  if (at.tokens == 0) {
    clear_partial_sums(a, at);
    return;
  }
  const ChunkShared sh(memory, p.key_dim, p.value_dim, at.warps);
  const auto columns = static_cast<int>(p.value_dim);
  copy_rows_async(sh.d_o, rows.d_o, at.tokens, 0, columns);
  copy_rows_async(sh.values, rows.v, at.tokens, 0, columns);
  commit_copies();

  float scores[2][4];
  make_factors<T, kKind>(a, at, sh, scores);
  wait_for_copies<0>();
  finish_rows<T>(sh.d_o, InputActivation::kNone, at.tokens, columns);
  finish_rows<T>(sh.values, p.v_activation, at.tokens, columns);
  __syncthreads();
  store_diagonal_scores(at, sh, scores);
  make_far_factors(at, sh);
  __syncthreads();
  store_far_scores(at, sh);
  __syncthreads();
  store_value_gradients<T>(a, at, sh);
  __syncthreads();  // the scores give way to their gradients
  make_score_gradients(at, sh);
  __syncthreads();
  BlockSums sums;
  if (at.warp < at.key_slices) {
    sum_over_blocks(a, at, sh, sums);
  }
  __syncthreads();  // values, do and the factors give way to the sums
  if (at.warp < at.key_slices) {
    store_block_sums(at, sh, sums);
    __syncwarp();
    finish_gradients<T, kKind>(a, at, sh);
  }
  if (p.gate_per_head) {
    __syncthreads();
    store_head_gate_gradients<T>(a, at, sh);
  }
}

}  // namespace tidegate::kernels
