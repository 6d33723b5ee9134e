#pragma once

// A warp chunk: consecutive steps of one warp, and what the warp does with them between two
// fetches.

#include <type_traits>

#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/ring.cuh"

namespace tidegate::kernels::scan {

/// A chunk between the ring and the outputs. An Op may bring one of its own (wkv4/wkv4.cuh).
template <class Op>
struct WarpChunk {
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  struct Nothing {};
  std::conditional_t<Op::kInputsInRegisters, Raw, Nothing> taken[Op::kSteps];
  typename Op::Decoded decoded[Op::kSteps];
  Number kept[Op::kSteps][Op::kVec];

  __device__ void decode(const Op& op, const Ring<Op>& ring, int stage, int, int) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if constexpr (Op::kInputsInRegisters) {
        taken[i] = ring.take(op, stage, i);
      }
      decoded[i] = op.decode(raw(op, ring, stage, i));
    }
  }

  __device__ Raw raw(const Op& op, const Ring<Op>& ring, int stage, int i) const {
    if constexpr (Op::kInputsInRegisters) {
      return taken[i];
    } else {
      return ring.take(op, stage, i);
    }
  }

  /// The chunk's steps as one map.
  __device__ void compose(const Op& op, const Ring<Op>& ring, int stage,
                          AffineMap<Number, Op::kVec>& map) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.compose(raw(op, ring, stage, i), decoded[i], map);
    }
    op.finalize(map);
  }

  /// Takes s through the chunk that begins at step k; where it holds the sequence's last step,
  /// writes the final state.
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
      op.store_final_state(s);
    }
  }

  /// advance and emit in one, where outputs need not wait until s has been passed on.
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
      op.store_final_state(s);
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

/// Shared memory in which a warp keeps a decoded chunk.
template <class Op>
__host__ __device__ constexpr int staging_bytes() {
  if constexpr (Op::kPipelining == Pipelining::kStagingBuffer) {
    return Op::kSteps * kWarpSize * static_cast<int>(sizeof(typename Op::Decoded));
  } else {
    return 0;
  }
}

/// A decoded chunk in shared memory, kept until its state comes.
template <class Op>
class StagingBuffer {
  using Decoded = typename Op::Decoded;
  static_assert(sizeof(Decoded) % 8 == 0);
  using Unit = std::conditional_t<sizeof(Decoded) % 16 == 0, uint4, uint2>;
  static constexpr int kUnits = sizeof(Decoded) / sizeof(Unit);

 public:
  __device__ StagingBuffer(char* shared, int lane)
      : units_(reinterpret_cast<Unit*>(shared) + lane) {}

  __device__ void store(int i, const Decoded& d) const {
    Unit units[kUnits];
    memcpy(units, &d, sizeof(d));
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      units_[(i * kUnits + u) * kWarpSize] = units[u];
    }
  }
  __device__ Decoded load(int i) const {
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
    const Decoded decoded = load(i);
    op.advance({}, decoded, s, now);
    op.template emit<kLast>(k, i, {}, decoded, now);
  }
  /// All steps of the chunk from step k on.
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
      op.store_final_state(s);
    }
  }

 private:
  Unit* units_;
};

}  // namespace tidegate::kernels::scan
