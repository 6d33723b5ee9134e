#pragma once

// The first kernel of the backward pass, over all chunks at once, and what it and the last one
// read: a lane's share of a sub-chunk and a K-slice, which is two adjacent tokens and four adjacent
// channels of q, keys and decays, from what is in memory.

#include "kernels/gla/cuda/backward/chunk_layout.cuh"
#include "kernels/gla/cuda/dyadic.cuh"

namespace tidegate::kernels::gla {

/// [token][channel]; q is activated and scaled.
struct Quad {
  float q[2][4], k[2][4], f[2][4];
};

/// The slopes that lead from the gradients of a Quad back to those of what is in memory.
struct QuadSlopes {
  float q[2][4];        // dq / d(q in memory)
  float opening[2][4];  // sigmoid of the logit
};

/// x = scale * activate(x), and the derivative where `slope` is given: one branch for all.
template <bool kSlopes>
__device__ inline void activate_quad(InputActivation activation, float scale, float (&x)[2][4],
                                     float (*slope)[4]) {
  using Math = GateMath<float, true>;
  const auto for_each = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value_slope = visit(x[i][j]);
        if constexpr (kSlopes) {
          slope[i][j] = scale * value_slope;
        }
        x[i][j] *= scale;
      }
    }
  };
  if (activation == InputActivation::kNone) {
    for_each([](float&) { return 1.0f; });
  } else if (activation == InputActivation::kSilu) {
    for_each([](float& x) {
      const float s = Math::reciprocal(1.0f + exp2_approx(x * -kLog2E));
      x *= s;
      return fmaf(x, 1.0f - s, s);
    });
  } else {
    for_each([](float& x) {
      const float e = Math::exp_minus_abs(x);
      const float larger = Math::reciprocal(1.0f + e), smaller = e * larger;
      x = x > 0.0f ? larger : smaller;
      return larger * smaller;
    });
  }
}

template <class T, GateKind kKind>
class QuadInputs {
 public:
  __device__ QuadInputs(const GlaParams& p, const ChunkRows& rows)
      : p_(p), rows_(rows), wide_gate_(p.gate.dtype == DType::kFloat32) {}

  /// Takes tokens `token` and the next; past the chunk's end its last one again.
  __device__ void move_to(int token) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = min(token + i, rows_.tokens - 1);
      q_[i] = rows_.q.row(t);
      if constexpr (kKind == GateKind::kLogDecay) {
        k_[i] = rows_.k.row(t);
      }
      gate_[i] = rows_.gate.row(t);
    }
  }

  /// Starts loading four channels of them.
  __device__ void load(int channel) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw_q_[i] = load_as<uint2>(q_[i] + channel * 2);
      if constexpr (kKind == GateKind::kLogDecay) {
        raw_k_[i] = load_as<uint2>(k_[i] + channel * 2);
      }
      if (p_.gate_per_head) {
        const uint32_t one =
            wide_gate_ ? load_as<unsigned>(gate_[i]) : load_as<unsigned short>(gate_[i]) * 0x10001u;
        raw_gate_[i] = make_uint4(one, one, one, one);
      } else if (wide_gate_) {
        raw_gate_[i] = load_as<uint4>(gate_[i] + channel * 4);
      } else {
        const uint2 quad = load_as<uint2>(gate_[i] + channel * 2);
        raw_gate_[i] = make_uint4(quad.x, quad.y, 0, 0);
      }
    }
  }

  /// What was loaded last. `live` of the two tokens exist. A missing one gets f = 1 and, as q and
  /// k, those of the chunk's last token; its do and v are zero, and no gradient of it is stored.
  __device__ void get(const float (&gamma)[4], int live, Quad& x) const {
    QuadSlopes none;
    convert<false>(gamma, live, x, none);
  }
  __device__ void get(const float (&gamma)[4], int live, Quad& x, QuadSlopes& slopes) const {
    convert<true>(gamma, live, x, slopes);
  }

 private:
  template <class Bits>
  static __device__ Bits load_as(const char* from) {
    return __ldg(reinterpret_cast<const Bits*>(from));
  }
  static __device__ void unpack(uint2 bits, float (&x)[4]) {
    const float2 low = unpack_pair<T>(bits.x), high = unpack_pair<T>(bits.y);
    x[0] = low.x;
    x[1] = low.y;
    x[2] = high.x;
    x[3] = high.y;
  }

  template <bool kSlopes>
  __device__ void convert(const float (&gamma)[4], int live, Quad& x, QuadSlopes& slopes) const {
    float gate[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unpack(raw_q_[i], x.q[i]);
      if constexpr (kKind == GateKind::kLogDecay) {
        unpack(raw_k_[i], x.k[i]);
      }
      if (wide_gate_) {
        *reinterpret_cast<uint4*>(gate[i]) = raw_gate_[i];
      } else {
        unpack(make_uint2(raw_gate_[i].x, raw_gate_[i].y), gate[i]);
      }
    }
    activate_quad<kSlopes>(p_.q_activation, static_cast<float>(p_.scale), x.q, slopes.q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float decay;
        if constexpr (kKind == GateKind::kLogit) {
          using Math = GateMath<float, true>;
          const auto made = logit_gate<Math>(gate[i][j], gamma[j], 1.0f - gamma[j]);
          x.k[i][j] = made.key;
          decay = made.decay;
          if constexpr (kSlopes) {
            const float e = Math::exp_minus_abs(gate[i][j]);
            const float larger = Math::reciprocal(1.0f + e);
            slopes.opening[i][j] = gate[i][j] > 0.0f ? larger : e * larger;
          }
        } else {
          decay = exp2_approx(gate[i][j] * kLog2E);
        }
        x.f[i][j] = i < live ? decay : 1.0f;
      }
    }
  }

  const GlaParams& p_;
  const ChunkRows& rows_;
  bool wide_gate_;
  const char *q_[2], *k_[2], *gate_[2];
  uint2 raw_q_[2] = {}, raw_k_[2] = {};
  uint4 raw_gate_[2] = {};
};

