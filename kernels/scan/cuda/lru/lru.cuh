#pragma once

// What both directions of the linear recurrent unit's recurrence share:
//   h_t = lambda * h_{t-1} + gamma * x_t
//   lambda = exp(-exp(nu_log) + i exp(theta_log)), or real;  gamma = exp(gamma_log)
//
// The decay is the same at every step, so an error of it is made again and again: it is computed in
// double and kept as a sum of two floats, and so is its power over a chunk of steps.

#include <array>

#include "kernels/common/cuda/precise.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/launch.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/scan.h"
#include "kernels/scan/scan_cuda.h"

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
  // What prepare() computes; zero in a carry warp, which has no steps of its own.
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
    return static_cast<const Real*>(values)[channels.at(v)];
  }
  /// The given parameters of the thread's channel number v.
  __device__ Given given(int v) const {
    return {parameter(nu_log, v), kComplex ? parameter(theta_log, v) : Real(0),
            parameter(gamma_log, v)};
  }
  /// The given parameters of the first channel that the thread's warp prepares.
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
    // nu is used as nu * lambda, which is zero there; infinity times zero would be NaN.
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

// ---- The two Ops, and which of their kernels params ask for ----

template <class Data_, bool kComplex_, int kVec_, Regime kRegime>
struct LruForward : LruBase<Data_, kComplex_, kVec_, kRegime>,
                    TileConfig<OpKind::kLru, Direction::kForward, kRegime> {
  using Base = LruBase<Data_, kComplex_, kVec_, kRegime>;
  using Base::kParts, Base::kVec, Base::channels, Base::seq, Base::decay, Base::gamma, Base::chunk;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = LruParams;
  static constexpr bool kEmitWhileAdvancing = true;  // or long chunks would not fit in registers
  // Chunks of multi-block scans would not fit; with several blocks a multiprocessor it gains
  // nothing.
  static constexpr bool kInputsInRegisters = kRegime == Regime::kOneBlockPerSm;

  struct Raw {
    Pack<Data, kVec> x[kParts];
  };
  static constexpr int kInputs = kParts;
  struct Decoded {};  // nothing prepared: compose and advance read raw

  PartRows<Data, kVec, kParts> x, h;
  const void* h0;
  void* h_final;

  __device__ LruForward(const Params& params, const Sequence& seq, const Channels& channels)
      : Base(params, seq, channels),
        x(params.x, seq, params.layout.reverse, channels),
        h(params.h, seq, params.layout.reverse, channels),
        h0(params.h0),
        h_final(params.h_final) {}

  __device__ void prepare() { this->template prepare_alone<LruForward::kSteps>(); }
  __device__ void prepare(char* shared, const WarpPosition& at,
                          const typename Base::Given& given) const {
    this->template prepare_together<LruForward::kSteps>(shared, at, given);
  }
  __device__ void initial(Number (&s)[kVec]) const {
    Base::State::load(s, h0, seq.index, channels);
  }
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    Base::State::store(h_final, seq.index, channels, s);
  }

  template <class Source>
  __device__ Raw gather(Source source, int k, int /*last*/) const {
    Raw raw;
    x.gather(source, raw.x, k);
    return raw;
  }

  __device__ Decoded decode(const Raw&) const { return {}; }

  __device__ void advance(const Raw& raw, Decoded, Number (&s)[kVec], Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = Base::stepped(decay[v], s[v], gamma[v] * Base::number(raw.x, v));
      kept[v] = s[v];
    }
  }
  /// advance() with the two-float decay: a state may take any number of steps, each a launch of its
  /// own.
  __device__ void advance_alone(const Raw& raw, Number (&s)[kVec], Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = Base::decayed(decay[v], s[v], gamma[v] * Base::number(raw.x, v));
      kept[v] = s[v];
    }
  }

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw&, Decoded, const Number (&kept)[kVec]) const {
    Pack<Data, kVec> out[kParts];
    Base::split(kept, out);
    h.store(k, i, out);
  }

  __device__ void compose(const Raw& raw, Decoded, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.x[v] = Base::stepped(decay[v], map.x[v], Base::number(raw.x, v));
    }
  }
  __device__ void finalize(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.x[v] = gamma[v] * map.x[v];
      map.a[v] = chunk[v];
    }
  }

  __device__ void reduce(int64_t, void*, int, int, int) const {}
  __device__ void reduce_alone(int64_t) const {}
};

