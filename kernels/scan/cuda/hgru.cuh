#pragma once

// HGRN's recurrence as Ops of the walk (walk.cuh):
//   lambda = gamma + (1 - gamma) * sigmoid(f)
//   h_t = lambda_t * rot * h_{t-1} + (1 - lambda_t) * act(c_t),   rot = exp(i theta), or 1 when
//   real

#include "kernels/common/cuda/forget_gate.cuh"
#include "kernels/common/cuda/rotation.cuh"
#include "kernels/scan/cuda/partial_sums.cuh"
#include "kernels/scan/cuda/parts.cuh"
#include "kernels/scan/cuda/walk.cuh"

namespace tidegate::kernels::scan {

/// The rotation of one channel by exp(i theta) a step. Real recurrences have none.
template <class Real, bool kComplex>
struct Rotation;

template <class Real>
struct Rotation<Real, false> {
  __device__ Real forward(Real h) const { return h; }
  __device__ Real backward(Real g) const { return g; }
  __device__ void seal_forward(Precise<Real>&) const {}
  __device__ void seal_backward(Precise<Real>&) const {}
};

template <class Real>
struct Rotation<Real, true> {
  Complex<Real> step;  // exp(i theta)
  Complex<Real> run;   // of a run of steps, from its own angle: more exact than a power

  static __device__ Complex<Real> turn(Real theta, int steps) {
    double s, c;
    exact_sincos(steps * static_cast<double>(theta), &s, &c);
    return {static_cast<Real>(c), static_cast<Real>(s)};
  }
  __device__ Complex<Real> forward(Complex<Real> h) const { return step * h; }
  __device__ Complex<Real> backward(Complex<Real> g) const { return conj(step) * g; }

  /// A run's decay is folded as a plain product, in the real part; its rotation comes last.
  __device__ void seal_forward(Precise<Complex<Real>>& a) const { seal(a, run); }
  __device__ void seal_backward(Precise<Complex<Real>>& a) const { seal(a, conj(run)); }

 private:
  static __device__ void seal(Precise<Complex<Real>>& a, Complex<Real> turn) {
    a = complex_of(real_part(a) * turn.re, real_part(a) * turn.im);
  }
};

/// A fold of a decay into the product of a run, whose imaginary part is zero until it is sealed.
template <class Real>
__device__ inline void fold_decay(Precise<Real>& a, Real decay) {
  a = a * decay;
}
template <class Real>
__device__ inline void fold_decay(Precise<Complex<Real>>& a, Real decay) {
  const Precise<Real> product = real_part(a) * decay;
  a.hi.re = product.hi;
  a.lo.re = product.lo;
}

/// What forward and backward share: the types of one instantiation, the per-channel parameters and
/// the decay gate.
template <class Data_, class Gate_, bool kComplex_, int kVec_, WalkUse kUse>
struct HgruBase : Parts<Data_, kComplex_, kVec_> {
  using Layout = Parts<Data_, kComplex_, kVec_>;
  using Layout::kComplex, Layout::kVec;
  using typename Layout::Data;
  using typename Layout::Real;
  using Gate = Gate_;
  using Math = GateMath<Real, sizeof(Data) == 2>;
  static constexpr bool kDecaysAlike = false;
  // A complex state takes too long through a run for the chain to wait.
  static constexpr bool kCrossByMap = kComplex;
  // Decays are at most one, and 16-bit data do not show one rounding a run.
  static constexpr bool kPlainMaps = kUse == WalkUse::kLinked && !kComplex && sizeof(Data) == 2;
  // Bytes of one thread's elements of one row, the same for every input; zero where they differ.
  static constexpr int kPackBytes = sizeof(Data) == sizeof(Gate) ? sizeof(Data) * kVec : 0;

  Lane lane;
  Sequence seq;
  Real gamma[kVec];
  const void* theta;
  Rotation<Real, kComplex> rotation[kVec];  // prepared

  __device__ HgruBase(const HgruParams& params, const Sequence& seq, const Lane& lane)
      : lane(lane), seq(seq), theta(params.theta) {
    load_channels(gamma, params.gamma, lane, Real(0));
  }

