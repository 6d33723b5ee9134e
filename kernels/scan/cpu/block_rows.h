#pragma once

// Rows and buffers shared by the per-ISA scan kernels (see cpu_simd.h about what
// those units may include).

#include "kernels/common/cpu_simd.h"
#include "kernels/common/cpu_sums.h"
#include "kernels/common/cpu_types.h"
#include "kernels/scan/cpu/scan_kernels.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {

using namespace tidegate::kernels::TIDEGATE_ISA;  // NOLINT: the vectors of cpu_simd.h

namespace {

/// Values a channel of the block needs at every step. Complex scans use one for each half.
template <class R>
struct RowBuffer {
  alignas(64) R values[kMaxBlockRowBytes / sizeof(R)];

  TIDEGATE_INLINE Vec<R> at(int64_t j) const { return load<R>(values + j, Whole{}); }
  TIDEGATE_INLINE void set(int64_t j, Vec<R> v) { store<R>(values + j, v, Whole{}); }

  /// The first `count` of `from`, or of a row of `otherwise` where `from` is null.
  void fill(const R* from, int64_t count, R otherwise) {
    for_each_vector<R>(count, [&](int64_t j, auto extent) {
      set(j, from != nullptr ? load<R>(from + j, extent) : splat(otherwise));
    });
  }
  void write_to(R* to, int64_t count) const {
    if (to == nullptr) return;
    for_each_vector<R>(count, [&](int64_t j, auto extent) { store<R>(to + j, at(j), extent); });
  }
};

/// A row of sums over time (cpu_sums.h).
template <class R>
struct TimeSum {
  RowBuffer<R> recent;
  RowBuffer<R> total;

  void clear(int64_t count) {
    recent.fill(nullptr, count, R(0));
    total.fill(nullptr, count, R(0));
  }
  TIDEGATE_INLINE void add(int64_t j, Vec<R> v) { recent.set(j, recent.at(j) + v); }
  /// Once a step, after the row.
  void settle(int64_t step, int64_t count) {
    if (step % kShortSumTokens == 0) settle_all(count);
  }
  /// Settles whatever the step, for sums that grow chunk by chunk.
  void settle_all(int64_t count) {
    for_each_vector<R>(count, [&](int64_t j, auto) {
      total.set(j, total.at(j) + recent.at(j));
      recent.set(j, Vec<R>{});
    });
  }
};

/// The row of one tensor at the present step of a scan; `step` elements lead to the next one.
template <class E>
struct RowCursor {
  E* row = nullptr;
  int64_t step = 0;
  int64_t prefetch_offset = 0;

  TIDEGATE_INLINE void advance() { row += step; }
  /// Rows that follow each other downwards in memory are best read downwards, too: the hardware's
  /// prefetchers then see one stream (short rows' backward pass: 1.7 times as fast).
  TIDEGATE_INLINE bool descends() const { return step < 0; }
  /// The arithmetic of a row fills the window of out-of-order execution, so the loads of later rows
  /// start too late by themselves (asking for them early made the forward pass 1.7 times as fast).
  /// A prefetch past the sequence's end does no harm.
  TIDEGATE_INLINE void prefetch(int64_t j) const { __builtin_prefetch(row + prefetch_offset + j); }
};

/// How far ahead of their use rows are prefetched, in numbers of a row: far enough for the memory's
/// latency, near enough that the lines stay in the first-level cache.
constexpr int64_t kPrefetchNumbers = 1024;

/// The cursor of a forward pass starts at the sequence's first step. `scale` is the number of E in
/// an element (2 for interleaved complex numbers).
template <class E>
RowCursor<E> forward_cursor(const TimeSeries& series, const ScanBlock& block, bool reverse,
                            int64_t scale = 1) {
  const int64_t first = reverse ? block.begin + block.length - 1 : block.begin;
  const int64_t offset = block.batch * series.stride_b + first * series.stride_t + block.channel;
  RowCursor<E> cursor;
  cursor.row = static_cast<E*>(series.data) + offset * scale;
  cursor.step = (reverse ? -series.stride_t : series.stride_t) * scale;
  cursor.prefetch_offset = cursor.step * ((kPrefetchNumbers + block.width - 1) / block.width);
  return cursor;
}

/// The cursor of a backward pass starts at the sequence's last step.
template <class E>
RowCursor<E> backward_cursor(const TimeSeries& series, const ScanBlock& block, bool reverse,
                             int64_t scale = 1) {
  return forward_cursor<E>(series, block, !reverse, scale);
}

/// Row `sequence`, column `channel` of an [N, columns] array; null stays null.
template <class R>
R* state_row(const void* data, int64_t sequence, int64_t columns, int64_t channel) {
  if (data == nullptr) return nullptr;
  return static_cast<R*>(const_cast<void*>(data)) + sequence * columns + channel;
}

/// Rows of a block's states: one of real numbers, or the real and the imaginary half of complex
/// ones.
template <class R, int kParts>
struct StateRows {
  RowBuffer<R> parts[kParts];

  /// From and to row `sequence` of an [N, kParts * channels] array, or null.
  void fill(const void* data, const ScanBlock& block, int64_t channels) {
    const R* row = state_row<R>(data, block.sequence, kParts * channels, block.channel);
    for (int p = 0; p < kParts; ++p) {
      parts[p].fill(row == nullptr ? nullptr : row + p * channels, block.width, R(0));
    }
  }
  void write_to(void* data, const ScanBlock& block, int64_t channels) const {
    R* row = state_row<R>(data, block.sequence, kParts * channels, block.channel);
    if (row == nullptr) return;
    for (int p = 0; p < kParts; ++p) parts[p].write_to(row + p * channels, block.width);
  }
};

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
