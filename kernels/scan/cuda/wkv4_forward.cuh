#pragma once

// RWKV-4's token mixing forward, as an Op of the walk with runs of its own. Nothing but a map
// depends on what enters a run, so no exponential but a map's is taken on the way from warp to
// warp.

#include "kernels/scan/cuda/wkv4_base.cuh"

namespace tidegate::kernels {

// Longer runs make chains shorter; with several blocks a multiprocessor there are enough of them.
template <WalkUse kUse>
struct Wkv4ForwardShape : WalkShape<kUse == WalkUse::kShort ? 8 : 16, 2> {};

template <class Data_, int kVec_, WalkUse kUse>
struct Wkv4Forward : Wkv4Base<Data_, kVec_>, Wkv4ForwardShape<kUse> {
  using Base = Wkv4Base<Data_, kVec_>;
  using Base::kVec, Base::lane, Base::seq, Base::w, Base::u, Base::decay, Base::bonus;
  using typename Base::Data;
  using typename Base::Number;
  using typename Base::Real;
  using Params = Wkv4Params;
  using Map = AffineMap<Number, kVec>;
  using typename Base::StatePack;
  static constexpr int kSteps = Wkv4ForwardShape<kUse>::kSteps;
  static constexpr bool kEmitsAtOnce = true;

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

  __device__ void initial(Number (&s)[kVec]) const {
    Pack<Data, kVec> first = {};
    if (seq.length > 0) {
      first = load_streaming<Data, kVec>(this->k.at(0));
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      s[c] = this->first_state(first.get(c), c);
    }
  }
  /// An empty sequence hands on what it was given.
  __device__ void finish(const Number (&s)[kVec]) const {
    Number last[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      last[c] = in_natural_gauge(s[c]);
      if (seq.length == 0) {
        last[c] = {};
        if (this->state != nullptr) {
          last[c] = this->load_state(this->state, seq.index, c);
        }
      }
    }
    this->store_states(final_state, seq.index, last);
  }
  /// The state that enters a token. Its gauge has one word, and stays binary.
  __device__ void save(int step, const Number (&s)[kVec]) const {
    const int64_t row = saved_base + (seq.start + step) / kWkv4SavedEvery;
    Real* at = static_cast<Real*>(saved) + 3 * row * lane.channels + lane.channel;
    Real y[kVec], z[kVec], m[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      y[c] = s[c].y, z[c] = s[c].z, m[c] = s[c].m;
    }
    *reinterpret_cast<StatePack*>(at) = pack<Real, kVec>(y);
    *reinterpret_cast<StatePack*>(at + lane.channels) = pack<Real, kVec>(z);
    *reinterpret_cast<StatePack*>(at + 2 * lane.channels) = pack<Real, kVec>(m);
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

  struct Run {
    using Op = Wkv4Forward;
    bool quick;
    Real gauge[kVec];
    // Of a quick run:
    Real weight[kSteps][kVec];
    Pack<Data, kVec> value[kSteps];

    template <class Ring>
    __device__ void decode(const Op& op, const Ring& ring, int stage, int k, int end) {
      Pack<Data, kVec> key[kSteps];
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
      quick = all_lanes(op.find_gauges(keys, gauge)) && k + kSteps <= end;
      if (quick) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            weight[i][c] = Base::weight(key[i].get(c), gauge[c]);
          }
        }
      }
    }

    /// The run's own sums after its last step.
    template <class Ring>
    __device__ void fold(const Op& op, const Ring& ring, int stage, Map& map) const {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (quick) {
          Number sums = {0.0f, 0.0f, gauge[c], kSteps * op.w[c]};
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            sums.y = fused(op.decay[c], sums.y, weight[i][c] * value[i].get(c));
            sums.z = fused(op.decay[c], sums.z, weight[i][c]);
          }
          map.sums[c] = sums;
        } else {
          map.sums[c] = slow_sums(op, ring, stage, c);
        }
      }
    }

    /// The same, scaled by the largest weight after the last step.
    template <class Ring>
    __device__ static Number slow_sums(const Op& op, const Ring& ring, int stage, int c) {
      Real top = -1e30f;
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        const Real key = binary(ring.take(op, stage, i).k.get(c));
        top = larger(top, fused(op.w[c], Real(i + 1 - kSteps), key));
      }
      Number sums = {0.0f, 0.0f, top, kSteps * op.w[c]};
#pragma unroll 1
      for (int i = 0; i < kSteps; ++i) {
        const Raw raw = ring.take(op, stage, i);
        const Real above = fused(op.w[c], Real(i + 1 - kSteps), binary_above(raw.k.get(c), top));
        const Real weight = exp2_of(above);
        sums.y = fused(weight, raw.v.get(c), sums.y);
        sums.z += weight;
      }
      return sums;
    }

    template <class Ring>
    __device__ void advance_and_emit(Op& op, const Ring& ring, int stage, int k, int end,
                                     Number (&s)[kVec]) const {
      Number entering[kVec];
      bool near = quick;
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        entering[c] = s[c];
        near = Base::enter_gauge(entering[c], gauge[c]) && near;
      }
      if (all_lanes(near)) {
        if (op.saved != nullptr) {
          walk<true>(op, k, entering);
        } else {
          walk<false>(op, k, entering);
        }
        if (end == k + kSteps) {
          op.finish(entering);
        }
      } else if (k < end) {
        walk_slowly(op, ring, stage, k, min(end - k, kSteps), s);
        if (end <= k + kSteps) {
          op.finish(s);
        }
      }
    }

    template <bool kSaves>
    __device__ void walk(const Op& op, int k, Number (&s)[kVec]) const {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (kSaves && op.saves_before(k + i)) {
          op.save(k + i, s);
        }
        Real out[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Real token = weight[i][c], weighted = token * value[i].get(c);
          out[c] =
              fused(op.bonus[c], weighted, s[c].y) * reciprocal(fused(op.bonus[c], token, s[c].z));
          s[c].y = fused(op.decay[c], s[c].y, weighted);
          s[c].z = fused(op.decay[c], s[c].z, token);
        }
        op.o.store(k, i, pack<Data, kVec>(out));
      }
    }

    template <class Ring>
    __device__ static void walk_slowly(const Op& op, const Ring& ring, int stage, int k, int count,
                                       Number (&s)[kVec]) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (op.saved != nullptr && op.saves_before(k + i)) {
          Number entering[kVec];
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            entering[c] = in_one_word(s[c]);
          }
          op.save(k + i, entering);
        }
        const Raw raw = ring.take(op, stage, i);
        Real out[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const Real key = raw.k.get(c), value = raw.v.get(c);
          const Real bonus = op.bonus_beside(s[c], key, c);
          out[c] = fused(bonus, value, s[c].y) * reciprocal(s[c].z + bonus);
          op.add(s[c], key, value, c);
        }
        op.o.store(k + i, 0, pack<Data, kVec>(out));
      }
    }
  };

  __device__ void reduce(int64_t, void*, int, int, int) const {}
};

}  // namespace tidegate::kernels
