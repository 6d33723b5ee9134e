#pragma once

// What a run of steps does to a state, as one affine map, and the boards in shared memory through
// which the warps of a block pass states and maps to each other.

#include "kernels/common/cuda/precise.cuh"

namespace tidegate::kernels::scan {

template <class Number, int kVec>
__device__ inline void copy_state(Number (&to)[kVec], const Number (&from)[kVec]) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    to[v] = from[v];
  }
}

/// The effect of a run of steps on the state: s -> a * s + x, a channel each.
template <class Number, int kVec>
struct AffineMap {
  Precise<Number> a[kVec];
  Number x[kVec];

  __device__ static AffineMap identity() {
    AffineMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = as_precise(one<Number>());
      m.x[v] = Number{};
    }
    return m;
  }

  __device__ void advance(Number (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(a[v], s[v], x[v]);
    }
  }

  /// What differs from run to run where all decay alike; and the map of such a run, like this one.
  struct Added {
    Number x[kVec];
  };
  __device__ Added added() const {
    Added words;
    copy_state(words.x, x);
    return words;
  }
  __device__ AffineMap like(const Added& words) const {
    AffineMap m = *this;
    copy_state(m.x, words.x);
    return m;
  }

  /// This map after `earlier`.
  __device__ void append_to(AffineMap& earlier) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      earlier.x[v] = fused(a[v], earlier.x[v], x[v]);
      earlier.a[v] = multiply(a[v], earlier.a[v]);
    }
  }
};

/// The same with decays of one word. That is enough for 16-bit data and decays of at most one,
/// where it is rounded once a run and the product of the run's own steps is not (see numerics.md).
template <class Number, int kVec>
struct PlainMap {
  Number a[kVec];
  Number x[kVec];

  __device__ static PlainMap identity() {
    PlainMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = one<Number>();
      m.x[v] = Number{};
    }
    return m;
  }
  __device__ static PlainMap of(const AffineMap<Number, kVec>& map) {
    PlainMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = map.a[v].hi + map.a[v].lo;
      m.x[v] = map.x[v];
    }
    return m;
  }
  __device__ void advance(Number (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(a[v], s[v], x[v]);
    }
  }
  __device__ void append_to(PlainMap& earlier) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      earlier.x[v] = fused(a[v], earlier.x[v], x[v]);
      earlier.a[v] = a[v] * earlier.a[v];
    }
  }
};

/// A state in a letter from block to block (links.cuh).
template <class Number>
struct StateWordsOf {
  using type = Number;
};
template <class Number>
__device__ inline Number to_words(const Number& s) {
  return s;
}
template <class Number>
__device__ inline Number from_words(const Number& s) {
  return s;
}

/// Maps of several warps, their parts apart so that a warp's accesses have no bank conflicts.
template <class Number, int kVec, int kCount>
struct MapBoard {
  using Part = Pack<Number, kVec>;
  Part hi[kCount][kWarpSize];
  Part lo[kCount][kWarpSize];
  Part x[kCount][kWarpSize];

  __device__ void post(int slot, int lane, const AffineMap<Number, kVec>& m) {
    Number his[kVec], los[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      his[v] = m.a[v].hi;
      los[v] = m.a[v].lo;
    }
    hi[slot][lane] = pack<Number, kVec>(his);
    lo[slot][lane] = pack<Number, kVec>(los);
    x[slot][lane] = pack<Number, kVec>(m.x);
  }

  __device__ AffineMap<Number, kVec> read(int slot, int lane) const {
    const Part h = hi[slot][lane];
    const Part l = lo[slot][lane];
    const Part p = x[slot][lane];
    AffineMap<Number, kVec> m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = {h.get(v), l.get(v)};
      m.x[v] = p.get(v);
    }
    return m;
  }
};

/// Maps of one word, each in one access.
template <class Number, int kVec, int kCount>
struct PlainMapBoard {
  using Map = PlainMap<Number, kVec>;
  using Bits = typename BitsOf<sizeof(Map)>::type;
  Bits maps[kCount][kWarpSize];

  __device__ void post(int slot, int lane, const Map& m) {
    Bits bits;
    memcpy(&bits, &m, sizeof(m));
    maps[slot][lane] = bits;
  }
  __device__ Map read(int slot, int lane) const {
    const Bits bits = maps[slot][lane];
    Map m;
    memcpy(&m, &bits, sizeof(m));
    return m;
  }
};

/// One state, a warp wide.
template <class Number, int kVec>
struct StateBoard {
  Pack<Number, kVec> state[kWarpSize];

  __device__ void post(int lane, const Number (&s)[kVec]) { state[lane] = pack<Number, kVec>(s); }
  __device__ void read(int lane, Number (&s)[kVec]) const {
    const Pack<Number, kVec> p = state[lane];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = p.get(v);
    }
  }
};

}  // namespace tidegate::kernels::scan
