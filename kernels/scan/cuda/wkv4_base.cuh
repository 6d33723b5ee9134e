#pragma once

// What RWKV-4's token mixing needs in both directions as an Op of the walk (walk.cuh).
//
// Gauges, keys, rates and bonuses are binary logarithms here. Where the weights of a run and of the
// state that enters it lie within a factor of 2^kReach, the run is quick: one gauge serves all of
// it, sums decay by a product, and a token costs one exponential and one reciprocal. Other runs,
// and those with which a sequence ends, move the gauge at every token (docs/kernels/wkv4.md).

#include "kernels/scan/cuda/partial_sums.cuh"
#include "kernels/scan/cuda/walk.cuh"
#include "kernels/scan/cuda/wkv4_maps.cuh"
#include "kernels/scan/cuda/wkv4_plain.cuh"

namespace tidegate::kernels {

constexpr float kReach = 40.0f;

/// A token's weight with its bonus, beside sums whose gauge is `distance` below it. Above 2^58 the
/// sums, at most a few million of the largest weight, are lost in rounding anyway.
__device__ inline float bonus_weight(float distance) { return exp2_of(fminf(distance, 58.0f)); }

/// A logarithm as a binary one; and by how much it lies above another one, rounded once.
__device__ inline float binary(float x) { return x * kLog2E; }
__device__ inline float binary_above(float x, float gauge) { return fused(x, kLog2E, -gauge); }

/// The smallest and the largest of some keys, a channel each.
template <class Data, int kVec>
struct KeyRange {
  float low[kVec], high[kVec];

  __device__ explicit KeyRange(const Pack<Data, kVec>& first) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      low[c] = high[c] = first.get(c);
    }
  }
  __device__ void add(const Pack<Data, kVec>& keys) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      low[c] = fminf(low[c], keys.get(c));
      high[c] = fmaxf(high[c], keys.get(c));
    }
  }
  __device__ float lowest(int c) const { return low[c]; }
  __device__ float highest(int c) const { return high[c]; }
};

template <class Data>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};

/// Two 16-bit keys are compared by one instruction.
template <class Data>
struct KeyRange<Data, 2> {
  using Pair = typename PairOf<Data>::type;
  Pair low, high;

  static __device__ Pair pair(const Pack<Data, 2>& keys) {
    Pair p;
    memcpy(&p, &keys.bits, sizeof(p));
    return p;
  }
  static __device__ float element(const Pair& p, int c) {
    Pack<Data, 2> keys;
    memcpy(&keys.bits, &p, sizeof(p));
    return keys.get(c);
  }
  __device__ explicit KeyRange(const Pack<Data, 2>& first) : low(pair(first)), high(low) {}
  __device__ void add(const Pack<Data, 2>& keys) {
    low = __hmin2(low, pair(keys));
    high = __hmax2(high, pair(keys));
  }
  __device__ float lowest(int c) const { return element(low, c); }
  __device__ float highest(int c) const { return element(high, c); }
};

/// Whether something holds for all threads of a warp.
__device__ inline bool all_lanes(bool holds) { return __all_sync(0xffffffffu, holds) != 0; }

template <class Data_, int kVec_>
struct Wkv4Base {
  using Data = Data_;
  using Real = typename Register<Data>::type;
  using Number = Wkv4State<Real>;
  using StatePack = Pack<Real, kVec_>;
  static constexpr int kVec = kVec_;
  static constexpr bool kCrossByMap = true;
  static constexpr int kPackBytes = sizeof(Data) * kVec;
  static constexpr bool kOwnsRun = true;

  Lane lane;
  Sequence seq;
  Rows<Data, kVec> k, v;
  Real w[kVec], u[kVec];
  Real decay[kVec], bonus[kVec];  // exp(-w), exp(u)
  bool bonus_is_near;             // to one
  const void* state;

  __device__ Wkv4Base(const Wkv4Params& p, const Sequence& seq, const Lane& lane, bool backwards)
      : lane(lane),
        seq(seq),
        k(p.k, seq, backwards, lane),
        v(p.v, seq, backwards, lane),
        state(p.state) {
    load_channels(w, p.w, lane, Real(0));
    load_channels(u, p.u, lane, Real(0));
    bonus_is_near = true;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      decay[c] = Real(1) + expm1f(-w[c]);
      bonus[c] = expf(u[c]);
      bonus_is_near = bonus_is_near && fabsf(u[c]) <= Real(14);
      w[c] = binary(w[c]);
      u[c] = binary(u[c]);
    }
  }

  __device__ void prepare() const {}

  __device__ void store_states(void* states, int64_t row, const Number (&s)[kVec]) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      store_wkv4_state(states, row, lane.channels, lane.channel + c, s[c]);
    }
  }
  __device__ Number load_state(const void* states, int64_t row, int c) const {
    return load_wkv4_state<Real>(states, row, lane.channels, lane.channel + c);
  }
  /// The state that enters the first token, whose key is given.
  __device__ Number first_state(Real key, int c) const {
    Number s = initial_wkv4_state<Real>(state, seq.index, lane.channels, lane.channel + c, key);
    set_binary_gauge(s, s.m);
    return s;
  }

  /// The gauge of a quick run, or false where its keys lie too far apart.
  __device__ bool find_gauges(const KeyRange<Data, kVec>& keys, Real (&gauge)[kVec]) const {
    bool near = bonus_is_near;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      gauge[c] = rintf(binary(keys.highest(c)));
      near = near && gauge[c] - binary(keys.lowest(c)) <= kReach;
    }
    return near;
  }
  /// A token's weight in a run's gauge.
  static __device__ Real weight(Real key, Real gauge) { return exp2_of(binary_above(key, gauge)); }

  /// A token added to a state, the gauge moving along.
  __device__ Wkv4Weights<Real> add(Number& s, Real key, Real value, int c) const {
    s.lower_gauge(w[c]);
    const Real distance = binary_above(key, s.m) - s.rest;
    const auto weights = Wkv4Weights<Real>::at_binary(distance);
    s.y = fused(weights.first, s.y, weights.second * value);
    s.z = fused(weights.first, s.z, weights.second);
    if (distance > Real(0)) {
      s.m = binary(key);
      s.rest = binary_above(key, s.m);
    }
    return weights;
  }
  __device__ Real bonus_beside(const Number& s, Real key, int c) const {
    return bonus_weight((binary_above(key, s.m) - s.rest) + u[c]);
  }

  /// Moves the sums to a gauge; false where they lie too far from it.
  static __device__ bool enter_gauge(Number& s, Real gauge) {
    const Real scale = exp2_of((s.m - gauge) + s.rest);
    const bool is_empty = s.y == Real(0) && s.z == Real(0);
    if (!is_empty) {
      s.y *= scale, s.z *= scale;
    }
    s.m = gauge, s.rest = Real(0);
    return is_empty || (s.z >= Real(9.1e-13) && s.z <= Real(1.1e12));  // 2^-40, 2^40
  }
};

}  // namespace tidegate::kernels
