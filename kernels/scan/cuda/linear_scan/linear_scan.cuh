#pragma once

// h_t = a_t * h_{t-1} + x_t: its two Ops, which are the simplest ones to read, and which of their
// kernels params ask for.

#include <array>

#include "kernels/scan/cuda/engine/launch.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

template <class Data_, class Gate, int kVec_, Regime kRegime>
struct LinearScanForward : OpDefaults,
                           TileConfig<OpKind::kLinearScan, Direction::kForward, kRegime> {
  using Data = Data_;
  using Number = typename Register<Data>::type;
  using Real = RealOf<Number>;
  using State = StateRow<Number, kVec_, false>;
  using Params = LinearScanParams;
  static constexpr int kVec = kVec_;
  // A real state takes little time through a chunk. (For complex ones, maps have not been
  // measured.)
  static constexpr bool kCarryByMap = false;
  static constexpr bool kEqualDecays = false;
  static constexpr bool kEmitWhileAdvancing = false;
  static constexpr bool kFindsNextWarpLate =
      kIsUnaligned<Data> && kRegime == Regime::kOneBlockPerSm;
  static constexpr int kPackBytes = sizeof(Data) == sizeof(Gate) ? sizeof(Data) * kVec : 0;

  struct Raw {
    Pack<Data, kVec> x;
    Pack<Gate, kVec> a;
  };
  static constexpr int kInputs = 2;
  struct Decoded {
    Number a[kVec], x[kVec];
  };

  Channels channels;
  Sequence seq;
  Rows<Data, kVec> x, h;
  Rows<Gate, kVec> a;
  const void* h0;
  void* h_final;

  __device__ LinearScanForward(const Params& params, const Sequence& seq, const Channels& channels)
      : channels(channels),
        seq(seq),
        x(params.x, seq, params.layout.reverse, channels),
        h(params.h, seq, params.layout.reverse, channels),
        a(params.a, seq, params.layout.reverse, channels),
        h0(params.h0),
        h_final(params.h_final) {}

  __device__ void initial(Number (&s)[kVec]) const { State::load(s, h0, seq.index, channels); }
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    State::store(h_final, seq.index, channels, s);
  }

  template <class Source>
  __device__ Raw gather(Source source, int k, int /*last*/) const {
    Raw raw;
    source(raw.x, x, k);
    source(raw.a, a, k);
    return raw;
  }

  __device__ Decoded decode(const Raw& raw) const {
    Decoded d;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      d.a[v] = raw.a.get(v);
      d.x[v] = raw.x.get(v);
    }
    return d;
  }

  __device__ void advance(const Raw&, const Decoded& d, Number (&s)[kVec],
                          Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(d.a[v], s[v], d.x[v]);
      kept[v] = s[v];
    }
  }

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw&, const Decoded&, const Number (&kept)[kVec]) const {
    h.store(k, i, pack<Data, kVec>(kept));
  }

  __device__ void compose(const Raw&, const Decoded& d, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.a[v] = map.a[v] * d.a[v];
      map.x[v] = fused(d.a[v], map.x[v], d.x[v]);
    }
  }
  __device__ void finalize(AffineMap<Number, kVec>&) const {}

  __device__ void reduce(int64_t, void*, int, int, int) const {}
  __device__ void reduce_alone(int64_t) const {}
};

