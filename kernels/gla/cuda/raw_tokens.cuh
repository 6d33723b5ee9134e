#pragma once

// A lane's share of a block of 16 tokens as it comes from device memory: two tokens, eight
// channels, 16 bytes an access (8 floats: two accesses).

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/gla/cuda/gates.cuh"
#include "kernels/gla/cuda/head_rows.cuh"

namespace tidegate::kernels {

/// Eight elements of T.
template <class T>
struct Eight {
  static constexpr int kAccesses = sizeof(T) / 2;
  uint4 bits[kAccesses];

  __device__ void load(const char* from) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      bits[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
  }
  __device__ void fill(uint32_t word) {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      bits[i] = {word, word, word, word};
    }
  }
  __device__ void splat(T x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      set(i, x);
    }
  }
  /// Element i, a constant once loops are unrolled.
  __device__ float get(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word(i));
    } else if constexpr (sizeof(Pack<T, 2>) == 4) {
      return Pack<T, 2>{word(i / 2)}.get(i % 2);
    }
  }

 private:
  __device__ void set(int i, T x) {
    uint32_t words[sizeof(bits) / 4];
    memcpy(words, bits, sizeof(bits));
    memcpy(reinterpret_cast<char*>(words) + i * sizeof(T), &x, sizeof(T));
    memcpy(bits, words, sizeof(bits));
  }
  __device__ uint32_t word(int i) const {
    const uint4& b = bits[i / 4];
    return i % 4 == 0 ? b.x : i % 4 == 1 ? b.y : i % 4 == 2 ? b.z : b.w;
  }
};

/// Rows of one tensor as a lane visits them: its two tokens of a block, 32 channels a round.
template <class T>
class LaneRows {
 public:
  __device__ LaneRows(const HeadSeries& series, const Sequence& seq, bool backwards, int64_t head,
                      int step, int64_t channel) {
    const HeadRows rows(series, seq, backwards, head);
    at_ = rows.row(step) + channel * int64_t{sizeof(T)};
    stride_ = rows.stride_bytes();
  }

  __device__ const char* at(int token, int channel) const {
    return at_ + (token == 0 ? 0 : stride_) + channel * int{sizeof(T)};
  }
  __device__ void move_channels(int channels) { at_ += channels * int{sizeof(T)}; }
  __device__ void move_steps(int steps) { at_ += int64_t{steps} * stride_; }

 private:
  const char* at_;
  int stride_;  // bytes
};

/// Sigmoid at the precision of 16-bit data; zero where exp(-x) overflows.
__device__ inline float sigmoid_of_data(float x) {
  return reciprocal_approx(1.0f + exp2_approx(x * -1.4426950408889634f));
}

/// Four of eight elements, activated, as floats.
template <class T>
__device__ inline void activated(InputActivation activation, const Eight<T>& raw, int first,
                                 float (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    out[j] = raw.get(first + j);
  }
  if (activation != InputActivation::kNone) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float s = sigmoid_of_data(out[j]);
      out[j] = activation == InputActivation::kSilu ? out[j] * s : s;
    }
  }
}

/// Eight values, activated, as bf16.
template <class T>
__device__ inline uint4 activated_bf16(InputActivation activation, const Eight<T>& raw) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (activation == InputActivation::kNone) {
      return raw.bits[0];
    }
  }
  float low[4], high[4];
  activated(activation, raw, 0, low);
  activated(activation, raw, 4, high);
  return {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
          pack_bf16(high[2], high[3])};
}

}  // namespace tidegate::kernels
