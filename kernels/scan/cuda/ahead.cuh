#pragma once

// Linked workers that look a round ahead: a worker folds its next run and posts that run's map
// before it takes the state that enters the present one. So carriers and letters (links.cuh) have a
// round's time to bring a state. Meanwhile the present run waits where LookAhead says
// (walk_op.cuh):
//   kParks    as decoded steps, where outputs follow from these and the state alone: nothing is
//             decoded twice, and a run's place in the ring is free as soon as it has been decoded;
//   kSplits   in the ring, where outputs need more inputs than a fold does. A run is decoded twice,
//             and of what a fold does not read the ring holds a run less;
//   kOwnRuns  in the ring, as a whole.

#include <type_traits>

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/scan/cuda/chain.cuh"
#include "kernels/scan/cuda/run.cuh"

namespace tidegate::kernels::scan {

/// Shared memory in which a warp keeps a decoded run.
template <class Op>
__host__ __device__ constexpr int park_bytes() {
  if constexpr (Op::kLookAhead == LookAhead::kParks) {
    return Op::kSteps * kWarpSize * static_cast<int>(sizeof(typename Op::Decoded));
  } else {
    return 0;
  }
}

/// A decoded run, kept until its state comes.
template <class Op>
class Park {
  using Decoded = typename Op::Decoded;
  static_assert(sizeof(Decoded) % 8 == 0);
  using Unit = std::conditional_t<sizeof(Decoded) % 16 == 0, uint4, uint2>;
  static constexpr int kUnits = sizeof(Decoded) / sizeof(Unit);

 public:
  __device__ Park(char* shared, int lane) : units_(reinterpret_cast<Unit*>(shared) + lane) {}

  __device__ void put(int i, const Decoded& d) const {
    Unit units[kUnits];
    memcpy(units, &d, sizeof(d));
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      units_[(i * kUnits + u) * kWarpSize] = units[u];
    }
  }
  __device__ Decoded get(int i) const {
    Unit units[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      units[u] = units_[(i * kUnits + u) * kWarpSize];
    }
    Decoded d;
    memcpy(&d, units, sizeof(d));
    return d;
  }

  /// Step k + i from the state s, with its outputs.
  template <bool kLast>
  __device__ void step(Op& op, int k, int i, typename Op::Number (&s)[Op::kVec]) const {
    typename Op::Number now[Op::kVec];
    const Decoded decoded = get(i);
    op.advance({}, decoded, s, now);
    op.template emit<kLast>(k, i, {}, decoded, now);
  }
  /// All steps of the run from step k on.
  __device__ void advance_and_emit(Op& op, int k, int end,
                                   typename Op::Number (&s)[Op::kVec]) const {
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        step<false>(op, k, i, s);
      }
    } else if (k < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          step<true>(op, k, i, s);
        }
      }
      op.finish(s);
    }
  }

 private:
  Unit* units_;
};

/// kParks.
template <class Op, class Shared>
__device__ inline void walk_parking(Op& op, const Ring<Op>& ring, const Park<Op>& park,
                                    Shared& shared, const Place& at, int k, int end, int stride) {
  Run<Op> next;
  int stage = 0;
  // Decodes the run from step `from`, posts its map and starts the copies of one that comes later.
  const auto look = [&](int round, int from, int base) {
    ring.wait();
    next.decode(op, ring, stage, from, end);
    auto map = AffineMap<typename Op::Number, Op::kVec>::identity();
    next.fold(op, ring, stage, map);
    shared.post(at, round, map);
    if (base + Op::kStages * stride < end) {
      ring.fetch(op, stage, from + Op::kStages * stride, end);
    }
    commit_copies();
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  };
  if (end > 0) {
    look(0, k, 0);
  }
  for (int base = 0, round = 0; base < end; base += stride, k += stride, ++round) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      park.put(i, next.decoded[i]);
    }
    if (base + stride < end) {
      look(round + 1, k + stride, base + stride);
    }
    typename Op::Number s[Op::kVec];
    shared.take(at, round, s);
    park.advance_and_emit(op, k, end, s);
  }
}

/// Step i of a round's run, which begins at step k, from the state s, with its outputs.
template <bool kLast, class Op>
__device__ inline void step_from_ring(Op& op, const SplitRing<Op>& ring, int round, int k, int i,
                                      typename Op::Number (&s)[Op::kVec]) {
  typename Op::Number now[Op::kVec];
  const typename Op::Raw raw = ring.take(op, round, i);
  const typename Op::Decoded decoded = op.decode(raw);
  op.advance(raw, decoded, s, now);
  op.template emit<kLast>(k, i, raw, decoded, now);
}

/// kSplits.
template <class Op, class Shared>
__device__ inline void walk_splitting(Op& op, const SplitRing<Op>& ring, Shared& shared,
                                      const Place& at, int k, int end, int stride) {
  const auto look = [&](int round) {
    auto map = AffineMap<typename Op::Number, Op::kVec>::identity();
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      const typename Op::Raw raw = ring.take_for_fold(op, round, i);
      op.fold(raw, op.decode(raw), map);
    }
    op.seal(map);
    shared.post(at, round, map);
  };
  if (end > 0) {
    ring.wait();
    look(0);
  }
  for (int base = 0, round = 0; base < end; base += stride, k += stride, ++round) {
    ring.template wait<2>();
    if (base + stride < end) {
      look(round + 1);
    }
    typename Op::Number s[Op::kVec];
    shared.take(at, round, s);
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        step_from_ring<false>(op, ring, round, k, i, s);
      }
    } else if (k < end) {
#pragma unroll 1
      for (int i = 0; k + i < end; ++i) {
        step_from_ring<true>(op, ring, round, k, i, s);
      }
      op.finish(s);
    }
    ring.fetch(op, round + Op::kStages, k + Op::kStages * stride, end, stride);
    commit_copies();
  }
}

/// kOwnRuns.
template <class Op, class Shared>
__device__ inline void walk_own_runs(Op& op, const Ring<Op>& ring, Shared& shared, const Place& at,
                                     int k, int end, int stride,
                                     typename Op::Number (&s)[Op::kVec]) {
  int folded = 0;  // the stage of the run that comes after the present one
  const auto look = [&](int round, int from) {
    Run<Op> run;
    run.decode(op, ring, folded, from, end);
    auto map = AffineMap<typename Op::Number, Op::kVec>::identity();
    run.fold(op, ring, folded, from, end, map);
    shared.post(op, at, round, map);
    folded = folded + 1 == Op::kStages ? 0 : folded + 1;
  };
  if (end > 0) {
    ring.wait();
    look(0, k);
  }
  int stage = 0;
  int round = 0;
  for (int base = 0; base < end; base += stride, k += stride, ++round) {
    ring.template wait<2>();
    if (base + stride < end) {
      look(round + 1, k + stride);
    }
    Run<Op> run;
    shared.take(op, at, round, s);
    if constexpr (requires { run.take(ring, stage); }) {
      run.take(ring, stage);
    } else {
      run.decode(op, ring, stage, k, end);
    }
    run.advance_and_emit(op, ring, stage, k, end, s);
    if (end - base > Op::kStages * stride) {
      ring.fetch(op, stage, k + Op::kStages * stride, end);
    }
    commit_copies();
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  }
}

}  // namespace tidegate::kernels::scan
