#pragma once

// The gated RNN with its matrix on the chip: one launch scans all tokens of all sequences.
//
//   forward:   for t in tokens:           a = z_t + W h;  h = lambda(a) h + (1 - lambda(a)) x_t
//   backward:  for t in tokens reversed:  g += dh_t;  da = slope_t g;  g = lambda_t g + W^T da
//
// A thread owns kOwn elements of the state, one channel of one sequence each, and does all that
// concerns them alone: it reads their tokens, computes gates and writes results. Tile::Matrix
// (fma_matrix.cuh or mma_matrix.cuh) does what concerns all of them: it sends the threads' elements
// to every block that shares the matrix, waits for theirs, and multiplies. What needs no product is
// done between sending and waiting. All barriers are the matrix's.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/rnn/cuda/on_chip/fma_matrix.cuh"
#include "kernels/rnn/cuda/on_chip/mma_matrix.cuh"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

// ---- An element, and its tokens in memory ----
//
// An element is one channel of one sequence.

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

/// One channel of one sequence of a tensor that the caller gave, a token after another.
struct TokenColumn {
  char* first = nullptr;
  int step = 0;  // bytes

  __device__ char* at(int t) const { return first + int64_t{t} * step; }
};

/// Which element a thread owns, and where it lies.
struct OwnedElement {
  Sequence sequence = {0, 0, 0, 0};  // of length zero where there is no such element
  int channel = 0;
  bool exists = false;
  bool writes = false;  // of the threads that own it, this one writes its results

  __device__ bool has_token(int t) const { return t >= 0 && t < sequence.length; }
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

/// The first of the sequences that a block (or the blocks that share a matrix) scans.
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

/// Steps that a block takes: as many as the longest of its sequences has tokens.
template <class Tile>
__device__ inline int count_steps(const GatedRnnParams& p) {
  int steps = 0;
  for (int r = 0; r < Tile::kVectors; ++r) {
    const int64_t n = first_sequence<Tile>(p) + r;
    if (n < p.layout.sequences) steps = max(steps, find_sequence(p.layout, n).length);
  }
  return steps;
}

// ---- The scans ----

/// Tokens between a prefetch into the L2 cache and its use: more than memory takes to answer.
constexpr int kTokensAhead = 12;

using ChipGates = Sigmoids<float>;

/// Whether a unit holds a kernel: those for clusters are empty but for compute capability 9.0.
template <class Tile>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kRunsHere = !Tile::kNeedsClusters;
#else
constexpr bool kRunsHere = true;
#endif

/// What all elements of a launch have in common.
struct ScanCall {
  const GatedRnnParams& p;
  ElementType type, gate_type;  // of x and what is like it; of z
  int dim;
  bool keeps_logits;

  __device__ explicit ScanCall(const GatedRnnParams& p)
      : p(p),
        type(p.x.dtype),
        gate_type(p.z.dtype),
        dim(static_cast<int>(p.channels)),
        keeps_logits(p.logits.data != nullptr) {}
};

// ---- forward ----

/// What a step forward reads of an element, as it lies in memory.
struct TokenInputs {
  unsigned z = 0, x = 0;
};

struct ForwardElement {
  OwnedElement own;
  TokenColumn z, x;
  int64_t first;  // of h and logits
  float gamma;
  float logit = 0.0f;
  TokenInputs now, next;  // next: where loads are a token ahead

