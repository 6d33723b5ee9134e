#pragma once

// RWKV-4's token mixing backward, as an Op of the walk with runs of its own.

#include "kernels/scan/cuda/wkv4_base.cuh"

namespace tidegate::kernels {

/// Walks the other way with what flows back into y and z as its sums, whose gauge is near minus
/// that of the state they belong to. A run is what lies between two saved states. It first goes
/// forward through its tokens again, then back with nothing flowing in; what does flow in is added
/// last, since everything depends on it linearly.
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
  using RunInputs = std::conditional_t<Base::kFoldsAhead, SavedAndFound, SavedState>;
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

  struct RunOnce {
    using Op = Wkv4Backward;
    bool quick[kVec];
    // Of quick channels, with nothing flowing in; and what a token gets of what does.
    Real dk[kSteps][kVec], dv[kSteps][kVec], share[kSteps][kVec];
    Real y_sum[kVec], z_sum[kVec];  // -dw of what flows in, per unit
    Real gauge[kVec];
    Map map;

    template <class Ring>
    __device__ void decode(Op& op, const Ring& ring, int stage, int k, int end) {
      map = Map::identity();
      const int count = min(end - k, kSteps), first = end - k - count;
      if (count <= 0) {
        return;
      }
      KeyRange<Data, kVec> keys(ring.take(op, stage, 0).k);
#pragma unroll
      for (int i = 1; i < kSteps; ++i) {
        keys.add(ring.take(op, stage, i).k);
      }
      const Pack<Data, kVec> first_key = ring.take(op, stage, count - 1).k;
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        gauge[c] = rintf(binary(keys.highest(c)));
        Number s = op.entering(ring, stage, first, first_key.get(c), c);
        quick[c] = op.enter_gauge(s, gauge[c], c) && count == kSteps &&
                   gauge[c] - binary(keys.lowest(c)) <= kReach;
        if (quick[c]) {
          walk(op, ring, stage, s, c);
        } else {
          Number flow = {};
          walk_slowly<false>(op, ring, stage, count, first, flow, c);
          map.sums[c] = {flow.y, flow.z, flow.m};
        }
        asm volatile("" ::: "memory");  // channel by channel: there are not registers for two
      }
    }

