#pragma once

// The gated RNN with its matrix on the chip: one launch walks all tokens.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/sequence.cuh"
#include "kernels/rnn/cuda/elements.cuh"
#include "kernels/rnn/cuda/matrix_in_fragments.cuh"
#include "kernels/rnn/cuda/matrix_on_chip.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels {

/// One channel of one sequence of a tensor, a token after another. What a load brings stays as it
/// lies in memory until it is used: a conversion would wait for it.
struct TokenColumn {
  char* first = nullptr;
  int step = 0;  // bytes
  DType dtype = DType::kFloat32;

  __device__ char* at(int t) const { return first + int64_t{t} * step; }
  __device__ unsigned load(int t) const {
    return dtype == DType::kFloat32 ? *reinterpret_cast<const unsigned*>(at(t))
                                    : *reinterpret_cast<const unsigned short*>(at(t));
  }
  __device__ float value(unsigned bits) const {
    if (dtype == DType::kBFloat16) return __uint_as_float(bits << 16);
    if (dtype == DType::kFloat16) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
    return __uint_as_float(bits);
  }
  __device__ void store(int t, float x) const { store_element<float>(at(t), dtype, 0, x); }
  /// So that load() finds it in the second-level cache.
  __device__ void prefetch(int t) const { asm volatile("prefetch.global.L2 [%0];" ::"l"(at(t))); }
};

/// Tokens between a prefetch and its use: more than memory takes to answer.
constexpr int kTokensAhead = 12;

/// An element of the state that a thread owns.
struct OwnedElement {
  Sequence sequence = {0, 0, 0, 0};  // of length zero where there is no such element
  int channel = 0;
  bool exists = false;
  bool writes = false;  // of the threads that own it, this one writes its results

  __device__ TokenColumn column(const TimeSeries& series) const {
    const int64_t first = element_index(series, sequence.batch, sequence.start, channel);
    const auto bytes = series.dtype == DType::kFloat32 ? 4 : 2;
    return {static_cast<char*>(series.data) + first * bytes,
            static_cast<int>(series.stride_t * bytes), series.dtype};
  }
  __device__ int64_t state_index(const GatedRnnParams& p) const {
    return sequence.index * p.channels + channel;
  }
  __device__ float initial(const GatedRnnParams& p, const void* state) const {
    return exists && state != nullptr ? static_cast<const float*>(state)[state_index(p)] : 0.0f;
  }
};

template <class Tile>
__device__ inline int64_t first_sequence(const GatedRnnParams& p) {
  return p.plan.first_sequence + int64_t{blockIdx.x} / Tile::kCluster * Tile::kVectors;
}

template <class Tile>
__device__ inline OwnedElement owned_element(const GatedRnnParams& p,
                                             const typename Tile::Matrix& matrix, int e) {
  OwnedElement element;
  const int64_t n = first_sequence<Tile>(p) + matrix.vector_of(e);
  element.channel = matrix.channel_of(e);
  element.exists = matrix.vector_of(e) < Tile::kVectors && n < p.layout.sequences &&
                   element.channel < p.channels;
  element.writes = element.exists && matrix.is_first();
  if (element.exists) element.sequence = find_sequence(p.layout, n);
  return element;
}

/// Of the longest sequence that this block walks.
template <class Tile>
__device__ inline int count_steps(const GatedRnnParams& p) {
  int steps = 0;
  for (int r = 0; r < Tile::kVectors; ++r) {
    const int64_t n = first_sequence<Tile>(p) + r;
    if (n < p.layout.sequences) steps = max(steps, find_sequence(p.layout, n).length);
  }
  return steps;
}

using ChipGates = Sigmoids<float>;

/// Whether a unit holds a kernel: those for clusters are empty but for compute capability 9.0.
template <class Tile>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kRunsHere = !Tile::kNeedsClusters;
#else
constexpr bool kRunsHere = true;
#endif

template <class Tile>
__device__ void walk_forward(const GatedRnnParams& p, void* shared) {
  constexpr int kOwn = Tile::kOwn;
  typename Tile::Matrix matrix(p, /*transposed=*/false, shared);
  const bool keeps_logits = p.a.data != nullptr;
  const int steps = count_steps<Tile>(p);
  OwnedElement element[kOwn];
  TokenColumn z[kOwn], x[kOwn], h[kOwn], a[kOwn];
  float state[kOwn];
  unsigned next_z[kOwn] = {}, next_x[kOwn] = {};
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e] = owned_element<Tile>(p, matrix, e);
    z[e] = element[e].column(p.z), x[e] = element[e].column(p.x);
    h[e] = element[e].column(p.h), a[e] = element[e].column(p.a);
    state[e] = element[e].initial(p, p.h0);
    if (element[e].sequence.length > 0) next_z[e] = z[e].load(0), next_x[e] = x[e].load(0);
  }

  float logit[kOwn] = {};
  // Token t's results are written while the next product is under way.
  const auto write = [&](int e, int t) {
    if (!element[e].writes || t < 0 || t >= element[e].sequence.length) return;
    h[e].store(t, state[e]);
    if (keeps_logits) a[e].store(t, logit[e]);
  };
  for (int t = 0; t < steps; ++t) {
    float now_z[kOwn], now_x[kOwn], products[kOwn];
    matrix.multiply(state, products, [&] {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        write(e, t - 1);
        now_z[e] = z[e].value(next_z[e]), now_x[e] = x[e].value(next_x[e]);
        const int length = element[e].sequence.length;
        if (t + 1 < length) next_z[e] = z[e].load(t + 1), next_x[e] = x[e].load(t + 1);
        if (t + kTokensAhead < length) {
          z[e].prefetch(t + kTokensAhead), x[e].prefetch(t + kTokensAhead);
        }
      }
    });
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      if (t >= element[e].sequence.length) continue;
      logit[e] = now_z[e] + products[e];
      const ChipGates gate = sigmoids<GateMath<float, false>>(logit[e]);
      state[e] = fmaf(gate.pos, state[e], gate.neg * now_x[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < kOwn; ++e) write(e, steps - 1);
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    if (element[e].writes) static_cast<float*>(p.h_final)[element[e].state_index(p)] = state[e];
  }
  matrix.finish();
}

