#pragma once

// Between a chunk's tensors and the sums over products: what is done channel by channel.

#include "kernels/gla/cuda/chunk_shared.cuh"

namespace tidegate::kernels {

/// q, keys and decays of two adjacent tokens and four channels, loaded one slice ahead.
template <class T, GateKind kKind>
class QuadInputs {
 public:
  /// `count`: how many tokens there are from this one on; may be negative.
  __device__ QuadInputs(const GlaParams& p, const ChunkPlace& at, int token, int count)
      : p_(p),
        q_(at.rows.q),
        k_(at.rows.k),
        gate_(at.rows.gate),
        gamma_(p.gamma == nullptr ? nullptr
                                  : static_cast<const float*>(p.gamma) + at.head * p.key_dim),
        first_(min(token, at.tokens - 1)),
        second_(min(token + 1, at.tokens - 1)),
        count_(count),
        wide_gate_(p.gate.dtype == DType::kFloat32) {}

  __device__ void load(int channel) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = i == 0 ? first_ : second_;
      raw_q_[i] = load_quad(q_, token, channel);
      if constexpr (kKind == GateKind::kLogDecay) {
        raw_k_[i] = load_quad(k_, token, channel);
      }
      if (p_.gate_per_head) {
        const char* gate = gate_.row(token);
        const uint32_t one = wide_gate_
                                 ? __ldg(reinterpret_cast<const unsigned*>(gate))
                                 : __ldg(reinterpret_cast<const unsigned short*>(gate)) * 0x10001u;
        raw_gate_[i] = make_uint4(one, one, one, one);
      } else if (wide_gate_) {
        raw_gate_[i] = __ldg(reinterpret_cast<const uint4*>(gate_.row(token) + channel * 4));
      } else {
        const uint2 quad = load_quad(gate_, token, channel);
        raw_gate_[i] = make_uint4(quad.x, quad.y, 0, 0);
      }
    }
  }

  /// Of the channels that were loaded last. Where there is no token, f = 1; q and k are another
  /// token's there, and meet a do or v of zero wherever they are used.
  __device__ void get(int channel, float (&q)[2][4], float (&k)[2][4], float (&f)[2][4]) const {
    const float4 bound = gamma_ == nullptr
                             ? make_float4(0, 0, 0, 0)
                             : __ldg(reinterpret_cast<const float4*>(gamma_ + channel));
    const float gamma[4] = {bound.x, bound.y, bound.z, bound.w};
    float queries[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      queries[i] = Pack<T, 4>{raw_q_[i / 4]}.get(i % 4);
    }
    activate_all(p_.q_activation, static_cast<float>(p_.scale), queries);
    float gates[8];
    if (wide_gate_) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        gates[i] = Pack<float, 4>{raw_gate_[i / 4]}.get(i % 4);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        gates[i] = Pack<T, 4>{make_uint2(raw_gate_[i / 4].x, raw_gate_[i / 4].y)}.get(i % 4);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float key = Pack<T, 4>{raw_k_[i / 4]}.get(i % 4);
      const LogitGate<float> gate = channel_gate<kKind>(gates[i], key, gamma[i % 4]);
      q[i / 4][i % 4] = queries[i];
      k[i / 4][i % 4] = gate.key;
      f[i / 4][i % 4] = i / 4 < count_ ? gate.decay : 1.0f;
    }
  }

 private:
  static __device__ uint2 load_quad(const NearRows& rows, int token, int channel) {
    return __ldg(reinterpret_cast<const uint2*>(rows.row(token) + channel * int{sizeof(T)}));
  }

  const GlaParams& p_;
  NearRows q_, k_, gate_;
  const float* gamma_;
  int first_, second_, count_;
  bool wide_gate_;
  uint2 raw_q_[2] = {}, raw_k_[2] = {};
  uint4 raw_gate_[2] = {};
};