  /// Of a step, of the thread's channel number v.
  __device__ Real angle(int v) const { return static_cast<const Real*>(theta)[lane.channel + v]; }
  static __device__ Complex<Real> turn(Real angle, int steps) {
    return Rotation<Real, true>::turn(angle, steps);
  }
  template <int kSteps>
  __device__ void prepare_alone() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].step = turn(angle(v), 1);
      rotation[v].run = turn(angle(v), kSteps);
    }
  }

  // All warps of a team walk the same channels: each turn is found by one of them. Where several
  // blocks share a multiprocessor, every warp finds them for itself.
  using PreparedBoard = Complex<Real>[kVec][2][kWarpSize];
  static constexpr int kPreparedBytes =
      kComplex && kUse != WalkUse::kManyBlocks ? sizeof(PreparedBoard) : 0;

  /// Of the first turn that the thread's warp prepares.
  __device__ Real given(const Place& at) const { return angle(min(at.warp / 2, kVec - 1)); }
  template <int kSteps>
  __device__ void prepare_together(char* shared, const Place& at, Real first) const {
    auto& board = *reinterpret_cast<PreparedBoard*>(shared);
#pragma unroll 1
    for (int i = at.warp; i < 2 * kVec; i += at.warps) {
      board[i / 2][i % 2][at.lane] =
          turn(i == at.warp ? first : angle(i / 2), i % 2 == 0 ? 1 : kSteps);
    }
  }
  __device__ void take_prepared(const char* shared, int lane_index) {
    const auto& board = *reinterpret_cast<const PreparedBoard*>(shared);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].step = board[v][0][lane_index];
      rotation[v].run = board[v][1][lane_index];
    }
  }

  /// sigmoid(x) alone, to what 16-bit data can show. Where exp(-x) overflows, the reciprocal is
  /// zero, as it should be.
  static __device__ Real quick_sigmoid(Real x) {
    return Math::reciprocal(Real(1) + exp2_approx(x * -kLog2E));
  }
};

/// Shapes of the walk, tuned on an H200 (docs/kernels/scan_cuda_measured.md).
template <bool kBackward, bool kComplex, WalkUse kUse>
struct HgruShape;
template <WalkUse kUse>
struct HgruShape<false, false, kUse> : WalkShape<kUse == WalkUse::kManyBlocks ? 8 : 16, 2> {};
template <>
struct HgruShape<false, false, WalkUse::kLinked> : WalkShape<16, 1> {};
template <>
struct HgruShape<true, false, WalkUse::kManyBlocks> : WalkShape<4, 3> {};
template <>
struct HgruShape<true, false, WalkUse::kOneBlock> : WalkShape<8, 3> {};
template <>
struct HgruShape<true, false, WalkUse::kLinked> : WalkShape<12, 2> {};
template <WalkUse kUse>
struct HgruShape<false, true, kUse> : WalkShape<8, 2> {};
template <WalkUse kUse>
struct HgruShape<true, true, kUse> : WalkShape<4, 3> {};
/// Of linked runs that are split.
struct HgruSplitShape : WalkShape<12, 3> {};

/// Whether linked runs of the backward pass are split: those of 16-bit data and gates.
template <class Data, class Gate, bool kComplex, WalkUse kUse>
constexpr bool hgru_splits_runs() {
  return kUse == WalkUse::kLinked && !kComplex && sizeof(Data) == 2 && sizeof(Gate) == 2;
}

