#pragma once

// Between the driver (gla_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// Tokens of a sub-chunk, which are handled together. Inside a sub-chunk every pair of tokens has
/// its own product of decays; between sub-chunks a state is carried.
constexpr int kSubChunk = 16;

/// Sub-chunks of a segment, whose states the backward pass keeps at a time. A longer sequence has
/// several segments: the state at the start of each is kept too, and the others are computed again
/// from there.
constexpr int64_t kSegmentSubChunks = 64;

/// Rows of scratch memory are filled up to a multiple of this many numbers.
constexpr int64_t kPadding = 16;
constexpr int64_t padded(int64_t width) { return (width + kPadding - 1) / kPadding * kPadding; }

/// One piece of work, a tile of a state: one head of one sequence, and some neighbouring columns,
/// of V or of K.
struct GlaTile {
  int64_t sequence = 0;     // n
  int64_t head = 0;         // h
  int64_t batch = 0;        // b, the row of the [B, T, H, ..] tensors
  int64_t begin = 0;        // the sequence's first token
  int64_t length = 0;       // and its number of tokens
  int64_t column = 0;       // the first column
  int64_t width = 0;        // and their number
  void* scratch = nullptr;  // 64-byte aligned, as long as the kernel's function below says
};

struct GlaKernels {
  /// o and the final state, for some columns of V.
  void (*forward)(const GlaParams&, const GlaTile&);
  /// dv and dh0, for some columns of V.
  void (*backward_values)(const GlaBackwardParams&, const GlaTile&);
  /// dq, dk, the gate's gradient and dgamma, for some columns of K (all for one gate a head).
  void (*backward_keys)(const GlaBackwardParams&, const GlaTile&);
};

/// Scratch memory of a tile of `width` columns of V, in numbers of the state's type.
constexpr int64_t value_tile_scratch(int64_t key_dim, int64_t width) {
  const int64_t keys = padded(key_dim), values = padded(width);
  return keys * values + kSubChunk * (5 * keys + 2 * values + kSubChunk) + 2 * keys;
}
/// States that a tile of columns of K keeps: before each sub-chunk of a segment, and each segment.
constexpr int64_t sub_chunk_states(int64_t length) {
  const int64_t sub_chunks = (length + kSubChunk - 1) / kSubChunk;
  return sub_chunks < kSegmentSubChunks ? sub_chunks : kSegmentSubChunks;
}
constexpr int64_t segment_states(int64_t length) {
  return length / (kSegmentSubChunks * kSubChunk) + 1;
}
constexpr int64_t key_tile_scratch(int64_t value_dim, int64_t width, int64_t length) {
  const int64_t keys = padded(width), values = padded(value_dim);
  const int64_t states = 1 + sub_chunk_states(length) + segment_states(length);
  return states * keys * values + kSubChunk * (11 * keys + 2 * values + kSubChunk) + 4 * keys +
         values;
}

TIDEGATE_ISA_KERNELS(GlaKernels, kGlaKernels)

}  // namespace tidegate::kernels::gla
