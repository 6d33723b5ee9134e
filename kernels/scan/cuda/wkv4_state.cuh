#pragma once

// The state of RWKV-4's token mixing, one channel, and what a token does to it. Everything here
// scales two numbers by the larger of two weights, so that no exponent is above zero.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequence.cuh"
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

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }
__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }

/// Two terms of a sum, scaled by the larger of their weights.
template <class Real>
struct Wkv4Weights {
  Real first, second;

  /// Of weights whose natural logarithms differ by `distance` = second - first.
  __device__ static Wkv4Weights at(Real distance) {
    return from(distance, exp_of(-magnitude(distance)));
  }
  /// The same of binary logarithms, which differ by whole + rest.
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

/// Sums scaled by exp(-m - rest). The gauge has two words, so that slow decays stay exact beside
/// large gauges; in memory it has one.
template <class Real>
struct Wkv4State {
  Real y, z, m;
  Real rest = Real(0);

  /// Lets the sums decay.
  __device__ void lower_gauge(Real by) {
    const Real change = rest - by;
    const Real lowered = m + change;
    rest = change - (lowered - m);
    m = lowered;
  }

  /// Adds a token; returns the weights of the old sums and of the token. The gauge is the largest
  /// weight of all tokens so far.
  __device__ Wkv4Weights<Real> add(Real w, Real k, Real v) {
    lower_gauge(w);
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

  /// The same state with a gauge of one word.
  __device__ Wkv4State in_one_word() const {
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

  /// `distance`: of the logarithms of the token's weight, with its bonus, and of the gauge.
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
  const Wkv4State<Real> s = state.in_one_word();
  Real* row = static_cast<Real*>(states) + 3 * n * channels + channel;
  row[0] = s.y;
  row[channels] = s.z;
  row[2 * channels] = s.m;
}

/// The state before the first token, whose k is given. An empty one takes the gauge of that token,
/// so that nothing is lost beside a gauge that stands for nothing. (A k of -inf is a token without
/// weight.)
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
/// Its row there.
__device__ inline int64_t saved_row(const SequenceLayout& layout, const Sequence& seq, int step) {
  const int64_t rows = layout.time / kWkv4SavedEvery + 1;  // wkv4_saved_rows
  return seq.batch * rows + (seq.start + step) / kWkv4SavedEvery;
}

}  // namespace tidegate::kernels::scan
