#include "kernels/common/cuda/segment_carries.cuh"

#include <algorithm>

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"

namespace tidegate::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostScans = 2;

struct Scans {
  SegmentCarries of[kMostScans];
};

/// A thread takes four columns of a row of one head through all segments of a sequence.
template <CarryPlace kPlace>
__global__ void __launch_bounds__(kThreads)
    compose_segments_kernel(const __grid_constant__ Scans scans) {
  const SegmentCarries& scan = scans.of[blockIdx.y];
  const SequenceLayout& layout = scan.segments.layout;
  const int64_t fours = scan.rows * scan.columns / 4;  // of a state
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= layout.sequences * scan.heads * fours) {
    return;
  }
  const int64_t n = item / fours / scan.heads, head = item / fours % scan.heads;
  const int64_t at = item % fours, row = at * 4 / scan.columns;
  const Sequence seq = find_sequence(layout, n);
  const int64_t first = first_tile_index(scan.segments, static_cast<int>(n));
  const int segments = tiles_of(scan.segments, seq);
  float4 s = {};
  if (scan.initial != nullptr) {
    s = static_cast<const float4*>(scan.initial)[(n * scan.heads + head) * fours + at];
  }
  const int steps = kPlace == CarryPlace::kBefore ? segments : segments - 1;
#pragma unroll 4
  for (int i = 0; i < steps; ++i) {
    const int64_t index = first + (scan.adjoint ? segments - 1 - i : i);
    float4* const place =
        reinterpret_cast<float4*>(scan.states) + (index * scan.heads + head) * fours + at;
    const float decay = scan.decays[(index * scan.heads + head) * scan.rows + row];
    const float4 own = *place, before = s;
    s = {fmaf(decay, s.x, own.x), fmaf(decay, s.y, own.y), fmaf(decay, s.z, own.z),
         fmaf(decay, s.w, own.w)};
    *place = kPlace == CarryPlace::kBefore ? before : s;
  }
}

}  // namespace

cudaError_t compose_segments(const SegmentCarries* scans, int count, CarryPlace place,
                             cudaStream_t stream) {
  Scans all = {};
  std::copy_n(scans, count, all.of);
  const SegmentCarries& s = scans[0];
  const int64_t items = s.segments.layout.sequences * s.heads * s.rows * s.columns / 4;
  const dim3 grid(static_cast<unsigned>(ceil_div(items, kThreads)), static_cast<unsigned>(count));
  return place == CarryPlace::kBefore
             ? launch_unless_empty(&compose_segments_kernel<CarryPlace::kBefore>, grid, kThreads, 0,
                                   stream, all)
             : launch_unless_empty(&compose_segments_kernel<CarryPlace::kAfter>, grid, kThreads, 0,
                                   stream, all);
}

}  // namespace tidegate::kernels
