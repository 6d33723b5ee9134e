#pragma once

// Time cut into pieces that blocks work on at the same time: chunks of 64 tokens, and segments of
// many chunks. Pieces are numbered by slots, a number of them that is known without reading the
// sequences' offsets; some slots of packed sequences stay empty.

#include <algorithm>

#include "kernels/common/cuda/sequence.cuh"

namespace tidegate::kernels {

/// Every sequence cut into pieces of `length` tokens along its walk, the last one shorter.
struct Cuts {
  SequenceLayout layout = {};
  int length = 0;
  int64_t slots = 0;
  int equal_pieces = 1;  // how many each sequence has, where they are equally long
};

/// A piece is a whole sequence where `length` is larger than all of time.
inline Cuts cut_time(const SequenceLayout& layout, int64_t length) {
  const int64_t pieces = std::max<int64_t>(1, (layout.time + length - 1) / length);
  const int64_t slots = layout.offsets == nullptr ? layout.sequences * pieces
                                                  : layout.time / length + layout.sequences;
  return {layout, static_cast<int>(length), slots, static_cast<int>(pieces)};
}

/// Tokens [first, first + tokens) of a sequence's walk.
struct Cut {
  Sequence sequence;
  int index;   // of its sequence's pieces
  int pieces;  // of the sequence: one, without tokens, if it is empty
  int first;
  int tokens;

  __device__ bool exists() const { return index < pieces; }
  __device__ bool last() const { return index + 1 == pieces; }
  __device__ int end() const { return first + tokens; }
};

/// Sequence n's first slot. Packed: a sequence over [a, b) has at most b / L - a / L + 1 pieces, so
/// that a / L + n leaves it enough slots whatever comes before it.
__device__ inline int first_slot(const Cuts& cuts, int n) {
  return cuts.layout.offsets == nullptr
             ? n * cuts.equal_pieces
             : static_cast<int>(find_sequence(cuts.layout, n).start) / cuts.length + n;
}

__device__ inline int pieces_of(const Cuts& cuts, const Sequence& seq) {
  return max(1, (seq.length + cuts.length - 1) / cuts.length);
}

__device__ inline Cut find_cut(const Cuts& cuts, int slot) {
  int n = 0;
  if (cuts.layout.offsets == nullptr) {
    n = slot / cuts.equal_pieces;
  } else {
    for (int end = static_cast<int>(cuts.layout.sequences); end - n > 1;) {
      const int middle = (n + end) / 2;  // first_slot(n) <= slot < first_slot(end)
      (first_slot(cuts, middle) <= slot ? n : end) = middle;
    }
  }
  Cut cut;
  cut.sequence = find_sequence(cuts.layout, n);
  cut.index = slot - first_slot(cuts, n);
  cut.pieces = pieces_of(cuts, cut.sequence);
  cut.first = cut.index * cuts.length;
  cut.tokens = max(0, min(cuts.length, cut.sequence.length - cut.first));
  return cut;
}

}  // namespace tidegate::kernels
