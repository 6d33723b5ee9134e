#pragma once

// The first kernel of the backward pass, over all chunks at once, and what it and the last one
// read: a lane's share of a sub-chunk and a K-slice, which is eight elements each of q, keys and
// decays, from what is in memory. The first kernel has two adjacent tokens and four adjacent
// channels in a lane, as dyadic.cuh wants them, the last one four tokens and two channels.

#include "kernels/gla/cuda/backward/chunk_place.cuh"
#include "kernels/gla/cuda/dyadic.cuh"

namespace tidegate::kernels::gla {

/// Eight elements of a lane, [token][channel]: adjacent tokens by adjacent channels. q is activated
/// and scaled.
template <int kTokens>
struct LaneInputs {
  static constexpr int kChannels = 8 / kTokens;
  float q[kTokens][kChannels], k[kTokens][kChannels], f[kTokens][kChannels];
};

/// The slopes that lead from the gradients of LaneInputs back to those of what is in memory.
template <int kTokens>
struct LaneSlopes {
  float q[kTokens][8 / kTokens];        // dq / d(q in memory)
  float opening[kTokens][8 / kTokens];  // sigmoid of the logit
};

/// x = scale * activate(x), and the derivative where `slope` is given: one branch for all.
template <bool kSlopes, int kTokens, int kChannels>
__device__ inline void activate_inputs(InputActivation activation, float scale,
                                       float (&x)[kTokens][kChannels], float (*slope)[kChannels]) {
  using Math = GateMath<float, true>;
  const auto for_each = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
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

/// Brings a lane its LaneInputs, in two steps: what is in memory, and what it stands for.
template <class T, GateKind kKind, int kTokens>
class InputLoader {
 public:
  static constexpr int kChannels = 8 / kTokens;
  using Inputs = LaneInputs<kTokens>;
  using Slopes = LaneSlopes<kTokens>;

  __device__ InputLoader(const GlaParams& p, const ChunkRows& rows)
      : p_(p),
        rows_(rows),
        wide_gate_(p.gate.dtype == DType::kFloat32),
        gate_bytes_(p.gate_per_head ? 0
                    : wide_gate_    ? 4
                                    : 2) {}

  /// Takes token `token` and those after it, past the chunk's end its last one again, and their
  /// channels from `channel` on.
  __device__ void move_to(int token, int channel) {
    const int last = rows_.tokens - 1, first = min(token, last);
    const auto find = [&](const NearRows& rows, int bytes, const char*(&places)[kTokens]) {
      const NearRows from(rows.row(first) + channel * bytes, rows.stride);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        places[i] = from.row(min(i, last - first));
      }
    };
    find(rows_.q, 2, q_);
    if constexpr (kKind == GateKind::kLogDecay) {
      find(rows_.k, 2, k_);
    }
    find(rows_.gate, gate_bytes_, gate_);
  }

  /// On to the next K-slice.
  __device__ void next_slice() {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      q_[i] += kSlice * 2;
      if constexpr (kKind == GateKind::kLogDecay) {
        k_[i] += kSlice * 2;
      }
      gate_[i] += kSlice * gate_bytes_;
    }
  }

  /// Starts loading.
  __device__ void load() {
    for_each_token([&](int i) {
      raw_q_[i] = load_as<NarrowBits>(q_[i]);
      if constexpr (kKind == GateKind::kLogDecay) {
        raw_k_[i] = load_as<NarrowBits>(k_[i]);
      }
    });
    if (p_.gate_per_head) {
      for_each_token([&](int i) {
        const uint32_t one =
            wide_gate_ ? load_as<unsigned>(gate_[i]) : load_as<unsigned short>(gate_[i]) * 0x10001u;
#pragma unroll
        for (uint32_t& word : raw_gate_[i]) {
          word = one;
        }
      });
    } else if (wide_gate_) {
      for_each_token([&](int i) {
        put(load_as<typename Pack<float, kChannels>::Bits>(gate_[i]), raw_gate_[i]);
      });
    } else {
      for_each_token([&](int i) { put(load_as<NarrowBits>(gate_[i]), raw_gate_[i]); });
    }
  }

  /// What was loaded last. `live` of the tokens exist. A missing one gets f = 1 and, as q and k,
  /// those of the chunk's last token; its do and v are zero, and no gradient of it is stored.
  __device__ void get(const float (&gamma)[kChannels], int live, Inputs& x) const {
    Slopes none;
    convert<false>(gamma, live, x, none);
  }
  __device__ void get(const float (&gamma)[kChannels], int live, Inputs& x, Slopes& slopes) const {
    convert<true>(gamma, live, x, slopes);
  }

 private:
  using NarrowBits = typename Pack<T, kChannels>::Bits;

