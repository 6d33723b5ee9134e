#pragma once

// The state of RWKV-4's token mixing, what a token does to it, and how it crosses a chunk. Every
// sum here scales two numbers by the larger of two weights, so that no exponential is taken of a
// number above zero.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequence.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

/// 2^(whole + rest): no digit of the rest is lost beside a large whole number.
__device__ inline float exp2_of(float whole, float rest) {
  return exp2_approx(whole) * exp2_approx(rest);
}
__device__ inline float exp_of(float x) { return exp2_approx(x * kLog2E); }
__device__ inline double exp_of(double x) { return exp(x); }

__device__ inline float reciprocal(float x) { return reciprocal_approx(x); }
__device__ inline double reciprocal(double x) { return 1.0 / x; }

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }

/// Two terms of a sum, scaled by the larger of their weights.
template <class Real>
struct Wkv4Weights {
  Real first, second;

  /// Those whose natural logarithms differ by `distance` = second - first.
  __device__ static Wkv4Weights at(Real distance) {
    return from(distance, exp_of(-magnitude(distance)));
  }
  /// Those whose binary logarithms differ by whole + rest.
  __device__ static Wkv4Weights at_binary(Real whole, Real rest) {
    const bool second_leads = whole + rest > Real(0);
    return from(whole + rest, second_leads ? exp2_of(-whole, -rest) : exp2_of(whole, rest));
  }

 private:
  __device__ static Wkv4Weights from(Real distance, Real smaller) {
    const bool second_leads = distance > Real(0);
    return {second_leads ? smaller : Real(1), second_leads ? Real(1) : smaller};
  }
};

/// Sums scaled by exp(-m - rest). Inside a kernel the scaling exponent is a sum of two floats, so
/// that slow decays stay exact beside large exponents; in memory it is one.
template <class Real>
struct Wkv4State {
  Real y, z, m;
  Real rest = Real(0);

  /// Lets the sums decay.
  __device__ void lower_exponent(Real by) {
    const Real change = rest - by;
    const Real lowered = m + change;
    rest = change - (lowered - m);
    m = lowered;
  }

  /// Adds a token; returns the weights of the old sums and of the token. The exponent is the
  /// largest weight of all tokens so far.
  __device__ Wkv4Weights<Real> add(Real w, Real k, Real v) {
    lower_exponent(w);
    const Real distance = (k - m) - rest;
    const Wkv4Weights<Real> weights = Wkv4Weights<Real>::at(distance);
    y = fused(weights.first, y, weights.second * v);
    z = fused(weights.first, z, weights.second);
    if (distance > Real(0)) {
      m = k;
      rest = Real(0);
    }
    return weights;
  }

  /// This state with a single-float exponent: the sums take over the rest.
  __device__ Wkv4State absorb_rest() const {
    const Real more = fused(rest * Real(0.5), rest, rest);  // exp(rest) - 1
    return {fused(y, more, y), fused(z, more, z), m};
  }
};

/// A token's output from the state before it.
template <class Real>
struct Wkv4Output {
  Wkv4Weights<Real> weights;  // of the sums and of the token with its bonus
  Real scale;                 // 1 / the sum of the weights
  Real o;

  /// `distance`: of the logarithms of the token's weight, with its bonus, and of the exponent.
  __device__ static Wkv4Output at(Real distance, Real y, Real z, Real v) {
    const Wkv4Weights<Real> weights = Wkv4Weights<Real>::at(distance);
    const Real scale = reciprocal(fused(weights.first, z, weights.second));
    return {weights, scale, fused(weights.first, y, weights.second * v) * scale};
  }
};

/// A channel of row n of an [N, 3, D] array.
template <class Real>
__device__ inline Wkv4State<Real> load_wkv4_state(const void* states, int64_t n, int64_t channels,
                                                  int64_t channel) {
  const Real* row = static_cast<const Real*>(states) + 3 * n * channels + channel;
  return {row[0], row[channels], row[2 * channels]};
}
template <class Real>
__device__ inline void store_wkv4_state(void* states, int64_t n, int64_t channels, int64_t channel,
                                        const Wkv4State<Real>& state) {
  const Wkv4State<Real> s = state.absorb_rest();
  Real* row = static_cast<Real*>(states) + 3 * n * channels + channel;
  row[0] = s.y;
  row[channels] = s.z;
  row[2 * channels] = s.m;
}

/// The state before the first token, whose k is given. An empty one takes the exponent of that
/// token, so that nothing is lost beside an exponent that stands for nothing. (A k of -inf is a
/// token without weight.)
template <class Real>
__device__ inline Wkv4State<Real> initial_wkv4_state(const void* states, int64_t n,
                                                     int64_t channels, int64_t channel, Real k) {
  Wkv4State<Real> s = {};
  if (states != nullptr) {
    s = load_wkv4_state<Real>(states, n, channels, channel);
  }
  if (s.y == Real(0) && s.z == Real(0)) {
    s.m = k < Real(kWkv4NoWeight) ? Real(kWkv4NoWeight) : k;
  }
  return s;
}

