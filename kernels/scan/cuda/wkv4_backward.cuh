#pragma once

// RWKV-4's token mixing backward, as an Op of the walk with runs of its own.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/scan/cuda/wkv4_base.cuh"
#include "kernels/scan/cuda/wkv4_linked_run.cuh"
#include "kernels/scan/cuda/wkv4_whole_run.cuh"

namespace tidegate::kernels::scan {

/// Walks the other way with what flows back into y and z as its sums, whose gauge is near minus
/// that of the state they belong to. A run is what lies between two saved states, and goes forward
/// through its tokens again first.
template <class Data_, int kVec_, WalkUse kUse>
struct Wkv4Backward
    : Wkv4Base<Data_, kVec_, kUse, true>,
      WalkShape<static_cast<int>(kWkv4SavedEvery), kUse == WalkUse::kLinked ? 3 : 2> {
  using Base = Wkv4Base<Data_, kVec_, kUse, true>;
  using Base::kVec, Base::lane, Base::seq, Base::decay, Base::bonus;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using typename Base::StatePack;
  using Params = Wkv4BackwardParams;
  using Map = AffineMap<Number, kVec>;
  static constexpr int kSteps = static_cast<int>(kWkv4SavedEvery);
  static constexpr bool kEmitsAtOnce = true;

  struct Raw {
    Pack<Data, kVec> k, v, grad_o;
  };
  /// The saved state that enters the run's tokens.
  struct SavedState {
    StatePack y, z, m;
  };
  struct SavedAndFound : SavedState {
    unsigned quick;  // which channels are; their y and z are then in the run's gauge, m
  };
  using RunInputs = std::conditional_t<Base::kSharesGauge, SavedAndFound, SavedState>;
  static constexpr int kRunInputBytes = sizeof(RunInputs);

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
  typename Base::SavedStates saved_rows;
  const void* final_state;
  const void* dfinal_state;
  void* dstate;
  void* dw_partial;
  void* du_partial;
  Sum<Real, sizeof(Data) >= 4> dw[kVec], du[kVec];

  __device__ Wkv4Backward(const Params& p, const Sequence& seq, const Lane& lane)
      : Base(p.forward, seq, lane),
        grad_o(p.grad_o, seq, true, lane),
        dk(p.dk, seq, true, lane),
        dv(p.dv, seq, true, lane),
        saved(p.forward.saved),
        saved_base(saved_row(p.forward.layout, {seq.index, seq.batch, 0, 0}, 0)),
        saved_rows(p.forward, seq, lane),
        final_state(p.forward.final_state),
        dfinal_state(p.dfinal_state),
        dstate(p.dstate),
        dw_partial(p.dw_partial),
        du_partial(p.du_partial) {}

  __device__ void initial(Number (&s)[kVec]) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      s[c] = {0.0f, 0.0f, kWkv4NoWeight, 0.0f};
      if (dfinal_state != nullptr) {
        s[c] = this->load_state(dfinal_state, seq.index, c);
        set_binary_gauge(s[c], -this->load_state(final_state, seq.index, c).m);
      }
    }
  }
  /// To the gauge of the state as it was given.
  __device__ void finish(const Number (&s)[kVec]) const {
    Number d[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      Number given = {0.0f, 0.0f, -s[c].m, -s[c].rest};
      if (this->state != nullptr) {
        set_binary_gauge(given, this->load_state(this->state, seq.index, c).m);
      }
      const Real scale = exp2_of(given.m + s[c].m, given.rest + s[c].rest);
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

  /// Of the run from step k of the walk, whose tokens are the ones before its end.
  __device__ void fetch_run(char* place, int lane_index, int k, int end) const {
    const int first = end - k - kSteps;
    if (first > 0) {
      const Real* from;
      if constexpr (Base::kSharesGauge) {
        from = saved_rows.at(first);
      } else {
        const int64_t row = saved_base + (seq.start + first) / kWkv4SavedEvery;
        from = static_cast<const Real*>(saved) + 3 * row * lane.channels + lane.channel;
      }
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        char* to = place + (part * kWarpSize + lane_index) * sizeof(StatePack);
        copy_async<sizeof(StatePack)>(to, from + part * lane.channels);
      }
    }
  }
  static __device__ Real saved_word(const char* place, int lane_index, int part, int c) {
    return reinterpret_cast<const Real*>(place)[(part * kWarpSize + lane_index) * kVec + c];
  }
  static __device__ Real& saved_word(char* place, int lane_index, int part, int c) {
    return reinterpret_cast<Real*>(place)[(part * kWarpSize + lane_index) * kVec + c];
  }
  static __device__ unsigned& quick_bits(char* place, int lane_index) {
    return reinterpret_cast<unsigned*>(place)[3 * kWarpSize * kVec + lane_index];
  }
  /// The state that enters the run whose first token is `first`; `key`: of that token.
  template <class Ring>
  __device__ Number entering(const Ring& ring, int stage, int first, Real key, int c) const {
    if (first > 0) {
      const char* place = ring.run_inputs(stage);
      return {saved_word(place, ring.lane(), 0, c), saved_word(place, ring.lane(), 1, c),
              saved_word(place, ring.lane(), 2, c)};
    }
    return in_one_word(this->first_state(key, c));
  }

  // Outputs leave in the places of these inputs.
  static constexpr int kPlaceOfDk = 0, kPlaceOfDv = 1;

  /// Of a channel that is not quick: takes what flows back through the run, and, emitting, what it
  /// gives to the tokens.
  template <bool kEmits, class Ring>
  __device__ void walk_slowly(const Ring& ring, int stage, int count, int first, Number& flow,
                              int c, Real* dw = nullptr, Real* du = nullptr) const {
    Number states[kSteps];  // that enter
    Wkv4Weights<Real> weights[kSteps];
    Number s = entering(ring, stage, first, ring.take(*this, stage, count - 1).k.get(c), c);
    const Real start = s.m;
#pragma unroll 1
    for (int i = count - 1; i >= 0; --i) {
      const Raw raw = ring.take(*this, stage, i);
      states[i] = s;
      weights[i] = this->add(s, raw.k.get(c), raw.v.get(c), c);
    }
    if (kEmits) {
      const Real scale = exp2_of(s.m + flow.m, s.rest + flow.rest);
      flow = {flow.y * scale, flow.z * scale, Real(0)};
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Raw raw = ring.take(*this, stage, i);
      const Real key = raw.k.get(c), value = raw.v.get(c);
      const Number state = states[i];
      const Real old = weights[i].first, token = weights[i].second;
      const auto shares = this->bonus_beside(state, key, c);
      const Real scale = reciprocal(fused(shares.first, state.z, shares.second));
      const Real out = fused(shares.first, state.y, shares.second * value) * scale;
      const Real g = raw.grad_o.get(c) * scale;
      const Real by_token = g * shares.second, by_sums = g * shares.first;
      const Real by_bonus = by_token * (shares.first * scale * fused(state.z, value, -state.y));
      if (kEmits) {
        const Real dk = fused(token, fused(value, flow.y, flow.z), by_bonus);
        ring.put_channel(stage, i, kPlaceOfDk, c, narrow<Data>(dk));
        ring.put_channel(stage, i, kPlaceOfDv, c, narrow<Data>(fused(token, flow.y, by_token)));
        *dw = fused(old, fused(flow.y, state.y, flow.z * state.z), *dw);
        *du += by_bonus;
      }
      flow.y = fused(old, flow.y, by_sums);
      flow.z = fused(old, flow.z, -by_sums * out);
    }
    flow.m = -start;
  }

  using Run = std::conditional_t<Base::kSharesGauge, Wkv4LinkedRun<Wkv4Backward>,
                                 Wkv4WholeRun<Wkv4Backward>>;

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane_index) const {
    sum_over_warps(dw, dw_partial, row, lane, scratch, warp, warps, lane_index);
    sum_over_warps(du, du_partial, row, lane, scratch, warp, warps, lane_index);
  }
};

}  // namespace tidegate::kernels::scan
