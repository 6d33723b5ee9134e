#pragma once

// What RWKV-4's token mixing needs in both directions as an Op of the scan engine (op.cuh).
//
// Exponents, keys, rates and bonuses are binary logarithms here. Where a channel's weights in a
// chunk and in the state that enters it lie within a factor of 2^kExponentRange, it takes the fast
// path there: one exponent serves the whole chunk, sums decay by a product, and a token costs one
// exponential and one reciprocal. Elsewhere, and in the incomplete chunk with which a scan
// ends (backward: a sequence's first tokens), the slow path moves the exponent at every token
// (docs/kernels/wkv4.md). Each channel takes its own path, whatever its neighbours hold.

#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/engine/rows.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_state.cuh"

namespace tidegate::kernels::scan {

/// A natural logarithm as a binary one, and the distance of two as one, rounded once.
__device__ inline float binary(float x) { return x * kLog2E; }
__device__ inline float binary_above(float x, float exponent) {
  return fused(x, kLog2E, -exponent);
}

__device__ inline float median_of_three(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}
/// Four numbers without their smallest and largest one leave two: the median of these and the fifth
/// number is that of all five.
__device__ inline float median_of_five(float a, float b, float c, float d, float e) {
  return median_of_three(fmaxf(fminf(a, b), fminf(c, d)), fminf(fmaxf(a, b), fmaxf(c, d)), e);
}

/// The smallest and the largest of some keys, a channel each.
template <class Data, int kVec>
struct KeyRange {
  float low[kVec], high[kVec];

  __device__ explicit KeyRange(const Pack<Data, kVec>& first) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      low[c] = high[c] = first.get(c);
    }
  }
  __device__ void add(const Pack<Data, kVec>& keys) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      low[c] = fminf(low[c], keys.get(c));
      high[c] = fmaxf(high[c], keys.get(c));
    }
  }
  __device__ float lowest(int c) const { return low[c]; }
  __device__ float highest(int c) const { return high[c]; }
};

template <class Data>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <class T>
struct PairOf<Unaligned<T>> : PairOf<T> {};

/// Two 16-bit keys are compared by one instruction.
template <class Data>
struct KeyRange<Data, 2> {
  using Pair = typename PairOf<Data>::type;
  Pair low, high;

  static __device__ Pair pair(const Pack<Data, 2>& keys) {
    Pair p;
    memcpy(&p, &keys.bits, sizeof(p));
    return p;
  }
  static __device__ float element(const Pair& p, int c) {
    Pack<Data, 2> keys;
    memcpy(&keys.bits, &p, sizeof(p));
    return keys.get(c);
  }
  __device__ explicit KeyRange(const Pack<Data, 2>& first) : low(pair(first)), high(low) {}
  __device__ void add(const Pack<Data, 2>& keys) {
    low = __hmin2(low, pair(keys));
    high = __hmax2(high, pair(keys));
  }
  __device__ float lowest(int c) const { return element(low, c); }
  __device__ float highest(int c) const { return element(high, c); }
};

/// exp(-w), which is one minus something exact where w is small.
__device__ inline float decay_of(float w) { return w < 0.5f ? 1.0f + expm1f(-w) : expf(-w); }

/// A thread's saved states of one sequence, at addresses of one multiply-add.
class SavedRows {
 public:
  __device__ SavedRows(const Wkv4Params& p, const Sequence& seq, const Channels& channels)
      : stride_(static_cast<int>(3 * channels.total * sizeof(float))),
        shift_(static_cast<int>(seq.start % kWkv4SavedEvery)) {
    const int64_t row = saved_row(p.layout, seq, 0);
    base_ = static_cast<char*>(p.saved) + row * stride_ + channels.first * int64_t{sizeof(float)};
    asm("" : "+l"(base_));
  }
  /// The row of the state that enters a token. The next of its parts is one third of a row further
  /// on.
  __device__ float* at(int step) const {
    float* to;
    asm("mad.wide.s32 %0, %1, %2, %3;"
        : "=l"(to)
        : "r"((shift_ + step) / static_cast<int>(kWkv4SavedEvery)), "r"(stride_), "l"(base_));
    return to;
  }

 private:
  char* base_;
  int stride_, shift_;
};

struct NoSavedRows {
  __device__ NoSavedRows(const Wkv4Params&, const Sequence&, const Channels&) {}
};

