#pragma once

// The recurrence token by token, with the state in registers: o, and dv, which is the same walk
// from the other end with other names.

#include "kernels/gla/cuda/plain/plain_inputs.cuh"

namespace tidegate::kernels::gla {

/// o_t = scale q_t^T S_t while walking S_t = f_t S_{t-1} + k_t v_t^T;  or, kValueGradient,
/// dv_t = k_t^T P_t while walking the other way P_t = f_{t+1} P_{t+1} + scale q_t do_t^T.
struct PlainScan {
  GlaParams params = {};
  HeadSeries d_o = {};            // kValueGradient
  HeadSeries out = {};            // o or dv
  const void* initial = nullptr;  // h0 or dh_final
  void* final = nullptr;          // h_final; null in the backward pass
  int tile_time = 1;
};

template <class Real>
int plain_scan_bytes_per_token(int64_t key_dim) {
  const LaneSplit keys(key_dim);
  return (3 * keys.padded() + 2 * keys.lines()) * static_cast<int>(sizeof(Real));
}

template <class Real, bool kValueGradient>
__global__ void __launch_bounds__(kPlainThreads) plain_scan_kernel(const PlainScan w) {
  const GlaParams& p = w.params;
  const LaneSplit keys(p.key_dim);
  const int padded = keys.padded(), columns = keys.lines();
  const int tile = w.tile_time;

  extern __shared__ __align__(16) char shared[];
  Real* const query = reinterpret_cast<Real*>(shared);  // [tile][padded]
  Real* const key = query + tile * padded;
  Real* const decay = key + tile * padded;
  Real* const value = decay + tile * padded;  // [tile][columns]
  Real* const result = value + tile * columns;

  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  const int column_tiles = (value_dim + columns - 1) / columns;
  const int64_t pair = blockIdx.x / column_tiles;
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * columns;
  const int64_t head = pair % p.heads;
  const Sequence seq = find_sequence(p.layout, pair / p.heads);
  const bool backwards = p.layout.reverse != kValueGradient;
  const PlainInputs<Real> inputs(p, seq, backwards, head);
  const HeadRows d_o(w.d_o, seq, backwards, head);
  const HeadRows out(w.out, seq, backwards, head);

  const int column = first_column + keys.line();
  const bool exists = column < value_dim;
  const int64_t state_at = (seq.index * p.heads + head) * key_dim * value_dim + column;
  Real state[kPlainOwn] = {};
#pragma unroll
  for (int e = 0; e < kPlainOwn; ++e) {
    const int channel = keys.first(e / 4) + e % 4;
    if (w.initial != nullptr && exists && channel < key_dim) {
      state[e] =
          static_cast<const Real*>(w.initial)[state_at + static_cast<int64_t>(channel) * value_dim];
    }
  }

  for (int start = 0; start < seq.length; start += tile) {
    const int tokens = min(tile, seq.length - start);
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * padded; i += kPlainThreads) {
      const int step = start + i / padded, channel = i % padded;
      Real q = 0, k = 0, f = 1;
      if (channel < key_dim) {
        const LogitGate<Real> gate = inputs.gate(step, channel);
        q = inputs.query(step, channel);
        k = gate.key;
        f = gate.decay;
        if (kValueGradient) {
          f = step == 0 ? Real(1) : inputs.gate(step - 1, channel).decay;
        }
      }
      query[i] = kValueGradient ? k : q;
      key[i] = kValueGradient ? q : k;
      decay[i] = f;
    }
    for (int i = threadIdx.x; i < tokens * columns; i += kPlainThreads) {
      const int step = start + i / columns, at = first_column + i % columns;
      value[i] = at >= value_dim  ? Real(0)
                 : kValueGradient ? d_o.template load<Real>(step, at)
                                  : inputs.value(step, at);
    }
    __syncthreads();
    for (int t = 0; t < tokens; ++t) {
      const Real v = value[t * columns + keys.line()];
      Real sums[4] = {};
#pragma unroll
      for (int g = 0; g < kPlainOwn / 4; ++g) {
        const int at = t * padded + keys.first(g);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Real& s = state[4 * g + i];
          s = fused(decay[at + i], s, key[at + i] * v);
          sums[i] = fused(query[at + i], s, sums[i]);
        }
      }
      const Real sum = keys.sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
      if (keys.slice() == 0) {
        result[t * columns + keys.line()] = sum;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * columns; i += kPlainThreads) {
      const int step = start + i / columns, at = first_column + i % columns;
      if (at < value_dim) {
        Real x = result[i];
        if (kValueGradient && p.v_activation != InputActivation::kNone) {
          x *= activation_slope<GateMath<Real, false>>(p.v_activation, inputs.raw_value(step, at));
        }
        out.store(step, at, x);
      }
    }
  }

  if (w.final != nullptr && exists) {
#pragma unroll
    for (int e = 0; e < kPlainOwn; ++e) {
      const int channel = keys.first(e / 4) + e % 4;
      if (channel < key_dim) {
        static_cast<Real*>(w.final)[state_at + static_cast<int64_t>(channel) * value_dim] =
            state[e];
      }
    }
  }
}

}  // namespace tidegate::kernels::gla
