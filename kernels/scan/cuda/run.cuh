#pragma once

// A run: what a warp does with its steps between two fetches.

#include <type_traits>

#include "kernels/scan/cuda/maps.cuh"
#include "kernels/scan/cuda/ring.cuh"

namespace tidegate::kernels::scan {

/// A run between the ring and the outputs. An op may bring one of its own (wkv4.cuh).
template <class Op>
struct Run {
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  struct Nothing {};
  std::conditional_t<Op::kTakesRuns, Raw, Nothing> taken[Op::kSteps];
  typename Op::Decoded decoded[Op::kSteps];
  Number kept[Op::kSteps][Op::kVec];

  __device__ void decode(const Op& op, const Ring<Op>& ring, int stage, int, int) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if constexpr (Op::kTakesRuns) {
        taken[i] = ring.take(op, stage, i);
      }
      decoded[i] = op.decode(raw(op, ring, stage, i));
    }
  }

  __device__ Raw raw(const Op& op, const Ring<Op>& ring, int stage, int i) const {
    if constexpr (Op::kTakesRuns) {
      return taken[i];
    } else {
      return ring.take(op, stage, i);
    }
  }

  __device__ void fold(const Op& op, const Ring<Op>& ring, int stage,
                       AffineMap<Number, Op::kVec>& map) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.fold(raw(op, ring, stage, i), decoded[i], map);
    }
    op.seal(map);
  }

  /// Takes s through the run that begins at step k; where it holds the sequence's last step, writes
  /// the final state.
  __device__ void advance(const Op& op, const Ring<Op>& ring, int stage, int k, int end,
                          Number (&s)[Op::kVec]) {
    if (k + Op::kSteps <= end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.advance(raw(op, ring, stage, i), decoded[i], s, kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.advance(raw(op, ring, stage, i), decoded[i], s, kept[i]);
        }
      }
    }
    if (k < end && end <= k + Op::kSteps) {
      op.finish(s);
    }
  }

  /// The same where outputs need not wait until s has been passed on.
  __device__ void advance_and_emit(Op& op, const Ring<Op>& ring, int stage, int k, int end,
                                   Number (&s)[Op::kVec]) const {
    Number now[Op::kVec];
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        const Raw inputs = raw(op, ring, stage, i);
        op.advance(inputs, decoded[i], s, now);
        op.template emit<false>(k, i, inputs, decoded[i], now);
      }
    } else if (k < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          const Raw inputs = raw(op, ring, stage, i);
          op.advance(inputs, decoded[i], s, now);
          op.template emit<true>(k, i, inputs, decoded[i], now);
        }
      }
      op.finish(s);
    }
  }

  __device__ void emit(Op& op, const Ring<Op>& ring, int stage, int k, int end) const {
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        op.template emit<false>(k, i, raw(op, ring, stage, i), decoded[i], kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.template emit<true>(k, i, raw(op, ring, stage, i), decoded[i], kept[i]);
        }
      }
    }
  }
};

}  // namespace tidegate::kernels::scan
