#pragma once

// How a state of wkv4 crosses a run, and the boards that carry states and maps from warp to warp:
// maps.cuh for a recurrence whose numbers are scaled by a gauge.

#include "kernels/scan/cuda/maps.cuh"
#include "kernels/scan/cuda/wkv4_state.cuh"

namespace tidegate::kernels {

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
      const auto weights = Wkv4Weights<float>::at(distance);
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
      s[v] = s[v].in_one_word();
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