template <class Data_, class Gate_, bool kComplex_, int kVec_, WalkUse kUse>
struct HgruForward : HgruBase<Data_, Gate_, kComplex_, kVec_, kUse>,
                     HgruShape<false, kComplex_, kUse> {
  using Base = HgruBase<Data_, Gate_, kComplex_, kVec_, kUse>;
  using Base::kComplex, Base::kParts, Base::kVec, Base::lane, Base::rotation, Base::seq;
  using typename Base::Data;
  using typename Base::Gate;
  using typename Base::Math;
  using typename Base::Number;
  using typename Base::Real;
  using Params = HgruParams;
  static constexpr LookAhead kLookAhead =
      kUse == WalkUse::kLinked && !kComplex ? LookAhead::kParks : LookAhead::kNone;
  static constexpr bool kEmitsAtOnce = kComplex;

  struct Raw {
    Pack<Data, kVec> c[kParts];
    Pack<Gate, kVec> f;
  };
  struct Decoded {
    Real lambda[kVec];
    Number in[kVec];
  };

  static __host__ __device__ const SequenceLayout& layout(const Params& p) { return p.layout; }
  static __host__ __device__ int64_t channels(const Params& p) { return p.channels; }

  PartRows<Data, kVec, kParts> c, h;
  Rows<Gate, kVec> f;
  const void* h0;
  void* h_final;
  bool silu;

  __device__ HgruForward(const Params& params, const Sequence& seq, const Lane& lane)
      : Base(params, seq, lane),
        c(params.c, seq, params.layout.reverse, lane),
        h(params.h, seq, params.layout.reverse, lane),
        f(params.f, seq, params.layout.reverse, lane),
        h0(params.h0),
        h_final(params.h_final),
        silu(params.activation == Activation::kSilu) {}

  __device__ void prepare()
    requires(kComplex_)
  {
    this->template prepare_alone<HgruForward::kSteps>();
  }
  __device__ void prepare(char* shared, const Place& at, Real given) const {
    this->template prepare_together<HgruForward::kSteps>(shared, at, given);
  }
  __device__ void initial(Number (&s)[kVec]) const { Base::State::load(s, h0, seq.index, lane); }
  __device__ void finish(const Number (&s)[kVec]) const {
    Base::State::store(h_final, seq.index, lane, s);
  }

  template <class Source>
  __device__ Raw gather(Source source, int k, int /*last*/) const {
    Raw raw;
    c.gather(source, raw.c, k);
    source(raw.f, f, k);
    return raw;
  }

  /// lambda and (1 - lambda) * act(c).
  __device__ Decoded decode(const Raw& raw) const {
    Decoded d;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if constexpr (kQuick) {
        decode_quickly(raw, v, d);
      } else {
        decode(raw, v, d);
      }
    }
    return d;
  }

  // Where instructions are what is short, two reciprocals take fewer than one for both.
  static constexpr bool kQuick = kLookAhead == LookAhead::kParks && sizeof(Data) == 2;

  __device__ void decode_quickly(const Raw& raw, int v, Decoded& d) const {
    const Real gamma = this->gamma[v];
    const Real one_minus_gamma = Real(1) - gamma;
    const Number x = Base::number(raw.c, v);
    const Real f = raw.f.get(v);
    const Real e = Math::exp_minus_abs(f);
    const Real larger = Math::reciprocal(Real(1) + e);  // of the two sigmoids
    const Real smaller = e * larger;
    const bool open = f > Real(0);
    const Real input_gate = one_minus_gamma * (open ? smaller : larger);  // 1 - lambda
    d.lambda[v] = open ? Real(1) - input_gate : fused(one_minus_gamma, smaller, gamma);
    d.in[v] = (silu ? input_gate * Base::quick_sigmoid(x) : input_gate) * x;
  }

  /// One reciprocal for the gate's sigmoids and the (real part's) activation: with A = gate.sum and
  /// B = act.sum, both in [1, 2], 1/A and 1/B follow from 1/(A B).
  __device__ void decode(const Raw& raw, int v, Decoded& d) const {
    const Real gamma = this->gamma[v];
    const Real one_minus_gamma = Real(1) - gamma;
    const Number x = Base::number(raw.c, v);
    const Real f = raw.f.get(v);
    const SigmoidRatio<Real> gate = sigmoid_ratio<Math>(f);
    const SigmoidRatio<Real> act = sigmoid_ratio<Math>(real_part(x));
    const Real r = Math::reciprocal(gate.sum * act.sum);
    const Real gate_scale = act.sum * r;
    const bool open = f > Real(0);
    d.lambda[v] = forget_gate(gamma, open, (open ? gate.neg : gate.pos) * gate_scale);
    const Real scale_re = one_minus_gamma * gate.neg * (silu ? act.pos * r : gate_scale);
    if constexpr (kComplex) {
      const Real open_im = sigmoids<Math>(x.im).pos;  // always: branches would cost more
      const Real im = silu ? x.im * open_im : x.im;
      d.in[v] = {scale_re * x.re, one_minus_gamma * gate.neg * gate_scale * im};
    } else {
      d.in[v] = scale_re * x;
    }
  }

  static __device__ Real real_part(Real x) { return x; }
  static __device__ Real real_part(Complex<Real> x) { return x.re; }

  __device__ void advance(const Raw&, const Decoded& d, Number (&s)[kVec],
                          Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(d.lambda[v], rotation[v].forward(s[v]), d.in[v]);
      kept[v] = s[v];
    }
  }

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw&, const Decoded&, const Number (&kept)[kVec]) const {
    Pack<Data, kVec> out[kParts];
    Base::split(kept, out);
    h.store(k, i, out);
  }

  __device__ void fold(const Raw&, const Decoded& d, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      fold_decay(map.a[v], d.lambda[v]);
      map.x[v] = fused(d.lambda[v], rotation[v].forward(map.x[v]), d.in[v]);
    }
  }
  __device__ void seal(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].seal_forward(map.a[v]);
    }
  }

  __device__ void reduce(int64_t, void*, int, int, int) const {}
  __device__ void reduce_alone(int64_t) const {}
};

