#pragma once

// How a state of wkv4 crosses a run, and the board that carries one from warp to warp: maps.cuh for
// a recurrence whose numbers are scaled by a gauge.

#include "kernels/scan/cuda/maps.cuh"
#include "kernels/scan/cuda/wkv4_state.cuh"

namespace tidegate::kernels::scan {

// The walk keeps gauges, keys, rates and bonuses as binary logarithms. A gauge is a whole number,
// m, and a rest of half a unit at most: sums of whole numbers are exact, and so are their powers of
// two, so a gauge has all digits of its rest beside keys of any size. Keys and gauges are converted
// by one and the same factor, which keeps them comparable.

constexpr float kPerLog2E = 0.693147182f;        // 1 / kLog2E,
constexpr float kPerLog2ERest = 7.34869306e-9f;  // in two words

/// Sums and weights within 2^kReach of a gauge are kept in it (wkv4_base.cuh, wkv4_links.cuh).
constexpr float kReach = 40.0f;

/// A natural logarithm as a binary one in two words.
struct BinaryLog {
  float whole, rest;

  __device__ BinaryLog(float whole, float rest) : whole(whole), rest(rest) {}
  __device__ explicit BinaryLog(float x) {
    whole = rintf(x * kLog2E);
    // Beyond 2^23, and for infinity, there are no digits behind the point.
    rest = fmaxf(fminf(fused(x, kLog2E, -whole), 0.5f), -0.5f);
  }
};

/// A gauge of natural logarithms as a binary one.
__device__ inline void set_binary_gauge(Wkv4State<float>& s, float m) {
  const BinaryLog log(m);
  s.m = log.whole, s.rest = log.rest;
}

/// Lets the sums decay.
__device__ inline void lower_binary_gauge(Wkv4State<float>& s, float whole, float rest) {
  s.rest -= rest;
  const float carry = rintf(s.rest);
  s.rest -= carry;
  s.m += carry - whole;
}

/// The same state with a (binary) gauge of one word.
__device__ inline Wkv4State<float> in_one_word(const Wkv4State<float>& s) {
  const float scale = exp2_approx(s.rest);
  return {s.y * scale, s.z * scale, s.m};
}

/// The same state with a natural gauge of one word.
__device__ inline Wkv4State<float> in_natural_gauge(const Wkv4State<float>& s) {
  const float m = fused(s.m, kPerLog2E, s.rest * kPerLog2E);
  const float lost = fused(s.rest, kPerLog2E, fused(s.m, kPerLog2E, -m)) + s.m * kPerLog2ERest;
  const float more = fused(lost * 0.5f, lost, lost);  // exp(lost) - 1
  return {fused(s.y, more, s.y), fused(s.z, more, s.z), m};
}

/// A state in a letter: with a gauge of one word it takes two accesses, with another one three.
struct Wkv4Words {
  float y, z, m;
};
template <>
struct StateWordsOf<Wkv4State<float>> {
  using type = Wkv4Words;
};
__device__ inline Wkv4State<float> from_words(const Wkv4Words& s) { return {s.y, s.z, s.m}; }

/// A run lets the sums decay and adds its own, whose gauge is a whole number.
template <int kVec>
struct AffineMap<Wkv4State<float>, kVec> {
  using State = Wkv4State<float>;
  struct Added {
    Wkv4Words sums[kVec];
  };
  Wkv4Words sums[kVec];
  float whole[kVec], rest[kVec];  // the decay: what the gauge falls by

  __device__ static AffineMap identity() {
    AffineMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.sums[v] = {0.0f, 0.0f, kWkv4NoWeight};
      m.whole[v] = m.rest[v] = 0.0f;
    }
    return m;
  }
  /// The exponentials of two weights, and nothing else that takes long.
  __device__ void advance(State (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Wkv4Words& run = sums[v];
      lower_binary_gauge(s[v], whole[v], rest[v]);
      const float distance = run.m - s[v].m;
      const auto weights = Wkv4Weights<float>::at_binary(distance, -s[v].rest);
      s[v].y = fused(weights.first, s[v].y, weights.second * run.y);
      s[v].z = fused(weights.first, s[v].z, weights.second * run.z);
      const bool run_leads = distance - s[v].rest > 0.0f;
      s[v].m = run_leads ? run.m : s[v].m;
      s[v].rest = run_leads ? 0.0f : s[v].rest;
    }
  }
};

/// Four words a channel and lane, side by side.
template <int kVec>
struct StateBoard<Wkv4State<float>, kVec> {
  float4 words[kVec][kWarpSize];

  __device__ void post(int lane, const Wkv4State<float> (&s)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      words[v][lane] = {s[v].y, s[v].z, s[v].m, s[v].rest};
    }
  }
  __device__ void read(int lane, Wkv4State<float> (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float4 w = words[v][lane];
      s[v] = {w.x, w.y, w.z, w.w};
    }
  }
};

}  // namespace tidegate::kernels::scan
