#pragma once

// The linear recurrent unit's recurrence as Ops of the walk (walk.cuh):
//   h_t = lambda * h_{t-1} + gamma * x_t
//   lambda = exp(-exp(nu_log) + i exp(theta_log)), or real;  gamma = exp(gamma_log)
//
// The decay is the same at every step, so an error of it is made again and again: it is computed in
// double and kept as a sum of two numbers, and so is its power over a run of steps.

#include "kernels/common/cuda/rotation.cuh"
#include "kernels/scan/cuda/partial_sums.cuh"
#include "kernels/scan/cuda/parts.cuh"
#include "kernels/scan/cuda/walk.cuh"

namespace tidegate::kernels::scan {

/// What forward and backward share: the types of one instantiation and what follows from the
/// parameters.
template <class Data_, bool kComplex_, int kVec_, WalkUse kUse>
struct LruBase : Parts<Data_, kComplex_, kVec_> {
  using Layout = Parts<Data_, kComplex_, kVec_>;
  using Layout::kComplex, Layout::kVec;
  using typename Layout::Data;
  using typename Layout::Number;
  using typename Layout::Real;
  // A run's power of the decay is known beforehand: a state crosses it by two products.
  static constexpr bool kCrossByMap = true;
  static constexpr bool kDecaysAlike = true;
  static constexpr int kPackBytes = sizeof(Data) * kVec;

  Lane lane;
  Sequence seq;
  const void *nu_log, *theta_log, *gamma_log;
  // Prepared; zero in a carrier, which has no steps of its own.
  Real nu[kVec] = {}, theta[kVec] = {}, gamma[kVec] = {};
  Precise<Number> decay[kVec] = {}, run[kVec] = {};

  __device__ LruBase(const LruParams& params, const Sequence& seq, const Lane& lane)
      : lane(lane),
        seq(seq),
        nu_log(params.nu_log),
        theta_log(params.theta_log),
        gamma_log(params.gamma_log) {}

  /// What follows from the parameters of one channel.
  struct Decays {
    Precise<Number> decay, run;
    Real nu, theta, gamma;
  };
  using PreparedBoard = Decays[kVec][kWarpSize];
  // What modules give is a projection's whole output, whose lines are all some tile's. In a part of
  // a wider row the halves of complex numbers still make most neighbours one tensor's.
  static constexpr bool kBringsNeighbours = true;
  // Where several blocks share a multiprocessor, every warp for itself was faster.
  static constexpr int kPreparedBytes = kUse == WalkUse::kManyBlocks ? 0 : sizeof(PreparedBoard);

  /// The parameters of one channel, as they are given.
  struct Given {
    Real log_rate, log_angle, log_gamma;
  };
  __device__ Real parameter(const void* values, int v) const {
    return static_cast<const Real*>(values)[lane.channel + v];
  }
  /// Of the thread's channel number v.
  __device__ Given given(int v) const {
    return {parameter(nu_log, v), kComplex ? parameter(theta_log, v) : Real(0),
            parameter(gamma_log, v)};
  }
  /// Of the first channel that the thread's warp prepares.
  __device__ Given given(const Place& at) const { return given(min(at.warp, kVec - 1)); }

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
      const Complex<double> over_run = power<kSteps>(Complex<double>{re.hi, im.hi});
      found.decay = complex_of(in_words_of<Real>(re), in_words_of<Real>(im));
      found.run =
          complex_of(in_words_of<Real>({over_run.re, 0.0}), in_words_of<Real>({over_run.im, 0.0}));
      found.theta = static_cast<Real>(angle.hi);
    } else {
      found.decay = in_words_of<Real>(modulus);
      found.run = in_words_of<Real>({power<kSteps>(modulus.hi), 0.0});
      found.theta = Real(0);
    }
    found.gamma = static_cast<Real>(gamma.hi);
    // It is used as nu * lambda, which is zero there; infinity times zero would be NaN.
    found.nu = modulus.hi == 0.0 ? Real(0) : static_cast<Real>(rate.hi);
    return found;
  }
  __device__ void set_decays(int v, const Decays& found) {
    decay[v] = found.decay, run[v] = found.run;
    nu[v] = found.nu, theta[v] = found.theta, gamma[v] = found.gamma;
  }

  template <int kSteps>
  __device__ void prepare_alone() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      set_decays(v, find_decays<kSteps>(given(v)));
    }
  }
  /// All warps of a team walk the same channels: each is computed by one of them.
  template <int kSteps>
  __device__ void prepare_together(char* shared, const Place& at, const Given& first) const {
    auto& board = *reinterpret_cast<PreparedBoard*>(shared);
#pragma unroll 1
    for (int v = at.warp; v < kVec; v += at.warps) {
      board[v][at.lane] = find_decays<kSteps>(v == at.warp ? first : given(v));
    }
  }
  __device__ void take_prepared(const char* shared, int lane_index) {
    const auto& board = *reinterpret_cast<const PreparedBoard*>(shared);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      set_decays(v, board[v][lane_index]);
    }
  }

  /// a * s + x.
  static __device__ Number decayed(const Precise<Number>& a, Number s, Number x) {
    return fused(a.hi, s, fused(a.lo, s, x));
  }
  /// The same for a step of a run. States cross runs by a power that has both words, so an error is
  /// made kSteps times at most: of 16-bit data, far less than their last digit.
  static __device__ Number stepped(const Precise<Number>& a, Number s, Number x) {
    return sizeof(Data) < 4 ? fused(a.hi, s, x) : decayed(a, s, x);
  }
  /// A state through a run, without AffineMap's test for a state of zero: the chain is that much
  /// shorter. The test is for products of decays that have overflowed, and powers of a decay of at
  /// most one do not. They are finite, and a state of zero leaves x as it is, but for the sign of a
  /// zero. Or a parameter has made the decay NaN, in every word: then so is x, from the run's first
  /// step on.
  static __device__ void cross(const AffineMap<Number, kVec>& map, Number (&s)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = decayed(map.a[v], s[v], map.x[v]);
    }
  }
};

