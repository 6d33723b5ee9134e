#pragma once

// Between the driver (gla_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// Tokens that are handled together. Inside a block every pair of tokens has its own product of
/// decays; between blocks a state is carried.
constexpr int kTokens = 16;

/// Blocks whose states the backward pass keeps at a time. Of longer sequences it keeps the state at
/// every kSegmentBlocks-th block too, and computes the others again from there.
constexpr int64_t kSegmentBlocks = 64;

/// Rows of scratch memory are filled up to a multiple of this many numbers.
constexpr int64_t kPadding = 16;
constexpr int64_t padded(int64_t width) { return (width + kPadding - 1) / kPadding * kPadding; }

/// One piece of work: one head of one sequence, and some neighbouring columns, of V or of K.
struct GlaBlock {
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
  void (*forward)(const GlaParams&, const GlaBlock&);
  /// dv and dh0, for some columns of V.
  void (*backward_values)(const GlaBackwardParams&, const GlaBlock&);
  /// dq, dk, the gate's gradient and dgamma, for some columns of K (all for one gate a head).
  void (*backward_keys)(const GlaBackwardParams&, const GlaBlock&);
};

/// Scratch memory of a block of `width` columns, in numbers of the state's type.
constexpr int64_t value_block_scratch(int64_t key_dim, int64_t width) {
  const int64_t keys = padded(key_dim), values = padded(width);
  return keys * values + kTokens * (5 * keys + 2 * values + kTokens) + 2 * keys;
}
/// States that a block of columns of K keeps: before each block of a segment, and each segment.
constexpr int64_t block_states(int64_t length) {
  const int64_t blocks = (length + kTokens - 1) / kTokens;
  return blocks < kSegmentBlocks ? blocks : kSegmentBlocks;
}
constexpr int64_t segment_states(int64_t length) { return length / (kSegmentBlocks * kTokens) + 1; }
constexpr int64_t key_block_scratch(int64_t value_dim, int64_t width, int64_t length) {
  const int64_t keys = padded(width), values = padded(value_dim);
  const int64_t states = 1 + block_states(length) + segment_states(length);
  return states * keys * values + kTokens * (11 * keys + 2 * values + kTokens) + 4 * keys + values;
}

TIDEGATE_ISA_KERNELS(GlaKernels, kGlaKernels)

}  // namespace tidegate::kernels::gla