/// gamma of four channels of a head from `channel` on.
__device__ inline void load_lane_gamma(const GlaParams& p, int head, int channel,
                                       float (&gamma)[4]) {
  float4 bound = make_float4(0, 0, 0, 0);
  if (p.gamma != nullptr) {
    bound = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p.gamma) +
                                                  head * p.key_dim + channel));
  }
  gamma[0] = bound.x;
  gamma[1] = bound.y;
  gamma[2] = bound.z;
  gamma[3] = bound.w;
}

// ---- The kernel ----
//
// It finds what the tokens of a sub-chunk exchange with the states at its ends, which are Q and K,
// and their scores among themselves.

/// A lane's two tokens and four columns into a tile: four bytes for each token and half of the
/// columns.
__device__ inline void store_quad(char* to, int to_token, int to_half, const float (&x)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint32_t*>(to + i * to_token) = pack_bf16(x[i][2 * n], x[i][2 * n + 1]);
    }
    to += to_half;
  }
}

/// The way from a lane's first four bytes of a tile to its others, and to those of the next
/// K-slice's tile.
struct alignas(16) QuadSteps {
  int to_token, to_half, to_slice, to_piece;

  __device__ void find(const ChunkFactors& factors, const NearRows& rows) {
    const auto distance = [&](int slice, int offset) {
      return static_cast<int>(factors.tile(rows, slice, 0, offset) - rows.base);
    };
    to_token = distance(0, kTileBytes / 4);
    to_half = distance(0, kTileBytes / 2);
    to_slice = distance(1, 0);
    to_piece = distance(factors.slices_down(), 0) - distance(factors.slices_down() - 1, 0);
  }
};

/// The scores of a sub-chunk as a tile: rows and columns in the order of token_of_row.
__device__ inline void store_scores(const ChunkBackward& a, const ChunkPlace& at, int sub_chunk,
                                    DyadicScores& sums) {
  float scores[2][4];
  sums.finish(scores, at.lane);
  const float by_row[2][4] = {{scores[0][0], scores[0][2], scores[0][1], scores[0][3]},
                              {scores[1][0], scores[1][2], scores[1][1], scores[1][3]}};
  uint4* const tile = a.factors.sub_chunk_scores(at.chunk, at.head, sub_chunk);
  store_quad(reinterpret_cast<char*>(tile) + at.lane * 4, kTileBytes / 4, kTileBytes / 2, by_row);
}

/// A block of threads is a chunk and a head, a warp a sub-chunk. A lane goes through the K-slices
/// with two tokens and four channels: loads them a slice ahead, makes Q, K and the sub-chunk's
/// decays by dyadic_step, which adds to the scores, and stores them. kWide: half of a tile lies in
/// one piece of a row.
template <class T, GateKind kKind, bool kWide>
__global__ void __launch_bounds__(kSubChunks * 32, 5)
    chunk_factors_kernel(const __grid_constant__ ChunkBackward a) {
  __shared__ ChunkRows rows;
  __shared__ QuadSteps steps[kFactorSides];
  const GlaParams& p = a.backward.forward;
  const auto index = static_cast<int>(blockIdx.x), heads = static_cast<int>(p.heads);
  const int chunk = index / heads, head = index % heads;
  if (threadIdx.x < 32) {
    rows.find(a, chunk, head, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  if (threadIdx.x < kFactorSides) {
    steps[threadIdx.x].find(a.factors, rows.factors[threadIdx.x]);
  }
  __syncthreads();
  const ChunkPlace at(p, chunk, head, rows);
  if (at.tokens == 0) {
    return;
  }
  const int sub_chunk = at.warp, r = at.lane / 4, c = at.lane % 4;
  const int token = sub_chunk * kSubChunk + 2 * r;
  const int last_down = a.factors.slices_down() - 1;
  char* places[kFactorSides];
#pragma unroll
  for (int side = 0; side < kFactorSides; ++side) {
    places[side] = a.factors.tile(rows.factors[side], 0, sub_chunk, at.lane * 4);
  }
  float* decays = a.factors.slice_decays(chunk, head, 0) + sub_chunk * kSlice + 2 * c;
  QuadInputs<T, kKind> inputs(p, rows);
  DyadicScores sums;
  inputs.move_to(token);
  inputs.load(4 * c);
#pragma unroll 1
  for (int s = 0; s < at.key_slices; ++s) {
    float gamma[4], total[4];
    load_lane_gamma(p, head, s * kSlice + 4 * c, gamma);
    Quad x;
    inputs.get(gamma, at.tokens - token, x);
    if (s + 1 < at.key_slices) {
      inputs.load((s + 1) * kSlice + 4 * c);
    }
    dyadic_step(x.q, x.k, x.f, at.lane, sums, total);
#pragma unroll
    for (int side = 0; side < kFactorSides; ++side) {
      const QuadSteps& step = steps[side];
      store_quad(places[side], kWide ? kTileBytes / 4 : step.to_token, step.to_half,
                 side == kQueries ? x.q : x.k);
      places[side] += (s & last_down) == last_down ? step.to_piece : step.to_slice;
    }
    if (r == 0) {
      *reinterpret_cast<float2*>(decays) = make_float2(total[0], total[1]);
      *reinterpret_cast<float2*>(decays + 8) = make_float2(total[2], total[3]);
    }
    decays += ChunkFactors::kSliceDecays;
  }
  store_scores(a, at, sub_chunk, sums);
}

}  // namespace tidegate::kernels::gla
