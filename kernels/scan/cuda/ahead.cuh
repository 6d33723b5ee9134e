#pragma once

// Linked workers that look a round ahead: a worker decodes its next run and posts that run's map
// before it takes the state that enters the present one, whose decoded steps wait in shared memory.
// So carriers and letters (links.cuh) have a round's time to bring a state. For Ops with
// kLooksAhead, whose outputs follow from decoded steps and the state alone: a run's place in the
// ring is free as soon as it has been decoded.

#include <type_traits>

#include "kernels/scan/cuda/chain.cuh"
#include "kernels/scan/cuda/run.cuh"

namespace tidegate::kernels {

/// Shared memory in which a warp keeps a decoded run.
template <class Op>
__host__ __device__ constexpr int park_bytes() {
  if constexpr (Op::kLooksAhead) {
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

/// A worker's walk.
template <class Op, class Shared>
__device__ inline void walk_ahead(Op& op, const Ring<Op>& ring, const Park<Op>& park,
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

}  // namespace tidegate::kernels
