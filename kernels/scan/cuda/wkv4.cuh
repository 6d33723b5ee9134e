#pragma once

// RWKV-4's token mixing as Ops of the walk (walk.cuh), with runs of their own: nothing but a map
// depends on what enters a run, so no exponential is taken on the way from warp to warp
// (docs/kernels/wkv4.md).

#include "kernels/scan/cuda/partial_sums.cuh"
#include "kernels/scan/cuda/walk.cuh"
#include "kernels/scan/cuda/wkv4_maps.cuh"
#include "kernels/scan/cuda/wkv4_plain.cuh"

namespace tidegate::kernels {

/// A token's weight with its bonus, beside sums whose gauge is `distance` below it. Above exp(40)
/// the sums, at most a few million of the largest weight, are lost in rounding anyway.
__device__ inline float bonus_weight(float distance) { return exp_of(fminf(distance, 40.0f)); }

/// What both directions share.
template <class Data_, int kVec_>
struct Wkv4Base {
  using Data = Data_;
  using Real = typename Register<Data>::type;
  using Number = Wkv4State<Real>;
  static constexpr int kVec = kVec_;
  static constexpr bool kCrossByMap = true;
  static constexpr bool kEmitsAtOnce = false;
  static constexpr int kPackBytes = sizeof(Data) * kVec;
  static constexpr bool kOwnsRun = true;

  Lane lane;
  Sequence seq;
  Rows<Data, kVec> k, v;
  Real w[kVec], u[kVec];
  const void* state;

  __device__ Wkv4Base(const Wkv4Params& p, const Sequence& seq, const Lane& lane, bool backwards)
      : lane(lane),
        seq(seq),
        k(p.k, seq, backwards, lane),
        v(p.v, seq, backwards, lane),
        state(p.state) {
    load_channels(w, p.w, lane, Real(0));
    load_channels(u, p.u, lane, Real(0));
  }

  __device__ void prepare() const {}

  /// Kind::store(states, n, D, channel, s) and the like, for every channel of the lane.
  __device__ void store_states(void* states, int64_t row, const Number (&s)[kVec]) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      store_wkv4_state(states, row, lane.channels, lane.channel + c, s[c]);
    }
  }
  __device__ Number load_state(const void* states, int64_t row, int c) const {
    return load_wkv4_state<Real>(states, row, lane.channels, lane.channel + c);
  }
};

template <WalkUse kUse>
struct Wkv4ForwardShape : WalkShape<kUse == WalkUse::kShort ? 8 : 16, 2> {};

template <class Data_, int kVec_, WalkUse kUse>
struct Wkv4Forward : Wkv4Base<Data_, kVec_>, Wkv4ForwardShape<kUse> {
  using Base = Wkv4Base<Data_, kVec_>;
  using Base::kVec, Base::lane, Base::seq, Base::w, Base::u;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = Wkv4Params;
  using Map = AffineMap<Number, kVec>;
  static constexpr int kSteps = Wkv4ForwardShape<kUse>::kSteps;

  struct Raw {
    Pack<Data, kVec> k, v;
  };

  static __host__ __device__ const SequenceLayout& layout(const Params& p) { return p.layout; }
  static __host__ __device__ int64_t channels(const Params& p) { return p.channels; }
  static cudaError_t launch_plain(const Params& p, cudaStream_t stream) {
    return launch_wkv4_plain<Data>(p, stream);
  }

  Rows<Data, kVec> o;
  void* final_state;
  void* saved;
  int64_t saved_base;  // row of the batch's first saved state

  __device__ Wkv4Forward(const Params& p, const Sequence& seq, const Lane& lane)
      : Base(p, seq, lane, false),
        o(p.o, seq, false, lane),
        final_state(p.final_state),
        saved(p.saved),
        saved_base(saved_row(p.layout, {seq.index, seq.batch, 0, 0}, 0)) {}

  /// An empty sequence hands on what it was given.
  __device__ void initial(Number (&s)[kVec]) const {
    Pack<Data, kVec> first = {};
    if (seq.length > 0) {
      first = load_streaming<Data, kVec>(this->k.at(0));
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if (seq.length > 0) {
        s[c] = initial_wkv4_state<Real>(this->state, seq.index, lane.channels, lane.channel + c,
                                        first.get(c));
      } else {
        s[c] = {};
        if (this->state != nullptr) {
          s[c] = this->load_state(this->state, seq.index, c);
        }
      }
    }
  }
  __device__ void finish(const Number (&s)[kVec]) const {
    this->store_states(final_state, seq.index, s);
  }
  __device__ void save(int step, const Number (&s)[kVec]) const {
    this->store_states(saved, saved_base + (seq.start + step) / kWkv4SavedEvery, s);
  }

