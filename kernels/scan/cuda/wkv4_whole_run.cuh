#pragma once

// How a run of wkv4's backward pass is walked where blocks walk whole sequences.

#include "kernels/scan/cuda/wkv4_base.cuh"

namespace tidegate::kernels::scan {

/// A run of whole walks: forward through its tokens again and back with nothing flowing in, while
/// what does flow in is on its way; when that has come, each token gets its share of it, since
/// everything depends on it linearly.
template <class Op>
struct Wkv4WholeRun {
  using Map = typename Op::Map;
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  using Real = typename Op::Real;
  using Data = typename Op::Data;
  static constexpr int kVec = Op::kVec, kSteps = Op::kSteps;
  static constexpr int kPlaceOfDk = Op::kPlaceOfDk, kPlaceOfDv = Op::kPlaceOfDv;

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
        op.template walk_slowly<false>(ring, stage, count, first, flow, c);
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
      weight[i] = Op::weight(raw.k.get(c), gauge[c]);
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

  template <class Ring>
  __device__ void fold(const Op& op, const Ring&, int, Map& to) const {
    to = map;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      op.set_decay(to, kSteps, c);  // of an incomplete run, too: nothing comes after it
    }
  }

  __device__ void add_inflow(const Raw& raw, const Real (&flow_y)[kVec], const Real (&flow_z)[kVec],
                             int i, int c, Real& dk_out, Real& dv_out) const {
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
        op.template walk_slowly<true>(ring, stage, count, end - k - count, flow, c, &dw, &du);
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

}  // namespace tidegate::kernels::scan
