#pragma once

// What a state is carried by: the affine maps of chunks, the shared memory through which warps pass
// states and maps to each other, and the carry chain of a single-block scan.

#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/shared_memory.cuh"

namespace tidegate::kernels::scan {

/// The warps for which a multiprocessor has registers: 65536 are 128 for each thread of 16 warps. A
/// block has at most that many warps; where an SM has several blocks, these share the 16
/// (launch.cuh). Kernels are compiled for 128 registers whatever the warps of a launch
/// (__launch_bounds__).
constexpr int kMaxWarps = 16;

/// A warp's place in its warp group (the warps of a block, or half of them), and the warp group's
/// rank among those that share a sequence.
struct WarpPosition {
  int warp, warps;  // warps: compute warps of the warp group
  int lane;
  int rank, warp_groups;

  /// Keeps warp and lane in registers. Otherwise the compiler computes both anew wherever a carry
  /// warp waits.
  __device__ void keep_in_registers() { asm("" : "+r"(warp), "+r"(lane)); }
};

template <class Number, int kVec>
__device__ inline void copy_state(Number (&to)[kVec], const Number (&from)[kVec]) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    to[v] = from[v];
  }
}

/// The effect of a chunk of steps on the state: s -> a * s + x, a channel each. The decay is a sum
/// of two floats.
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

  __device__ void apply(Number (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(a[v], s[v], x[v]);
    }
  }

  /// What differs from chunk to chunk where all decays are equal; and the map that such an added
  /// part makes with the decay of this map.
  struct Added {
    Number x[kVec];
  };
  __device__ Added added() const {
    Added packed;
    copy_state(packed.x, x);
    return packed;
  }
  __device__ AffineMap like(const Added& packed) const {
    AffineMap m = *this;
    copy_state(m.x, packed.x);
    return m;
  }

  /// earlier <- this map o earlier.
  __device__ void compose_after(AffineMap& earlier) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      earlier.x[v] = fused(a[v], earlier.x[v], x[v]);
      earlier.a[v] = multiply(a[v], earlier.a[v]);
    }
  }
};

/// An affine map with single-float decays. That is enough for 16-bit data and decays of at most one
/// if the product of a chunk's steps is two-float and is rounded once, when the chunk is done
/// (docs/numerics.md, "Long memories").
template <class Number, int kVec>
struct SingleFloatMap {
  Number a[kVec];
  Number x[kVec];

  __device__ static SingleFloatMap identity() {
    SingleFloatMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = one<Number>();
      m.x[v] = Number{};
    }
    return m;
  }
  __device__ static SingleFloatMap of(const AffineMap<Number, kVec>& map) {
    SingleFloatMap m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = map.a[v].hi + map.a[v].lo;
      m.x[v] = map.x[v];
    }
    return m;
  }
  __device__ void apply(Number (&s)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fused(a[v], s[v], x[v]);
    }
  }
  __device__ void compose_after(SingleFloatMap& earlier) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      earlier.x[v] = fused(a[v], earlier.x[v], x[v]);
      earlier.a[v] = a[v] * earlier.a[v];
    }
  }
};

/// A state as it travels in a carry record from block to block (multi_block.cuh).
template <class Number>
struct PackedStateOf {
  using type = Number;
};
template <class Number>
__device__ inline Number pack_state(const Number& s) {
  return s;
}
template <class Number>
__device__ inline Number unpack_state(const Number& s) {
  return s;
}

/// The maps of several warps in shared memory, their parts apart so that a warp's accesses have no
/// bank conflicts.
template <class Number, int kVec, int kCount>
struct SharedMaps {
  using Part = Pack<Number, kVec>;
  Part hi[kCount][kWarpSize];
  Part lo[kCount][kWarpSize];
  Part x[kCount][kWarpSize];

  __device__ void store(int warp, int lane, const AffineMap<Number, kVec>& m) {
    Number his[kVec], los[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      his[v] = m.a[v].hi;
      los[v] = m.a[v].lo;
    }
    hi[warp][lane] = pack<Number, kVec>(his);
    lo[warp][lane] = pack<Number, kVec>(los);
    x[warp][lane] = pack<Number, kVec>(m.x);
  }

  __device__ AffineMap<Number, kVec> load(int warp, int lane) const {
    const Part h = hi[warp][lane];
    const Part l = lo[warp][lane];
    const Part p = x[warp][lane];
    AffineMap<Number, kVec> m;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      m.a[v] = {h.get(v), l.get(v)};
      m.x[v] = p.get(v);
    }
    return m;
  }
};

/// Single-float maps of several warps, each in one access.
template <class Number, int kVec, int kCount>
struct SharedSingleFloatMaps {
  using Map = SingleFloatMap<Number, kVec>;
  using Bits = typename BitsOf<sizeof(Map)>::type;
  Bits maps[kCount][kWarpSize];

  __device__ void store(int warp, int lane, const Map& m) {
    Bits bits;
    memcpy(&bits, &m, sizeof(m));
    maps[warp][lane] = bits;
  }
  __device__ Map load(int warp, int lane) const {
    const Bits bits = maps[warp][lane];
    Map m;
    memcpy(&m, &bits, sizeof(m));
    return m;
  }
};

/// One state in shared memory, a warp wide.
template <class Number, int kVec>
struct SharedState {
  Pack<Number, kVec> state[kWarpSize];

  __device__ void store(int lane, const Number (&s)[kVec]) { state[lane] = pack<Number, kVec>(s); }
  __device__ void load(int lane, Number (&s)[kVec]) const {
    const Pack<Number, kVec> p = state[lane];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = p.get(v);
    }
  }
};

/// The shared-memory carry of a single-block scan.
template <class Op>
struct CarryChainShared {
  SharedState<typename Op::Number, Op::kVec>
      carry[kMaxWarps];  // the state that enters a warp's chunk
  uint64_t carry_ready[kMaxWarps];

  /// A single-block carry has nothing to prepare from the Op; wkv4's multi-block carry has.
  __device__ void prepare(const Op&, const WarpPosition&) const {}
  __device__ void init(const WarpPosition& at) {
    if (at.lane == 0) {
      mbarrier_init(&carry_ready[at.warp], kWarpSize);
    }
  }
};

/// The carry chain of a block's warps, the last one linked to the first one's next iteration. A
/// warp that has received may overwrite the next warp's slot: the chain passed that warp, an
/// iteration ago, after it had read the slot. So no second barrier says that a slot is free.
template <class Op>
struct CarryChain {
  using Number = typename Op::Number;
  CarryChainShared<Op>& shared;
  const WarpPosition& at;

  /// The first chunk of all receives nothing: its state is what the scan begins with.
  __device__ void receive(int iteration, Number (&s)[Op::kVec]) const {
    if (iteration > 0 || at.warp > 0) {
      // The first warp's carry comes from the iteration before.
      mbarrier_wait(&shared.carry_ready[at.warp], (at.warp == 0 ? iteration - 1 : iteration) & 1);
      shared.carry[at.warp].load(at.lane, s);
    }
  }
  __device__ void send(const Number (&s)[Op::kVec]) const {
    int next = at.warp + 1 == at.warps ? 0 : at.warp + 1;
    if constexpr (Op::kFindsNextWarpLate) {
      asm volatile("" : "+r"(next));  // or its addresses are kept, and one of them is spilled
    }
    shared.carry[next].store(at.lane, s);
    mbarrier_arrive(&shared.carry_ready[next]);
  }
};

}  // namespace tidegate::kernels::scan