/// One channel of 16 tokens from `token` on as they lie in memory, in float; past the chunk's end
/// its last one again.
template <class T>
__device__ inline void load_column(const NearRows& rows, int token, int last, int channel,
                                   float (&x)[kBlock]) {
  auto stride = static_cast<int>(rows.stride);
  // Offsets are cheaper found again for every channel than kept in registers.
  asm volatile("" : "+r"(stride));
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const char* row = rows.base + int64_t{min(token + t, last)} * stride;
    x[t] = widen(reinterpret_cast<const T*>(row)[channel]);
  }
}

/// The gradients of one channel of a block, as its tokens are walked. `decay_grad` is dL/df, which
/// is formed without f itself, so that neither a division nor an f of zero can harm it.
struct ColumnGradients {
  float f[kBlock], k[kBlock];
  float key_grad[kBlock], decay_grad[kBlock];
};

/// Everything that crosses the block's boundaries. In shared memory, `before` becomes dq so far and
/// `after` becomes q.
__device__ inline void add_outer_gradients(ColumnGradients& g, const float (&q)[kBlock],
                                           float through, const SumColumn& column, char* before,
                                           char* after) {
  float temp[kBlock];
  float pre = 1;
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const int place = column.at(t);
    auto* b = reinterpret_cast<float*>(before + place);
    auto* e = reinterpret_cast<float*>(after + place);
    const float state = *b;
    g.decay_grad[t] = pre;
    pre *= g.f[t];
    temp[t] = q[t] * state;
    *b = pre * state;
    g.key_grad[t] = *e;
    *e = q[t];
  }
  // In from before, out from here on: x_u = q_u S do_u + f_{u+1} x_{u+1}; what passes through joins
  // in at the end.
  float x = through, suf = 1;
#pragma unroll
  for (int u = kBlock - 1; u >= 0; --u) {
    x = u == kBlock - 1 ? temp[u] + x : fmaf(g.f[u + 1], x, temp[u]);
    g.decay_grad[u] *= x;
    temp[u] = suf;
    suf *= g.f[u];
  }
  // In from here, out after the end: y_u = f_{u-1} y_{u-1} + k_{u-1} D v_{u-1}.
  float y = 0;
#pragma unroll
  for (int u = 0; u < kBlock; ++u) {
    g.decay_grad[u] = fmaf(temp[u], y, g.decay_grad[u]);
    y = fmaf(g.f[u], y, g.k[u] * g.key_grad[u]);
    g.key_grad[u] *= temp[u];
  }
}

/// Four floats of shared memory, loaded at this very place: keeping them in registers from one use
/// to the next would cost more than loading them twice.
__device__ inline float4 load_again(const float* shared) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}

/// The pairs within the block, in fp32: for every token t the recurrence x_u = f_u x_{u-1} +
/// dA(t, u) k_u up to u = t, and its derivative back.
__device__ inline void add_inner_gradients(ColumnGradients& g, const float* score_grads,
                                           const SumColumn& column, char* before,
                                           const char* after) {
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const int place = column.at(t);
    const float* grads = score_grads + t * kBlock;
    float x[kBlock];
#pragma unroll
    for (int u = 0; u <= t; u += 4) {
      const float4 four = load_again(grads + u);
      const float grad[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4 && u + i <= t; ++i) {
        const float fresh = grad[i] * g.k[u + i];
        x[u + i] = u + i == 0 ? fresh : fmaf(g.f[u + i], x[max(u + i, 1) - 1], fresh);
      }
    }
    *reinterpret_cast<float*>(before + place) += x[t];
    float y = *reinterpret_cast<const float*>(after + place);
#pragma unroll
    for (int u = t / 4 * 4; u >= 0; u -= 4) {
      const float4 four = load_again(grads + u);
      const float grad[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = min(3, t - u); i >= 0; --i) {
        g.key_grad[u + i] = fmaf(y, grad[i], g.key_grad[u + i]);
        if (u + i > 0) {
          g.decay_grad[u + i] = fmaf(y, x[max(u + i, 1) - 1], g.decay_grad[u + i]);
          y *= g.f[u + i];
        }
      }
    }
  }
}