/// Shapes of the walk, tuned on an H200 (docs/kernels/scan_cuda_measured.md).
template <bool kBackward, WalkUse kUse>
struct LruShape;
template <>
struct LruShape<false, WalkUse::kManyBlocks> : WalkShape<8, 2> {};
template <>
struct LruShape<false, WalkUse::kOneBlock> : WalkShape<16, 3> {};
template <>
struct LruShape<false, WalkUse::kLinked> : WalkShape<24, 2> {};
template <WalkUse kUse>
struct LruShape<true, kUse> : WalkShape<kUse == WalkUse::kManyBlocks ? 4 : 8, 2> {};

template <class Data_, bool kComplex_, int kVec_, WalkUse kUse>
struct LruForward : LruBase<Data_, kComplex_, kVec_, kUse>, LruShape<false, kUse> {
  using Base = LruBase<Data_, kComplex_, kVec_, kUse>;
  using Base::kParts, Base::kVec, Base::lane, Base::seq, Base::decay, Base::gamma, Base::run;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = LruParams;
  static constexpr bool kEmitsAtOnce = true;  // or long runs would not fit into the registers
  // Runs of linked blocks would not fit; with several blocks a multiprocessor it gains nothing.
  static constexpr bool kTakesRuns = kUse == WalkUse::kOneBlock;

  struct Raw {
    Pack<Data, kVec> x[kParts];
  };
  struct Decoded {};  // nothing prepared: fold and advance read raw

  static __host__ __device__ const SequenceLayout& layout(const Params& p) { return p.layout; }
  static __host__ __device__ int64_t channels(const Params& p) { return p.channels; }

  PartRows<Data, kVec, kParts> x, h;
  const void* h0;
  void* h_final;

  __device__ LruForward(const Params& params, const Sequence& seq, const Lane& lane)
      : Base(params, seq, lane),
        x(params.x, seq, params.layout.reverse, lane),
        h(params.h, seq, params.layout.reverse, lane),
        h0(params.h0),
        h_final(params.h_final) {}

  __device__ void prepare() { this->template prepare_alone<LruForward::kSteps>(); }
  __device__ void prepare(char* shared, const Place& at, const typename Base::Given& given) const {
    this->template prepare_together<LruForward::kSteps>(shared, at, given);
  }
  __device__ void initial(Number (&s)[kVec]) const { Base::State::load(s, h0, seq.index, lane); }
  __device__ void finish(const Number (&s)[kVec]) const {
    Base::State::store(h_final, seq.index, lane, s);
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
  /// With both words: a state may take any number of steps, each a launch of its own.
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

  __device__ void fold(const Raw& raw, Decoded, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.x[v] = Base::stepped(decay[v], map.x[v], Base::number(raw.x, v));
    }
  }
  __device__ void seal(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.x[v] = gamma[v] * map.x[v];
      map.a[v] = run[v];
    }
  }

  __device__ void reduce(int64_t, void*, int, int, int) const {}
  __device__ void reduce_alone(int64_t) const {}
};

