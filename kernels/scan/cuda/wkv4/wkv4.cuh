#pragma once

// RWKV-4's token mixing backward, as an Op of the scan engine with chunks of its own. A chunk is
// the eight tokens between two saved states, whose state comes through the ring with it:
//   decode             forward through the tokens again and, in a single-block scan, back with
//                      nothing flowing in (Wkv4SingleBlockChunk, here)
//   compose            what flows out of the chunk: its map
//   advance_and_emit   what flows in adds to dk, dv and dw (du is complete without); rows leave by
//   way
//                      of the ring
// In a multi-block scan composing keeps nothing, and the chunk is taken back when its state has
// come (Wkv4MultiBlockChunk, wkv4_chunk_multi_block.cuh). Below: which kernels, of both directions,
// wkv4 has for a data type. The barriers are the carry's (carry.cuh,
// wkv4_multi_block.cuh).

#include <array>

#include "kernels/scan/cuda/engine/launch.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_base.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_chunk_multi_block.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_forward.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_multi_block.cuh"
#include "kernels/scan/scan_cuda.h"

namespace tidegate::kernels::scan {

/// A backward chunk of single-block scans: forward through its tokens again and back with nothing
/// flowing in, while what does flow in is on its way; when that has come, each token gets its share
/// of it, since everything depends on it linearly.
template <class Op>
struct Wkv4SingleBlockChunk {
  using Map = typename Op::Map;
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  using Real = typename Op::Real;
  using Data = typename Op::Data;
  static constexpr int kVec = Op::kVec, kSteps = Op::kSteps;
  static constexpr int kSlotOfDk = Op::kSlotOfDk, kSlotOfDv = Op::kSlotOfDv;

  bool fast[kVec];
  // The fast path's gradients as if nothing flowed in from later chunks, and `share`: by how much
  // what does flow in is multiplied before it is added to a token's.
  Real dk[kSteps][kVec], dv[kSteps][kVec], share[kSteps][kVec];
  // dw has -(flow_y y_sum + flow_z z_sum) of what flows in: sums of the states that enter the
  // chunk's tokens, each decayed to the chunk's end.
  Real y_sum[kVec], z_sum[kVec];
  // Step i of a scan from the end is i tokens before the chunk's last.
  Real exponent[kVec];
  Map map;

  template <class Ring>
  __device__ void decode(Op& op, const Ring& ring, int stage, int k, int end) {
    map = Map::identity();
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
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      exponent[c] = rintf(binary(keys.highest(c)));
      Number s = op.entering(ring, stage, first, first_key.get(c), c);
      fast[c] = op.rescale_to(s, exponent[c], c) && count == kSteps &&
                exponent[c] - binary(keys.lowest(c)) <= kExponentRange;
      if (fast[c]) {
        fast_path(op, ring, stage, s, c);
      } else {
        Number flow = {};
        op.template slow_path<false>(ring, stage, count, first, flow, c);
        map.sums[c] = {flow.y, flow.z, flow.m};
      }
      asm volatile("" ::: "memory");  // channel by channel: there are not registers for two
    }
  }

  template <class Ring>
  __device__ void fast_path(Op& op, const Ring& ring, int stage, Number s, int c) {
    Real weight[kSteps], y[kSteps], z[kSteps];  // y, z: of the states that enter
    const Real decay = op.decay[c];
#pragma unroll
    for (int i = kSteps - 1; i >= 0; --i) {
      const Raw raw = ring.take(op, stage, i);
      y[i] = s.y, z[i] = s.z;
      weight[i] = Op::weight(raw.k.get(c), exponent[c]);
      s.y = fused(decay, s.y, weight[i] * raw.v.get(c));
      s.z = fused(decay, s.z, weight[i]);
    }
    Real flow_y = 0, flow_z = 0;
    Real kept = 1;  // what decay leaves of a token's state at the end of the chunk
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
    map.sums[c] = {flow_y, flow_z, -exponent[c]};
  }