/// Whether the state that enters a token, `step` of its sequence, is among the saved ones.
__device__ inline bool is_saved(const Sequence& seq, int step) {
  return step > 0 && (seq.length - step) % kWkv4SavedEvery == 0;
}
/// The row of that state among the saved ones.
__device__ inline int64_t saved_row(const SequenceLayout& layout, const Sequence& seq, int step) {
  const int64_t rows = layout.time / kWkv4SavedEvery + 1;  // wkv4_saved_rows
  return seq.batch * rows + (seq.start + step) / kWkv4SavedEvery;
}

// The parallel scan keeps exponents, keys, rates and bonuses as binary logarithms. An exponent is a
// whole number, m, and a rest of half a unit at most: sums of whole numbers are exact, and so are
// their powers of two, so an exponent has all digits of its rest beside keys of any size. Keys and
// exponents are converted by one and the same factor, which keeps them comparable.

constexpr float kPerLog2E = 0.693147182f;        // 1 / kLog2E,
constexpr float kPerLog2ERest = 7.34869306e-9f;  // in two floats

/// Sums and weights within 2^kExponentRange of an exponent are kept at it (wkv4_base.cuh,
/// wkv4_multi_block.cuh).
constexpr float kExponentRange = 40.0f;

/// A natural logarithm as a binary one in two floats.
struct BinaryLog {
  float whole, rest;

  __device__ BinaryLog(float whole, float rest) : whole(whole), rest(rest) {}
  __device__ explicit BinaryLog(float x) {
    whole = rintf(x * kLog2E);
    // Beyond 2^23, and for infinity, there are no digits behind the point.
    rest = fmaxf(fminf(fused(x, kLog2E, -whole), 0.5f), -0.5f);
  }
};

/// A scaling exponent of natural logarithms as a binary one.
__device__ inline void set_binary_exponent(Wkv4State<float>& s, float m) {
  const BinaryLog log(m);
  s.m = log.whole, s.rest = log.rest;
}

/// Lets the sums decay.
__device__ inline void lower_binary_exponent(Wkv4State<float>& s, float whole, float rest) {
  s.rest -= rest;
  const float carry = rintf(s.rest);
  s.rest -= carry;
  s.m += carry - whole;
}

/// The state with a single-float exponent, which stays binary: the sums take over the rest.
__device__ inline Wkv4State<float> absorb_rest(const Wkv4State<float>& s) {
  const float scale = exp2_approx(s.rest);
  return {s.y * scale, s.z * scale, s.m};
}

/// The state with a natural, single-float exponent.
__device__ inline Wkv4State<float> to_natural_exponent(const Wkv4State<float>& s) {
  const float m = fused(s.m, kPerLog2E, s.rest * kPerLog2E);
  const float lost = fused(s.rest, kPerLog2E, fused(s.m, kPerLog2E, -m)) + s.m * kPerLog2ERest;
  const float more = fused(lost * 0.5f, lost, lost);  // exp(lost) - 1
  return {fused(s.y, more, s.y), fused(s.z, more, s.z), m};
}

/// A state in a carry record: with a single-float exponent it takes two accesses, with another
/// float three.
struct Wkv4PackedState {
  float y, z, m;
};
template <>
struct PackedStateOf<Wkv4State<float>> {
  using type = Wkv4PackedState;
};
__device__ inline Wkv4State<float> unpack_state(const Wkv4PackedState& s) {
  return {s.y, s.z, s.m};
}

/// A chunk lets the sums decay and adds its own, whose exponent is a whole number.
template <int kVec>
struct AffineMap<Wkv4State<float>, kVec> {
  using State = Wkv4State<float>;
  struct Added {
    Wkv4PackedState sums[kVec];
  };
  Wkv4PackedState sums[kVec];
  float whole[kVec], rest[kVec];  // the decay: what the exponent falls by

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
  __device__ void apply(State (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Wkv4PackedState& chunk = sums[v];
      lower_binary_exponent(s[v], whole[v], rest[v]);
      const float distance = chunk.m - s[v].m;
      const auto weights = Wkv4Weights<float>::at_binary(distance, -s[v].rest);
      s[v].y = fused(weights.first, s[v].y, weights.second * chunk.y);
      s[v].z = fused(weights.first, s[v].z, weights.second * chunk.z);
      const bool chunk_leads = distance - s[v].rest > 0.0f;
      s[v].m = chunk_leads ? chunk.m : s[v].m;
      s[v].rest = chunk_leads ? 0.0f : s[v].rest;
    }
  }
};

/// A state of wkv4 in shared memory: four floats a channel and lane, side by side.
template <int kVec>
struct SharedState<Wkv4State<float>, kVec> {
  float4 states[kVec][kWarpSize];

  __device__ void store(int lane, const Wkv4State<float> (&s)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      states[v][lane] = {s[v].y, s[v].z, s[v].m, s[v].rest};
    }
  }
  __device__ void load(int lane, Wkv4State<float> (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float4 w = states[v][lane];
      s[v] = {w.x, w.y, w.z, w.w};
    }
  }
};

}  // namespace tidegate::kernels::scan