/// Walks the other way with p_t = dL/dh_{t-1} along the recurrence:
///   g_t = dh_t + p_{t+1},  p_t = conj(lambda) * g_t,  dx_t = gamma * g_t
/// and, with S the sum of conj(g_t) h_{t-1} over time:
///   dnu_log = -nu * Re(lambda S),  dtheta_log = -theta * Im(lambda S)
///   dgamma_log = gamma * sum Re(conj(g_t) x_t)
template <class Data_, bool kComplex_, int kVec_, WalkUse kUse>
struct LruBackward : LruBase<Data_, kComplex_, kVec_, kUse>, LruShape<true, kUse> {
  using Base = LruBase<Data_, kComplex_, kVec_, kUse>;
  using Base::decay, Base::gamma, Base::nu, Base::run, Base::theta;
  using Base::kComplex, Base::kParts, Base::kVec, Base::lane, Base::seq;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = LruBackwardParams;
  static constexpr bool kEmitsAtOnce = false;
  static constexpr bool kPreciseSums = sizeof(Data) >= 4;

  struct Raw {
    Pack<Data, kVec> x[kParts], h_before[kParts], dh[kParts];
  };
  struct Decoded {};  // nothing prepared: fold and advance read raw

  static __host__ __device__ const SequenceLayout& layout(const Params& p) {
    return p.forward.layout;
  }
  static __host__ __device__ int64_t channels(const Params& p) { return p.forward.channels; }

  PartRows<Data, kVec, kParts> x, h, dh, dx;
  const void* h0;
  const void* dh_final;
  void* dh0;
  void* dnu_log_partial;
  void* dtheta_log_partial;
  void* dgamma_log_partial;
  Sum<Number, kPreciseSums> g_h[kVec];
  Sum<Real, kPreciseSums> g_x[kVec];

  __device__ LruBackward(const Params& params, const Sequence& seq, const Lane& lane)
      : Base(params.forward, seq, lane),
        x(params.forward.x, seq, !params.forward.layout.reverse, lane),
        h(params.forward.h, seq, !params.forward.layout.reverse, lane),
        dh(params.dh, seq, !params.forward.layout.reverse, lane),
        dx(params.dx, seq, !params.forward.layout.reverse, lane),
        h0(params.forward.h0),
        dh_final(params.dh_final),
        dh0(params.dh0),
        dnu_log_partial(params.dnu_log_partial),
        dtheta_log_partial(params.dtheta_log_partial),
        dgamma_log_partial(params.dgamma_log_partial) {}

  __device__ void prepare() { this->template prepare_alone<LruBackward::kSteps>(); }
  __device__ void prepare(char* shared, const Place& at, const typename Base::Given& given) const {
    this->template prepare_together<LruBackward::kSteps>(shared, at, given);
  }
  __device__ void initial(Number (&s)[kVec]) const {
    Base::State::load(s, dh_final, seq.index, lane);
  }
  __device__ void finish(const Number (&s)[kVec]) const {
    Base::State::store(dh0, seq.index, lane, s);
  }

  // h_{t-1} is one step further along this walk. Past the last step it is h0 (see emit).
  template <class Source>
  __device__ Raw gather(Source source, int k, int last) const {
    Raw raw;
    x.gather(source, raw.x, k);
    h.gather(source, raw.h_before, min(k + 1, last));
    dh.gather(source, raw.dh, k);
    return raw;
  }

  __device__ Decoded decode(const Raw&) const { return {}; }

  /// Keeps g.
  __device__ void advance(const Raw& raw, Decoded, Number (&s)[kVec], Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      kept[v] = Base::number(raw.dh, v) + s[v];
      s[v] = Base::stepped(conj(decay[v]), kept[v], Number{});
    }
  }

  __device__ void fold(const Raw& raw, Decoded, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Number g = map.x[v] + Base::number(raw.dh, v);
      map.x[v] = Base::stepped(conj(decay[v]), g, Number{});
    }
  }
  __device__ void seal(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.a[v] = conj(run[v]);
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
      Base::State::load(before, h0, seq.index, lane);
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

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane_index) const {
    Sums dnu_log, dtheta_log, dgamma_log;
    add_up(dnu_log, dtheta_log, dgamma_log);
    sum_over_warps(dnu_log, dnu_log_partial, row, lane, scratch, warp, warps, lane_index);
    sum_over_warps(dgamma_log, dgamma_log_partial, row, lane, scratch, warp, warps, lane_index);
    if constexpr (kComplex) {
      sum_over_warps(dtheta_log, dtheta_log_partial, row, lane, scratch, warp, warps, lane_index);
    }
  }
  __device__ void reduce_alone(int64_t row) const {
    Sums dnu_log, dtheta_log, dgamma_log;
    add_up(dnu_log, dtheta_log, dgamma_log);
    write_partial(dnu_log, dnu_log_partial, row, lane);
    write_partial(dgamma_log, dgamma_log_partial, row, lane);
    if constexpr (kComplex) {
      write_partial(dtheta_log, dtheta_log_partial, row, lane);
    }
  }
};

}  // namespace tidegate::kernels::scan