  /// One loop for each of several branches, not the branches in each turn.
  template <class Visit>
  static __device__ void for_each_token(Visit visit) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      visit(i);
    }
  }
  template <class Bits>
  static __device__ Bits load_as(const char* from) {
    return __ldg(reinterpret_cast<const Bits*>(from));
  }
  /// The first words of an array.
  template <class Bits>
  static __device__ void put(const Bits& bits, uint32_t (&words)[kChannels]) {
    memcpy(words, &bits, sizeof(bits));
  }
  static __device__ void unpack(NarrowBits bits, float (&x)[kChannels]) {
    uint32_t words[kChannels];
    put(bits, words);
    unpack(words, x);
  }
  static __device__ void unpack(const uint32_t (&words)[kChannels], float (&x)[kChannels]) {
#pragma unroll
    for (int j = 0; j < kChannels; j += 2) {
      const float2 pair = unpack_pair<T>(words[j / 2]);
      x[j] = pair.x;
      x[j + 1] = pair.y;
    }
  }

  template <bool kSlopes>
  __device__ void convert(const float (&gamma)[kChannels], int live, Inputs& x,
                          Slopes& slopes) const {
    float gate[kTokens][kChannels];
    for_each_token([&](int i) {
      unpack(raw_q_[i], x.q[i]);
      if constexpr (kKind == GateKind::kLogDecay) {
        unpack(raw_k_[i], x.k[i]);
      }
    });
    if (wide_gate_) {
      memcpy(gate, raw_gate_, sizeof(gate));
    } else {
      for_each_token([&](int i) { unpack(raw_gate_[i], gate[i]); });
    }
    activate_inputs<kSlopes>(p_.q_activation, static_cast<float>(p_.scale), x.q, slopes.q);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
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
  int gate_bytes_;  // from one channel to the next
  const char *q_[kTokens], *k_[kTokens], *gate_[kTokens];
  NarrowBits raw_q_[kTokens] = {}, raw_k_[kTokens] = {};
  uint32_t raw_gate_[kTokens][kChannels] = {};
};

/// gamma of some channels of a head from `channel` on.
template <int kChannels>
__device__ inline void load_lane_gamma(const GlaParams& p, int head, int channel,
                                       float (&gamma)[kChannels]) {
  Pack<float, kChannels> bound = {};
  if (p.gamma != nullptr) {
    const auto* from = static_cast<const float*>(p.gamma) + head * p.key_dim + channel;
    bound.bits = __ldg(reinterpret_cast<const typename Pack<float, kChannels>::Bits*>(from));
  }
  memcpy(gamma, &bound.bits, sizeof(gamma));
}

// ---- The kernel ----
//
// It finds what the tokens of a sub-chunk exchange with the states at its ends, which are Q and K,
// and their scores among themselves.

/// A lane's two tokens and four channels into a tile: four bytes for each token and half of the
/// columns, of which the first has the even channels.
__device__ inline void store_channels(char* to, int to_token, int to_half, const float (&x)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint32_t*>(to + i * to_token) = pack_bf16(x[i][n], x[i][n + 2]);
    }
    to += to_half;
  }
}

/// The way from a lane's first four bytes of a tile to its others, and to those of the next
/// K-slice's tile.
struct alignas(16) LaneSteps {
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
  uint4* const tile = a.factors.sub_chunk_scores(at.chunk(), at.head(), sub_chunk);
  store_channels(reinterpret_cast<char*>(tile) + at.lane * 4, kTileBytes / 4, kTileBytes / 2,
                 scores);
}

/// A block of threads is a chunk and a head, a warp a sub-chunk. A lane goes through the K-slices
/// with two tokens and four channels: loads them a slice ahead, makes Q, K and the sub-chunk's
/// decays by dyadic_step, which adds to the scores, and stores them. kWide: half of a tile lies in
/// one piece of a row.
template <class T, GateKind kKind, bool kWide>
__global__ void __launch_bounds__(kSubChunks * 32, 5)
    chunk_factors_kernel(const __grid_constant__ ChunkBackward a) {
  __shared__ ChunkRows rows;
  __shared__ LaneSteps steps[kFactorSides];
  const GlaParams& p = a.backward.forward;
  rows.find(a, static_cast<int>(threadIdx.x));
  __syncthreads();
  if (threadIdx.x < kFactorSides) {
    steps[threadIdx.x].find(a.factors, rows.factors[threadIdx.x]);
  }
  __syncthreads();
  const ChunkPlace at(p.key_dim, p.value_dim, rows);
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
  float* decays = a.factors.slice_decays(at.chunk(), at.head(), 0) + sub_chunk * kSlice + 2 * c;
  InputLoader<T, kKind, 2> inputs(p, rows);
  DyadicScores sums;
  inputs.move_to(token, 4 * c);
  inputs.load();
#pragma unroll 1
  for (int s = 0; s < at.key_slices; ++s) {
    float gamma[4], total[4];
    load_lane_gamma(p, at.head(), s * kSlice + 4 * c, gamma);
    LaneInputs<2> x;
    inputs.get(gamma, at.tokens - token, x);
    if (s + 1 < at.key_slices) {
      inputs.next_slice();
      inputs.load();
    }
    dyadic_step(x.q, x.k, x.f, at.lane, sums, total);
#pragma unroll
    for (int side = 0; side < kFactorSides; ++side) {
      const LaneSteps& step = steps[side];
      store_channels(places[side], kWide ? kTileBytes / 4 : step.to_token, step.to_half,
                     side == kQueries ? x.q : x.k);
      places[side] += (s & last_down) == last_down ? step.to_piece : step.to_slice;
    }
    if (r == 0) {
      *reinterpret_cast<float2*>(decays) = make_float2(total[0], total[2]);
      *reinterpret_cast<float2*>(decays + 8) = make_float2(total[1], total[3]);
    }
    decays += ChunkFactors::kSliceDecays;
  }
  store_scores(a, at, sub_chunk, sums);
}

}  // namespace tidegate::kernels::gla