/// The backward pass walks the other way. Its state is p_t = dL/dh_{t-1} along the recurrence:
///   g_t = dh_t + p_{t+1},  p_t = lambda_t * conj(rot) * g_t,  p_T = dh_final,  dh0 = p_0
/// and everything else is local to a step:
///   dc = act'(c) * (1 - lambda) * g
///   dlambda = Re(conj(g) * (rot * h_{t-1} - act(c))),  df = dlambda * (1 - gamma) * s * (1 - s)
///   dgamma = sum dlambda * (1 - s),  dtheta = sum Re(conj(g) * i * lambda * rot * h_{t-1})
template <class Data_, class Gate_, bool kComplex_, int kVec_, WalkUse kUse>
struct HgruBackward : HgruBase<Data_, Gate_, kComplex_, kVec_, kUse>,
                      std::conditional_t<hgru_splits_runs<Data_, Gate_, kComplex_, kUse>(),
                                         HgruSplitShape, HgruShape<true, kComplex_, kUse>> {
  using Base = HgruBase<Data_, Gate_, kComplex_, kVec_, kUse>;
  using Base::kComplex, Base::kParts, Base::kVec, Base::lane, Base::rotation, Base::seq;
  using typename Base::Data;
  using typename Base::Gate;
  using typename Base::Math;
  using typename Base::Number;
  using typename Base::Real;
  using Params = HgruBackwardParams;
  static constexpr bool kEmitsAtOnce = Base::kPlainMaps;
  static constexpr LookAhead kLookAhead =
      hgru_splits_runs<Data, Gate, kComplex, kUse>() ? LookAhead::kSplits : LookAhead::kNone;
  // A run is folded and then walked, so lambda is needed twice (found twice, if runs are split).
  // Whole walks, which need it once, were slower with it kept: docs/kernels/scan_cuda_measured.md.
  static constexpr bool kKeepsLambda = kUse == WalkUse::kLinked && !kComplex;
  using Gates =
      std::conditional_t<kUse == WalkUse::kManyBlocks, Sigmoids<Real>, PackedSigmoids<Real>>;

  struct Raw {
    Pack<Data, kVec> c[kParts], h_before[kParts], dh[kParts];
    Pack<Gate, kVec> f;
  };
  struct Decoded {
    Real lambda[kVec];  // where it is kept
    Gates gate[kVec];
  };

  static __host__ __device__ const SequenceLayout& layout(const Params& p) {
    return p.forward.layout;
  }
  static __host__ __device__ int64_t channels(const Params& p) { return p.forward.channels; }

  PartRows<Data, kVec, kParts> c, h, dh, dc;
  Rows<Gate, kVec> f, df;
  const void* h0;
  const void* dh_final;
  void* dh0;
  void* dgamma_partial;
  void* dtheta_partial;
  bool silu;
  Sum<Real, sizeof(Data) >= 4> dgamma[kVec];
  Sum<Real, sizeof(Data) >= 4> dtheta[kVec];

  __device__ HgruBackward(const Params& params, const Sequence& seq, const Lane& lane)
      : Base(params.forward, seq, lane),
        c(params.forward.c, seq, !params.forward.layout.reverse, lane),
        h(params.forward.h, seq, !params.forward.layout.reverse, lane),
        dh(params.dh, seq, !params.forward.layout.reverse, lane),
        dc(params.dc, seq, !params.forward.layout.reverse, lane),
        f(params.forward.f, seq, !params.forward.layout.reverse, lane),
        df(params.df, seq, !params.forward.layout.reverse, lane),
        h0(params.forward.h0),
        dh_final(params.dh_final),
        dh0(params.dh0),
        dgamma_partial(params.dgamma_partial),
        dtheta_partial(params.dtheta_partial),
        silu(params.forward.activation == Activation::kSilu) {}

  __device__ void prepare()
    requires(kComplex_)
  {
    this->template prepare_alone<HgruBackward::kSteps>();
  }
  __device__ void prepare(char* shared, const Place& at, Real given) const {
    this->template prepare_together<HgruBackward::kSteps>(shared, at, given);
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
    gather_others(source, raw, k, last);
    gather_for_fold(source, raw, k);
    return raw;
  }
  static constexpr int kFoldBytes = sizeof(Raw::dh) + sizeof(Raw::f);
  template <class Source>
  __device__ void gather_for_fold(Source& source, Raw& raw, int k) const {
    dh.gather(source, raw.dh, k);
    source(raw.f, f, k);
  }
  static constexpr int kOtherBytes = sizeof(Raw::c) + sizeof(Raw::h_before);
  template <class Source>
  __device__ void gather_others(Source& source, Raw& raw, int k, int last) const {
    c.gather(source, raw.c, k);
    h.gather(source, raw.h_before, min(k + 1, last));
  }

  __device__ Decoded decode(const Raw& raw) const {
    Decoded d;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Real f = raw.f.get(v);
      find_sigmoids<Math>(f, &d.gate[v]);
      if constexpr (kKeepsLambda) {
        const Real gamma = this->gamma[v];
        const Real part = Real(1) - gamma, smaller = fabs(d.gate[v].smaller);
        d.lambda[v] = f > Real(0) ? fused(-part, smaller, Real(1)) : fused(part, smaller, gamma);
      }
    }
    return d;
  }

  __device__ Real lambda_of(const Decoded& d, int v) const {
    return kKeepsLambda ? d.lambda[v] : forget_gate(this->gamma[v], d.gate[v]);
  }

  /// Keeps g.
  __device__ void advance(const Raw& raw, const Decoded& d, Number (&s)[kVec],
                          Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      kept[v] = Base::number(raw.dh, v) + s[v];
      s[v] = lambda_of(d, v) * rotation[v].backward(kept[v]);
    }
  }

  __device__ void fold(const Raw& raw, const Decoded& d, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Real lambda = lambda_of(d, v);
      fold_decay(map.a[v], lambda);
      map.x[v] = lambda * rotation[v].backward(map.x[v] + Base::number(raw.dh, v));
    }
  }
  __device__ void seal(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].seal_backward(map.a[v]);
    }
  }

  __device__ void activate(Real x, Real* value, Real* derivative) const {
    // Always: branches would cost more.
    if constexpr (kKeepsLambda && sizeof(Data) == 2) {
      const Real s = Base::quick_sigmoid(x);
      *value = x * s;
      *derivative = fused(*value, Real(1) - s, s);
    } else {
      silu_with_derivative<Math>(x, value, derivative);
    }
    *value = silu ? *value : x;
    *derivative = silu ? *derivative : Real(1);
  }

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw& raw, const Decoded& d, const Number (&g)[kVec]) {
    Number before[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      before[v] = Base::number(raw.h_before, v);
    }
    if (kLast && k + i == seq.length - 1) {
      Base::State::load(before, h0, seq.index, lane);
    }
    Number dc_out[kVec];
    Real df_out[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      step(raw, d.gate[v], v, before[v], g[v], dc_out[v], df_out[v]);
    }
    Pack<Data, kVec> dc_parts[kParts];
    Base::split(dc_out, dc_parts);
    dc.store(k, i, dc_parts);
    df.store(k, i, pack<Gate, kVec>(df_out));
  }

  /// One channel of one step.
  __device__ void step(const Raw& raw, Gates gate, int v, Number before, Number g, Number& dc_out,
                       Real& df_out) {
    const Sigmoids<Real> sig = gate.both();
    const Real input_gate = (Real(1) - this->gamma[v]) * sig.neg;  // 1 - lambda
    const Number x = Base::number(raw.c, v);
    Number u, slope;
    if constexpr (kComplex) {
      activate(x.re, &u.re, &slope.re);
      activate(x.im, &u.im, &slope.im);
      dc_out = {input_gate * g.re * slope.re, input_gate * g.im * slope.im};
    } else {
      activate(x, &u, &slope);
      dc_out = input_gate * g * slope;
    }
    const Number turned = rotation[v].forward(before);
    const Real dlambda = dot(g, turned - u);
    df_out = dlambda * (input_gate * sig.pos);
    dgamma[v].add(dlambda * sig.neg);
    if constexpr (kComplex) {
      dtheta[v].add(forget_gate(this->gamma[v], gate) * (g.im * turned.re - g.re * turned.im));
    }
  }

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane_index) const {
    sum_over_warps(dgamma, dgamma_partial, row, lane, scratch, warp, warps, lane_index);
    if constexpr (kComplex) {
      sum_over_warps(dtheta, dtheta_partial, row, lane, scratch, warp, warps, lane_index);
    }
  }
  __device__ void reduce_alone(int64_t row) const {
    write_partial(dgamma, dgamma_partial, row, lane);
    if constexpr (kComplex) {
      write_partial(dtheta, dtheta_partial, row, lane);
    }
  }
};

}  // namespace tidegate::kernels::scan
