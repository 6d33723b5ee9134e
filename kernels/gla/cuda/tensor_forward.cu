// The forward pass on tensor cores: how a launch is divided, and what follows what.

#include "kernels/gla/cuda/tensor_forward.h"

#include <algorithm>

#include "kernels/common/cuda/device.h"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/tensor_forward.cuh"

namespace tidegate::kernels::gla {
namespace {

constexpr int kMaxKeys = 128;  // a kernel's; more are taken in slices
constexpr int kMaxDim = 256;   // of K and V
constexpr int kThreadsToJoin = 256;
constexpr int64_t kShortestSegment = 256;
// What a pass over the maps costs beside the pass over the outputs.
constexpr double kMapCost = 0.5;

bool rows_align(const HeadSeries& t, int64_t bytes) {
  const int64_t elements = bytes / element_size(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.stride_b % elements == 0 &&
         t.stride_t % elements == 0 && t.stride_h % elements == 0;
}

int64_t value_tiles(const GlaParams& p) { return ceil_div(p.value_dim, kTileColumns); }

/// Tokens of a segment, or 0 where whole sequences keep the chip busy.
int64_t choose_segment_time(const GlaParams& p, int multiprocessors) {
  const int64_t lanes = p.heads * value_tiles(p);  // blocks of one segment
  const auto rounded = [](int64_t time) { return ceil_div(time, kDyadicTokens) * kDyadicTokens; };
  if (p.layout.offsets != nullptr) {
    // Lengths are not known here: enough segments of equal length, unless there are many sequences.
    const int64_t time = std::max(
        kShortestSegment, rounded(ceil_div(p.layout.time * lanes, int64_t{multiprocessors})));
    return p.layout.sequences * lanes >= 2 * multiprocessors || p.layout.time <= time ? 0 : time;
  }
  int64_t best = 1;
  double least = 0;
  for (int64_t cut = 1; cut == 1 || p.layout.time / cut >= kShortestSegment; ++cut) {
    const int64_t waves = ceil_div(p.layout.sequences * lanes * cut, multiprocessors);
    // Passes of 1 / cut of the time each, and a little for every one of them.
    const double cost =
        (cut == 1 ? 1.0 : 1.0 + kMapCost) * static_cast<double>(waves) / static_cast<double>(cut) +
        0.002 * static_cast<double>(cut);
    if (cut == 1 || cost < least) {
      best = cut;
      least = cost;
    }
  }
  return best == 1 ? 0 : rounded(ceil_div(p.layout.time, best));
}

int64_t state_bytes(const GlaParams& p) {
  return p.plan.segments * p.heads * p.key_dim * p.value_dim * int64_t{sizeof(float)};
}
int64_t product_bytes(const GlaParams& p) {
  return p.plan.segments * p.heads * p.key_dim * int64_t{sizeof(float)};
}
int64_t sum_bytes(const GlaParams& p) {
  return p.key_dim <= kMaxKeys
             ? 0
             : p.layout.batch * p.layout.time * p.heads * p.value_dim * int64_t{sizeof(float)};
}

/// From the maps of segments to the state after each: S = product * S + S of the segment, from the
/// first to the last but one. A thread takes four columns of a row of one head.
__global__ void __launch_bounds__(kThreadsToJoin)
    join_segments_kernel(const __grid_constant__ TensorForward w) {
  const GlaParams& p = w.params;
  const int64_t fours = p.key_dim * p.value_dim / 4;
  const int64_t item = int64_t{blockIdx.x} * kThreadsToJoin + threadIdx.x;
  if (item >= p.layout.sequences * p.heads * fours) {
    return;
  }
  const int64_t n = item / fours / p.heads, head = item / fours % p.heads, at = item % fours;
  const int64_t row = at * 4 / p.value_dim;
  const Sequence seq = find_sequence(p.layout, n);
  const int64_t first = first_tile_index(w.segments, static_cast<int>(n));
  const int joints = tiles_of(w.segments, seq) - 1;
  float4 s = {};
  if (p.h0 != nullptr) {
    s = static_cast<const float4*>(p.h0)[(n * p.heads + head) * fours + at];
  }
#pragma unroll 4
  for (int i = 0; i < joints; ++i) {
    const int64_t slot = (first + i) * p.heads + head;
    float4* const place = reinterpret_cast<float4*>(w.states) + slot * fours + at;
    const float f = w.products[slot * p.key_dim + row];
    const float4 own = *place;
    s = {fmaf(f, s.x, own.x), fmaf(f, s.y, own.y), fmaf(f, s.z, own.z), fmaf(f, s.w, own.w)};
    *place = s;
  }
}

cudaError_t launch_unit(const TensorForward& w, bool maps, int64_t blocks, cudaStream_t stream) {
  const GlaParams& p = w.params;
  const auto with_data = [&]<class Data>() {
    return p.gate_kind == GateKind::kLogit
               ? TensorForwardUnit<Data, GateKind::kLogit>::launch(w, maps, blocks, stream)
               : TensorForwardUnit<Data, GateKind::kLogDecay>::launch(w, maps, blocks, stream);
  };
  return p.q.dtype == DType::kBFloat16 ? with_data.template operator()<__nv_bfloat16>()
                                       : with_data.template operator()<__half>();
}

}  // namespace

bool tensor_forward_fits(const GlaParams& p) {
  const auto dim_fits = [](int64_t dim) { return dim % 16 == 0 && dim <= kMaxDim; };
  const bool half = p.q.dtype == DType::kBFloat16 || p.q.dtype == DType::kFloat16;
  return half && dim_fits(p.key_dim) && dim_fits(p.value_dim) && rows_align(p.q, 16) &&
         (p.k.data == nullptr || rows_align(p.k, 16)) && rows_align(p.v, 16) &&
         (p.gate_per_head || rows_align(p.gate, 16)) && rows_align(p.o, 8) &&
         reinterpret_cast<uintptr_t>(p.h0) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.h_final) % 4 == 0;
}

cudaError_t tensor_forward_plan(const GlaParams& params, GlaPlan* plan) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *plan = {.path = GlaPath::kTensorCore};
  plan->segment_time = choose_segment_time(params, limits.multiprocessors);
  GlaParams p = params;
  if (plan->segment_time != 0) {
    plan->segments = time_tiles(p.layout, plan->segment_time).count;
  }
  p.plan = *plan;
  plan->workspace_bytes = state_bytes(p) + product_bytes(p) + sum_bytes(p);
  return cudaSuccess;
}