/// Eight floats from adjacent places.
__device__ inline void load_eight(const void* from, float (&x)[8]) {
  const auto* p = static_cast<const float4*>(from);
  const float4 lo = p[0], hi = p[1];
  x[0] = lo.x;
  x[1] = lo.y;
  x[2] = lo.z;
  x[3] = lo.w;
  x[4] = hi.x;
  x[5] = hi.y;
  x[6] = hi.z;
  x[7] = hi.w;
}

template <class T>
__device__ inline void unpack_eight(const void* from, float (&x)[8]) {
  const Pack<T, 8> raw = {__ldg(static_cast<const uint4*>(from))};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = raw.get(i);
  }
}

template <class T>
__device__ inline void store_eight(void* to, const float (&x)[8]) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float pair[2] = {x[2 * i], x[2 * i + 1]};
    bits[i] = pack<T, 2>(pair).bits;
  }
  *static_cast<uint4*>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
}

/// Sigmoids of x from one exponential.
struct SigmoidPair {
  float smaller, larger;  // of sigmoid(x), sigmoid(-x)

  __device__ explicit SigmoidPair(float x) {
    using Math = GateMath<float, true>;
    const float e = Math::exp_minus_abs(x);
    larger = Math::reciprocal(1.0f + e);
    smaller = e * larger;
  }
};

/// dq of the activated and scaled q to dq of what was given, eight channels of a token.
__device__ inline void multiply_by_slopes(InputActivation activation, float scale,
                                          const float (&q)[8], float (&x)[8]) {
  if (activation == InputActivation::kNone) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] *= scale;
    }
    return;
  }
  const bool silu = activation == InputActivation::kSilu;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const SigmoidPair s(q[i]);
    const bool positive = q[i] > 0.0f;
    const float pos = positive ? s.larger : s.smaller, neg = positive ? s.smaller : s.larger;
    x[i] *= scale * pos * (silu ? fmaf(q[i], neg, 1.0f) : neg);
  }
}

/// Sixteen tokens x 8 channels at a time, 16 bytes a lane: through activations and gates to the
/// gradients of what was given. `before` holds dq; `after` dL/df - dL/dk with logits, and the log
/// gate's gradient without. Keys' gradients are written by the lanes that have them.
template <class T, GateKind kKind>
__device__ inline void store_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                       const ChunkShared& sh) {
  const GlaParams& p = a.backward.forward;
  const int half = at.lane % 2, channel = at.warp * kBlock + 8 * half;
  const int narrow_bytes = channel * 2, wide_bytes = channel * 4;
  const NearRows q = at.rows.q, gate = at.rows.gate, dq = at.rows.dq, dgate = at.rows.dgate;
  const bool wide = p.gate.dtype == DType::kFloat32;
  float open[8], gamma_grad[8] = {};  // open: 1 - gamma
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    open[i] = 1.0f;
  }
  if (p.gamma != nullptr) {
    load_eight(static_cast<const float*>(p.gamma) + at.head * p.key_dim + channel, open);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      open[i] = 1.0f - open[i];
    }
  }
#pragma unroll 1
  for (int b = 0; b < kBlocks; ++b) {
    const int row = b * kBlock + at.lane / 2;
    if (row >= at.tokens) {
      break;
    }
    const int place = sum_offset(b, at.lane / 2, 8 * half);
    float x[8], raw[8];
    if (p.q_activation != InputActivation::kNone) {
      unpack_eight<T>(q.row(row) + narrow_bytes, raw);
    }
    load_eight(sh.before(at.warp) + place, x);
    multiply_by_slopes(p.q_activation, static_cast<float>(p.scale), raw, x);
    store_eight<T>(dq.row(row) + narrow_bytes, x);
    if (p.gate_per_head) {
      continue;
    }
    load_eight(sh.after(at.warp) + place, x);
    if constexpr (kKind == GateKind::kLogit) {
      if (wide) {
        load_eight(gate.row(row) + wide_bytes, raw);
      } else {
        unpack_eight<T>(gate.row(row) + narrow_bytes, raw);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const SigmoidPair s(raw[i]);
        gamma_grad[i] = fmaf(raw[i] > 0.0f ? s.smaller : s.larger, x[i], gamma_grad[i]);
        x[i] *= open[i] * s.smaller * s.larger;
      }
    }
    if (wide) {
      auto* to = reinterpret_cast<float4*>(dgate.row(row) + wide_bytes);
      to[0] = make_float4(x[0], x[1], x[2], x[3]);
      to[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
      store_eight<T>(dgate.row(row) + narrow_bytes, x);
    }
  }
  if (a.backward.dgamma_partial != nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int lanes = 2; lanes < 32; lanes *= 2) {
        gamma_grad[i] += __shfl_xor_sync(~0u, gamma_grad[i], lanes);
      }
      if (at.lane < 2) {
        partial_sums(a, at)[channel + i] = gamma_grad[i];
      }
    }
  }
}

