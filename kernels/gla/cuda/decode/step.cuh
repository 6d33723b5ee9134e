#pragma once

// One or two tokens, as decoding has them: bound by reading and writing the state, once, in place
// if h_final is h0.

#include "kernels/gla/cuda/plain/plain.h"
#include "kernels/gla/cuda/plain/plain_inputs.cuh"

namespace tidegate::kernels::gla {

constexpr int kStepWarps = 8;
constexpr int kStepRowsInFlight = 8;  // a thread's, of the state

/// A block's tile of a state: all its rows, 32 * kVec columns of them. A warp takes every eighth
/// row.
template <class Real, int kVec>
__global__ void __launch_bounds__(32 * kStepWarps, 3) gla_step_kernel(const GlaParams p) {
  using Pack = Pack<Real, kVec>;
  constexpr int kColumns = 32 * kVec, kRows = kStepWarps * kStepRowsInFlight;
  extern __shared__ __align__(16) char shared[];
  const auto key_dim = static_cast<int>(p.key_dim), value_dim = static_cast<int>(p.value_dim);
  Real* const query = reinterpret_cast<Real*>(shared);  // [tokens][K]
  Real* const key = query + kStepTokens * key_dim;
  Real* const decay = key + kStepTokens * key_dim;
  __shared__ Real sums[kStepWarps][kColumns];

  const int column_tiles = (value_dim + kColumns - 1) / kColumns;
  const int64_t pair = blockIdx.x / column_tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * kColumns;
  const int column = first_column + lane * kVec;
  const bool exists = column < value_dim;
  const int64_t head = pair % p.heads;
  const Sequence seq = find_sequence(p.layout, pair / p.heads);
  const PlainInputs<Real> inputs(p, seq, p.layout.reverse, head);
  const HeadRows out(p.o, seq, p.layout.reverse, head);
  const int64_t state_at = pair * key_dim * value_dim + column;
  const Real* const before = static_cast<const Real*>(p.h0) + state_at;
  Real* const after = static_cast<Real*>(p.h_final) + state_at;

  Real acc[kStepTokens][kVec] = {};
  for (int first = 0; first < key_dim; first += kRows) {
    Pack state[kStepRowsInFlight];
#pragma unroll
    for (int i = 0; i < kStepRowsInFlight; ++i) {
      const int row = first + warp + i * kStepWarps;
      state[i] = {};
      if (p.h0 != nullptr && exists && row < key_dim) {
        state[i] = load_streaming<Real, kVec>(before + static_cast<int64_t>(row) * value_dim);
      }
    }
    if (first == 0) {  // while the states are on their way
      for (int i = threadIdx.x; i < seq.length * key_dim; i += 32 * kStepWarps) {
        const int step = i / key_dim, channel = i % key_dim;
        const LogitGate<Real> gate = inputs.gate(step, channel);
        query[i] = inputs.query(step, channel);
        key[i] = gate.key;
        decay[i] = gate.decay;
      }
      __syncthreads();
    }
    Real value[kStepTokens][kVec] = {};
    for (int t = 0; t < seq.length; ++t) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        if (t == 0) value[0][v] = exists ? inputs.value(0, column + v) : Real(0);
        if (t == 1) value[1][v] = exists ? inputs.value(1, column + v) : Real(0);
      }
    }
#pragma unroll
    for (int i = 0; i < kStepRowsInFlight; ++i) {
      const int row = first + warp + i * kStepWarps;
      if (!exists || row >= key_dim) {
        continue;
      }
      Real s[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        s[v] = state[i].get(v);
      }
#pragma unroll
      for (int t = 0; t < kStepTokens; ++t) {
        if (t < seq.length) {
          const Real f = decay[t * key_dim + row], k = key[t * key_dim + row];
          const Real q = query[t * key_dim + row];
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            s[v] = fused(f, s[v], k * value[t][v]);
            acc[t][v] = fused(q, s[v], acc[t][v]);
          }
        }
      }
      if (p.h_final != nullptr) {
        __stcs(
            reinterpret_cast<typename Pack::Bits*>(after + static_cast<int64_t>(row) * value_dim),
            pack<Real, kVec>(s).bits);
      }
    }
  }

#pragma unroll
  for (int t = 0; t < kStepTokens; ++t) {
    if (t >= seq.length) {
      return;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      sums[warp][lane * kVec + v] = acc[t][v];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns; i += 32 * kStepWarps) {
      Real sum = 0;
      for (int w = 0; w < kStepWarps; ++w) {
        sum += sums[w][i];
      }
      if (first_column + i < value_dim) {
        out.store(t, first_column + i, sum);
      }
    }
  }
}

}  // namespace tidegate::kernels::gla