  template <class Source>
  __device__ Raw gather(Source source, int step, int /*last*/) const {
    Raw raw;
    source(raw.k, this->k, step);
    source(raw.v, this->v, step);
    return raw;
  }

  struct Run {
    using Op = Wkv4Forward;
    Raw raw[kSteps];
    Pack<Data, kVec> o[kSteps];

    template <class Ring>
    __device__ void decode(const Op& op, const Ring& ring, int stage, int, int) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        raw[i] = ring.take(op, stage, i);
      }
    }

    /// The run's own sums after its last step, scaled by its largest weight there.
    template <class Ring>
    __device__ void fold(const Op& op, const Ring&, int, Map& map) const {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        Real top = -1e30f;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          top = larger(top, fused(op.w[c], Real(i + 1 - kSteps), raw[i].k.get(c)));
        }
        Number sums = {0.0f, 0.0f, top, kSteps * op.w[c]};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          // The keys' difference first: near the top it is exact, however large they are.
          const Real weight = exp_of(fused(op.w[c], Real(i + 1 - kSteps), raw[i].k.get(c) - top));
          sums.y = fused(weight, raw[i].v.get(c), sums.y);
          sums.z += weight;
        }
        map.sums[c] = sums;
      }
    }

    template <class Ring>
    __device__ void advance(const Op& op, const Ring&, int, int k, int end, Number (&s)[kVec]) {
      const bool saves = op.saved != nullptr;
      if (k + kSteps <= end) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          step(op, saves, k, i, end, s);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (k + i < end) {
            step(op, saves, k, i, end, s);
          }
        }
      }
      if (k < end && end <= k + kSteps) {
        op.finish(s);
      }
    }

    /// The gauge's second word takes all decay of a run, until a token leads: beside a gauge of 80,
    /// rounding at every token would add up to 1e-4.
    __device__ void step(const Op& op, bool saves, int k, int i, int end, Number (&s)[kVec]) {
      if (saves && (end - k - i) % kWkv4SavedEvery == 0 && k + i > 0) {
        op.save(k + i, s);
      }
      Real out[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real key = raw[i].k.get(c), value = raw[i].v.get(c);
        const Real above = key - s[c].m;
        const Real bonus = bonus_weight((above - s[c].rest) + op.u[c]);
        out[c] = fused(bonus, value, s[c].y) * reciprocal(s[c].z + bonus);
        s[c].rest -= op.w[c];
        const Real distance = above - s[c].rest;
        const auto weights = Wkv4Weights<Real>::at(distance);
        s[c].y = fused(weights.first, s[c].y, weights.second * value);
        s[c].z = fused(weights.first, s[c].z, weights.second);
        const bool leads = distance > Real(0);
        s[c].m = leads ? key : s[c].m;
        s[c].rest = leads ? Real(0) : s[c].rest;
      }
      o[i] = pack<Data, kVec>(out);
    }

    template <class Ring>
    __device__ void emit(Op& op, const Ring&, int, int k, int end) const {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (k + i < end) {
          op.o.store(k, i, o[i]);
        }
      }
    }
  };

  __device__ void reduce(int64_t, void*, int, int, int) const {}
};

/// Walks the other way with what flows back into y and z as its sums, whose gauge is near minus
/// that of the state they belong to. A run is what lies between two saved states. It first goes
/// forward through its tokens again, then back with nothing flowing in; what does flow in is added
/// last, since everything depends on it linearly.
template <class Data_, int kVec_, WalkUse kUse>
struct Wkv4Backward : Wkv4Base<Data_, kVec_>, WalkShape<static_cast<int>(kWkv4SavedEvery), 2> {
  using Base = Wkv4Base<Data_, kVec_>;
  using Base::kVec, Base::lane, Base::seq, Base::w, Base::u;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = Wkv4BackwardParams;
  using Map = AffineMap<Number, kVec>;
  static constexpr int kSteps = static_cast<int>(kWkv4SavedEvery);

