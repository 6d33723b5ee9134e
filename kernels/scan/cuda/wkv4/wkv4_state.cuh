#pragma once

// The state of RWKV-4's token mixing, what a token does to it, and how it crosses a chunk. Every
// sum here scales two numbers by the larger of two weights, so that no exponential is taken of a
// number above zero. At the end the sequential scan, which is also wkv4_step's.

#include <cfloat>

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
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

/// The smaller of two numbers; NaN stays NaN.
template <class Real>
__device__ inline Real at_most(Real x, Real largest) {
  return x > largest ? largest : x;
}
/// Infinity as the largest number; NaN stays NaN.
template <class Real>
__device__ inline Real bounded(Real x) {
  constexpr Real kLargest = sizeof(Real) == 8 ? Real(DBL_MAX) : Real(FLT_MAX);
  return x < -kLargest ? -kLargest : at_most(x, kLargest);
}

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }

/// Two terms of a sum, scaled by the larger of their weights.
template <class Real>
struct Wkv4Weights {
  Real first, second;

  /// The pair of weights whose natural logarithms differ by `distance` = second - first.
  __device__ static Wkv4Weights at(Real distance) {
    return from(distance, exp_of(-magnitude(distance)));
  }
  /// The pair of weights whose binary logarithms differ by whole + rest.
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

/// Sums scaled by exp(-m - rest): natural logarithms in memory and in the sequential scan, binary
/// ones in the parallel scans. Inside a kernel the scaling exponent is a sum of two floats, so that
/// slow decays stay exact beside large exponents; in memory it is one.
template <class Real>
struct Wkv4State {
  Real y, z, m;
  Real rest = Real(0);

  __device__ bool is_empty() const { return y == Real(0) && z == Real(0); }

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

/// The logarithm of a token's weight, with its bonus, beside a state: at least `least` where that
/// is empty, unless the token has no weight at all.
template <class Real>
__device__ inline Real beside_empty(const Wkv4State<Real>& s, Real distance, Real least) {
  return s.is_empty() && distance < least && distance > Real(kWkv4NoWeight) ? least : distance;
}

/// A token's output from the state before it.
template <class Real>
struct Wkv4Output {
  Wkv4Weights<Real> weights;  // of the sums and of the token with its bonus
  Real scale;                 // 1 / the sum of the weights
  Real o;