    template <class Ring>
    __device__ void walk(Op& op, const Ring& ring, int stage, Number s, int c) {
      Real weight[kSteps], y[kSteps], z[kSteps];  // y, z: of the states that enter
      const Real decay = op.decay[c];
#pragma unroll
      for (int i = kSteps - 1; i >= 0; --i) {
        const Raw raw = ring.take(op, stage, i);
        y[i] = s.y, z[i] = s.z;
        weight[i] = Base::weight(raw.k.get(c), gauge[c]);
        s.y = fused(decay, s.y, weight[i] * raw.v.get(c));
        s.z = fused(decay, s.z, weight[i]);
      }
      Real flow_y = 0, flow_z = 0;
      Real kept = 1;  // of a state, to the end of the run
      Real dw = 0, du = 0;
      y_sum[c] = z_sum[c] = Real(0);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const Raw raw = ring.take(op, stage, i);
        const Real value = raw.v.get(c), token = weight[i];
        const Real bonus = op.bonus[c] * token;
        const Real scale = reciprocal(z[i] + bonus);
        const Real apart = fused(z[i], value, -y[i]) * scale;  // value - o, and does not cancel
        const Real g = raw.grad_o.get(c) * scale;
        const Real by_token = g * bonus;
        const Real by_bonus = by_token * apart;
        dv[i][c] = fused(token, flow_y, by_token);
        dk[i][c] = fused(token, fused(value, flow_y, flow_z), by_bonus);
        share[i][c] = kept * token;
        kept *= decay;
        y_sum[c] = fused(kept, y[i], y_sum[c]);
        z_sum[c] = fused(kept, z[i], z_sum[c]);
        du += by_bonus;
        dw = fused(flow_y, y[i], fused(flow_z, z[i], dw));
        flow_y = fused(decay, flow_y, g);
        flow_z = fused(decay, flow_z, g * (apart - value));
      }
      op.dw[c].add(-decay * dw);
      op.du[c].add(du);
      map.sums[c] = {flow_y, flow_z, -gauge[c]};
    }

    /// Takes what flows back through the run, and, emitting, what it gives to the tokens.
    template <bool kEmits, class Ring>
    __device__ static void walk_slowly(const Op& op, const Ring& ring, int stage, int count,
                                       int first, Number& flow, int c, Real* dw = nullptr,
                                       Real* du = nullptr) {
      Number states[kSteps];  // that enter
      Wkv4Weights<Real> weights[kSteps];
      Number s = op.entering(ring, stage, first, ring.take(op, stage, count - 1).k.get(c), c);
      const Real start = s.m;
#pragma unroll 1
      for (int i = count - 1; i >= 0; --i) {
        const Raw raw = ring.take(op, stage, i);
        states[i] = s;
        weights[i] = op.add(s, raw.k.get(c), raw.v.get(c), c);
      }
      if (kEmits) {
        const Real scale = exp2_of(s.m + flow.m, s.rest + flow.rest);
        flow = {flow.y * scale, flow.z * scale, Real(0)};
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const Raw raw = ring.take(op, stage, i);
        const Real key = raw.k.get(c), value = raw.v.get(c);
        const Number state = states[i];
        const Real old = weights[i].first, token = weights[i].second;
        const auto shares = op.bonus_beside(state, key, c);
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
    template <class Ring>
    __device__ void fold(const Op& op, const Ring&, int, Map& to) const {
      to = map;
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        op.set_decay(to, kSteps, c);  // of an incomplete run, too: nothing comes after it
      }
    }

    __device__ void add_inflow(const Raw& raw, const Real (&flow_y)[kVec],
                               const Real (&flow_z)[kVec], int i, int c, Real& dk_out,
                               Real& dv_out) const {
      dv_out = fused(share[i][c], flow_y[c], dv[i][c]);
      dk_out = fused(share[i][c], fused(raw.v.get(c), flow_y[c], flow_z[c]), dk[i][c]);
    }

    template <class Ring>
    __device__ void advance_and_emit(Op& op, const Ring& ring, int stage, int k, int end,
                                     Number (&s)[kVec]) {
      if (k >= end) {
        return;
      }
      Real flow_y[kVec], flow_z[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (quick[c]) {
          const Real scale = exp2_of(gauge[c] + s[c].m, s[c].rest);
          flow_y[c] = s[c].y * scale;
          flow_z[c] = s[c].z * scale;
          op.dw[c].add(-fused(flow_y[c], y_sum[c], flow_z[c] * z_sum[c]));
        } else {
          const int count = min(end - k, kSteps);
          Number flow = s[c];
          flow_y[c] = flow_z[c] = Real(0);
          Real dw = 0, du = 0;
          walk_slowly<true>(op, ring, stage, count, end - k - count, flow, c, &dw, &du);
          op.dw[c].add(-dw);
          op.du[c].add(du);
        }
      }
      if (all_of(quick)) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const Raw raw = ring.take(op, stage, i);
          Real dk_out[kVec], dv_out[kVec];
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            add_inflow(raw, flow_y, flow_z, i, c, dk_out[c], dv_out[c]);
          }
          ring.put(stage, i, kPlaceOfDk, pack<Data, kVec>(dk_out));
          ring.put(stage, i, kPlaceOfDv, pack<Data, kVec>(dv_out));
        }
      } else {
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            if (quick[c]) {
              const Raw raw = ring.take(op, stage, i);
              Real dk_out, dv_out;
              add_inflow(raw, flow_y, flow_z, i, c, dk_out, dv_out);
              ring.put_channel(stage, i, kPlaceOfDk, c, narrow<Data>(dk_out));
              ring.put_channel(stage, i, kPlaceOfDv, c, narrow<Data>(dv_out));
            }
          }
        }
      }
      ring.store(stage, kPlaceOfDk, op.dk, k, end);
      ring.store(stage, kPlaceOfDv, op.dv, k, end);
      if (end <= k + kSteps) {
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          op.set_decay(map, end - k, c);
        }
        map.advance(s);
        op.finish(s);
      }
    }
  };

  /// The same for linked blocks, which fold a run long before its state comes, and take it from the
  /// ring again then: a fold that keeps nothing, and one way back with all that flows in.
  struct RunTwice {
    using Op = Wkv4Backward;
    bool quick[kVec];
    Real gauge[kVec];
    Number before[kVec];  // the state that enters the run's tokens, in that gauge

    template <class Ring>
    __device__ void decode(Op& op, const Ring& ring, int stage, int k, int end) {
      const int count = min(end - k, kSteps), first = end - k - count;
      if (count <= 0) {
        return;
      }
      KeyRange<Data, kVec> keys(ring.take(op, stage, 0).k);
#pragma unroll
      for (int i = 1; i < kSteps; ++i) {
        keys.add(ring.take(op, stage, i).k);
      }
      const Pack<Data, kVec> first_key = ring.take(op, stage, count - 1).k;
      char* const place = ring.run_inputs(stage);
      unsigned bits = 0;
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real low = binary(keys.lowest(c));
        gauge[c] = op.gauge_of(low, binary(keys.highest(c)), c);
        before[c] = op.entering(ring, stage, first, first_key.get(c), c);
        quick[c] =
            op.enter_gauge(before[c], gauge[c], c) && count == kSteps && gauge[c] - low <= kReach;
        if (quick[c]) {
          bits |= 1u << c;
          saved_word(place, ring.lane(), 0, c) = before[c].y;
          saved_word(place, ring.lane(), 1, c) = before[c].z;
          saved_word(place, ring.lane(), 2, c) = gauge[c];
        }
      }
      quick_bits(place, ring.lane()) = bits;
    }
    /// What decode found.
    template <class Ring>
    __device__ void take(const Ring& ring, int stage) {
      char* const place = ring.run_inputs(stage);
      const unsigned bits = quick_bits(place, ring.lane());
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        quick[c] = (bits >> c & 1) != 0;
        gauge[c] = saved_word(place, ring.lane(), 2, c);
        before[c] = {saved_word(place, ring.lane(), 0, c), saved_word(place, ring.lane(), 1, c)};
      }
    }

    template <class Ring>
    __device__ void fold(const Op& op, const Ring& ring, int stage, int k, int end,
                         Map& map) const {
      map = Map::identity();
      if (k >= end) {
        return;
      }
      Real y[kVec], z[kVec], kept[kVec], flow_y[kVec], flow_z[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        y[c] = before[c].y, z[c] = before[c].z;
        kept[c] = Real(1), flow_y[c] = flow_z[c] = Real(0);
        asm("" : "+f"(kept[c]));  // its powers are the same in all runs, but would take registers
      }
#pragma unroll
      for (int i = kSteps - 1; i >= 0; --i) {
        const Raw raw = ring.take(op, stage, i);
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Real token = Base::weight(raw.k.get(c), gauge[c]), value = raw.v.get(c);
          const Real scale = reciprocal(fused(op.bonus[c], token, z[c]));
          const Real weighted = token * value;
          const Real out = fused(op.bonus[c], weighted, y[c]) * scale;
          const Real g = raw.grad_o.get(c) * scale * kept[c];
          flow_y[c] += g;
          flow_z[c] = fused(-g, out, flow_z[c]);
          kept[c] *= op.decay[c];
          y[c] = fused(op.decay[c], y[c], weighted);
          z[c] = fused(op.decay[c], z[c], token);
        }
      }
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        map.sums[c] = {flow_y[c], flow_z[c], -gauge[c]};
        if (!quick[c]) {
          Number flow = {};
          const int count = min(end - k, kSteps);
          RunOnce::template walk_slowly<false>(op, ring, stage, count, end - k - count, flow, c);
          map.sums[c] = {flow.y, flow.z, flow.m};
        }
      }
    }

    template <class Ring>
    __device__ void advance_and_emit(Op& op, const Ring& ring, int stage, int k, int end,
                                     Number (&s)[kVec]) const {
      if (k >= end) {
        return;
      }
      Real flow_y[kVec], flow_z[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real scale = exp2_of(gauge[c] + s[c].m, s[c].rest);
        flow_y[c] = s[c].y * scale;
        flow_z[c] = s[c].z * scale;
      }
      if (__all_sync(0xffffffffu, all_of(quick))) {
        walk<true>(op, ring, stage, flow_y, flow_z);
      } else {
        const int count = min(end - k, kSteps);
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          if (!quick[c]) {
            Real dw = 0, du = 0;
            RunOnce::template walk_slowly<true>(op, ring, stage, count, end - k - count, s[c], c,
                                                &dw, &du);
            op.dw[c].add(-dw);
            op.du[c].add(du);
          }
        }
        walk<false>(op, ring, stage, flow_y, flow_z);
      }
      ring.store(stage, kPlaceOfDk, op.dk, k, end);
      ring.store(stage, kPlaceOfDv, op.dv, k, end);
      if (end <= k + kSteps) {
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          if (quick[c]) {
            s[c] = {flow_y[c], flow_z[c], -gauge[c]};
          }
        }
        op.finish(s);
      }
    }

    /// Forward through the tokens again, then back. kAll: all channels are quick; if not, those
    /// that are get the same bits, and the outputs of the others are in their places already.
    template <bool kAll, class Ring>
    __device__ void walk(Op& op, const Ring& ring, int stage, Real (&flow_y)[kVec],
                         Real (&flow_z)[kVec]) const {
      Real dw[kVec], du[kVec];
      Real later_y[kVec], later_z[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        later_y[c] = before[c].y, later_z[c] = before[c].z;
        dw[c] = du[c] = Real(0);
      }
      // First the later half of the tokens, whose indices are the lower ones: there are not
      // registers for the states of all.
#pragma unroll
      for (int i = kSteps - 1; i >= kSteps / 2; --i) {
        const Raw raw = ring.take(op, stage, i);
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Real token = Base::weight(raw.k.get(c), gauge[c]);
          later_y[c] = fused(op.decay[c], later_y[c], __fmul_rn(token, raw.v.get(c)));
          later_z[c] = fused(op.decay[c], later_z[c], token);
        }
      }
      walk_half<kAll, 0>(op, ring, stage, later_y, later_z, flow_y, flow_z, dw, du);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        later_y[c] = before[c].y, later_z[c] = before[c].z;
      }
      walk_half<kAll, kSteps / 2>(op, ring, stage, later_y, later_z, flow_y, flow_z, dw, du);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (kAll || quick[c]) {
          op.dw[c].add(-__fmul_rn(op.decay[c], dw[c]));
          op.du[c].add(du[c]);
        }
      }
    }

    /// Tokens kFirst and on, half a run, the latest first; y, z: of the state that enters the
    /// earliest.
    template <bool kAll, int kFirst, class Ring>
    __device__ void walk_half(const Op& op, const Ring& ring, int stage, Real (&state_y)[kVec],
                              Real (&state_z)[kVec], Real (&flow_y)[kVec], Real (&flow_z)[kVec],
                              Real (&dw)[kVec], Real (&du)[kVec]) const {
      constexpr int kHalf = kSteps / 2;
      Real weight[kHalf][kVec], y[kHalf][kVec], z[kHalf][kVec];  // y, z: of the states that enter
#pragma unroll
      for (int i = kHalf - 1; i >= 0; --i) {
        const Raw raw = ring.take(op, stage, kFirst + i);
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          y[i][c] = state_y[c], z[i][c] = state_z[c];
          weight[i][c] = Base::weight(raw.k.get(c), gauge[c]);
          state_y[c] = fused(op.decay[c], state_y[c], __fmul_rn(weight[i][c], raw.v.get(c)));
          state_z[c] = fused(op.decay[c], state_z[c], weight[i][c]);
        }
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const Raw raw = ring.take(op, stage, kFirst + i);
        Real dk[kVec], dv[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Real value = raw.v.get(c), token = weight[i][c];
          const Real bonus = __fmul_rn(op.bonus[c], token);
          const Real scale = reciprocal(__fadd_rn(z[i][c], bonus));
          // value - o, and does not cancel
          const Real apart = __fmul_rn(fused(z[i][c], value, -y[i][c]), scale);
          const Real g = __fmul_rn(raw.grad_o.get(c), scale);
          const Real by_token = __fmul_rn(g, bonus);
          const Real by_bonus = __fmul_rn(by_token, apart);
          dv[c] = fused(token, flow_y[c], by_token);
          dk[c] = fused(token, fused(value, flow_y[c], flow_z[c]), by_bonus);
          du[c] = __fadd_rn(du[c], by_bonus);
          dw[c] = fused(flow_y[c], y[i][c], fused(flow_z[c], z[i][c], dw[c]));
          flow_y[c] = fused(op.decay[c], flow_y[c], g);
          flow_z[c] = fused(op.decay[c], flow_z[c], __fmul_rn(g, __fadd_rn(apart, -value)));
        }
        if (kAll) {
          ring.put(stage, kFirst + i, kPlaceOfDk, pack<Data, kVec>(dk));
          ring.put(stage, kFirst + i, kPlaceOfDv, pack<Data, kVec>(dv));
        } else {
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            if (quick[c]) {
              ring.put_channel(stage, kFirst + i, kPlaceOfDk, c, narrow<Data>(dk[c]));
              ring.put_channel(stage, kFirst + i, kPlaceOfDv, c, narrow<Data>(dv[c]));
            }
          }
        }
      }
    }
  };
  using Run = std::conditional_t<Base::kFoldsAhead, RunTwice, RunOnce>;

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane_index) const {
    sum_over_warps(dw, dw_partial, row, lane, scratch, warp, warps, lane_index);
    sum_over_warps(du, du_partial, row, lane, scratch, warp, warps, lane_index);
  }
};

}  // namespace tidegate::kernels