  struct Raw {
    Pack<Data, kVec> k, v, grad_o;
  };

  static __host__ __device__ const SequenceLayout& layout(const Params& p) {
    return p.forward.layout;
  }
  static __host__ __device__ int64_t channels(const Params& p) { return p.forward.channels; }
  static cudaError_t launch_plain(const Params& p, cudaStream_t stream) {
    return launch_wkv4_plain<Data>(p, stream);
  }

  Rows<Data, kVec> grad_o, dk, dv;
  const void* saved;
  int64_t saved_base;
  const void* final_state;
  const void* dfinal_state;
  void* dstate;
  void* dw_partial;
  void* du_partial;
  Sum<Real, sizeof(Data) >= 4> dw[kVec], du[kVec];

  __device__ Wkv4Backward(const Params& p, const Sequence& seq, const Lane& lane)
      : Base(p.forward, seq, lane, true),
        grad_o(p.grad_o, seq, true, lane),
        dk(p.dk, seq, true, lane),
        dv(p.dv, seq, true, lane),
        saved(p.forward.saved),
        saved_base(saved_row(p.forward.layout, {seq.index, seq.batch, 0, 0}, 0)),
        final_state(p.forward.final_state),
        dfinal_state(p.dfinal_state),
        dstate(p.dstate),
        dw_partial(p.dw_partial),
        du_partial(p.du_partial) {}

