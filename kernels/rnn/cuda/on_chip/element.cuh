#pragma once

// The elements of the state that a thread owns, and their tokens in memory. An element is one
// channel of one sequence.

#include "kernels/common/cuda/elements.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequence.cuh"
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

}  // namespace tidegate::kernels::rnn
