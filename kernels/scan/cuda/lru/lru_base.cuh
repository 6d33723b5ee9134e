#pragma once

// What both directions of the linear recurrent unit's recurrence share:
//   h_t = lambda * h_{t-1} + gamma * x_t
//   lambda = exp(-exp(nu_log) + i exp(theta_log)), or real;  gamma = exp(gamma_log)
//
// The decay is the same at every step, so an error of it is made again and again: it is computed in
// double and kept as a sum of two floats, and so is its power over a chunk of steps.

#include "kernels/common/cuda/rotation.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/cuda/engine/tiles.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

/// What forward and backward share: the types of one instantiation and what follows from the
/// parameters.
template <class Data_, bool kComplex_, int kVec_, Regime kRegime>
struct LruBase : Parts<Data_, kComplex_, kVec_> {
  using Layout = Parts<Data_, kComplex_, kVec_>;
  using Layout::kComplex, Layout::kVec;
  using typename Layout::Data;
  using typename Layout::Number;
  using typename Layout::Real;
  // A chunk's power of the decay is known beforehand: a state crosses it by two products.
  static constexpr bool kCarryByMap = true;
  static constexpr bool kEqualDecays = true;
  static constexpr int kPackBytes = sizeof(Data) * kVec;

  Channels channels;
  Sequence seq;
  const void *nu_log, *theta_log, *gamma_log;
  // Prepared; zero in a carry warp, which has no steps of its own.
  Real nu[kVec] = {}, theta[kVec] = {}, gamma[kVec] = {};
  Precise<Number> decay[kVec] = {}, chunk[kVec] = {};

  __device__ LruBase(const LruParams& params, const Sequence& seq, const Channels& channels)
      : channels(channels),
        seq(seq),
        nu_log(params.nu_log),
        theta_log(params.theta_log),
        gamma_log(params.gamma_log) {}

  /// What follows from the parameters of one channel.
  struct Decays {
    Precise<Number> decay, chunk;
    Real nu, theta, gamma;
  };
  using Prepared = Decays[kVec][kWarpSize];
  // What modules give is a projection's whole output, whose lines are all some tile's. In a part of
  // a wider row the halves of complex numbers still make most neighbours one tensor's.
  static constexpr bool kPrefetchNeighbourLine = true;
  // Where several blocks share a multiprocessor, every warp for itself was faster.
  static constexpr int kPreparedBytes =
      kRegime == Regime::kSeveralBlocksPerSm ? 0 : sizeof(Prepared);

  /// The parameters of one channel, as they are given.
  struct Given {
    Real log_rate, log_angle, log_gamma;
  };
  __device__ Real parameter(const void* values, int v) const {
    return static_cast<const Real*>(values)[channels.first + v];
  }
  /// Those of the thread's channel number v.
  __device__ Given given(int v) const {
    return {parameter(nu_log, v), kComplex ? parameter(theta_log, v) : Real(0),
            parameter(gamma_log, v)};
  }
  /// Those of the first channel that the thread's warp prepares.
  __device__ Given given(const WarpPosition& at) const { return given(min(at.warp, kVec - 1)); }

  template <int kSteps>
  static __device__ Decays find_decays(const Given& given) {
    const Precise<double> log_rate = {given.log_rate, 0.0};
    const Precise<double> log_angle = {given.log_angle, 0.0};
    const Precise<double> log_gamma = {given.log_gamma, 0.0};
    Precise<double> rate, modulus, angle, gamma;
    Turn turn;
    if (log_rate.hi > -700.0 && log_rate.hi < 6.5 && log_angle.hi > -700.0 && log_angle.hi < 11.5 &&
        fabs(log_gamma.hi) < 700.0) {
      // exp(6.5) < 700 and exp(11.5) < 1e5: no branch keeps one series from running beside the
      // others, each of which is one long chain.
      rate = exp_by_series(log_rate);
      modulus = exp_by_series({-rate.hi, -rate.lo});
      angle = exp_by_series(log_angle);
      turn = turn_by_series(angle);
      gamma = exp_by_series(log_gamma);
    } else {
      rate = exact_exp(log_rate);
      modulus = exact_exp({-rate.hi, -rate.lo});
      angle = exact_exp(log_angle);
      turn = exact_turn(angle);
      gamma = exact_exp(log_gamma);
    }
    Decays found;
    if constexpr (kComplex) {
      const Precise<double> re = multiply(modulus, turn.cosine);
      const Precise<double> im = multiply(modulus, turn.sine);
      const Complex<double> over_chunk = power<kSteps>(Complex<double>{re.hi, im.hi});
      found.decay = complex_of(in_words_of<Real>(re), in_words_of<Real>(im));
      found.chunk = complex_of(in_words_of<Real>({over_chunk.re, 0.0}),
                               in_words_of<Real>({over_chunk.im, 0.0}));
      found.theta = static_cast<Real>(angle.hi);
    } else {
      found.decay = in_words_of<Real>(modulus);
      found.chunk = in_words_of<Real>({power<kSteps>(modulus.hi), 0.0});
      found.theta = Real(0);
    }
    found.gamma = static_cast<Real>(gamma.hi);
    // It is used as nu * lambda, which is zero there; infinity times zero would be NaN.
    found.nu = modulus.hi == 0.0 ? Real(0) : static_cast<Real>(rate.hi);
    return found;
  }
  __device__ void set_decays(int v, const Decays& found) {
    decay[v] = found.decay, chunk[v] = found.chunk;
    nu[v] = found.nu, theta[v] = found.theta, gamma[v] = found.gamma;
  }

  template <int kSteps>
  __device__ void prepare_alone() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      set_decays(v, find_decays<kSteps>(given(v)));
    }
  }
  /// All warps of a warp group scan the same channels: each channel is computed by one of them.
  template <int kSteps>
  __device__ void prepare_together(char* shared, const WarpPosition& at, const Given& first) const {
    auto& decays = *reinterpret_cast<Prepared*>(shared);
#pragma unroll 1
    for (int v = at.warp; v < kVec; v += at.warps) {
      decays[v][at.lane] = find_decays<kSteps>(v == at.warp ? first : given(v));
    }
  }
  __device__ void take_prepared(const char* shared, int lane) {
    const auto& decays = *reinterpret_cast<const Prepared*>(shared);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      set_decays(v, decays[v][lane]);
    }
  }

  /// a * s + x.
  static __device__ Number decayed(const Precise<Number>& a, Number s, Number x) {
    return fused(a.hi, s, fused(a.lo, s, x));
  }
  /// a * s + x for a step of a chunk. States cross chunks by a power that is a sum of two floats,
  /// so an error is made kSteps times at most: of 16-bit data, far less than their last digit.
  static __device__ Number stepped(const Precise<Number>& a, Number s, Number x) {
    return sizeof(Data) < 4 ? fused(a.hi, s, x) : decayed(a, s, x);
  }
  /// A state through a chunk, without AffineMap's test for a state of zero: the carry chain is that
  /// much shorter. The test is for products of decays that have overflowed, and powers of a decay
  /// of at most one do not. They are finite, and a state of zero leaves x as it is, but for the
  /// sign of a zero. Or a parameter has made the decay NaN, in both floats: then so is x, from the
  /// chunk's first step on.
  static __device__ void cross(const AffineMap<Number, kVec>& map, Number (&s)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = decayed(map.a[v], s[v], map.x[v]);
    }
  }
};

}  // namespace tidegate::kernels::scan