  __device__ void initial(Number (&s)[kVec]) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      s[c] = {0.0f, 0.0f, -1e30f, 0.0f};
      if (dfinal_state != nullptr) {
        const Number d = this->load_state(dfinal_state, seq.index, c);
        s[c] = {d.y, d.z, -this->load_state(final_state, seq.index, c).m, 0.0f};
      }
    }
  }
  /// To the gauge of the state as it was given.
  __device__ void finish(const Number (&s)[kVec]) const {
    Number d[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const Real given =
          this->state != nullptr ? this->load_state(this->state, seq.index, c).m : -s[c].m;
      const Real scale = exp_of((given + s[c].m) + s[c].rest);
      d[c] = {s[c].y * scale, s[c].z * scale, 0.0f, 0.0f};
    }
    this->store_states(dstate, seq.index, d);
  }

  template <class Source>
  __device__ Raw gather(Source source, int step, int /*last*/) const {
    Raw raw;
    source(raw.k, this->k, step);
    source(raw.v, this->v, step);
    source(raw.grad_o, grad_o, step);
    return raw;
  }

  struct Run {
    using Op = Wkv4Backward;
    // With nothing flowing in; and the weight of each token after the run's last one.
    Real dk[kSteps][kVec], dv[kSteps][kVec], weight[kSteps][kVec];
    Real dw[kVec], du[kVec];
    Real y_sum[kVec], z_sum[kVec];  // dw of what flows in, per unit
    Real m_end[kVec];               // gauge of the state after the run
    Map map;

    template <class Ring>
    __device__ void decode(const Op& op, const Ring& ring, int stage, int k, int end) {
      if (k + kSteps <= end) {
        work<true>(op, ring, stage, kSteps, end - k - kSteps);
      } else {
        work<false>(op, ring, stage, max(end - k, 0), 0);
      }
    }

    /// `count` steps of the walk, the last of which is token `first`. Channel by channel: there are
    /// not registers for two.
    template <bool kWhole, class Ring>
    __device__ void work(const Op& op, const Ring& ring, int stage, int count, int first) {
      map = Map::identity();
      if (!kWhole && count == 0) {
        return;
      }
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        work_on<kWhole>(op, ring, stage, count, first, c);
        asm volatile("" ::: "memory");
      }
    }

    template <bool kWhole, class Ring>
    __device__ void work_on(const Op& op, const Ring& ring, int stage, int count, int first,
                            int c) {
      const int64_t row = op.saved_base + (op.seq.start + first) / kWkv4SavedEvery;
      Number s = first > 0 ? op.load_state(op.saved, row, c)
                           : initial_wkv4_state<Real>(op.state, op.seq.index, op.lane.channels,
                                                      op.lane.channel + c,
                                                      ring.take(op, stage, count - 1).k.get(c));
      const Real start = s.m;
      Real y[kSteps], z[kSteps];  // of the states that enter
      Real above[kSteps];         // keys, from the gauges of these
      Real smaller[kSteps];       // of the two weights; negative where the sums have it
#pragma unroll
      for (int i = kSteps - 1; i >= 0; --i) {
        if (kWhole || i < count) {
          const Raw raw = ring.take(op, stage, i);
          const Real key = raw.k.get(c), from_m = key - s.m;
          y[i] = s.y, z[i] = s.z, above[i] = from_m - s.rest;
          s.rest -= op.w[c];
          const Real distance = from_m - s.rest;
          const Real e = exp_of(-magnitude(distance));
          const bool leads = distance > Real(0);
          smaller[i] = leads ? -e : e;
          const Real old = leads ? e : Real(1), token = leads ? Real(1) : e;
          s.y = fused(old, s.y, token * raw.v.get(c));
          s.z = fused(old, s.z, token);
          s.m = leads ? key : s.m;
          s.rest = leads ? Real(0) : s.rest;
        }
      }
      s.fold_rest();
      m_end[c] = s.m;
      Real flow_y = 0, flow_z = 0;
      Real kept = Real(1) + s.rest;  // of a state, to the end of the run and to m_end
      dw[c] = du[c] = y_sum[c] = z_sum[c] = Real(0);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (kWhole || i < count) {
          const Raw raw = ring.take(op, stage, i);
          const Real value = raw.v.get(c);
          const bool leads = __float_as_int(smaller[i]) < 0;
          const Real old = leads ? -smaller[i] : Real(1);
          const Real token = leads ? Real(1) : smaller[i];
          const Real bonus = bonus_weight(above[i] + op.u[c]);
          const Real scale = reciprocal(z[i] + bonus);
          const Real out = fused(bonus, value, y[i]) * scale;
          const Real g = raw.grad_o.get(c) * scale;
          const Real by_token = g * bonus;
          // value - out, from what does not cancel.
          const Real by_bonus = by_token * (fused(z[i], value, -y[i]) * scale);
          dv[i][c] = fused(token, flow_y, by_token);
          dk[i][c] = fused(token, fused(value, flow_y, flow_z), by_bonus);
          weight[i][c] = kept * token;
          kept *= old;
          y_sum[c] = fused(kept, y[i], y_sum[c]);
          z_sum[c] = fused(kept, z[i], z_sum[c]);
          du[c] += by_bonus;
          dw[c] = fused(old, fused(flow_y, y[i], flow_z * z[i]), dw[c]);
          flow_y = fused(old, flow_y, g);
          flow_z = fused(old, flow_z, -g * out);
        }
      }
      map.sums[c] = {flow_y, flow_z, -start, count * op.w[c]};
    }

    template <class Ring>
    __device__ void fold(const Op&, const Ring&, int, Map& to) const {
      to = map;
    }

    template <class Ring>
    __device__ void advance(const Op& op, const Ring& ring, int stage, int k, int end,
                            Number (&s)[kVec]) {
      Real flow_y[kVec], flow_z[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real scale = exp_of((m_end[c] + s[c].m) + s[c].rest);
        flow_y[c] = s[c].y * scale;
        flow_z[c] = s[c].z * scale;
        dw[c] = fused(flow_y[c], y_sum[c], fused(flow_z[c], z_sum[c], dw[c]));
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const Raw raw = ring.take(op, stage, i);
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          dv[i][c] = fused(weight[i][c], flow_y[c], dv[i][c]);
          dk[i][c] = fused(weight[i][c], fused(raw.v.get(c), flow_y[c], flow_z[c]), dk[i][c]);
        }
      }
      if (k < end && end <= k + kSteps) {
        map.advance(s);
        op.finish(s);
      }
    }

    template <class Ring>
    __device__ void emit(Op& op, const Ring&, int, int k, int end) const {
      if (k >= end) {
        return;
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (k + i < end) {
          op.dk.store(k, i, pack<Data, kVec>(dk[i]));
          op.dv.store(k, i, pack<Data, kVec>(dv[i]));
        }
      }
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        op.dw[c].add(-dw[c]);
        op.du[c].add(du[c]);
      }
    }
  };

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane_index) const {
    sum_over_warps(dw, dw_partial, row, lane, scratch, warp, warps, lane_index);
    sum_over_warps(du, du_partial, row, lane, scratch, warp, warps, lane_index);
  }
};

template <class Op>
  requires(Op::kOwnsRun)
struct Run<Op> : Op::Run {};

}  // namespace tidegate::kernels