/// Scans the other way with p_t = dL/dh_{t-1} along the recurrence:
///   g_t = dh_t + p_{t+1},  p_t = conj(a_t) * g_t,  dx_t = g_t,  da_t = g_t * conj(h_{t-1})
/// For a constant decay, da is a sum over time.
template <class Data_, class Gate, bool kConstant, int kVec_, Regime kRegime>
struct LinearScanBackward : OpDefaults,
                            TileConfig<OpKind::kLinearScan, Direction::kBackward, kRegime> {
  using Data = Data_;
  using Number = typename Register<Data>::type;
  using Real = RealOf<Number>;
  using State = StateRow<Number, kVec_, false>;
  using Params = LinearScanBackwardParams;
  static constexpr int kVec = kVec_;
  // A real state takes little time through a chunk. (For complex ones, maps have not been
  // measured.)
  static constexpr bool kCarryByMap = false;
  static constexpr bool kEqualDecays = false;
  static constexpr bool kEmitWhileAdvancing = false;
  static constexpr int kPackBytes = sizeof(Data) == sizeof(Gate) ? sizeof(Data) * kVec : 0;

  struct Raw {
    Pack<Data, kVec> h_before, dh;
    Pack<Gate, kVec> a;
  };
  static constexpr int kInputs = 3;
  struct Decoded {};  // nothing prepared: compose and advance read raw

  Channels channels;
  Sequence seq;
  Rows<Data, kVec> h, dh, dx;
  Rows<Gate, kVec> a, da;
  const void* h0;
  const void* dh_final;
  void* dh0;
  void* da_partial;
  Sum<Number, sizeof(RealOf<Data>) >= 4> da_sum[kVec];

  __device__ LinearScanBackward(const Params& params, const Sequence& seq, const Channels& channels)
      : channels(channels),
        seq(seq),
        h(params.forward.h, seq, !params.forward.layout.reverse, channels),
        dh(params.dh, seq, !params.forward.layout.reverse, channels),
        dx(params.dx, seq, !params.forward.layout.reverse, channels),
        a(params.forward.a, seq, !params.forward.layout.reverse, channels),
        da(params.da, seq, !params.forward.layout.reverse, channels),
        h0(params.forward.h0),
        dh_final(params.dh_final),
        dh0(params.dh0),
        da_partial(params.da_partial) {}

  __device__ void initial(Number (&s)[kVec]) const {
    State::load(s, dh_final, seq.index, channels);
  }
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    State::store(dh0, seq.index, channels, s);
  }

  // h_{t-1} is one step further along this scan. Past the last step it is h0 (see emit).
  template <class Source>
  __device__ Raw gather(Source source, int k, int last) const {
    Raw raw;
    source(raw.h_before, h, min(k + 1, last));
    source(raw.dh, dh, k);
    source(raw.a, a, k);
    return raw;
  }

  static __device__ Number conj_decay(const Raw& raw, int v) {
    return conj(static_cast<Number>(raw.a.get(v)));
  }

  __device__ Decoded decode(const Raw&) const { return {}; }

  /// Keeps g.
  __device__ void advance(const Raw& raw, Decoded, Number (&s)[kVec], Number (&kept)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      kept[v] = raw.dh.get(v) + s[v];
      s[v] = conj_decay(raw, v) * kept[v];
    }
  }

  __device__ void compose(const Raw& raw, Decoded, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.a[v] = map.a[v] * conj_decay(raw, v);
      map.x[v] = conj_decay(raw, v) * (map.x[v] + raw.dh.get(v));
    }
  }
  __device__ void finalize(AffineMap<Number, kVec>&) const {}

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw& raw, Decoded, const Number (&g)[kVec]) {
    Number before[kVec], da_out[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      before[v] = raw.h_before.get(v);
    }
    if (kLast && k + i == seq.length - 1) {
      State::load(before, h0, seq.index, channels);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      da_out[v] = g[v] * conj(before[v]);
      if constexpr (kConstant) {
        da_sum[v].add(da_out[v]);
      }
    }
    dx.store(k, i, pack<Data, kVec>(g));
    if constexpr (!kConstant) {
      da.store(k, i, pack<Gate, kVec>(da_out));
    }
  }

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane) const {
    if constexpr (kConstant) {
      sum_over_warps(da_sum, da_partial, row, channels, scratch, warp, warps, lane);
    }
  }
  __device__ void reduce_alone(int64_t row) const {
    if constexpr (kConstant) {
      write_partial(da_sum, da_partial, row, channels);
    }
  }
};

/// Which kernels a data type has, and which of them params ask for.
template <class Data>
struct LinearScanChoice {
  using Number = typename Register<Data>::type;
  // Four bytes a thread and row (eight of complex64): a warp's row of an input is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate>
  struct Forward : ScanRecurrence<Forward<Gate>, LinearScanParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op = LinearScanForward<Rowed<Data>, Rowed<Gate>, kPack, kRegime>;
    static constexpr int kVec = LinearScanChoice::kVec;
    static auto tensors(const LinearScanParams& p) { return std::array{&p.x, &p.a, &p.h}; }
  };
  template <class Gate, bool kConstant>
  struct Backward : ScanRecurrence<Backward<Gate, kConstant>, LinearScanBackwardParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op = LinearScanBackward<Rowed<Data>, Rowed<Gate>, kConstant, kPack,
                                  with_one_single_block(kRegime)>;
    static constexpr int kVec = LinearScanChoice::kVec;
    static auto tensors(const LinearScanBackwardParams& p) {
      return std::array{&p.forward.a, &p.forward.h, &p.dh, &p.dx, &p.da};
    }
  };

  /// Calls `visit` with the gate's type and whether it is constant, as template arguments of a
  /// lambda.
  template <class Visit>
  static cudaError_t choose(const LinearScanParams& p, Visit visit) {
    if (element_size(p.a.dtype) == int64_t{sizeof(Data)}) {
      return p.a_is_constant ? visit.template operator()<Data, true>()
                             : visit.template operator()<Data, false>();
    }
    return p.a_is_constant ? visit.template operator()<Number, true>()
                           : visit.template operator()<Number, false>();
  }
};

template <class Data>
cudaError_t LinearScanKernels<Data>::forward_plan(const LinearScanParams& p, ScanPlan* plan) {
  using Choice = LinearScanChoice<Data>;
  return Choice::choose(
      p, [&]<class Gate, bool>() { return Choice::template Forward<Gate>::plan(p, plan); });
}

template <class Data>
cudaError_t LinearScanKernels<Data>::forward(const LinearScanParams& p, cudaStream_t stream) {
  using Choice = LinearScanChoice<Data>;
  return Choice::choose(
      p, [&]<class Gate, bool>() { return Choice::template Forward<Gate>::launch(p, stream); });
}

template <class Data>
cudaError_t LinearScanKernels<Data>::backward_plan(const LinearScanBackwardParams& p,
                                                   ScanPlan* plan) {
  using Choice = LinearScanChoice<Data>;
  return Choice::choose(p.forward, [&]<class Gate, bool kConstant>() {
    return Choice::template Backward<Gate, kConstant>::plan(p, plan);
  });
}

template <class Data>
cudaError_t LinearScanKernels<Data>::backward(const LinearScanBackwardParams& p,
                                              cudaStream_t stream) {
  using Choice = LinearScanChoice<Data>;
  return Choice::choose(p.forward, [&]<class Gate, bool kConstant>() {
    return Choice::template Backward<Gate, kConstant>::launch(p, stream);
  });
}

}  // namespace tidegate::kernels::scan