/// Scans the other way with p_t = dL/dh_{t-1} along the recurrence:
///   g_t = dh_t + p_{t+1},  p_t = conj(lambda) * g_t,  dx_t = gamma * g_t
/// and, with S the sum of conj(g_t) h_{t-1} over time:
///   dnu_log = -nu * Re(lambda S),  dtheta_log = -theta * Im(lambda S)
///   dgamma_log = gamma * sum Re(conj(g_t) x_t)
template <class Data_, bool kComplex_, int kVec_, Regime kRegime>
struct LruBackward : LruBase<Data_, kComplex_, kVec_, kRegime>,
                     TileConfig<OpKind::kLru, Direction::kBackward, kRegime> {
  using Base = LruBase<Data_, kComplex_, kVec_, kRegime>;
  using Base::decay, Base::gamma, Base::nu, Base::chunk, Base::theta;
  using Base::kComplex, Base::kParts, Base::kVec, Base::channels, Base::seq;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = LruBackwardParams;
  static constexpr bool kEmitWhileAdvancing = false;
  static constexpr bool kPreciseSums = sizeof(Data) >= 4;

  struct Raw {
    Pack<Data, kVec> x[kParts], h_before[kParts], dh[kParts];
  };
  static constexpr int kInputs = 3 * kParts;
  struct Decoded {};  // nothing prepared: compose and advance read raw

  PartRows<Data, kVec, kParts> x, h, dh, dx;
  const void* h0;
  const void* dh_final;
  void* dh0;
  void* dnu_log_partial;
  void* dtheta_log_partial;
  void* dgamma_log_partial;
  Sum<Number, kPreciseSums> g_h[kVec];
  Sum<Real, kPreciseSums> g_x[kVec];

  __device__ LruBackward(const Params& params, const Sequence& seq, const Channels& channels)
      : Base(params.forward, seq, channels),
        x(params.forward.x, seq, !params.forward.layout.reverse, channels),
        h(params.forward.h, seq, !params.forward.layout.reverse, channels),
        dh(params.dh, seq, !params.forward.layout.reverse, channels),
        dx(params.dx, seq, !params.forward.layout.reverse, channels),
        h0(params.forward.h0),
        dh_final(params.dh_final),
        dh0(params.dh0),
        dnu_log_partial(params.dnu_log_partial),
        dtheta_log_partial(params.dtheta_log_partial),
        dgamma_log_partial(params.dgamma_log_partial) {}

  __device__ void prepare() { this->template prepare_alone<LruBackward::kSteps>(); }
  __device__ void prepare(char* shared, const WarpPosition& at,
                          const typename Base::Given& given) const {
    this->template prepare_together<LruBackward::kSteps>(shared, at, given);
  }
  __device__ void initial(Number (&s)[kVec]) const {
    Base::State::load(s, dh_final, seq.index, channels);
  }
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    Base::State::store(dh0, seq.index, channels, s);
  }

  // h_{t-1} is one step further along this scan. Past the last step it is h0 (see emit).
  template <class Source>
  __device__ Raw gather(Source source, int k, int last) const {
    Raw raw;
    x.gather(source, raw.x, k);
    h.gather(source, raw.h_before, min(k + 1, last));
    dh.gather(source, raw.dh, k);
    return raw;
  }

  __device__ Decoded decode(const Raw&) const { return {}; }

  /// `kept` is g.
  __device__ void advance(const Raw& raw, Decoded, Number (&s)[kVec], Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      kept[v] = Base::number(raw.dh, v) + s[v];
      s[v] = Base::stepped(conj(decay[v]), kept[v], Number{});
    }
  }

  __device__ void compose(const Raw& raw, Decoded, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Number g = map.x[v] + Base::number(raw.dh, v);
      map.x[v] = Base::stepped(conj(decay[v]), g, Number{});
    }
  }
  __device__ void finalize(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.a[v] = conj(chunk[v]);
    }
  }

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw& raw, Decoded, const Number (&g)[kVec]) {
    Number before[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      before[v] = Base::number(raw.h_before, v);
    }
    if (kLast && k + i == seq.length - 1) {
      Base::State::load(before, h0, seq.index, channels);
    }
    Number out[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      out[v] = gamma[v] * g[v];
      g_h[v].add(conj(g[v]) * before[v]);
      g_x[v].add(dot(g[v], Base::number(raw.x, v)));
    }
    Pack<Data, kVec> parts[kParts];
    Base::split(out, parts);
    dx.store(k, i, parts);
  }

  using Sums = Sum<Real, kPreciseSums>[kVec];

  /// The gradients that this thread's steps add up to.
  __device__ void add_up(Sums& dnu_log, Sums& dtheta_log, Sums& dgamma_log) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Number turned = Base::decayed(decay[v], g_h[v].value(), Number{});
      if constexpr (kComplex) {
        dnu_log[v].add(-nu[v] * turned.re);
        dtheta_log[v].add(-theta[v] * turned.im);
      } else {
        dnu_log[v].add(-nu[v] * turned);
      }
      dgamma_log[v].add(gamma[v] * g_x[v].value());
    }
  }

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane) const {
    Sums dnu_log, dtheta_log, dgamma_log;
    add_up(dnu_log, dtheta_log, dgamma_log);
    sum_over_warps(dnu_log, dnu_log_partial, row, channels, scratch, warp, warps, lane);
    sum_over_warps(dgamma_log, dgamma_log_partial, row, channels, scratch, warp, warps, lane);
    if constexpr (kComplex) {
      sum_over_warps(dtheta_log, dtheta_log_partial, row, channels, scratch, warp, warps, lane);
    }
  }
  __device__ void reduce_alone(int64_t row) const {
    Sums dnu_log, dtheta_log, dgamma_log;
    add_up(dnu_log, dtheta_log, dgamma_log);
    write_partial(dnu_log, dnu_log_partial, row, channels);
    write_partial(dgamma_log, dgamma_log_partial, row, channels);
    if constexpr (kComplex) {
      write_partial(dtheta_log, dtheta_log_partial, row, channels);
    }
  }
};

