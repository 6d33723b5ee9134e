#pragma once

// A lane's share of a sub-chunk and a K-slice: two adjacent tokens and four adjacent channels of q,
// keys and decays, from what is in memory.

#include "kernels/gla/cuda/backward/chunk_layout.cuh"

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

}  // namespace tidegate::kernels::gla
