#pragma once

// HGRN's recurrence backward, and which kernels hgru has for a data type and params ask for.

#include <array>

#include "kernels/scan/cuda/engine/launch.cuh"
#include "kernels/scan/cuda/hgru/hgru_forward.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

// ---- Backward, as an Op of the scan engine (engine/op.cuh) ----

/// Whether the backward pass takes a split ring: that of real 16-bit data and gates in a
/// multi-block scan.
template <class Data, class Gate, bool kComplex, Regime kRegime>
constexpr bool hgru_splits_ring() {
  return kRegime == Regime::kMultiBlock && !kComplex && sizeof(Data) == 2 && sizeof(Gate) == 2;
}

/// The backward pass scans the other way. Its state is p_t = dL/dh_{t-1} along the recurrence:
///   g_t = dh_t + p_{t+1},  p_t = lambda_t * conj(rot) * g_t,  p_T = dh_final,  dh0 = p_0
/// and everything else is local to a step:
///   dc = act'(c) * (1 - lambda) * g
///   dlambda = Re(conj(g) * (rot * h_{t-1} - act(c))),  df = dlambda * (1 - gamma) * s * (1 - s)
///   dgamma = sum dlambda * (1 - s),  dtheta = sum Re(conj(g) * i * lambda * rot * h_{t-1})
template <class Data_, class Gate_, bool kComplex_, int kVec_, Regime kRegime>
struct HgruBackward
    : HgruBase<Data_, Gate_, kComplex_, kVec_, kRegime>,
      TileConfig<hgru_splits_ring<Data_, Gate_, kComplex_, kRegime>() ? OpKind::kHgruSplitRing
                 : kComplex_                                          ? OpKind::kComplexHgru
                                                                      : OpKind::kHgru,
                 Direction::kBackward, kRegime> {
  using Base = HgruBase<Data_, Gate_, kComplex_, kVec_, kRegime>;
  using Base::kComplex, Base::kParts, Base::kVec, Base::channels, Base::rotation, Base::seq;
  using typename Base::Data;
  using typename Base::Gate;
  using typename Base::Math;
  using typename Base::Number;
  using typename Base::Real;
  using Params = HgruBackwardParams;
  static constexpr bool kEmitWhileAdvancing = Base::kReal16BitMultiBlock;
  static constexpr Pipelining kPipelining = hgru_splits_ring<Data, Gate, kComplex, kRegime>()
                                                ? Pipelining::kSplitRing
                                                : Pipelining::kNone;
  // A multi-block scan composes a chunk and then advances through it, so lambda is needed twice
  // (and found twice with a split ring). Single-block scans, which need it once, were slower with
  // it kept: docs/lab/scan.md.
  static constexpr bool kKeepsLambda = kRegime == Regime::kMultiBlock && !kComplex;
  using Gates = std::conditional_t<kRegime == Regime::kSeveralBlocksPerSm, Sigmoids<Real>,
                                   PackedSigmoids<Real>>;

  struct Raw {
    Pack<Data, kVec> c[kParts], h_before[kParts], dh[kParts];
    Pack<Gate, kVec> f;
  };
  static constexpr int kInputs = 3 * kParts + 1;
  struct Decoded {
    Real lambda[kVec];  // where it is kept
    Gates gate[kVec];
  };

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

  __device__ HgruBackward(const Params& params, const Sequence& seq, const Channels& channels)
      : Base(params.forward, seq, channels),
        c(params.forward.c, seq, !params.forward.layout.reverse, channels),
        h(params.forward.h, seq, !params.forward.layout.reverse, channels),
        dh(params.dh, seq, !params.forward.layout.reverse, channels),
        dc(params.dc, seq, !params.forward.layout.reverse, channels),
        f(params.forward.f, seq, !params.forward.layout.reverse, channels),
        df(params.df, seq, !params.forward.layout.reverse, channels),
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
  __device__ void prepare(char* shared, const WarpPosition& at, Real given) const {
    this->template prepare_together<HgruBackward::kSteps>(shared, at, given);
  }
  __device__ void initial(Number (&s)[kVec]) const {
    Base::State::load(s, dh_final, seq.index, channels);
  }
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    Base::State::store(dh0, seq.index, channels, s);
  }

  // h_{t-1} is one step further along this scan. After the last step it is h0 (see emit).
  template <class Source>
  __device__ Raw gather(Source source, int k, int last) const {
    Raw raw;
    gather_others(source, raw, k, last);
    gather_for_compose(source, raw, k);
    return raw;
  }
  static constexpr int kComposeBytes = sizeof(Raw::dh) + sizeof(Raw::f);
  static constexpr int kComposeInputs = kParts + 1;
  template <class Source>
  __device__ void gather_for_compose(Source& source, Raw& raw, int k) const {
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
        // forget_gate, with the sign of f at hand instead of read back from a packed gate.
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

  /// `kept` is g.
  __device__ void advance(const Raw& raw, const Decoded& d, Number (&s)[kVec],
                          Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      kept[v] = Base::number(raw.dh, v) + s[v];
      s[v] = lambda_of(d, v) * rotation[v].backward(kept[v]);
    }
  }

  __device__ void compose(const Raw& raw, const Decoded& d, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Real lambda = lambda_of(d, v);
      compose_decay(map.a[v], lambda);
      map.x[v] = lambda * rotation[v].backward(map.x[v] + Base::number(raw.dh, v));
    }
  }
  __device__ void finalize(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].finalize_backward(map.a[v]);
    }
  }

  __device__ void activate(Real x, Real* value, Real* derivative) const {
    // Both expressions are always computed: a branch would cost more.
    if constexpr (Base::kReal16BitMultiBlock) {
      const Real s = Base::fast_sigmoid(x);
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
      Base::State::load(before, h0, seq.index, channels);
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

  /// The gradients of one channel at one step.
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

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane) const {
    sum_over_warps(dgamma, dgamma_partial, row, channels, scratch, warp, warps, lane);
    if constexpr (kComplex) {
      sum_over_warps(dtheta, dtheta_partial, row, channels, scratch, warp, warps, lane);
    }
  }
  __device__ void reduce_alone(int64_t row) const {
    write_partial(dgamma, dgamma_partial, row, channels);
    if constexpr (kComplex) {
      write_partial(dtheta, dtheta_partial, row, channels);
    }
  }
};