/// Rows that begin anywhere have one kernel for both regimes of a single-block scan: that of
/// several blocks an SM, which took 5 to 10 % less time in either.
template <class Data>
constexpr Regime lru_regime(Regime regime) {
  return kIsUnaligned<Data> ? with_one_single_block(regime) : regime;
}

/// Which kernels a data type has, and which of them params ask for.
template <class Data>
struct LruChoice {
  // Four bytes a thread and row: a warp's row of an input is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <bool kComplex>
  struct Forward : ScanRecurrence<Forward<kComplex>, LruParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op = LruForward<Rowed<Data>, kComplex, kPack, lru_regime<Rowed<Data>>(kRegime)>;
    static constexpr int kVec = LruChoice::kVec;
    static auto tensors(const LruParams& p) { return std::array{&p.x, &p.h}; }
  };
  template <bool kComplex>
  struct Backward : ScanRecurrence<Backward<kComplex>, LruBackwardParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op = LruBackward<Rowed<Data>, kComplex, kPack, lru_regime<Rowed<Data>>(kRegime)>;
    static constexpr int kVec = LruChoice::kVec;
    static auto tensors(const LruBackwardParams& p) {
      return std::array{&p.forward.x, &p.forward.h, &p.dh, &p.dx};
    }
  };

  /// Calls `visit` with whether the recurrence is complex, as a template argument of a lambda.
  template <class Visit>
  static cudaError_t choose(const LruParams& p, Visit visit) {
    return p.theta_log != nullptr ? visit.template operator()<true>()
                                  : visit.template operator()<false>();
  }
};

template <class Data>
cudaError_t LruKernels<Data>::forward_plan(const LruParams& p, ScanPlan* plan) {
  using Choice = LruChoice<Data>;
  return Choice::choose(
      p, [&]<bool kComplex>() { return Choice::template Forward<kComplex>::plan(p, plan); });
}

template <class Data>
cudaError_t LruKernels<Data>::forward(const LruParams& p, cudaStream_t stream) {
  using Choice = LruChoice<Data>;
  return Choice::choose(
      p, [&]<bool kComplex>() { return Choice::template Forward<kComplex>::launch(p, stream); });
}

template <class Data>
cudaError_t LruKernels<Data>::backward_plan(const LruBackwardParams& p, ScanPlan* plan) {
  using Choice = LruChoice<Data>;
  return Choice::choose(p.forward, [&]<bool kComplex>() {
    return Choice::template Backward<kComplex>::plan(p, plan);
  });
}

template <class Data>
cudaError_t LruKernels<Data>::backward(const LruBackwardParams& p, cudaStream_t stream) {
  using Choice = LruChoice<Data>;
  return Choice::choose(p.forward, [&]<bool kComplex>() {
    return Choice::template Backward<kComplex>::launch(p, stream);
  });
}

}  // namespace tidegate::kernels::scan
