#pragma once

// How a chunk of wkv4's backward pass is taken where blocks share a sequence. It is composed an
// iteration before its state comes, and read from the ring again then:
//   decode             the range of keys and the saved state, rescaled; both stay in the ring
//   compose            forward through the tokens once, adding up what flows out by powers of the
//                      decay; nothing is kept
//   take               what decode left in the ring
//   advance_and_emit   forward and back with all that flows in, half after half: 15 warps have not
//                      the registers for the states of eight tokens of two channels

#include "kernels/scan/cuda/wkv4/wkv4_base.cuh"

namespace tidegate::kernels::scan {

/// A backward chunk of multi-block scans, which compose it long before its state comes, and read it
/// from the ring again then: a composition that keeps nothing, and one way back with all that flows
/// in.
template <class Op>
struct Wkv4MultiBlockChunk {
  using Map = typename Op::Map;
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  using Real = typename Op::Real;
  using Data = typename Op::Data;
  static constexpr int kVec = Op::kVec, kSteps = Op::kSteps;
  static constexpr int kSlotOfDk = Op::kSlotOfDk, kSlotOfDv = Op::kSlotOfDv;

  bool fast[kVec];
  Real exponent[kVec];
  Number before[kVec];  // the state that enters the chunk's tokens, at that exponent

  template <class Ring>
  __device__ void decode(Op& op, const Ring& ring, int stage, int k, int end) {
    const int count = min(end - k, kSteps), first = end - k - count;
    if (count <= 0) {
      return;
    }
    ring.put_in_place(op, stage);
    KeyRange<Data, kVec> keys(ring.take(op, stage, 0).k);
#pragma unroll
    for (int i = 1; i < kSteps; ++i) {
      keys.add(ring.take(op, stage, i).k);
    }
    const Pack<Data, kVec> first_key = ring.take(op, stage, count - 1).k;
    char* const inputs = ring.chunk_inputs(stage);
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const Real low = binary(keys.lowest(c));
      exponent[c] = op.exponent_of(low, binary(keys.highest(c)), c);
      before[c] = op.entering(ring, stage, first, first_key.get(c), c);
      fast[c] = op.rescale_to(before[c], exponent[c], c) && count == kSteps &&
                exponent[c] - low <= kExponentRange;
      if (fast[c]) {
        bits |= 1u << c;
        Op::saved_value(inputs, ring.lane(), 0, c) = before[c].y;
        Op::saved_value(inputs, ring.lane(), 1, c) = before[c].z;
        Op::saved_value(inputs, ring.lane(), 2, c) = exponent[c];
      }
    }
    Op::fast_bits(inputs, ring.lane()) = bits;
  }
  /// Reads what decode found and left in the ring.
  template <class Ring>
  __device__ void take(const Ring& ring, int stage) {
    char* const inputs = ring.chunk_inputs(stage);
    const unsigned bits = Op::fast_bits(inputs, ring.lane());
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      fast[c] = (bits >> c & 1) != 0;
      exponent[c] = Op::saved_value(inputs, ring.lane(), 2, c);
      before[c] = {Op::saved_value(inputs, ring.lane(), 0, c),
                   Op::saved_value(inputs, ring.lane(), 1, c)};
    }
  }

  template <class Ring>
  __device__ void compose(const Op& op, const Ring& ring, int stage, int k, int end,
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
      asm("" : "+f"(kept[c]));  // its powers are the same in all chunks, but would take registers
    }