  __device__ static Wkv4Output of(const Wkv4State<Real>& s, Real u, Real k, Real v) {
    const Real distance = beside_empty(s, ((k - s.m) - s.rest) + u, Real(kWkv4LeastBesideEmpty));
    const Wkv4Weights<Real> weights = Wkv4Weights<Real>::at(distance);
    const Real scale = reciprocal(fused(weights.first, s.z, weights.second));
    return {weights, scale, fused(weights.first, s.y, weights.second * v) * scale};
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
  if (s.is_empty()) {
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
    // Beyond 2^23, and for infinity, a float has no digits behind the point.
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

// ---- One thread a channel ----
//
// One token after another, in any type: for double precision, and for sequences of a token or two,
// where there is nothing to divide.

template <class Data>
struct Wkv4Sequential {
  using Real = typename Register<Data>::type;
  using State = Wkv4State<Real>;
  static constexpr int kChunk = static_cast<int>(kWkv4SavedEvery);

  /// One channel of one sequence.
  struct Channel {
    Sequence seq;
    int64_t channel;

    __device__ Data* at(const TimeSeries& series, int step) const {
      return static_cast<Data*>(series.data) + seq.batch * series.stride_b +
             (seq.start + step) * series.stride_t + channel;
    }
    __device__ Real read(const TimeSeries& series, int step) const {
      return widen(*at(series, step));
    }
    __device__ void write(const TimeSeries& series, int step, Real x) const {
      *at(series, step) = narrow<Data>(x);
    }
    __device__ Real of_channel(const void* values) const {
      return static_cast<const Real*>(values)[channel];
    }
  };

  /// Reads its state before writing any, so that a step may update it in place.
  static __device__ void forward(const Wkv4Params& p, const Channel& at) {
    const int64_t n = at.seq.index;
    if (at.seq.length == 0) {
      const State none = {};
      store_wkv4_state(
          p.final_state, n, p.channels, at.channel,
          p.state != nullptr ? load_wkv4_state<Real>(p.state, n, p.channels, at.channel) : none);
      return;
    }
    const Real w = at.of_channel(p.w), u = at.of_channel(p.u);
    State s = initial_wkv4_state(p.state, n, p.channels, at.channel, at.read(p.k, 0));
    for (int step = 0; step < at.seq.length; ++step) {
      if (p.saved != nullptr && is_saved(at.seq, step)) {
        store_wkv4_state(p.saved, saved_row(p.layout, at.seq, step), p.channels, at.channel, s);
      }
      const Real k = at.read(p.k, step), v = at.read(p.v, step);
      at.write(p.o, step, Wkv4Output<Real>::of(s, u, k, v).o);
      s.add(w, k, v);
    }
    store_wkv4_state(p.final_state, n, p.channels, at.channel, s);
  }

  /// Chunk by chunk from the end: forward through it again, then back.
  static __device__ void backward(const Wkv4BackwardParams& p, const Channel& at) {
    const Wkv4Params& f = p.forward;
    const int64_t n = at.seq.index, d = f.channels;
    const Real w = at.of_channel(f.w), u = at.of_channel(f.u);
    State flow = {};  // dL/dy and dL/dz, times exp(m) of the state that they belong to
    if (p.dfinal_state != nullptr) {
      flow = load_wkv4_state<Real>(p.dfinal_state, n, d, at.channel);
      flow.m = load_wkv4_state<Real>(f.final_state, n, d, at.channel).m;
    }
    Real dw = 0, du = 0;
    for (int end = at.seq.length; end > 0; end -= kChunk) {
      const int first = max(0, end - kChunk);
      State s = first > 0 ? load_wkv4_state<Real>(f.saved, saved_row(f.layout, at.seq, first), d,
                                                  at.channel)
                          : initial_wkv4_state(f.state, n, d, at.channel, at.read(f.k, 0));
      State states[kChunk];  // that enter a token
      Wkv4Weights<Real> weights[kChunk];
      for (int i = 0; i < end - first; ++i) {
        states[i] = s;
        weights[i] = s.add(w, at.read(f.k, first + i), at.read(f.v, first + i));
      }
      if (end == at.seq.length && p.dfinal_state == nullptr) {
        flow.m = s.m;
      }
      // Rescales to the exponent that the chunk has led to now, which may be another one by a
      // rounding.
      const Real scale = exp_of((s.m - flow.m) + s.rest);
      flow = {flow.y * scale, flow.z * scale, states[0].m};
      for (int i = end - first - 1; i >= 0; --i) {
        const Real k = at.read(f.k, first + i), v = at.read(f.v, first + i);
        const auto output = Wkv4Output<Real>::of(states[i], u, k, v);
        const Real g = at.read(p.grad_o, first + i) * output.scale;
        const Real by_token = g * output.weights.second;
        const Real by_sums = g * output.weights.first;
        // v - o, from what does not cancel.
        const Real apart =
            output.weights.first * output.scale * fused(states[i].z, v, -states[i].y);
        const Real bonus = by_token * apart;
        const Real old = weights[i].first, token = weights[i].second;
        at.write(p.dv, first + i, fused(token, flow.y, by_token));
        at.write(p.dk, first + i, fused(token, fused(v, flow.y, flow.z), bonus));
        du += bonus;
        dw -= old * fused(flow.y, states[i].y, flow.z * states[i].z);
        flow.y = fused(old, flow.y, by_sums);
        flow.z = fused(old, flow.z, -by_sums * output.o);
      }
      if (first == 0 && f.state != nullptr) {
        // dL/dstate goes from the scan's exponent to that of the state as it was given.
        const Real given = load_wkv4_state<Real>(f.state, n, d, at.channel).m;
        const Real back = exp_of(at_most(given - states[0].m, kWkv4LargestGradientScale<Real>));
        flow = {bounded(flow.y * back), bounded(flow.z * back), Real(0)};
      }
    }
    flow.m = Real(0);
    store_wkv4_state(p.dstate, n, d, at.channel, flow);
    static_cast<Real*>(p.dw_partial)[n * d + at.channel] = dw;
    static_cast<Real*>(p.du_partial)[n * d + at.channel] = du;
  }

  static __device__ void work(const Wkv4Params& p, const Channel& at) { forward(p, at); }
  static __device__ void work(const Wkv4BackwardParams& p, const Channel& at) { backward(p, at); }
};

template <class Data, class Params>
__global__ void wkv4_sequential_kernel(const __grid_constant__ Params params,
                                       int64_t channel_tiles) {
  using Sequential = Wkv4Sequential<Data>;
  const Wkv4Params& f = recurrence_params(params);
  const int64_t channel = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  if (channel < f.channels) {
    Sequential::work(params, {find_sequence(f.layout, blockIdx.x / channel_tiles), channel});
  }
}

template <class Data, class Params>
cudaError_t launch_wkv4_sequential(const Params& params, cudaStream_t stream) {
  constexpr int kThreads = 64;
  const Wkv4Params& f = recurrence_params(params);
  const int64_t tiles = (f.channels + kThreads - 1) / kThreads;
  return launch_unless_empty(&wkv4_sequential_kernel<Data, Params>, f.layout.sequences * tiles,
                             kThreads, 0, stream, params, tiles);
}

}  // namespace tidegate::kernels::scan
