#pragma once

// What both directions of HGRN's recurrence share:
//   lambda = gamma + (1 - gamma) * sigmoid(f)
//   h_t = lambda_t * rot * h_{t-1} + (1 - lambda_t) * act(c_t)
// with rot = exp(i theta), or 1 when real.

#include "kernels/common/cuda/forget_gate.cuh"
#include "kernels/common/cuda/rotation.cuh"
#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/cuda/engine/tiles.cuh"
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
  // A complex state takes too long through a chunk for the chain to wait.
  static constexpr bool kCarryByMap = kComplex;
  // A case of its own: its maps are single-float, and its backward pass emits as it advances and
  // finds SiLU from one fast sigmoid.
  static constexpr bool kReal16BitMultiBlock =
      kRegime == Regime::kMultiBlock && !kComplex && sizeof(Data) == 2;
  // Decays are at most one, and 16-bit data do not show one rounding a chunk.
  static constexpr bool kSingleFloatDecay = kReal16BitMultiBlock;
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
  __device__ Real angle(int v) const { return static_cast<const Real*>(theta)[channels.first + v]; }
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

  // All warps of a warp group scan the same channels: each turn is found by one of them. Where
  // several blocks share a multiprocessor, every warp finds them for itself.
  using Prepared = Complex<Real>[kVec][2][kWarpSize];
  static constexpr int kPreparedBytes =
      kComplex && kRegime != Regime::kSeveralBlocksPerSm ? sizeof(Prepared) : 0;

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

}  // namespace tidegate::kernels::scan