/// Whether every channel of a thread takes the fast path.
template <int kVec>
__device__ inline bool all_of(const bool (&fast)[kVec]) {
  bool all = true;
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    all = all && fast[c];
  }
  return all;
}

template <class Data_, int kVec_, Regime kRegime, bool kBackwards>
struct Wkv4Base : OpDefaults {
  using Data = Data_;
  using Real = typename Register<Data>::type;
  using Number = Wkv4State<Real>;
  using StatePack = Pack<Real, kVec_>;
  static constexpr int kVec = kVec_;
  static constexpr bool kCarryByMap = true;
  static constexpr bool kEqualDecays = true;
  static constexpr int kPackBytes = sizeof(Data) * kVec;
  static constexpr bool kHasOwnChunk = true;
  // In multi-block scans, chunks whose keys are within range of a channel's shared exponent have
  // that exponent, and exponents are counted from there in the carry (wkv4_multi_block.cuh). For
  // 32-bit data the range is narrow, as weights near their exponent have the most digits.
  static constexpr bool kSharedExponent = kRegime == Regime::kMultiBlock;
  static constexpr Pipelining kPipelining =
      kSharedExponent ? Pipelining::kOwnChunk : Pipelining::kNone;
  static constexpr Real kSharedExponentRange = sizeof(Data) == 2 ? 30 : 8;

  // For multi-block scans, which have few registers; single-block scans find each row's address
  // anew.
  using SavedStates = std::conditional_t<kSharedExponent, SavedRows, NoSavedRows>;

  Channels channels;
  Sequence seq;
  Rows<Data, kVec> k, v;
  Real w_whole[kVec], w_rest[kVec];
  Real decay[kVec], bonus[kVec];  // exp(-w), exp(u)
  Real shared_exponent[kVec];
  const void *w, *u;  // read again on the slow path
  const void* state;

