#pragma once

// What both directions of HGRN's recurrence share:
//   lambda = gamma + (1 - gamma) * sigmoid(f)
//   h_t = lambda_t * rot * h_{t-1} + (1 - lambda_t) * act(c_t)
// with rot = exp(i theta), or 1 when real.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

/// The rotation of one channel by exp(i theta) a step. Real recurrences have none.
template <class Real, bool kComplex>
struct Rotation;

template <class Real>
struct Rotation<Real, false> {
  __device__ Real forward(Real h) const { return h; }
  __device__ Real backward(Real g) const { return g; }
  __device__ void finalize_forward(Precise<Real>&) const {}
  __device__ void finalize_backward(Precise<Real>&) const {}
};

template <class Real>
struct Rotation<Real, true> {
  Complex<Real> step;   // exp(i theta)
  Complex<Real> chunk;  // of a chunk of steps, from its own angle: more exact than a power

  static __device__ Complex<Real> turn(Real theta, int steps) {
    double s, c;
    exact_sincos(steps * static_cast<double>(theta), &s, &c);
    return {static_cast<Real>(c), static_cast<Real>(s)};
  }
  __device__ Complex<Real> forward(Complex<Real> h) const { return step * h; }
  __device__ Complex<Real> backward(Complex<Real> g) const { return conj(step) * g; }

  /// A chunk's decay is composed as a real product, in the real part; its rotation comes last.
  __device__ void finalize_forward(Precise<Complex<Real>>& a) const { finalize(a, chunk); }
  __device__ void finalize_backward(Precise<Complex<Real>>& a) const { finalize(a, conj(chunk)); }

 private:
  static __device__ void finalize(Precise<Complex<Real>>& a, Complex<Real> turn) {
    a = complex_of(real_part(a) * turn.re, real_part(a) * turn.im);
  }
};

/// Multiplies a step's decay into the product of a chunk, whose imaginary part is zero until it is
/// finalized.
template <class Real>
__device__ inline void compose_decay(Precise<Real>& a, Real decay) {
  a = a * decay;
}
template <class Real>
__device__ inline void compose_decay(Precise<Complex<Real>>& a, Real decay) {
  const Precise<Real> product = real_part(a) * decay;
  a.hi.re = product.hi;
  a.lo.re = product.lo;
}

/// Complex hgru has one tile configuration for both regimes of a single-block scan, and so one
/// kernel: that of one block an SM, whose warps find the turns together.
template <bool kComplex>
constexpr Regime hgru_regime(Regime regime) {
  return kComplex && regime == Regime::kSeveralBlocksPerSm ? Regime::kOneBlockPerSm : regime;
}

/// What forward and backward share: the types of one instantiation, the per-channel parameters and
/// the decay gate.
template <class Data_, class Gate_, bool kComplex_, int kVec_, Regime kRegime>
struct HgruBase : Parts<Data_, kComplex_, kVec_> {
  using Layout = Parts<Data_, kComplex_, kVec_>;
  using Layout::kComplex, Layout::kVec;
  using typename Layout::Data;
  using typename Layout::Real;
  using Gate = Gate_;
  using Math = GateMath<Real, sizeof(Data) == 2>;
  static constexpr bool kEqualDecays = false;
  // A complex state takes so long through a chunk, step by step, that the chain would wait for it.
  static constexpr bool kCarryByMap = kComplex;
  // Real 16-bit data in a multi-block scan are a case of their own: maps are single-float, and the
  // backward pass emits as it advances and finds SiLU from one fast sigmoid.
  static constexpr bool kReal16BitMultiBlock =
      kRegime == Regime::kMultiBlock && !kComplex && sizeof(Data) == 2;
  // Decays are at most one, and 16-bit data do not show one rounding a chunk.
  static constexpr bool kSingleFloatDecay = kReal16BitMultiBlock;
  // Polling takes 10 % less time forward and 5 backward at T = 131072 on an H100; linear_scan
  // would lose 4 %, and the others gain nothing.
  static constexpr bool kPollsForMaps = kReal16BitMultiBlock;
  // Bytes of one thread's elements of one row, the same for every input; zero where they differ.
  static constexpr int kPackBytes = sizeof(Data) == sizeof(Gate) ? sizeof(Data) * kVec : 0;

  Channels channels;
  Sequence seq;
  Real gamma[kVec];
  const void* theta;
  Rotation<Real, kComplex> rotation[kVec];  // prepared

  __device__ HgruBase(const HgruParams& params, const Sequence& seq, const Channels& channels)
      : channels(channels), seq(seq), theta(params.theta) {
    load_channels(gamma, params.gamma, channels, Real(0));
  }

  /// The angle of a step, of the thread's channel number v.
  __device__ Real angle(int v) const { return static_cast<const Real*>(theta)[channels.at(v)]; }
  static __device__ Complex<Real> turn(Real angle, int steps) {
    return Rotation<Real, true>::turn(angle, steps);
  }
  template <int kSteps>
  __device__ void prepare_alone() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].step = turn(angle(v), 1);
      rotation[v].chunk = turn(angle(v), kSteps);
    }
  }

  // All warps of a warp group scan the same channels: each turn is found by one of them.
  using Prepared = Complex<Real>[kVec][2][kWarpSize];
  static constexpr int kPreparedBytes = kComplex ? sizeof(Prepared) : 0;

  /// The angle of the first turn that the thread's warp prepares.
  __device__ Real given(const WarpPosition& at) const { return angle(min(at.warp / 2, kVec - 1)); }
  template <int kSteps>
  __device__ void prepare_together(char* shared, const WarpPosition& at, Real first) const {
    auto& turns = *reinterpret_cast<Prepared*>(shared);
#pragma unroll 1
    for (int i = at.warp; i < 2 * kVec; i += at.warps) {
      turns[i / 2][i % 2][at.lane] =
          turn(i == at.warp ? first : angle(i / 2), i % 2 == 0 ? 1 : kSteps);
    }
  }
  __device__ void take_prepared(const char* shared, int lane) {
    const auto& turns = *reinterpret_cast<const Prepared*>(shared);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      rotation[v].step = turns[v][0][lane];
      rotation[v].chunk = turns[v][1][lane];
    }
  }

  /// sigmoid(x) alone, to what 16-bit data can show. Where exp(-x) overflows, the reciprocal is
  /// zero, as it should be.
  static __device__ Real fast_sigmoid(Real x) {
    return Math::reciprocal(Real(1) + exp2_approx(x * -kLog2E));
  }
};

// ---- Forward, as an Op of the scan engine (engine/op.cuh) ----

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
  static constexpr bool kFindsNextWarpLate =
      kIsUnaligned<Data> && kRegime == Regime::kOneBlockPerSm && !kComplex;
  static constexpr bool kEmitWhileAdvancing = kComplex;

  struct Raw {
    Pack<Data, kVec> c[kParts];
    Pack<Gate, kVec> f;
  };
  static constexpr int kInputs = kParts + 1;
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

  // Where instructions bound the scan, two reciprocals take fewer than one shared reciprocal.
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