  __device__ __forceinline__ void find(const ScanCall& call, const OwnedElement& element) {
    own = element;
    gamma = own.lower_bound(call.p);
    z = own.column(call.p.z), x = own.column(call.p.x);
    first = own.first_index(call.p);
  }
  __device__ __forceinline__ TokenInputs load(const ScanCall& call, int t) const {
    TokenInputs inputs;
    if (t < own.sequence.length) {
      inputs = {call.gate_type.load(z.at(t)), call.type.load(x.at(t))};
    }
    return inputs;
  }
  template <bool kAhead>
  __device__ __forceinline__ void load_token(const ScanCall& call, int t) {
    if constexpr (kAhead) {
      now = next, next = load(call, t + 1);
    } else {
      now = load(call, t);
    }
  }
  __device__ __forceinline__ void prefetch_token(int t) const {
    if (t < own.sequence.length) {
      prefetch_line(z.at(t)), prefetch_line(x.at(t));
    }
  }
  /// Takes the state past token t, and keeps the logit of its gate.
  __device__ __forceinline__ void update_state(const ScanCall& call, int t, float product,
                                               float& state) {
    const float found = call.gate_type.value(now.z) + product;
    const ChipGates gate = sigmoids<GateMath<float, false>>(found);
    const float entering = (1.0f - gamma) * gate.neg * call.type.value(now.x);
    const float after = fmaf(forget_gate(gamma, gate), state, entering);
    const bool exists = t < own.sequence.length;
    logit = exists ? found : logit;
    state = exists ? after : state;
  }
  __device__ __forceinline__ void write_token(const ScanCall& call, int t, float state) const {
    if (!own.writes || t < 0 || t >= own.sequence.length) return;
    const int64_t index = first + int64_t{t} * call.dim;
    call.type.store(call.type.at(call.p.h, index), state);
    if (call.keeps_logits) *float_at(call.p.logits, index) = logit;
  }
};

template <class Tile>
__device__ void scan_forward(const GatedRnnParams& p, void* shared) {
  constexpr int kOwn = Tile::kOwn;
  typename Tile::Matrix matrix(p, /*transposed=*/false, shared);
  const int steps = matrix.takes_part() ? count_steps<Tile>(p) : 0;
  const ScanCall call(p);
  ForwardElement element[kOwn];
  float state[kOwn];
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e].find(call, owned_element<Tile>(p, matrix, e));
    state[e] = element[e].own.initial(p, p.h0);
  }
  if constexpr (Tile::kLoadsAhead) {
#pragma unroll
    for (int e = 0; e < kOwn; ++e) element[e].next = element[e].load(call, 0);
  }

  for (int t = 0; t < steps; ++t) {
    float products[kOwn];
    matrix.multiply(state, products, [&] {  // while states are on their way to other blocks
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        element[e].write_token(call, t - 1, state[e]);
        element[e].template load_token<Tile::kLoadsAhead>(call, t);
        element[e].prefetch_token(t + kTokensAhead);
      }
    });
    if (!matrix.owns()) continue;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      element[e].update_state(call, t, products[e], state[e]);
    }
  }

#pragma unroll
  for (int e = 0; e < kOwn; ++e) element[e].write_token(call, steps - 1, state[e]);
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const OwnedElement& own = element[e].own;
    if (own.writes) static_cast<float*>(p.h_final)[own.state_index(p)] = state[e];
  }
  matrix.finish();
}

// ---- backward ----

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

struct BackwardElement {
  OwnedElement own;
  TokenColumn x, dh;
  int64_t first;  // of logits, h, dz, dx and h_before
  float gamma, h0;
  BackwardBits next = {};  // of the token before that of `factors`
  TokenFactors factors;
  Sum<float, true> bound_grad;  // dgamma, of a whole sequence: precise whatever the data

