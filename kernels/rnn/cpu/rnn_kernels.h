#pragma once

// Between the drivers (rnn_cpu.cpp) and the code compiled once an instruction set.

#include <cstddef>
#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

/// A sequence as a block scans it.
struct RnnRow {
  int64_t sequence = 0;  // n
  int64_t batch = 0;     // b, the row of the [B, T, D] tensors
  int64_t begin = 0;     // its first token
  int64_t length = 0;    // and its number of tokens
};

/// At most this many sequences are scanned side by side, so that a part of the matrix that has been
/// loaded serves all of them.
constexpr int kMaxRnnRows = 8;

/// One piece of work: a few sequences, the longest first.
struct RnnBlock {
  RnnRow rows[kMaxRnnRows];
  int count = 0;
  const void* panels = nullptr;  // the matrix, as pack() wrote it
  void* vectors = nullptr;       // [kMaxRnnRows, stride] of the state type: what is multiplied
  void* products = nullptr;      // the same, and what comes out
  void* sums = nullptr;          // the same, over tokens; all three 64-byte aligned
  int64_t stride = 0;            // D padded to whole panels
};

/// The matrix is kept as panels of neighbouring columns, each as long as the matrix is high, so
/// that a product reads it in order. A panel is as wide as two vectors of the instruction set.
constexpr int64_t kMaxPanelBytes = 128;

struct RnnKernels {
  int rows = 1;  // sequences a block, best for the product
  /// Packs panels [begin, end) of kMaxPanelBytes: columns of W^T, or of W (transposed = false).
  void (*pack)(const GatedRnnParams&, bool transposed, int64_t begin, int64_t end, void* panels);
  void (*forward)(const GatedRnnParams&, const RnnBlock&);
  void (*backward)(const GatedRnnBackwardParams&, const RnnBlock&);
};

TIDEGATE_ISA_KERNELS(RnnKernels, kRnnKernels)

}  // namespace tidegate::kernels::rnn
