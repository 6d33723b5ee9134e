#pragma once

// The gated RNN with its matrix on the chip: one launch walks all tokens.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/elements.cuh"
#include "kernels/common/cuda/forget_gate.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/sequence.cuh"
#include "kernels/rnn/cuda/matrix_in_fragments.cuh"
#include "kernels/rnn/cuda/matrix_on_chip.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

/// The type of a tensor's elements, known at run time only: what depends on it is chosen without a
/// branch.
struct ElementType {
  bool is_wide, is_half;  // float, f16; else bf16

  __device__ explicit ElementType(DType dtype)
      : is_wide(dtype == DType::kFloat32), is_half(dtype == DType::kFloat16) {}

  __device__ char* at(const TimeSeries& series, int64_t index) const {
    return static_cast<char*>(series.data) + (index << (is_wide ? 2 : 1));
  }
  /// What a load brings stays as it lies in memory until it is used: a conversion would wait for
  /// it.
  __device__ unsigned load(const char* from) const {
    return is_wide ? *reinterpret_cast<const unsigned*>(from)
                   : *reinterpret_cast<const unsigned short*>(from);
  }
  __device__ float value(unsigned bits) const {
    const float of_half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    const float of_other = __uint_as_float(is_wide ? bits : bits << 16);
    return is_half ? of_half : of_other;
  }
  __device__ void store(char* to, float x) const {
    const unsigned short of_half = __half_as_ushort(narrow<__half>(x));
    const unsigned short of_bf16 = __bfloat16_as_ushort(narrow<__nv_bfloat16>(x));
    if (is_wide) *reinterpret_cast<float*>(to) = x;
    if (!is_wide) *reinterpret_cast<unsigned short*>(to) = is_half ? of_half : of_bf16;
  }
};

__device__ inline float* float_at(const TimeSeries& series, int64_t index) {
  return static_cast<float*>(series.data) + index;
}

/// Tokens between a prefetch and its use: more than memory takes to answer.
constexpr int kTokensAhead = 12;

/// One channel of one sequence of a tensor that the caller gave, a token after another.
struct TokenColumn {
  char* first = nullptr;
  int step = 0;  // bytes

  __device__ char* at(int t) const { return first + int64_t{t} * step; }
};

/// An element of the state that a thread owns.
struct OwnedElement {
  Sequence sequence = {0, 0, 0, 0};  // of length zero where there is no such element
  int channel = 0;
  bool exists = false;
  bool writes = false;  // of the threads that own it, this one writes its results

  __device__ TokenColumn column(const TimeSeries& series) const {
    const int64_t index = element_offset(series, sequence.batch, sequence.start, channel);
    const int bytes = series.dtype == DType::kFloat32 ? 4 : 2;
    return {static_cast<char*>(series.data) + index * bytes,
            static_cast<int>(series.stride_t * bytes)};
  }
  /// Where it lies at the first token, in tensors that are contiguous.
  __device__ int64_t first_index(const GatedRnnParams& p) const {
    return (sequence.batch * p.layout.time + sequence.start) * p.channels + channel;
  }
  __device__ int64_t state_index(const GatedRnnParams& p) const {
    return sequence.index * p.channels + channel;
  }
  __device__ float initial(const GatedRnnParams& p, const void* state) const {
    return exists && state != nullptr ? static_cast<const float*>(state)[state_index(p)] : 0.0f;
  }
  __device__ float lower_bound(const GatedRnnParams& p) const {
    return exists && p.gamma != nullptr ? static_cast<const float*>(p.gamma)[channel] : 0.0f;
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

/// What a step forward reads of an element, as it lies in memory.
struct TokenInputs {
  unsigned z = 0, x = 0;
};

template <class Tile>
__device__ void walk_forward(const GatedRnnParams& p, void* shared) {
  constexpr int kOwn = Tile::kOwn;
  typename Tile::Matrix matrix(p, /*transposed=*/false, shared);
  const bool keeps_logits = p.logits.data != nullptr;
  const int steps = matrix.takes_part() ? count_steps<Tile>(p) : 0;
  const ElementType type(p.x.dtype), gate_type(p.z.dtype);
  const int dim = static_cast<int>(p.channels);
  OwnedElement element[kOwn];
  TokenColumn z[kOwn], x[kOwn];
  int64_t first[kOwn];  // of h and logits
  float state[kOwn], gamma[kOwn];
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e] = owned_element<Tile>(p, matrix, e);
    gamma[e] = element[e].lower_bound(p);
    z[e] = element[e].column(p.z), x[e] = element[e].column(p.x);
    first[e] = element[e].first_index(p);
    state[e] = element[e].initial(p, p.h0);
  }

