#pragma once

// h_t = a_t * h_{t-1} + x_t as Ops of the walk (walk.cuh).

#include "kernels/scan/cuda/partial_sums.cuh"
#include "kernels/scan/cuda/walk.cuh"

namespace tidegate::kernels::scan {

/// Shapes of the walk.
template <bool kBackward, WalkUse kUse>
struct LinearScanShape : WalkShape<!kBackward && kUse != WalkUse::kManyBlocks ? 16 : 8, 2> {};

template <class Data, class Gate, int kVec_, WalkUse kUse>
struct LinearScanForward : WalkDefaults, LinearScanShape<false, kUse> {
  using Number = typename Register<Data>::type;
  using Real = RealOf<Number>;
  using State = StateRow<Number, kVec_, false>;
  using Params = LinearScanParams;
  static constexpr int kVec = kVec_;
  // Real states take little time through a run. Of complex ones maps have not been measured.
  static constexpr bool kCrossByMap = false;
  static constexpr bool kDecaysAlike = false;
  static constexpr bool kEmitsAtOnce = false;
  static constexpr int kPackBytes = sizeof(Data) == sizeof(Gate) ? sizeof(Data) * kVec : 0;

  struct Raw {
    Pack<Data, kVec> x;
    Pack<Gate, kVec> a;
  };
  struct Decoded {
    Number a[kVec], x[kVec];
  };

  static __host__ __device__ const SequenceLayout& layout(const Params& p) { return p.layout; }
  static __host__ __device__ int64_t channels(const Params& p) { return p.channels; }

  Lane lane;
  Sequence seq;
  Rows<Data, kVec> x, h;
  Rows<Gate, kVec> a;
  const void* h0;
  void* h_final;

  __device__ LinearScanForward(const Params& params, const Sequence& seq, const Lane& lane)
      : lane(lane),
        seq(seq),
        x(params.x, seq, params.layout.reverse, lane),
        h(params.h, seq, params.layout.reverse, lane),
        a(params.a, seq, params.layout.reverse, lane),
        h0(params.h0),
        h_final(params.h_final) {}

  __device__ void initial(Number (&s)[kVec]) const { State::load(s, h0, seq.index, lane); }
  __device__ void finish(const Number (&s)[kVec]) const {
    State::store(h_final, seq.index, lane, s);
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

  __device__ void fold(const Raw&, const Decoded& d, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.a[v] = map.a[v] * d.a[v];
      map.x[v] = fused(d.a[v], map.x[v], d.x[v]);
    }
  }
  __device__ void seal(AffineMap<Number, kVec>&) const {}

  __device__ void reduce(int64_t, void*, int, int, int) const {}
  __device__ void reduce_alone(int64_t) const {}
};

/// Walks the other way with p_t = dL/dh_{t-1} along the recurrence:
///   g_t = dh_t + p_{t+1},  p_t = conj(a_t) * g_t,  dx_t = g_t,  da_t = g_t * conj(h_{t-1})
/// For a constant decay, da is a sum over time.
template <class Data, class Gate, bool kConstant, int kVec_, WalkUse kUse>
struct LinearScanBackward : WalkDefaults, LinearScanShape<true, kUse> {
  using Number = typename Register<Data>::type;
  using Real = RealOf<Number>;
  using State = StateRow<Number, kVec_, false>;
  using Params = LinearScanBackwardParams;
  static constexpr int kVec = kVec_;
  // Real states take little time through a run. Of complex ones maps have not been measured.
  static constexpr bool kCrossByMap = false;
  static constexpr bool kDecaysAlike = false;
  static constexpr bool kEmitsAtOnce = false;
  static constexpr int kPackBytes = sizeof(Data) == sizeof(Gate) ? sizeof(Data) * kVec : 0;

  struct Raw {
    Pack<Data, kVec> h_before, dh;
    Pack<Gate, kVec> a;
  };
  struct Decoded {};  // nothing prepared: fold and advance read raw

  static __host__ __device__ const SequenceLayout& layout(const Params& p) {
    return p.forward.layout;
  }
  static __host__ __device__ int64_t channels(const Params& p) { return p.forward.channels; }

  Lane lane;
  Sequence seq;
  Rows<Data, kVec> h, dh, dx;
  Rows<Gate, kVec> a, da;
  const void* h0;
  const void* dh_final;
  void* dh0;
  void* da_partial;
  Sum<Number, sizeof(RealOf<Data>) >= 4> da_sum[kVec];

  __device__ LinearScanBackward(const Params& params, const Sequence& seq, const Lane& lane)
      : lane(lane),
        seq(seq),
        h(params.forward.h, seq, !params.forward.layout.reverse, lane),
        dh(params.dh, seq, !params.forward.layout.reverse, lane),
        dx(params.dx, seq, !params.forward.layout.reverse, lane),
        a(params.forward.a, seq, !params.forward.layout.reverse, lane),
        da(params.da, seq, !params.forward.layout.reverse, lane),
        h0(params.forward.h0),
        dh_final(params.dh_final),
        dh0(params.dh0),
        da_partial(params.da_partial) {}

  __device__ void initial(Number (&s)[kVec]) const { State::load(s, dh_final, seq.index, lane); }
  __device__ void finish(const Number (&s)[kVec]) const { State::store(dh0, seq.index, lane, s); }

  // h_{t-1} is one step further along this walk. Past the last step it is h0 (see emit).
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

  __device__ void fold(const Raw& raw, Decoded, AffineMap<Number, kVec>& map) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      map.a[v] = map.a[v] * conj_decay(raw, v);
      map.x[v] = conj_decay(raw, v) * (map.x[v] + raw.dh.get(v));
    }
  }
  __device__ void seal(AffineMap<Number, kVec>&) const {}

  template <bool kLast>
  __device__ void emit(int k, int i, const Raw& raw, Decoded, const Number (&g)[kVec]) {
    Number before[kVec], da_out[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      before[v] = raw.h_before.get(v);
    }
    if (kLast && k + i == seq.length - 1) {
      State::load(before, h0, seq.index, lane);
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

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane_index) const {
    if constexpr (kConstant) {
      sum_over_warps(da_sum, da_partial, row, lane, scratch, warp, warps, lane_index);
    }
  }
  __device__ void reduce_alone(int64_t row) const {
    if constexpr (kConstant) {
      write_partial(da_sum, da_partial, row, lane);
    }
  }
};

}  // namespace tidegate::kernels::scan