  __device__ Wkv4Base(const Wkv4Params& p, const Sequence& seq, const Channels& channels)
      : channels(channels),
        seq(seq),
        k(p.k, seq, kBackwards, channels),
        v(p.v, seq, kBackwards, channels),
        w(p.w),
        u(p.u),
        state(p.state) {
    Real w[kVec], u[kVec];
    load_channels(w, p.w, channels, Real(0));
    load_channels(u, p.u, channels, Real(0));
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      decay[c] = decay_of(w[c]);
      bonus[c] = expf(u[c]);
      const BinaryLog rate(w[c]);
      w_whole[c] = rate.whole, w_rest[c] = rate.rest;
    }
    if constexpr (kSharedExponent && kBackwards) {
      find_shared_exponent();
    }
  }

  /// Forward, the first keys are among the first chunks, and are read while these come. (Backward
  /// they are the last rows: asked for behind all chunks, they would come late.)
  __device__ void prepare() {
    if constexpr (kSharedExponent && !kBackwards) {
      find_shared_exponent();
    }
  }

  /// A channel's shared exponent: zero, or the median of its first keys where that is far from
  /// zero. (The very first key alone is now and then an outlier; all other chunks, within no range
  /// of it, would then take the slow path to the end of the sequence.)
  __device__ void find_shared_exponent() {
    constexpr int kKeys = 5;
    Pack<Data, kVec> first[kKeys] = {};
    if (seq.length > 0) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int token = min(i, seq.length - 1);
        first[i] = k.load(kBackwards ? seq.length - 1 - token : token);
      }
    }
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const Real key = median_of_five(first[0].get(c), first[1].get(c), first[2].get(c),
                                      first[3].get(c), first[4].get(c));
      const Real exponent = rintf(binary(key));
      const bool is_far =
          fabsf(exponent) > kSharedExponentRange * Real(0.5) && fabsf(exponent) < Real(1e6);
      shared_exponent[c] = is_far ? exponent : Real(0);
    }
  }

  __device__ void store_states(void* states, int64_t row, const Number (&s)[kVec]) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if (channels.exists(c)) {
        store_wkv4_state(states, row, channels.total, channels.at(c), s[c]);
      }
    }
  }
  __device__ Number load_state(const void* states, int64_t row, int c) const {
    return load_wkv4_state<Real>(states, row, channels.total, channels.at(c));
  }
  /// The state that enters the first token, whose key is given.
  __device__ Number first_state(Real key, int c) const {
    Number s = initial_wkv4_state<Real>(state, seq.index, channels.total, channels.at(c), key);
    set_binary_exponent(s, s.m);
    return s;
  }

  /// Stores one of the three parts of a saved state. Where rows are unaligned, so are those of the
  /// saved states.
  __device__ void store_saved(Real* to, const Real (&part)[kVec]) const {
    if constexpr (kIsUnaligned<Data>) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (channels.exists(c)) {
          to[c] = part[c];
        }
      }
    } else {
      *reinterpret_cast<StatePack*>(to) = pack<Real, kVec>(part);
    }
  }
  /// Starts the copy of a saved state.
  __device__ void copy_saved(char* to, const Real* from) const {
    if constexpr (kIsUnaligned<Data>) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (channels.exists(c)) {
          copy_async<sizeof(Real)>(to + c * sizeof(Real), from + c);
        }
      }
    } else {
      copy_async<sizeof(StatePack)>(to, from);
    }
  }

  /// How fast a channel decays on the slow path. (Multi-block scans have not the registers to keep
  /// that.)
  __device__ BinaryLog rate_of(int c) const {
    if constexpr (kSharedExponent) {
      return BinaryLog(static_cast<const Real*>(w)[channels.at(c)]);
    } else {
      return {w_whole[c], w_rest[c]};
    }
  }
  /// How a channel's map of `steps` steps decays.
  __device__ void set_decay(AffineMap<Number, kVec>& map, int steps, int c) const {
    map.whole[c] = steps * w_whole[c];
    map.rest[c] = steps * w_rest[c];
  }
  /// The shared exponent of a state: what flows back has the opposite of that of the state it
  /// belongs to.
  __device__ Real shared_exponent_of_state(int c) const {
    return kBackwards ? -shared_exponent[c] : shared_exponent[c];
  }
  /// The exponent of a chunk whose keys lie between these.
  __device__ Real exponent_of(Real low, Real high, int c) const {
    if constexpr (kSharedExponent) {
      if (high - shared_exponent[c] <= kSharedExponentRange &&
          shared_exponent[c] - low <= kSharedExponentRange) {
        return shared_exponent[c];
      }
    }
    return rintf(high);
  }
  /// A token's weight at a chunk's exponent.
  static __device__ Real weight(Real key, Real exponent) {
    return exp2_approx(binary_above(key, exponent));
  }

  /// A token added to a state, the exponent moving along.
  __device__ Wkv4Weights<Real> add(Number& s, Real key, Real value, int c) const {
    const BinaryLog rate = rate_of(c);
    lower_binary_exponent(s, rate.whole, rate.rest);
    const BinaryLog log(key);
    const Real distance = log.whole - s.m, rest = log.rest - s.rest;
    const auto weights = Wkv4Weights<Real>::at_binary(distance, rest);
    s.y = fused(weights.first, s.y, weights.second * value);
    s.z = fused(weights.first, s.z, weights.second);
    if (distance + rest > Real(0)) {
      s.m = log.whole;
      s.rest = log.rest;
    }
    return weights;
  }
  /// The weights of a state's sums and of a token with its bonus.
  __device__ Wkv4Weights<Real> bonus_beside(const Number& s, Real key, int c) const {
    const BinaryLog log(key), bonus(static_cast<const Real*>(u)[channels.at(c)]);
    // A large bonus has no power of two of its own; its whole part goes with the key's.
    const Real whole =
        beside_empty(s, (log.whole - s.m) + bonus.whole, binary(kWkv4LeastBesideEmpty));
    return Wkv4Weights<Real>::at_binary(whole, (log.rest - s.rest) + bonus.rest);
  }

  /// Rescales the sums to an exponent; false where they, or the bonus, lie too far from it: s is
  /// spoilt then.
  __device__ bool rescale_to(Number& s, Real exponent, int c) const {
    const Real scale = exp2_of(s.m - exponent, s.rest);
    const bool is_empty = s.is_empty();
    if (!is_empty) {
      s.y *= scale, s.z *= scale;
    }
    s.m = exponent, s.rest = Real(0);
    const bool is_near = s.z >= Real(0x1p-40f) && s.z <= Real(0x1p40f);  // kExponentRange
    // Weights with their bonus then leave values 2^68 of a float's range.
    return (is_empty || is_near) && bonus[c] >= Real(0x1p-20f) && bonus[c] <= Real(0x1p20f);
  }
};

}  // namespace tidegate::kernels::scan
