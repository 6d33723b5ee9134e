#pragma once

// Which stretch of which sequence a block works on, where time is cut into segments.
//
// Sequence n owns the slots from slot_base(n) on, one a segment and sometimes one that stays empty:
// bases follow from the offsets alone, so that packed sequences need neither a table nor the host.

#include "kernels/common/cuda/sequence.cuh"

namespace tidegate::kernels {

struct Segment {
  Sequence seq;
  int index;       // of the sequence's segments
  int begin, end;  // steps of the walk; both 0 where the sequence has no token
  bool exists;     // a slot may have no segment
  bool last;       // of its sequence
};

/// Slots for all sequences together.
inline int64_t segment_slots(const SequenceLayout& layout, int64_t segment_time) {
  if (segment_time == 0) {
    return layout.sequences;
  }
  return layout.offsets != nullptr
             ? layout.time / segment_time + layout.sequences
             : layout.sequences *
                   (layout.time > 0 ? (layout.time + segment_time - 1) / segment_time : 1);
}

__device__ inline int64_t slot_base(const SequenceLayout& layout, int64_t n, int64_t segment_time) {
  if (layout.offsets == nullptr) {
    return n * max((layout.time + segment_time - 1) / segment_time, int64_t{1});
  }
  const int64_t start = layout.offsets_are_int64 ? static_cast<const int64_t*>(layout.offsets)[n]
                                                 : static_cast<const int32_t*>(layout.offsets)[n];
  return start / segment_time + n;
}

/// segment_time 0: a segment is a sequence.
__device__ inline Segment find_segment(const SequenceLayout& layout, int64_t slot,
                                       int64_t segment_time) {
  if (segment_time == 0) {
    const Sequence seq = find_sequence(layout, slot);
    return {seq, 0, 0, seq.length, true, true};
  }
  int64_t low = 0, high = layout.sequences;  // the last n whose base is at most the slot
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (slot_base(layout, middle, segment_time) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Sequence seq = find_sequence(layout, low);
  const int64_t index = slot - slot_base(layout, low, segment_time);
  const int64_t begin = index * segment_time;
  const int64_t end = min(begin + segment_time, int64_t{seq.length});
  return {seq,
          static_cast<int>(index),
          static_cast<int>(begin),
          static_cast<int>(end),
          begin < seq.length || index == 0,
          end == seq.length};
}

}  // namespace tidegate::kernels
