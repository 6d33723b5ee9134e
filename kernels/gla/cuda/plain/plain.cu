// Launches of the plain kernels.

#include "kernels/gla/cuda/plain/plain.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/decode/step.cuh"
#include "kernels/gla/cuda/plain/plain_backward.cuh"
#include "kernels/gla/cuda/plain/plain_scan.cuh"

namespace tidegate::kernels::gla {
namespace {

constexpr int kSharedBytes = 48 << 10;  // what every device gives without being asked
constexpr int kTileTime = 16;           // tokens that a block stages at once: more do not help

int tile_time(int bytes_per_token) {
  return std::clamp(kSharedBytes / bytes_per_token, 1, kTileTime);
}

template <class Real, bool kValueGradient>
cudaError_t launch_scan(PlainScan scan, cudaStream_t stream) {
  const GlaParams& p = scan.params;
  const int bytes = plain_scan_bytes_per_token<Real>(p.key_dim);
  scan.tile_time = tile_time(bytes);
  const int64_t blocks =
      p.layout.sequences * p.heads * ceil_div(p.value_dim, LaneSplit(p.key_dim).lines());
  return launch_unless_empty(&plain_scan_kernel<Real, kValueGradient>, blocks, dim3(kPlainThreads),
                             bytes * scan.tile_time, stream, scan);
}

template <class Real, int kVec>
cudaError_t launch_step(const GlaParams& p, cudaStream_t stream) {
  const int64_t blocks = p.layout.sequences * p.heads * ceil_div(p.value_dim, 32 * kVec);
  const int bytes = 3 * kStepTokens * static_cast<int>(p.key_dim * sizeof(Real));
  return launch_unless_empty(&decode_kernel<Real, kVec>, blocks, dim3(32 * kStepWarps), bytes,
                             stream, p);
}

bool states_aligned(const GlaParams& p) {
  return p.value_dim * element_size(state_dtype(p.q.dtype)) % 16 == 0 && is_aligned(p.h0, 16) &&
         is_aligned(p.h_final, 16);
}

/// How the backward kernel divides its work, and with it the workspace: found for the plan and for
/// the launch by this type alone.
template <class Real>
struct PlainBackwardSchedule {
  PlainBackward work;
  int blocks = 0;
  int64_t state_bytes = 0, gate_bytes = 0;  // the parts of the workspace, in their order

  cudaError_t find(const GlaBackwardParams& params) {
    const GlaParams& p = params.forward;
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    work.params = params;
    work.items = p.layout.sequences * p.heads * ceil_div(p.key_dim, LaneSplit(p.value_dim).lines());
    // Chunks as long as there are chunks: the fewest states to keep.
    const auto time = static_cast<int>(std::max<int64_t>(1, p.layout.time));
    work.chunk = static_cast<int>(std::ceil(std::sqrt(static_cast<double>(time))));
    work.kept = (time + work.chunk - 1) / work.chunk;
    work.tile_time = tile_time(plain_backward_bytes_per_token<Real>(p.value_dim));
    blocks = static_cast<int>(std::min<int64_t>(work.items, 4 * limits.multiprocessors));
    constexpr int64_t kBytes = sizeof(Real);
    state_bytes = int64_t{blocks} * (work.kept + work.chunk) * kPlainOwn * kPlainThreads * kBytes;
    gate_bytes =
        p.gate_per_head ? p.layout.batch * p.layout.time * p.heads * p.key_dim * kBytes : 0;
    return cudaSuccess;
  }

  int64_t workspace_bytes() const { return state_bytes + gate_bytes; }
  void assign(void* workspace) {
    work.states = workspace;
    work.gate_channels = static_cast<char*>(workspace) + state_bytes;
  }
};

template <class Real>
cudaError_t launch_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  const GlaParams& p = params.forward;
  const PlainScan values = {p, params.d_o, params.dv, params.dh_final};
  TIDEGATE_RETURN_IF_CUDA_ERROR((launch_scan<Real, true>(values, stream)));

  PlainBackwardSchedule<Real> schedule;
  TIDEGATE_RETURN_IF_CUDA_ERROR(schedule.find(params));
  schedule.assign(p.workspace);
  const int bytes = schedule.work.tile_time * plain_backward_bytes_per_token<Real>(p.value_dim);
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&plain_backward_kernel<Real>,
                                                    int64_t{schedule.blocks}, dim3(kPlainThreads),
                                                    bytes, stream, schedule.work));
  if (!p.gate_per_head) {
    return cudaSuccess;
  }
  constexpr int kGatesPerBlock = kPlainThreads / 32;
  const int64_t gates = p.layout.batch * p.layout.time * p.heads;
  return launch_unless_empty(&plain_gate_sum_kernel<Real>, ceil_div(gates, kGatesPerBlock),
                             dim3(kPlainThreads), 0, stream, schedule.work);
}

}  // namespace

cudaError_t gla_plain_forward(const GlaParams& p, cudaStream_t stream) {
  return dispatch_state(p.q.dtype, [&]<class Real>() {
    if (p.layout.time <= kStepTokens) {
      return states_aligned(p) ? launch_step<Real, 16 / sizeof(Real)>(p, stream)
                               : launch_step<Real, 1>(p, stream);
    }
    return launch_scan<Real, false>({p, {}, p.o, p.h0, p.h_final}, stream);
  });
}

cudaError_t gla_plain_backward_plan(const GlaBackwardParams& params, GlaPlan* plan) {
  return dispatch_state(params.forward.q.dtype, [&]<class Real>() {
    PlainBackwardSchedule<Real> schedule;
    TIDEGATE_RETURN_IF_CUDA_ERROR(schedule.find(params));
    plan->partials = params.forward.layout.sequences;
    plan->workspace_bytes = schedule.workspace_bytes();
    return cudaSuccess;
  });
}

cudaError_t gla_plain_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  return dispatch_state(params.forward.q.dtype,
                        [&]<class Real>() { return launch_backward<Real>(params, stream); });
}

}  // namespace tidegate::kernels::gla