  template <class Ring>
  __device__ void compose(const Op& op, const Ring&, int, int, int, Map& to) const {
    to = map;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      op.set_decay(to, kSteps, c);  // of an incomplete chunk, too: nothing comes after it
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
      if (fast[c]) {
        const Real scale = exp2_of(exponent[c] + s[c].m, s[c].rest);
        flow_y[c] = s[c].y * scale;
        flow_z[c] = s[c].z * scale;
        op.dw[c].add(-fused(flow_y[c], y_sum[c], flow_z[c] * z_sum[c]));
      } else {
        const int count = min(end - k, kSteps);
        Number flow = s[c];
        flow_y[c] = flow_z[c] = Real(0);
        Real dw = 0, du = 0;
        op.template slow_path<true>(ring, stage, count, end - k - count, flow, c, &dw, &du);
        op.dw[c].add(-dw);
        op.du[c].add(du);
      }
    }
    if (all_of(fast)) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const Raw raw = ring.take(op, stage, i);
        Real dk_out[kVec], dv_out[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          add_inflow(raw, flow_y, flow_z, i, c, dk_out[c], dv_out[c]);
        }
        ring.stage_output(stage, i, kSlotOfDk, pack<Data, kVec>(dk_out));
        ring.stage_output(stage, i, kSlotOfDv, pack<Data, kVec>(dv_out));
      }
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (fast[c]) {
            const Raw raw = ring.take(op, stage, i);
            Real dk_out, dv_out;
            add_inflow(raw, flow_y, flow_z, i, c, dk_out, dv_out);
            ring.stage_output_channel(stage, i, kSlotOfDk, c, narrow<Data>(dk_out));
            ring.stage_output_channel(stage, i, kSlotOfDv, c, narrow<Data>(dv_out));
          }
        }
      }
    }
    ring.store_outputs(stage, kSlotOfDk, op.dk, k, end);
    ring.store_outputs(stage, kSlotOfDv, op.dv, k, end);
    // Outputs use what flowed in, so s has not been advanced: through the last chunk, which may be
    // incomplete, it goes here, to be the gradient of the first state.
    if (end <= k + kSteps) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        op.set_decay(map, end - k, c);
      }
      map.apply(s);
      op.store_final_state(s);
    }
  }
};

/// Scans the other way with what flows back into y and z as its sums, whose exponent is near minus
/// that of the state they belong to. A chunk is what lies between two saved states, and goes
/// forward through its tokens again first.
template <class Data_, int kVec_, Regime kRegime>
struct Wkv4Backward : Wkv4Base<Data_, kVec_, kRegime, true>,
                      TileConfig<OpKind::kWkv4, Direction::kBackward, kRegime> {
  using Base = Wkv4Base<Data_, kVec_, kRegime, true>;
  using Base::kVec, Base::channels, Base::seq, Base::decay, Base::bonus;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using typename Base::StatePack;
  using Params = Wkv4BackwardParams;
  using Map = AffineMap<Number, kVec>;
  static constexpr int kSteps = kSavedEvery;
  static constexpr bool kEmitWhileAdvancing = true;
  static constexpr bool kTakesOften = true;  // 4 to 12 times

  struct Raw {
    Pack<Data, kVec> k, v, grad_o;
  };
  static constexpr int kInputs = 3, kStagedOutputs = 2;
  /// The saved state that enters the chunk's tokens.
  struct SavedState {
    StatePack y, z, m;
  };
  struct SavedAndRescaled : SavedState {
    unsigned fast;  // a bit a channel: on the fast path, whose y and z are then at the chunk's
                    // exponent, m
  };
  using ChunkInputs = std::conditional_t<Base::kSharedExponent, SavedAndRescaled, SavedState>;
  static constexpr int kChunkInputBytes = sizeof(ChunkInputs);

  static cudaError_t launch_sequential(const Params& p, cudaStream_t stream) {
    return launch_wkv4_sequential<Data>(p, stream);
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

  __device__ Wkv4Backward(const Params& p, const Sequence& seq, const Channels& channels)
      : Base(p.forward, seq, channels),
        grad_o(p.grad_o, seq, true, channels),
        dk(p.dk, seq, true, channels),
        dv(p.dv, seq, true, channels),
        saved(p.forward.saved),
        saved_base(saved_row(p.forward.layout, {seq.index, seq.batch, 0, 0}, 0)),
        saved_rows(p.forward, seq, channels),
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
        set_binary_exponent(s[c], -this->load_state(final_state, seq.index, c).m);
      }
    }
  }
  /// Rescales the gradient of the state to the exponent of the state as it was given.
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    Number d[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      Number given = {0.0f, 0.0f, -s[c].m, -s[c].rest};
      if (this->state != nullptr) {
        set_binary_exponent(given, this->load_state(this->state, seq.index, c).m);
      }
      const Real whole = at_most(given.m + s[c].m, binary(kWkv4LargestGradientScale<Real>));
      const Real scale = exp2_of(whole, given.rest + s[c].rest);
      d[c] = {bounded(s[c].y * scale), bounded(s[c].z * scale), 0.0f, 0.0f};
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

  /// Fetches the saved state of the chunk from step k of the scan, whose tokens are the ones before
  /// its end.
  __device__ void fetch_chunk_inputs(char* place, int lane, int k, int end) const {
    const int first = end - k - kSteps;
    if (first > 0) {
      const Real* from;
      if constexpr (Base::kSharedExponent) {
        from = saved_rows.at(first);
      } else {
        const int64_t row = saved_base + (seq.start + first) / kWkv4SavedEvery;
        from = static_cast<const Real*>(saved) + 3 * row * channels.total + channels.first;
      }
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        char* to = place + (part * kWarpSize + lane) * sizeof(StatePack);
        this->copy_saved(to, from + part * channels.total);
      }
    }
  }
  static __device__ Real saved_value(const char* place, int lane, int part, int c) {
    return reinterpret_cast<const Real*>(place)[(part * kWarpSize + lane) * kVec + c];
  }
  static __device__ Real& saved_value(char* place, int lane, int part, int c) {
    return reinterpret_cast<Real*>(place)[(part * kWarpSize + lane) * kVec + c];
  }
  static __device__ unsigned& fast_bits(char* place, int lane) {
    return reinterpret_cast<unsigned*>(place)[3 * kWarpSize * kVec + lane];
  }
  /// The state that enters the chunk whose first token is `first`; `key`: of that token.
  template <class Ring>
  __device__ Number entering(const Ring& ring, int stage, int first, Real key, int c) const {
    if (first > 0) {
      const char* place = ring.chunk_inputs(stage);
      return {saved_value(place, ring.lane(), 0, c), saved_value(place, ring.lane(), 1, c),
              saved_value(place, ring.lane(), 2, c)};
    }
    return absorb_rest(this->first_state(key, c));
  }

  // Outputs leave by way of the slots of these inputs.
  static constexpr int kSlotOfDk = 0, kSlotOfDv = 1;

  /// The slow path of one channel: takes what flows back through the chunk, and, emitting, what it
  /// gives to the tokens.
  template <bool kEmits, class Ring>
  __device__ void slow_path(const Ring& ring, int stage, int count, int first, Number& flow, int c,
                            Real* dw = nullptr, Real* du = nullptr) const {
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
        ring.stage_output_channel(stage, i, kSlotOfDk, c, narrow<Data>(dk));
        ring.stage_output_channel(stage, i, kSlotOfDv, c,
                                  narrow<Data>(fused(token, flow.y, by_token)));
        *dw = fused(old, fused(flow.y, state.y, flow.z * state.z), *dw);
        *du += by_bonus;
      }
      flow.y = fused(old, flow.y, by_sums);
      flow.z = fused(old, flow.z, -by_sums * out);
    }
    flow.m = -start;
  }

  using Chunk = std::conditional_t<Base::kSharedExponent, Wkv4MultiBlockChunk<Wkv4Backward>,
                                   Wkv4SingleBlockChunk<Wkv4Backward>>;

  __device__ void reduce(int64_t row, void* scratch, int warp, int warps, int lane) const {
    sum_over_warps(dw, dw_partial, row, channels, scratch, warp, warps, lane);
    sum_over_warps(du, du_partial, row, channels, scratch, warp, warps, lane);
  }
};