// ---- The kernels of a data type ----

template <class Data>
struct HgruChoice {
  using Real = typename Register<Data>::type;
  // Four bytes a thread and row: a warp's row of an input is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate, bool kComplex>
  struct Forward : ScanRecurrence<Forward<Gate, kComplex>, HgruParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op =
        HgruForward<Rowed<Data>, Rowed<Gate>, kComplex, kPack, hgru_regime<kComplex>(kRegime)>;
    static constexpr int kVec = HgruChoice::kVec;
    static auto tensors(const HgruParams& p) { return std::array{&p.c, &p.f, &p.h}; }
  };
  template <class Gate, bool kComplex>
  struct Backward : ScanRecurrence<Backward<Gate, kComplex>, HgruBackwardParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op =
        HgruBackward<Rowed<Data>, Rowed<Gate>, kComplex, kPack, hgru_regime<kComplex>(kRegime)>;
    static constexpr int kVec = HgruChoice::kVec;
    static auto tensors(const HgruBackwardParams& p) {
      return std::array{&p.forward.c, &p.forward.f, &p.forward.h, &p.dh, &p.dc, &p.df};
    }
  };

  /// Calls `visit` with the gate's type and whether the recurrence is complex, as template
  /// arguments of a lambda.
  template <class Visit>
  static cudaError_t choose(const HgruParams& p, Visit visit) {
    const bool complex = p.theta != nullptr;
    if (element_size(p.f.dtype) == int64_t{sizeof(Data)}) {
      return complex ? visit.template operator()<Data, true>()
                     : visit.template operator()<Data, false>();
    }
    return complex ? visit.template operator()<Real, true>()
                   : visit.template operator()<Real, false>();
  }
};

template <class Data>
cudaError_t HgruKernels<Data>::forward_plan(const HgruParams& p, ScanPlan* plan) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool kComplex>() {
    return Choice::template Forward<Gate, kComplex>::plan(p, plan);
  });
}

template <class Data>
cudaError_t HgruKernels<Data>::forward(const HgruParams& p, cudaStream_t stream) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool kComplex>() {
    return Choice::template Forward<Gate, kComplex>::launch(p, stream);
  });
}

template <class Data>
cudaError_t HgruKernels<Data>::backward_plan(const HgruBackwardParams& p, ScanPlan* plan) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p.forward, [&]<class Gate, bool kComplex>() {
    return Choice::template Backward<Gate, kComplex>::plan(p, plan);
  });
}

template <class Data>
cudaError_t HgruKernels<Data>::backward(const HgruBackwardParams& p, cudaStream_t stream) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p.forward, [&]<class Gate, bool kComplex>() {
    return Choice::template Backward<Gate, kComplex>::launch(p, stream);
  });
}

}  // namespace tidegate::kernels::scan