#pragma unroll
    for (int i = kSteps - 1; i >= 0; --i) {
      const Raw raw = ring.take(op, stage, i);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real token = Op::weight(raw.k.get(c), exponent[c]), value = raw.v.get(c);
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
      map.sums[c] = {flow_y[c], flow_z[c], -exponent[c]};
      if (!fast[c]) {
        Number flow = {};
        const int count = min(end - k, kSteps);
        op.template slow_path<false>(ring, stage, count, end - k - count, flow, c);
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
      const Real scale = exp2_of(exponent[c] + s[c].m, s[c].rest);
      flow_y[c] = s[c].y * scale;
      flow_z[c] = s[c].z * scale;
    }
    if (__all_sync(0xffffffffu, all_of(fast))) {
      fast_path<true>(op, ring, stage, flow_y, flow_z);
    } else {
      const int count = min(end - k, kSteps);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (!fast[c]) {
          Real dw = 0, du = 0;
          op.template slow_path<true>(ring, stage, count, end - k - count, s[c], c, &dw, &du);
          op.dw[c].add(-dw);
          op.du[c].add(du);
        }
      }
      fast_path<false>(op, ring, stage, flow_y, flow_z);
    }
    ring.store_outputs(stage, kSlotOfDk, op.dk, k, end);
    ring.store_outputs(stage, kSlotOfDv, op.dv, k, end);
    if (end <= k + kSteps) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (fast[c]) {
          s[c] = {flow_y[c], flow_z[c], -exponent[c]};
        }
      }
      op.store_final_state(s);
    }
  }

  /// The fast path: forward through the tokens again, then back. kAll: all channels take it; if
  /// not, those that do get the same bits, and the outputs of the others are in their slots
  /// already.
  template <bool kAll, class Ring>
  __device__ void fast_path(Op& op, const Ring& ring, int stage, Real (&flow_y)[kVec],
                            Real (&flow_z)[kVec]) const {
    Real dw[kVec], du[kVec];
    Real state_y[kVec], state_z[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      state_y[c] = before[c].y, state_z[c] = before[c].z;
      dw[c] = du[c] = Real(0);
    }
    // There are not registers for the states of all tokens: the later half, whose indices are the
    // lower ones, comes first, from the state after the earlier half.
#pragma unroll
    for (int i = kSteps - 1; i >= kSteps / 2; --i) {
      const Raw raw = ring.take(op, stage, i);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real token = Op::weight(raw.k.get(c), exponent[c]);
        state_y[c] = fused(op.decay[c], state_y[c], __fmul_rn(token, raw.v.get(c)));
        state_z[c] = fused(op.decay[c], state_z[c], token);
      }
    }
    backward_half_chunk<kAll, 0>(op, ring, stage, state_y, state_z, flow_y, flow_z, dw, du);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      state_y[c] = before[c].y, state_z[c] = before[c].z;
    }
    backward_half_chunk<kAll, kSteps / 2>(op, ring, stage, state_y, state_z, flow_y, flow_z, dw,
                                          du);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if (kAll || fast[c]) {
        op.dw[c].add(-__fmul_rn(op.decay[c], dw[c]));
        op.du[c].add(du[c]);
      }
    }
  }

  /// Back through tokens kFirst and on, half a chunk, after a way forward from the state that
  /// enters the earliest of them.
  template <bool kAll, int kFirst, class Ring>
  __device__ void backward_half_chunk(const Op& op, const Ring& ring, int stage,
                                      Real (&state_y)[kVec], Real (&state_z)[kVec],
                                      Real (&flow_y)[kVec], Real (&flow_z)[kVec], Real (&dw)[kVec],
                                      Real (&du)[kVec]) const {
    constexpr int kHalf = kSteps / 2;
    Real weight[kHalf][kVec], y[kHalf][kVec], z[kHalf][kVec];  // y, z: of the states that enter
#pragma unroll
    for (int i = kHalf - 1; i >= 0; --i) {
      const Raw raw = ring.take(op, stage, kFirst + i);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        y[i][c] = state_y[c], z[i][c] = state_z[c];
        weight[i][c] = Op::weight(raw.k.get(c), exponent[c]);
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
        ring.stage_output(stage, kFirst + i, kSlotOfDk, pack<Data, kVec>(dk));
        ring.stage_output(stage, kFirst + i, kSlotOfDv, pack<Data, kVec>(dv));
      } else {
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          if (fast[c]) {
            ring.stage_output_channel(stage, kFirst + i, kSlotOfDk, c, narrow<Data>(dk[c]));
            ring.stage_output_channel(stage, kFirst + i, kSlotOfDv, c, narrow<Data>(dv[c]));
          }
        }
      }
    }
  }
};

}  // namespace tidegate::kernels::scan
