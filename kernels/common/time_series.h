#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"

namespace tidegate::kernels {

/// A [B, T, channels] tensor whose last stride is one. Strides count elements; a stride of zero
/// repeats a row (a constant decay is one row, seen at every step). A row must be less than 2^31
/// bytes from the next; batch rows may be any distance apart.
struct TimeSeries {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_t = 0;
  DType dtype = DType::kFloat32;
};

/// A [B, T, H, channels] tensor whose last stride is one: the same with heads. A head may lie
/// anywhere from the next, so that q, f and v can be read in place from one projection [B, T, 3 * H
/// * K].
struct HeadSeries {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_t = 0;
  int64_t stride_h = 0;
  DType dtype = DType::kFloat32;
};

/// How [B, T] divides into N sequences, and in which direction they are scanned.
///
/// Padded: N = B, sequence n is batch row n, all of length T.
/// Packed: B = 1, sequence n covers [offsets[n], offsets[n + 1]) of the time axis. The offsets live
/// where the data lives and are read by the kernel only, so no host synchronisation is needed;
/// offsets that do not rise from 0 to T are the caller's error.
/// Reversed, a sequence is scanned from its last token to its first, and everything that is said
/// about "before", "after", "initial" and "final" follows the scan.
struct SequenceLayout {
  int64_t batch = 0;              // B
  int64_t time = 0;               // T
  int64_t sequences = 0;          // N
  const void* offsets = nullptr;  // [N + 1] int32 or int64, or null when padded
  bool offsets_are_int64 = false;
  bool reverse = false;
};

}  // namespace tidegate::kernels