/// From the sums over a slice to its gradients. Lane 8b + p walks channels 2p and 2p + 1 of block
/// b, one after the other.
template <class T, GateKind kKind>
__device__ inline void finish_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                        const ChunkShared& sh) {
  const GlaParams& p = a.backward.forward;
  const int block = at.lane / 8, token = block * kBlock;
  const int count = at.tokens - token, last = at.tokens - 1;
  const NearRows q_rows = at.rows.q, k_rows = at.rows.k, gate_rows = at.rows.gate;
  char* before = sh.before(at.warp);
  char* after = sh.after(at.warp);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int c = at.lane % 8 * 2 + i, channel = at.warp * kBlock + c;
    const float gamma = bound_of(p, at.head, channel);
    const SumColumn column(block, c);
    ColumnGradients g;
    {
      float q[kBlock];
      load_column<T>(q_rows, token, last, channel, q);
      // Gates and keys as they come, then in place what they stand for.
      const int gate_channel = p.gate_per_head ? 0 : channel;
      if (p.gate.dtype == DType::kFloat32) {
        load_column<float>(gate_rows, token, last, gate_channel, g.f);
      } else {
        load_column<T>(gate_rows, token, last, gate_channel, g.f);
      }
      if constexpr (kKind == GateKind::kLogDecay) {
        load_column<T>(k_rows, token, last, channel, g.k);
      }
      activate_all(p.q_activation, static_cast<float>(p.scale), q);
#pragma unroll
      for (int t = 0; t < kBlock; ++t) {
        const LogitGate<float> both = channel_gate<kKind>(g.f[t], g.k[t], gamma);
        g.f[t] = t < count ? both.decay : 1.0f;
        g.k[t] = both.key;
      }
      add_outer_gradients(g, q, sh.through(at.warp)[block * kBlock + c], column, before, after);
    }
    add_inner_gradients(g, sh.partial(0, block, 0), column, before, after);
#pragma unroll
    for (int t = 0; t < kBlock; ++t) {
      auto* e = reinterpret_cast<float*>(after + column.at(t));
      if constexpr (kKind == GateKind::kLogit) {
        *e = g.decay_grad[t] - g.key_grad[t];
      } else {
        *e = g.decay_grad[t] * g.f[t];
        if (t < count) {
          reinterpret_cast<T*>(at.rows.dk.row(token + t))[channel] = narrow<T>(g.key_grad[t]);
        }
      }
    }
  }
  __syncwarp();
  store_gradients<T, kKind>(a, at, sh);
}

/// One gate a head: the sum of its gradients over the channels, a thread a token.
template <class T>
__device__ inline void store_head_gate_gradients(const ChunkBackward& a, const ChunkPlace& at,
                                                 const ChunkShared& sh) {
  for (int token = static_cast<int>(threadIdx.x); token < at.tokens;
       token += static_cast<int>(blockDim.x)) {
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < at.key_slices; ++s) {
      for (int c = 0; c < kBlock; ++c) {
        sum += *reinterpret_cast<const float*>(sh.after(s) +
                                               sum_offset(token / kBlock, token % kBlock, c));
      }
    }
    char* to = at.rows.dgate.row(token);
    if (a.backward.dgate.dtype == DType::kFloat32) {
      *reinterpret_cast<float*>(to) = sum;
    } else {
      *reinterpret_cast<T*>(to) = narrow<T>(sum);
    }
  }
}

}  // namespace tidegate::kernels