  __device__ __forceinline__ void find(const ScanCall& call, const GatedRnnBackwardParams& params,
                                       const OwnedElement& element) {
    own = element;
    gamma = own.lower_bound(call.p);
    x = own.column(call.p.x), dh = own.column(params.dh);
    first = own.first_index(call.p);
    h0 = own.initial(call.p, call.p.h0);
  }
  __device__ __forceinline__ int64_t index_of(const ScanCall& call, int t) const {
    return first + int64_t{t} * call.dim;
  }
  __device__ __forceinline__ void load_token(const ScanCall& call, int t) {
    if (!own.has_token(t)) return;
    const int64_t index = index_of(call, t);
    next.logit = *float_at(call.p.logits, index);
    next.x = call.type.load(x.at(t));
    if (t > 0) next.h = call.type.load(call.type.at(call.p.h, index - call.dim));
    next.dh = call.type.load(dh.at(t));
  }
  /// What token t needs but for the gradient from later ones: past a sequence's end, nothing.
  __device__ __forceinline__ void compute_factors(const ScanCall& call, int t) {
    const TokenFactors found = next.factors(call.type, gamma, t > 0, h0);
    factors = own.has_token(t) ? found : TokenFactors{};
  }
  /// Writes token t's gradients and takes the carry past it: it is multiplied by lambda_t, and the
  /// product with the matrix is added by the caller.
  __device__ __forceinline__ void finish_token(const ScanCall& call,
                                               const GatedRnnBackwardParams& params, int t,
                                               float gate_grad, float& carry) {
    if (!own.has_token(t)) return;
    if (own.writes) {
      const int64_t index = index_of(call, t);
      call.gate_type.store(call.gate_type.at(params.dz, index), gate_grad);
      call.type.store(call.type.at(params.dx, index), factors.shut * carry);
      call.type.store(call.type.at(params.h_before, index), factors.h);
    }
    bound_grad.add(factors.bound_slope * carry);
    carry *= factors.open;
  }
  __device__ __forceinline__ void prefetch_token(const ScanCall& call, int t) const {
    if (!own.has_token(t)) return;
    const int64_t index = index_of(call, t);
    prefetch_line(float_at(call.p.logits, index));
    prefetch_line(call.type.at(call.p.h, index));
    prefetch_line(x.at(t)), prefetch_line(dh.at(t));
  }
};

template <class Tile>
__device__ void scan_backward(const GatedRnnBackwardParams& params, void* shared) {
  constexpr int kOwn = Tile::kOwn;
  const GatedRnnParams& p = params.forward;
  typename Tile::Matrix matrix(p, /*transposed=*/true, shared);
  const int steps = matrix.takes_part() ? count_steps<Tile>(p) : 0;
  const ScanCall call(p);
  BackwardElement element[kOwn];
  float carry[kOwn];  // the gradient of the state, from later tokens
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e].find(call, params, owned_element<Tile>(p, matrix, e));
    carry[e] = element[e].own.initial(p, params.dh_final);
  }
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    element[e].load_token(call, steps - 1);
    element[e].compute_factors(call, steps - 1);
    element[e].load_token(call, steps - 2);
  }

  for (int t = steps - 1; t >= 0; --t) {
    float gate_grad[kOwn], products[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      carry[e] += element[e].factors.dh;
      gate_grad[e] = element[e].factors.slope * carry[e];
    }
    matrix.multiply(gate_grad, products, [&] {  // while they are on their way to other blocks
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        element[e].finish_token(call, params, t, gate_grad[e], carry[e]);
        element[e].compute_factors(call, t - 1);
        element[e].load_token(call, t - 2);
        element[e].prefetch_token(call, t - kTokensAhead);
      }
    });
#pragma unroll
    for (int e = 0; e < kOwn; ++e) carry[e] += products[e];
  }

#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    if (!element[e].own.writes) continue;
    const int64_t index = element[e].own.state_index(p);
    static_cast<float*>(params.dh0)[index] = carry[e];
    if (params.dgamma_partial != nullptr) {
      static_cast<float*>(params.dgamma_partial)[index] = element[e].bound_grad.value();
    }
  }
  matrix.finish();
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gated_rnn_on_chip_forward(const __grid_constant__ GatedRnnParams params) {
  extern __shared__ float4 shared[];
  if constexpr (kRunsHere<Tile>) scan_forward<Tile>(params, shared);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gated_rnn_on_chip_backward(const __grid_constant__ GatedRnnBackwardParams params) {
  extern __shared__ float4 shared[];
  if constexpr (kRunsHere<Tile>) scan_backward<Tile>(params, shared);
}

}  // namespace tidegate::kernels::rnn
