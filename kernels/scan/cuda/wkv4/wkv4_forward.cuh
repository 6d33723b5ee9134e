#pragma once

// RWKV-4's token mixing forward, as an Op of the scan engine with chunks of its own:
//   decode             keys and values from the ring, and the range of each channel's keys
//   compose            the chunk's own sums after its last token, on the fast or the slow path
//   advance_and_emit   from the state that entered: the states that are saved, the outputs; rows
//                      leave by way of the ring
// A chunk's map does not depend on what enters the chunk, so no exponential but those of crossing
// by it is taken on the way from warp to warp. Tiles are those of OpKind::kWkv4 (op.cuh), 8 or
// 16 tokens a chunk; the barriers are the carry's (carry.cuh, wkv4_multi_block.cuh).

#include "kernels/scan/cuda/wkv4/wkv4_base.cuh"

namespace tidegate::kernels::scan {

template <class Data_, int kVec_, Regime kRegime>
struct Wkv4Forward : Wkv4Base<Data_, kVec_, kRegime, false>,
                     TileConfig<OpKind::kWkv4, Direction::kForward, kRegime> {
  using Base = Wkv4Base<Data_, kVec_, kRegime, false>;
  using Base::kVec, Base::channels, Base::seq, Base::decay, Base::bonus;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = Wkv4Params;
  using Map = AffineMap<Number, kVec>;
  using Tile = TileConfig<OpKind::kWkv4, Direction::kForward, kRegime>;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr bool kEmitWhileAdvancing = true;

  struct Raw {
    Pack<Data, kVec> k, v;
  };
  static constexpr int kInputs = 2, kStagedOutputs = 1;

  static cudaError_t launch_sequential(const Params& p, cudaStream_t stream) {
    return launch_wkv4_sequential<Data>(p, stream);
  }

  Rows<Data, kVec> o;
  void* final_state;
  void* saved;
  int64_t saved_base;  // row of the batch's first saved state
  typename Base::SavedStates saved_rows;

  __device__ Wkv4Forward(const Params& p, const Sequence& seq, const Channels& channels)
      : Base(p, seq, channels),
        o(p.o, seq, false, channels),
        final_state(p.final_state),
        saved(p.saved),
        saved_base(saved_row(p.layout, {seq.index, seq.batch, 0, 0}, 0)),
        saved_rows(p, seq, channels) {}

  __device__ void initial(Number (&s)[kVec]) const {
    Pack<Data, kVec> first = {};
    if (seq.length > 0) {
      first = this->k.load(0);
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      s[c] = this->first_state(first.get(c), c);
    }
  }
  /// An empty sequence hands on what it was given.
  __device__ void store_final_state(const Number (&s)[kVec]) const {
    Number last[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      last[c] = to_natural_exponent(s[c]);
      if (seq.length == 0) {
        last[c] = {};
        if (this->state != nullptr) {
          last[c] = this->load_state(this->state, seq.index, c);
        }
      }
    }
    this->store_states(final_state, seq.index, last);
  }
  /// Saves the state that enters a token. Its exponent is a single float, and stays binary.
  __device__ void save(int step, const Number (&s)[kVec]) const {
    Real* at;
    if constexpr (Base::kSharedExponent) {
      at = saved_rows.at(step);
    } else {
      const int64_t row = saved_base + (seq.start + step) / kWkv4SavedEvery;
      at = static_cast<Real*>(saved) + 3 * row * channels.total + channels.first;
    }
    Real y[kVec], z[kVec], m[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      y[c] = s[c].y, z[c] = s[c].z, m[c] = s[c].m;
    }
    this->store_saved(at, y);
    this->store_saved(at + channels.total, z);
    this->store_saved(at + 2 * channels.total, m);
  }
  __device__ bool saves_before(int step) const {
    return static_cast<unsigned>(seq.length - step) % unsigned{kWkv4SavedEvery} == 0 && step > 0;
  }

  template <class Source>
  __device__ Raw gather(Source source, int step, int /*last*/) const {
    Raw raw;
    source(raw.k, this->k, step);
    source(raw.v, this->v, step);
    return raw;
  }

  struct Chunk {
    using Op = Wkv4Forward;
    Pack<Data, kVec> key[kSteps], value[kSteps];
    Real low[kVec], high[kVec];  // keys, as binary logarithms

    template <class Ring>
    __device__ void decode(const Op& op, const Ring& ring, int stage, int, int) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const Raw raw = ring.take(op, stage, i);
        key[i] = raw.k;
        value[i] = raw.v;
      }
      KeyRange<Data, kVec> keys(key[0]);
#pragma unroll
      for (int i = 1; i < kSteps; ++i) {
        keys.add(key[i]);
      }
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        low[c] = binary(keys.lowest(c));
        high[c] = binary(keys.highest(c));
      }
    }

    /// The chunk's own sums after its last step.
    template <class Ring>
    __device__ void compose(const Op& op, const Ring& ring, int stage, int, int, Map& map) const {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const Real exponent = op.exponent_of(low[c], high[c], c);
        if (exponent - low[c] <= kExponentRange) {
          Wkv4PackedState sums = {0.0f, 0.0f, exponent};
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            const Real token = Base::weight(key[i].get(c), exponent);
            sums.y = fused(op.decay[c], sums.y, token * value[i].get(c));
            sums.z = fused(op.decay[c], sums.z, token);
          }
          map.sums[c] = sums;
        } else {
          map.sums[c] = slow_sums(op, ring, stage, c);
        }
        op.set_decay(map, kSteps, c);
      }
    }

    /// The chunk's sums on the slow path, scaled by the largest weight after the last step.
    template <class Ring>
    __device__ static Wkv4PackedState slow_sums(const Op& op, const Ring& ring, int stage, int c) {
      const BinaryLog rate = op.rate_of(c);
      Real top = kWkv4NoWeight;
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        const Real key = binary(ring.take(op, stage, i).k.get(c));
        top = larger(top, fused(rate.whole + rate.rest, Real(i + 1 - kSteps), key));
      }
      top = rintf(top);
      Wkv4PackedState sums = {0.0f, 0.0f, top};
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        const Raw raw = ring.take(op, stage, i);
        const BinaryLog log(raw.k.get(c));
        const Real steps = Real(i + 1 - kSteps);
        const Real weight =
            exp2_of(fused(rate.whole, steps, log.whole - top), fused(rate.rest, steps, log.rest));
        sums.y = fused(weight, raw.v.get(c), sums.y);
        sums.z += weight;
      }
      return sums;
    }

    /// The exponent of the outputs is that of the state which enters: they do not depend on later
    /// keys of the chunk.
    template <class Ring>
    __device__ void advance_and_emit(Op& op, const Ring& ring, int stage, int k, int end,
                                     Number (&s)[kVec]) const {
      Number state[kVec];
      bool fast[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        state[c] = s[c];
        fast[c] = op.rescale_to(state[c], s[c].m, c);
        fast[c] = fast[c] && high[c] - state[c].m <= kExponentRange &&
                  state[c].m - low[c] <= kExponentRange;
      }
      if (all_of(fast) && k + kSteps <= end) {
        if (op.saved == nullptr) {
          fast_path<Saves::kNone>(op, ring, stage, k, state);
        } else if (Base::kSharedExponent && op.seq.length % kWkv4SavedEvery == 0) {
          fast_path<Saves::kKnown>(op, ring, stage, k, state);
        } else {
          fast_path<Saves::kSome>(op, ring, stage, k, state);
        }
        if (end == k + kSteps) {
          op.store_final_state(state);
        }
      } else if (k < end) {
        slow_path(op, ring, stage, k, min(end - k, kSteps), s);
        if (end <= k + kSteps) {
          op.store_final_state(s);
        }
      }
      ring.store_outputs(stage, 0, op.o, k, end);
    }

    // Which states of a chunk are saved: those that saves_before finds, or every eighth, from the
    // first.
    enum class Saves { kNone, kSome, kKnown };
    template <Saves kSaves, class Ring>
    __device__ void fast_path(const Op& op, const Ring& ring, int stage, int k,
                              Number (&s)[kVec]) const {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (kSaves == Saves::kKnown ? i % kWkv4SavedEvery == 0 && k + i > 0
                                    : kSaves == Saves::kSome && op.saves_before(k + i)) {
          op.save(k + i, s);
        }
        Real out[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          out[c] = fast_step(op, key[i].get(c), value[i].get(c), s[c], c);
        }
        ring.stage_output(stage, i, 0, pack<Data, kVec>(out));
      }
    }

    /// A token's output from the state before it, and the state after it, in the same exponent.
    __device__ static Real fast_step(const Op& op, Real key, Real value, Number& s, int c) {
      const Real token = Base::weight(key, s.m), weighted = token * value;
      const Real out =
          fused(op.bonus[c], weighted, s.y) * reciprocal(fused(op.bonus[c], token, s.z));
      s.y = fused(op.decay[c], s.y, weighted);
      s.z = fused(op.decay[c], s.z, token);
      return out;
    }
    /// A step on the slow path: the exponent moves along.
    __device__ static Real slow_step(const Op& op, Real key, Real value, Number& s, int c) {
      const auto weights = op.bonus_beside(s, key, c);
      const Real out = fused(weights.first, s.y, weights.second * value) *
                       reciprocal(fused(weights.first, s.z, weights.second));
      op.add(s, key, value, c);
      return out;
    }

    /// Token by token, where one of the thread's channels must or the chunk is incomplete. Each
    /// channel stays at one exponent, with the bits of the fast path, up to the first token out of
    /// its range.
    template <class Ring>
    __device__ static void slow_path(const Op& op, const Ring& ring, int stage, int k, int count,
                                     Number (&s)[kVec]) {
      bool fast[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        Number state = s[c];
        fast[c] = op.rescale_to(state, s[c].m, c);
        s[c] = fast[c] ? state : s[c];
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (op.saved != nullptr && op.saves_before(k + i)) {
          Number before[kVec];
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            before[c] = absorb_rest(s[c]);
          }
          op.save(k + i, before);
        }
        const Raw raw = ring.take(op, stage, i);
        Real out[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Real key = raw.k.get(c), value = raw.v.get(c);
          // NaN stays on the fast path, as in a whole chunk.
          fast[c] = fast[c] && !(fabsf(binary(key) - s[c].m) > kExponentRange);
          out[c] =
              fast[c] ? fast_step(op, key, value, s[c], c) : slow_step(op, key, value, s[c], c);
        }
        ring.stage_output(stage, i, 0, pack<Data, kVec>(out));
      }
    }
  };

  __device__ void reduce(int64_t, void*, int, int, int) const {}
};

}  // namespace tidegate::kernels::scan