cudaError_t tensor_forward(const GlaParams& p, cudaStream_t stream) {
  TensorForward work;
  work.params = p;
  const int64_t tiles = value_tiles(p);
  work.value_tile = static_cast<int>(ceil_div(p.value_dim, tiles * 16) * 16);
  const bool split = p.plan.segment_time != 0;
  work.segments = time_tiles(p.layout, split ? p.plan.segment_time : p.layout.time + 1);
  char* const scratch = static_cast<char*>(p.workspace);
  work.states = reinterpret_cast<float*>(scratch);
  work.products = reinterpret_cast<float*>(scratch + state_bytes(p));
  auto* const sums = reinterpret_cast<float*>(scratch + state_bytes(p) + product_bytes(p));
  const int64_t blocks = work.segments.count * p.heads * tiles;
  const auto slice = [&](int first) {
    work.first_key = first;
    work.keys = std::min(kMaxKeys, static_cast<int>(p.key_dim) - first);
  };

  if (split) {
    for (int first = 0; first < p.key_dim; first += kMaxKeys) {
      slice(first);
      TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unit(work, /*maps=*/true, blocks, stream));
    }
    const int64_t items = p.layout.sequences * p.heads * p.key_dim * p.value_dim / 4;
    join_segments_kernel<<<static_cast<unsigned>(ceil_div(items, kThreadsToJoin)), kThreadsToJoin,
                           0, stream>>>(work);
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  }
  for (int first = 0; first < p.key_dim; first += kMaxKeys) {
    slice(first);
    work.sum_before = first > 0 ? sums : nullptr;
    work.sum_after = first + kMaxKeys < p.key_dim ? sums : nullptr;
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unit(work, /*maps=*/false, blocks, stream));
  }
  return cudaSuccess;
}

}  // namespace tidegate::kernels::gla