/// What a step backward multiplies the gradient of the state by, and what it adds.
struct TokenFactors {
  float open, shut;  // sigmoid(a), sigmoid(-a)
  float slope;       // of h_t by a_t
  float h;           // the state before
  float dh;
};

/// What a step backward reads of an element.
struct BackwardTokens {
  TokenColumn a, x, h, dh;

  struct Bits {
    unsigned a, x, h, dh;
  };
  /// Of h the token before; there is none at the first.
  __device__ Bits load(int t) const {
    return {a.load(t), x.load(t), t > 0 ? h.load(t - 1) : 0, dh.load(t)};
  }
  __device__ TokenFactors factors(const Bits& bits, bool has_before, float h0) const {
    const ChipGates gate = sigmoids<GateMath<float, false>>(a.value(bits.a));
    const float before = has_before ? h.value(bits.h) : h0;
    return {gate.pos, gate.neg, gate.neg * gate.pos * (before - x.value(bits.x)), before,
            dh.value(bits.dh)};
  }
  __device__ void prefetch(int t) const {
    a.prefetch(t), x.prefetch(t), h.prefetch(t), dh.prefetch(t);
  }
};

template <class Tile>
__device__ void walk_backward(const GatedRnnBackwardParams& params, void* shared) {
  constexpr int kOwn = Tile::kOwn;
  const GatedRnnParams& p = params.forward;
  typename Tile::Matrix matrix(p, /*transposed=*/true, shared);
  const int steps = count_steps<Tile>(p);
  OwnedElement element[kOwn];
  BackwardTokens tokens[kOwn];
  TokenColumn dz[kOwn], dx[kOwn], h_before[kOwn];
  BackwardTokens::Bits next[kOwn] = {};
  float carry[kOwn], h0[kOwn];
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e] = owned_element<Tile>(p, matrix, e);
    tokens[e] = {element[e].column(p.a), element[e].column(p.x), element[e].column(p.h),
                 element[e].column(params.dh)};
    dz[e] = element[e].column(params.dz), dx[e] = element[e].column(params.dx);
    h_before[e] = element[e].column(params.h_before);
    carry[e] = element[e].initial(p, params.dh_final);
    h0[e] = element[e].initial(p, p.h0);
  }
  const auto exists = [&](int e, int t) { return t >= 0 && t < element[e].sequence.length; };
  const auto load = [&](int e, int t) {
    if (exists(e, t)) next[e] = tokens[e].load(t);
  };
  TokenFactors factors[kOwn];
  // What token t needs but for the gradient from later ones: past a sequence's end, nothing.
  const auto prepare = [&](int e, int t) {
    factors[e] = {};
    if (exists(e, t)) factors[e] = tokens[e].factors(next[e], t > 0, h0[e]);
  };
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    load(e, steps - 1);
    prepare(e, steps - 1);
    load(e, steps - 2);
  }

  for (int t = steps - 1; t >= 0; --t) {
    float gate_grad[kOwn], products[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      carry[e] += factors[e].dh;
      gate_grad[e] = factors[e].slope * carry[e];
    }
    matrix.multiply(gate_grad, products, [&] {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        if (exists(e, t)) {
          if (element[e].writes) {
            dz[e].store(t, gate_grad[e]);
            dx[e].store(t, factors[e].shut * carry[e]);
            h_before[e].store(t, factors[e].h);
          }
          carry[e] *= factors[e].open;
        }
        prepare(e, t - 1);
        load(e, t - 2);
        if (exists(e, t - kTokensAhead)) tokens[e].prefetch(t - kTokensAhead);
      }
    });
#pragma unroll
    for (int e = 0; e < kOwn; ++e) carry[e] += products[e];
  }
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    if (element[e].writes) static_cast<float*>(params.dh0)[element[e].state_index(p)] = carry[e];
  }
  matrix.finish();
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gated_rnn_chip_forward(const __grid_constant__ GatedRnnParams params) {
  extern __shared__ float4 shared[];
  if constexpr (kRunsHere<Tile>) walk_forward<Tile>(params, shared);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gated_rnn_chip_backward(const __grid_constant__ GatedRnnBackwardParams params) {
  extern __shared__ float4 shared[];
  if constexpr (kRunsHere<Tile>) walk_backward<Tile>(params, shared);
}

}  // namespace tidegate::kernels
