#pragma once

// The states of segments: states of matrix recurrences across time segments that blocks scanned at
// the same time. What each segment makes of a state, S -> decay * S + own a row, becomes the state
// itself. The kernel is in gla_cuda.cu.

#include <cuda_runtime_api.h>

#include "kernels/common/cuda/sequences.cuh"

namespace tidegate::kernels::gla {

/// The maps of all segments of one scan, in fp32.
struct SegmentCarries {
  TimeTiles segments = {};
  int64_t heads = 0, rows = 0, columns = 0;  // of a state
  const void* initial = nullptr;             // [N, H, rows, columns]; null: zero
  const float* decays = nullptr;             // [segment index, H, rows]
  float* states = nullptr;                   // [segment index, H, rows, columns]: own, then states
  bool adjoint = false;                      // a sequence's last segment comes first
};

/// Whether a segment's place gets the state before or after it. The state after a sequence's last
/// segment is nobody's start: then that segment's place stays as it was.
enum class CarryPlace : uint8_t { kBefore, kAfter };

/// Composes the maps of `count` scans, at most two, which have the same segments and sizes, in one
/// launch.
cudaError_t compose_segments(const SegmentCarries* scans, int count, CarryPlace place,
                             cudaStream_t stream);

}  // namespace tidegate::kernels::gla
