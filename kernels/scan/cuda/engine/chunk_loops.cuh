#pragma once

// A compute warp's chunks: what a warp does with consecutive steps between two fetches, and the
// loops in which it takes one chunk after the other.

#include <type_traits>

#include "kernels/scan/cuda/engine/carry.cuh"
#include "kernels/scan/cuda/engine/multi_block.cuh"
#include "kernels/scan/cuda/engine/ring.cuh"
#include "kernels/scan/cuda/engine/unaligned_ring.cuh"

namespace tidegate::kernels::scan {

// ---- A warp chunk ----
//
// Consecutive steps of one warp, and what the warp does with them between two fetches.

/// A chunk between the ring and the outputs. An Op may bring one of its own (wkv4/wkv4.cuh).
template <class Op>
struct WarpChunk {
  using Number = typename Op::Number;
  using Raw = typename Op::Raw;
  struct Nothing {};
  std::conditional_t<Op::kInputsInRegisters, Raw, Nothing> taken[Op::kSteps];
  typename Op::Decoded decoded[Op::kSteps];
  Number kept[Op::kSteps][Op::kVec];

  __device__ void decode(const Op& op, const Ring<Op>& ring, int stage, int k, int) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      if constexpr (Op::kInputsInRegisters) {
        taken[i] = ring.take(op, stage, i, k);
      }
      decoded[i] = op.decode(raw(op, ring, stage, i, k));
    }
  }

  __device__ Raw raw(const Op& op, const Ring<Op>& ring, int stage, int i, int k) const {
    if constexpr (Op::kInputsInRegisters) {
      return taken[i];
    } else {
      return ring.take(op, stage, i, k);
    }
  }

  /// The chunk's steps as one map.
  __device__ void compose(const Op& op, const Ring<Op>& ring, int stage, int k, int,
                          AffineMap<Number, Op::kVec>& map) const {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      op.compose(raw(op, ring, stage, i, k), decoded[i], map);
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
        op.advance(raw(op, ring, stage, i, k), decoded[i], s, kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.advance(raw(op, ring, stage, i, k), decoded[i], s, kept[i]);
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
        const Raw inputs = raw(op, ring, stage, i, k);
        op.advance(inputs, decoded[i], s, now);
        op.template emit<false>(k, i, inputs, decoded[i], now);
      }
    } else if (k < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          const Raw inputs = raw(op, ring, stage, i, k);
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
        op.template emit<false>(k, i, raw(op, ring, stage, i, k), decoded[i], kept[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        if (k + i < end) {
          op.template emit<true>(k, i, raw(op, ring, stage, i, k), decoded[i], kept[i]);
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

// ---- The loops ----
//
// The loops in which a compute warp takes its chunks, one iteration after the other. All of them
// decode a chunk, get the state that enters it, take that through the chunk and write the outputs;
// they differ in when the state comes.
//
// scan_chunks knows one chunk at a time. The others are software-pipelined: a compute warp composes
// the map of its next chunk and publishes it before it receives the state that enters the present
// one. So carry warps and carry records (multi_block.cuh) have the time of an iteration to bring a
// state. Meanwhile the present chunk waits where Pipelining says (op.cuh):
//   kStagingBuffer  as decoded steps, where outputs follow from these and the state alone: nothing
//                   is decoded twice, and a stage of the ring is free once it has been decoded;
//   kSplitRing      in the ring, where outputs need more inputs than compose does. A chunk is
//                   decoded twice, and of what compose does not read the ring holds a stage less;
//   kOwnChunk       in the ring, as a whole.
//
// Everywhere k is the step with which the warp's first chunk begins, end the sequence's length, and
// stride the steps of an iteration, of all warps together.

/// Whether a block scans whole sequences (TimeSplit::kSingleBlock), or several share one.
enum class ScanMode { kSingleBlock, kMultiBlock };

template <class Op, ScanMode kMode>
using ScanShared =
    std::conditional_t<kMode == ScanMode::kMultiBlock, MultiBlockShared<Op>, CarryChainShared<Op>>;

/// Chunk by chunk: decode, receive the carry, send it on, emit, fetch.
template <ScanMode kMode, class Op>
__device__ inline void scan_chunks(Op& op, const Ring<Op>& ring, ScanShared<Op, kMode>& shared,
                                   const WarpPosition& at, int k, int end, int stride,
                                   typename Op::Number (&s)[Op::kVec]) {
  constexpr bool kMultiBlock = kMode == ScanMode::kMultiBlock;
  using Map = AffineMap<typename Op::Number, Op::kVec>;
  int stage = 0;
  int iteration = 0;
  for (int base = 0; base < end; base += stride, k += stride, ++iteration) {
    ring.wait();
    WarpChunk<Op> chunk;
    chunk.decode(op, ring, stage, k, end);
    const auto refill = [&] {
      if (end - base > Op::kStages * stride) {
        ring.fetch(op, stage, k + Op::kStages * stride, end);
      }
      commit_copies();
    };
    if constexpr (Op::kInputsInRegisters) {
      refill();
    }
    if constexpr (kMultiBlock) {
      Map map = Map::identity();
      chunk.compose(op, ring, stage, k, end, map);
      shared.publish_map(at, iteration, map);
      shared.receive(at, iteration, s);
    } else if constexpr (Op::kCarryByMap) {
      const CarryChain<Op> carry{shared, at};
      Map map = Map::identity();
      chunk.compose(op, ring, stage, k, end, map);
      carry.receive(iteration, s);
      typename Op::Number leaving[Op::kVec];
      copy_state(leaving, s);
      if constexpr (requires { Op::cross(map, leaving); }) {
        Op::cross(map, leaving);
      } else {
        map.apply(leaving);
      }
      carry.send(leaving);
    } else {
      const CarryChain<Op> carry{shared, at};
      carry.receive(iteration, s);
      chunk.advance(op, ring, stage, k, end, s);
      carry.send(s);
    }
    if constexpr (Op::kEmitWhileAdvancing) {
      chunk.advance_and_emit(op, ring, stage, k, end, s);
    } else {
      if constexpr (kMultiBlock || Op::kCarryByMap) {
        chunk.advance(op, ring, stage, k, end, s);
      }
      chunk.emit(op, ring, stage, k, end);
    }

    if constexpr (!Op::kInputsInRegisters) {
      refill();
    }
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  }
}

/// Pipelining::kStagingBuffer.
template <class Op, class Shared>
__device__ inline void scan_with_staging_buffer(Op& op, const Ring<Op>& ring,
                                                const StagingBuffer<Op>& staging, Shared& shared,
                                                const WarpPosition& at, int k, int end,
                                                int stride) {
  WarpChunk<Op> next;
  int stage = 0;
  // Decodes the chunk from step `from`, publishes its map and starts the copies of a later one.
  const auto publish_next = [&](int iteration, int from, int base) {
    ring.wait();
    next.decode(op, ring, stage, from, end);
    auto map = AffineMap<typename Op::Number, Op::kVec>::identity();
    next.compose(op, ring, stage, from, end, map);
    shared.publish_map(at, iteration, map);
    if (base + Op::kStages * stride < end) {
      ring.fetch(op, stage, from + Op::kStages * stride, end);
    }
    commit_copies();
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  };
  if (end > 0) {
    publish_next(0, k, 0);
  }
  for (int base = 0, iteration = 0; base < end; base += stride, k += stride, ++iteration) {
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      staging.store(i, next.decoded[i]);
    }
    if (base + stride < end) {
      publish_next(iteration + 1, k + stride, base + stride);
    }
    typename Op::Number s[Op::kVec];
    shared.receive(at, iteration, s);
    staging.advance_and_emit(op, k, end, s);
  }
}

/// Step i of an iteration's chunk, which begins at step k, from the state s, with its outputs.
template <bool kLast, class Op>
__device__ inline void step_from_ring(Op& op, const SplitRing<Op>& ring, int iteration, int k,
                                      int i, typename Op::Number (&s)[Op::kVec]) {
  typename Op::Number now[Op::kVec];
  const typename Op::Raw raw = ring.take(op, iteration, i, k);
  const typename Op::Decoded decoded = op.decode(raw);
  op.advance(raw, decoded, s, now);
  op.template emit<kLast>(k, i, raw, decoded, now);
}

/// Pipelining::kSplitRing.
template <class Op, class Shared>
__device__ inline void scan_with_split_ring(Op& op, const SplitRing<Op>& ring, Shared& shared,
                                            const WarpPosition& at, int k, int end, int stride) {
  const auto publish_next = [&](int iteration, int from) {
    auto map = AffineMap<typename Op::Number, Op::kVec>::identity();
#pragma unroll
    for (int i = 0; i < Op::kSteps; ++i) {
      const typename Op::Raw raw = ring.take_for_compose(op, iteration, i, from);
      op.compose(raw, op.decode(raw), map);
    }
    op.finalize(map);
    shared.publish_map(at, iteration, map);
  };
  if (end > 0) {
    ring.wait();
    publish_next(0, k);
  }
  for (int base = 0, iteration = 0; base < end; base += stride, k += stride, ++iteration) {
    ring.template wait<2>();
    if (base + stride < end) {
      publish_next(iteration + 1, k + stride);
    }
    typename Op::Number s[Op::kVec];
    shared.receive(at, iteration, s);
    if (k + Op::kSteps < end) {
#pragma unroll
      for (int i = 0; i < Op::kSteps; ++i) {
        step_from_ring<false>(op, ring, iteration, k, i, s);
      }
    } else if (k < end) {
#pragma unroll 1
      for (int i = 0; k + i < end; ++i) {
        step_from_ring<true>(op, ring, iteration, k, i, s);
      }
      op.store_final_state(s);
    }
    ring.fetch(op, iteration + Op::kStages, k + Op::kStages * stride, end, stride);
    commit_copies();
  }
}

/// Pipelining::kOwnChunk.
template <class Op, class Shared>
__device__ inline void scan_with_own_chunks(Op& op, const Ring<Op>& ring, Shared& shared,
                                            const WarpPosition& at, int k, int end, int stride,
                                            typename Op::Number (&s)[Op::kVec]) {
  int next_stage = 0;  // of the chunk that comes after the present one
  const auto publish_next = [&](int iteration, int from) {
    WarpChunk<Op> chunk;
    chunk.decode(op, ring, next_stage, from, end);
    auto map = AffineMap<typename Op::Number, Op::kVec>::identity();
    chunk.compose(op, ring, next_stage, from, end, map);
    shared.publish_map(op, at, iteration, map);
    next_stage = next_stage + 1 == Op::kStages ? 0 : next_stage + 1;
  };
  if (end > 0) {
    ring.wait();
    publish_next(0, k);
  }
  int stage = 0;
  int iteration = 0;
  for (int base = 0; base < end; base += stride, k += stride, ++iteration) {
    ring.template wait<2>();
    if (base + stride < end) {
      publish_next(iteration + 1, k + stride);
    }
    WarpChunk<Op> chunk;
    shared.receive(op, at, iteration, s);
    if constexpr (requires { chunk.take(ring, stage); }) {
      chunk.take(ring, stage);
    } else {
      chunk.decode(op, ring, stage, k, end);
    }
    chunk.advance_and_emit(op, ring, stage, k, end, s);
    if (end - base > Op::kStages * stride) {
      ring.fetch(op, stage, k + Op::kStages * stride, end);
    }
    commit_copies();
    stage = stage + 1 == Op::kStages ? 0 : stage + 1;
  }
}

}  // namespace tidegate::kernels::scan
