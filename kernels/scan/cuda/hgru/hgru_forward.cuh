#pragma once

// HGRN's recurrence forward, as an Op of the scan engine (op.cuh).

#include "kernels/scan/cuda/hgru/hgru_base.cuh"

namespace tidegate::kernels::scan {

template <class Data_, class Gate_, bool kComplex_, int kVec_, Regime kRegime>
struct HgruForward
    : HgruBase<Data_, Gate_, kComplex_, kVec_, kRegime>,
      TileConfig<kComplex_ ? OpKind::kComplexHgru : OpKind::kHgru, Direction::kForward, kRegime> {
  using Base = HgruBase<Data_, Gate_, kComplex_, kVec_, kRegime>;
  using Base::kComplex, Base::kParts, Base::kVec, Base::channels, Base::rotation, Base::seq;
  using typename Base::Data;
  using typename Base::Gate;
  using typename Base::Math;
  using typename Base::Number;
  using typename Base::Real;
  using Params = HgruParams;
  static constexpr Pipelining kPipelining =
      kRegime == Regime::kMultiBlock && !kComplex ? Pipelining::kStagingBuffer : Pipelining::kNone;
  static constexpr bool kEmitWhileAdvancing = kComplex;

  struct Raw {
    Pack<Data, kVec> c[kParts];
    Pack<Gate, kVec> f;
  };
  struct Decoded {
    Real lambda[kVec];
    Number in[kVec];
  };

  PartRows<Data, kVec, kParts> c, h;
  Rows<Gate, kVec> f;
  const void* h0;
  void* h_final;
  bool silu;

  __device__ HgruForward(const Params& params, const Sequence& seq, const Channels& channels)
      : Base(params, seq, channels),
        c(params.c, seq, params.layout.reverse, channels),
        h(params.h, seq, params.layout.reverse, channels),
        f(params.f, seq, params.layout.reverse, channels),
        h0(params.h0),
        h_final(params.h_final),
        silu(params.activation == Activation::kSilu) {}

  __device__ void prepare()
    requires(kComplex_)
  {
    this->template prepare_alone<HgruForward::kSteps>();
  }
  __device__ void prepare(char* shared, const WarpPosition& at, Real given) const {
    this->template prepare_together<HgruForward::kSteps>(shared, at, given);
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
    c.gather(source, raw.c, k);
    source(raw.f, f, k);
    return raw;
  }

  /// lambda and (1 - lambda) * act(c).
  __device__ Decoded decode(const Raw& raw) const {
    Decoded d;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if constexpr (kFastDecode) {
        decode_fast(raw, v, d);
      } else {
        decode(raw, v, d);
      }
    }
    return d;
  }

  // Where instructions are what is short, two reciprocals take fewer than one for both.
  static constexpr bool kFastDecode =
      kPipelining == Pipelining::kStagingBuffer && sizeof(Data) == 2;

  __device__ void decode_fast(const Raw& raw, int v, Decoded& d) const {
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
    d.in[v] = (silu ? input_gate * Base::fast_sigmoid(x) : input_gate) * x;
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
      const Real open_im = sigmoids<Math>(x.im).pos;  // even without silu: branches would cost more
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

  __device__ void compose(const Raw&, const Decoded& d, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      compose_decay(map.a[v], d.lambda[v]);
      map.x[v] = fused(d.lambda[v], rotation[v].forward(map.x[v]), d.in[v]);
    }
  }
  __device__ void finalize(AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].finalize_forward(map.a[v]);
    }
  }

  __device__ void reduce(int64_t, void*, int, int, int) const {}
  __device__ void reduce_alone(int64_t) const {}
};

}  // namespace tidegate::kernels::scan
