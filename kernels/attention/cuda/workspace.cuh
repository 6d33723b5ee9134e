#pragma once

// How each path divides its workspace. A plan asks for the bytes, a launch for the pointers, both
// of the same constructor.

#include <cstdint>

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/pruning.cuh"
#include "kernels/attention/cuda/work.cuh"

namespace tidegate::kernels::attention {

/// Hands out a workspace part by part, each from a multiple of 16 bytes on. Planning, there is none
/// yet: then the pointers mean nothing.
class WorkspaceParts {
 public:
  explicit WorkspaceParts(void* workspace) : begin_(reinterpret_cast<uintptr_t>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    T* const part = reinterpret_cast<T*>(begin_ + static_cast<uintptr_t>(bytes_));
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return part;
  }
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  uintptr_t begin_;
  int64_t bytes_ = 0;
};

inline int64_t query_rows(const ForgettingAttentionParams& p) {
  return p.layout.batch * p.heads * p.layout.time;
}
inline int64_t key_rows(const ForgettingAttentionParams& p) {
  return p.key_layout.batch * p.heads * p.key_layout.time;
}

/// The forward pass on tensor cores.
struct ForwardWorkspace {
  double* gate_sums;       // c, then the totals of its scan
  unsigned* score_bounds;  // where keys are pruned
  int64_t bytes;

  explicit ForwardWorkspace(const ForgettingAttentionParams& p) {
    WorkspaceParts parts(p.workspace);
    gate_sums = parts.take<double>(gate_sums_count(p));
    score_bounds = parts.take<unsigned>(score_bounds_bytes(p, false) / 4);
    bytes = parts.bytes();
  }
};

/// The backward pass on tensor cores, with tiles of `tile_rows` queries whose dq sums have
/// `tile_columns` columns.
struct BackwardWorkspace {
  double* gate_sums;  // c, then the totals of its scan
  double* totals;     // of the gates' gradients: reuses gate_sums, as c is not read by then
  int* extent_ends;   // where keys are pruned
  int* short_range;   // where keys are pruned
  float* delta_minus_dlse;
  float* column_sums;
  unsigned* score_bounds;  // from here on, cleared together
  unsigned* long_range;    // where keys are pruned
  float* row_sums;         // a deterministic pass writes these itself
  float* dq_sums;          // null in a deterministic pass
  int64_t cleared_bytes;   // from score_bounds on
  int64_t bytes;

  BackwardWorkspace(const ForgettingAttentionParams& p, int tile_rows, int tile_columns) {
    const bool pruned = p.prune > 0;
    WorkspaceParts parts(p.workspace);
    gate_sums = parts.take<double>(gate_sums_count(p));
    totals = gate_sums;
    extent_ends =
        parts.take<int>(pruned ? time_tiles(p.key_layout, KeyExtents::kKeys).count * p.heads : 0);
    short_range = parts.take<int>(pruned ? p.key_layout.sequences * p.heads : 0);
    delta_minus_dlse = parts.take<float>(query_rows(p));
    column_sums = parts.take<float>(key_rows(p));
    const int64_t cleared = parts.bytes();
    score_bounds = parts.take<unsigned>(score_bounds_bytes(p, true) / 4);
    long_range = parts.take<unsigned>(pruned ? 2 : 0);
    cleared_bytes = parts.bytes() - cleared;
    row_sums = parts.take<float>(query_rows(p));
    dq_sums = nullptr;
    if (!p.deterministic) {
      dq_sums = parts.take<float>(time_tiles(p.layout, tile_rows).count * p.heads * tile_rows *
                                  tile_columns);
      cleared_bytes = parts.bytes() - cleared;
    }
    bytes = parts.bytes();
  }
};

/// The plain path; all parts are of doubles, or of at most their size.
struct PlainWorkspace {
  double* gate_sums;       // c, then the totals of its scan
  void* delta_minus_dlse;  // backward, [B, Hq, Tq] state type
  double* row_sums;
  double* column_sums;
  double* totals;  // of the scan of the gates' gradients
  int64_t bytes;

  PlainWorkspace(const ForgettingAttentionParams& p, bool backward) {
    WorkspaceParts parts(p.workspace);
    gate_sums = parts.take<double>(gate_sums_count(p));
    delta_minus_dlse = parts.take<double>(backward ? query_rows(p) : 0);
    row_sums = parts.take<double>(backward ? query_rows(p) : 0);
    column_sums = parts.take<double>(backward ? key_rows(p) : 0);
    totals = parts.take<double>(backward ? gate_totals_count(p) : 0);
    bytes = parts.bytes();
  }
};

}  // namespace tidegate::kernels::attention
