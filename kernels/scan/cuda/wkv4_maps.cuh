#pragma once

// How a state of wkv4 crosses a run, and the boards that carry states and maps from warp to warp:
// maps.cuh for a recurrence whose numbers are scaled by a gauge.

#include "kernels/scan/cuda/maps.cuh"
#include "kernels/scan/cuda/wkv4_state.cuh"

namespace tidegate::kernels {

// The walk keeps gauges, keys, rates and bonuses as binary logarithms: exp2 is one instruction.

constexpr float kLog2E = 1.44269504f;
constexpr float kLog2ERest = 1.92596299e-8f;  // log2(e) - kLog2E
constexpr float kLn2 = 0.693147182f;
constexpr float kLn2Rest = -1.90465421e-9f;  // ln(2) - kLn2

/// A gauge of natural logarithms as a binary one, in two words.
__device__ inline void set_binary_gauge(Wkv4State<float>& s, float m) {
  s.m = m * kLog2E;
  s.rest = fused(m, kLog2E, -s.m) + m * kLog2ERest;
}

/// The same state with gauge `m`, which is lower by exp's exponent `rest` than its own.
__device__ inline Wkv4State<float> with_rest(const Wkv4State<float>& s, float m, float rest) {
  const float more = fused(rest * 0.5f, rest, rest);  // exp(rest) - 1
  return {fused(s.y, more, s.y), fused(s.z, more, s.z), m, 0.0f};
}

/// The same state with a binary gauge of one word.
__device__ inline Wkv4State<float> in_one_word(const Wkv4State<float>& s) {
  return with_rest(s, s.m, s.rest * kLn2);
}

/// The same state with a natural gauge of one word.
__device__ inline Wkv4State<float> in_natural_gauge(const Wkv4State<float>& s) {
  const float m = s.m * kLn2;
  return with_rest(s, m, fused(s.rest, kLn2, fused(s.m, kLn2, -m) + s.m * kLn2Rest));
}

/// A run lets the sums decay and adds its own. In `sums`, `rest` is the decay: what the gauge falls
/// by from one end of the run to the other.
template <int kVec>
struct AffineMap<Wkv4State<float>, kVec> {
  using State = Wkv4State<float>;
  State sums[kVec];

  __device__ static AffineMap identity() {
    AffineMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.sums[v] = {0.0f, 0.0f, -1e30f, 0.0f};
    }
    return m;
  }

  /// One exponential between two states.
  __device__ void advance(State (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const State& run = sums[v];
      s[v].lower_gauge(run.rest);
      const float distance = (run.m - s[v].m) - s[v].rest;
      const auto weights = Wkv4Weights<float>::at_binary(distance);
      s[v].y = fused(weights.first, s[v].y, weights.second * run.y);
      s[v].z = fused(weights.first, s[v].z, weights.second * run.z);
      const bool run_leads = distance > 0.0f;
      s[v].m = run_leads ? run.m : s[v].m;
      s[v].rest = run_leads ? 0.0f : s[v].rest;
    }
  }

  /// This map after `earlier`.
  __device__ void append_to(AffineMap& earlier) const {
    State s[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = {earlier.sums[v].y, earlier.sums[v].z, earlier.sums[v].m, 0.0f};
    }
    advance(s);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = in_one_word(s[v]);
      earlier.sums[v] = {s[v].y, s[v].z, s[v].m, earlier.sums[v].rest + sums[v].rest};
    }
  }
};

/// Four words a channel and lane, side by side.
template <int kVec>
struct Wkv4Board {
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

template <int kVec>
struct StateBoard<Wkv4State<float>, kVec> : Wkv4Board<kVec> {};

template <int kVec, int kCount>
struct MapBoard<Wkv4State<float>, kVec, kCount> {
  using Map = AffineMap<Wkv4State<float>, kVec>;
  Wkv4Board<kVec> maps[kCount];

  __device__ void post(int slot, int lane, const Map& m) { maps[slot].post(lane, m.sums); }
  __device__ Map read(int slot, int lane) const {
    Map m;
    maps[slot].read(lane, m.sums);
    return m;
  }
};

}  // namespace tidegate::kernels