  float logit[kOwn] = {};
  const auto load = [&](int e, int t) {
    TokenInputs inputs;
    if (t < element[e].sequence.length) {
      inputs = {gate_type.load(z[e].at(t)), type.load(x[e].at(t))};
    }
    return inputs;
  };
  TokenInputs next[kOwn];  // where loads are a token ahead
  if constexpr (Tile::kLoadsAhead) {
#pragma unroll
    for (int e = 0; e < kOwn; ++e) next[e] = load(e, 0);
  }
  // Token t's results are written while the next product is under way.
  const auto write = [&](int e, int t) {
    if (!element[e].writes || t < 0 || t >= element[e].sequence.length) return;
    const int64_t index = first[e] + int64_t{t} * dim;
    type.store(type.at(p.h, index), state[e]);
    if (keeps_logits) *float_at(p.logits, index) = logit[e];
  };
  for (int t = 0; t < steps; ++t) {
    TokenInputs now[kOwn];
    float products[kOwn];
    matrix.multiply(state, products, [&] {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        write(e, t - 1);
        if constexpr (Tile::kLoadsAhead) {
          now[e] = next[e], next[e] = load(e, t + 1);
        } else {
          now[e] = load(e, t);
        }
        if (t + kTokensAhead < element[e].sequence.length) {
          prefetch_line(z[e].at(t + kTokensAhead)), prefetch_line(x[e].at(t + kTokensAhead));
        }
      }
    });
    if (!matrix.owns()) continue;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const float found = gate_type.value(now[e].z) + products[e];
      const ChipGates gate = sigmoids<GateMath<float, false>>(found);
      const float entering = (1.0f - gamma[e]) * gate.neg * type.value(now[e].x);
      const float next = fmaf(forget_gate(gamma[e], gate), state[e], entering);
      const bool exists = t < element[e].sequence.length;
      logit[e] = exists ? found : logit[e];
      state[e] = exists ? next : state[e];
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
  float open, shut;   // lambda_t and 1 - lambda_t
  float slope;        // of h_t by the logit
  float bound_slope;  // of h_t by gamma
  float h;            // the state before
  float dh;
};

/// What a step backward reads of an element, of h the token before, as it lies in memory.
struct BackwardBits {
  unsigned x, h, dh;
  float logit;

  __device__ TokenFactors factors(const ElementType& type, float gamma, bool has_before,
                                  float h0) const {
    const ChipGates gate = sigmoids<GateMath<float, false>>(logit);
    const float before = has_before ? type.value(h) : h0;
    const float part = 1.0f - gamma;
    const float bound_slope = gate.neg * (before - type.value(x));
    return {forget_gate(gamma, gate),
            part * gate.neg,
            part * gate.pos * bound_slope,
            bound_slope,
            before,
            type.value(dh)};
  }
};

template <class Tile>
__device__ void walk_backward(const GatedRnnBackwardParams& params, void* shared) {
  constexpr int kOwn = Tile::kOwn;
  const GatedRnnParams& p = params.forward;
  typename Tile::Matrix matrix(p, /*transposed=*/true, shared);
  const int steps = matrix.takes_part() ? count_steps<Tile>(p) : 0;
  const ElementType type(p.x.dtype), gate_type(p.z.dtype);
  const int dim = static_cast<int>(p.channels);
  OwnedElement element[kOwn];
  TokenColumn x[kOwn], dh[kOwn];
  int64_t first[kOwn];  // of logits, h, dz, dx and h_before
  BackwardBits next[kOwn] = {};
  float carry[kOwn], h0[kOwn], gamma[kOwn];
  Sum<float, true> bound_grad[kOwn];  // dgamma
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e] = owned_element<Tile>(p, matrix, e);
    gamma[e] = element[e].lower_bound(p);
    x[e] = element[e].column(p.x), dh[e] = element[e].column(params.dh);
    first[e] = element[e].first_index(p);
    carry[e] = element[e].initial(p, params.dh_final);
    h0[e] = element[e].initial(p, p.h0);
  }
  const auto exists = [&](int e, int t) { return t >= 0 && t < element[e].sequence.length; };
  const auto load = [&](int e, int t) {
    if (!exists(e, t)) return;
    const int64_t index = first[e] + int64_t{t} * dim;
    next[e].logit = *float_at(p.logits, index);
    next[e].x = type.load(x[e].at(t));
    if (t > 0) next[e].h = type.load(type.at(p.h, index - dim));
    next[e].dh = type.load(dh[e].at(t));
  };
  TokenFactors factors[kOwn];
  // What token t needs but for the gradient from later ones: past a sequence's end, nothing.
  const auto prepare = [&](int e, int t) {
    const TokenFactors found = next[e].factors(type, gamma[e], t > 0, h0[e]);
    factors[e] = exists(e, t) ? found : TokenFactors{};
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
            const int64_t index = first[e] + int64_t{t} * dim;
            gate_type.store(gate_type.at(params.dz, index), gate_grad[e]);
            type.store(type.at(params.dx, index), factors[e].shut * carry[e]);
            type.store(type.at(params.h_before, index), factors[e].h);
          }
          bound_grad[e].add(factors[e].bound_slope * carry[e]);
          carry[e] *= factors[e].open;
        }
        prepare(e, t - 1);
        load(e, t - 2);
        if (exists(e, t - kTokensAhead)) {
          const int64_t index = first[e] + int64_t{t - kTokensAhead} * dim;
          prefetch_line(float_at(p.logits, index)), prefetch_line(type.at(p.h, index));
          prefetch_line(x[e].at(t - kTokensAhead)), prefetch_line(dh[e].at(t - kTokensAhead));
        }
      }
    });
#pragma unroll
    for (int e = 0; e < kOwn; ++e) carry[e] += products[e];
  }
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    if (!element[e].writes) continue;
    const int64_t index = element[e].state_index(p);
    static_cast<float*>(params.dh0)[index] = carry[e];
    if (params.dgamma_partial != nullptr) {
      static_cast<float*>(params.dgamma_partial)[index] = bound_grad[e].value();
    }
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

}  // namespace tidegate::kernels::rnn