// ---- The kernels of a data type ----

/// WarpChunk<Op> (chunk_loops.cuh) of these Ops is their own.
template <class Op>
  requires(Op::kHasOwnChunk)
struct WarpChunk<Op> : Op::Chunk {};

template <class Data>
struct Wkv4Choice {
  // Four bytes a thread and row: a warp's row of an input is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  struct Forward : ScanRecurrence<Forward, Wkv4Params> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op = Wkv4Forward<Rowed<Data>, kPack, kRegime>;
    static constexpr int kVec = Wkv4Choice::kVec;
    static auto tensors(const Wkv4Params& p) { return std::array{&p.k, &p.v, &p.o}; }
  };
  struct Backward : ScanRecurrence<Backward, Wkv4BackwardParams> {
    template <template <class> class Rowed, int kPack, Regime kRegime>
    using Op = Wkv4Backward<Rowed<Data>, kPack, with_one_single_block(kRegime)>;
    static constexpr int kVec = Wkv4Choice::kVec;
    static auto tensors(const Wkv4BackwardParams& p) {
      return std::array{&p.forward.k, &p.forward.v, &p.grad_o, &p.dk, &p.dv};
    }
  };
};

template <class Data>
cudaError_t Wkv4Kernels<Data>::forward_plan(const Wkv4Params& p, ScanPlan* plan) {
  return Wkv4Choice<Data>::Forward::plan(p, plan);
}

template <class Data>
cudaError_t Wkv4Kernels<Data>::forward(const Wkv4Params& p, cudaStream_t stream) {
  return Wkv4Choice<Data>::Forward::launch(p, stream);
}

template <class Data>
cudaError_t Wkv4Kernels<Data>::backward_plan(const Wkv4BackwardParams& p, ScanPlan* plan) {
  return Wkv4Choice<Data>::Backward::plan(p, plan);
}

template <class Data>
cudaError_t Wkv4Kernels<Data>::backward(const Wkv4BackwardParams& p, cudaStream_t stream) {
  return Wkv4Choice<Data>::Backward::launch(p, stream);
}

}  // namespace tidegate::kernels::scan
