// Launches of the plain kernels.

#include "kernels/gla/cuda/plain.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/plain_backward.cuh"
#include "kernels/gla/cuda/plain_walk.cuh"
#include "kernels/gla/cuda/step.cuh"

namespace tidegate::kernels::gla {
namespace {

constexpr int kSharedBytes = 48 << 10;  // what every device gives without being asked
constexpr int kTileTime = 16;

int tile_time(int bytes_a_token) { return std::clamp(kSharedBytes / bytes_a_token, 1, kTileTime); }

template <class Real, bool kValueGradient>
cudaError_t launch_walk(PlainWalk walk, cudaStream_t stream) {
  const GlaParams& p = walk.params;
  const int bytes = plain_walk_bytes_a_token<Real>(p.key_dim);
  walk.tile_time = tile_time(bytes);
  const int64_t blocks =
      p.layout.sequences * p.heads * ceil_div(p.value_dim, PlainSlices(p.key_dim).lines());
  plain_walk_kernel<Real, kValueGradient>
      <<<static_cast<unsigned>(blocks), kPlainThreads, bytes * walk.tile_time, stream>>>(walk);
  return cudaGetLastError();
}

template <class Real, int kVec>
cudaError_t launch_step(const GlaParams& p, cudaStream_t stream) {
  const int64_t blocks = p.layout.sequences * p.heads * ceil_div(p.value_dim, 32 * kVec);
  const int bytes = 3 * kStepTokens * static_cast<int>(p.key_dim * sizeof(Real));
  gla_step_kernel<Real, kVec><<<static_cast<unsigned>(blocks), 32 * kStepWarps, bytes, stream>>>(p);
  return cudaGetLastError();
}

bool states_align(const GlaParams& p) {
  return p.value_dim * element_size(state_dtype(p.q.dtype)) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.h0) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.h_final) % 16 == 0;
}

/// How the backward kernel divides its work; the same for the plan and the launch.
template <class Real>
cudaError_t divide_backward(const GlaBackwardParams& params, PlainBackward* work, int* blocks) {
  const GlaParams& p = params.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  work->params = params;
  work->items =
      p.layout.sequences * p.heads * ceil_div(p.key_dim, PlainSlices(p.value_dim).lines());
  // Chunks as long as there are chunks: the fewest states to keep.
  const auto time = static_cast<int>(std::max<int64_t>(1, p.layout.time));
  work->chunk = static_cast<int>(std::ceil(std::sqrt(static_cast<double>(time))));
  work->kept = (time + work->chunk - 1) / work->chunk;
  work->tile_time = tile_time(plain_backward_bytes_a_token<Real>(p.value_dim));
  *blocks = static_cast<int>(std::min<int64_t>(work->items, 4 * limits.multiprocessors));
  return cudaSuccess;
}

template <class Real>
int64_t state_bytes(const PlainBackward& work, int blocks) {
  return int64_t{blocks} * (work.kept + work.chunk) * kPlainOwn * kPlainThreads *
         int64_t{sizeof(Real)};
}

template <class Real>
cudaError_t launch_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  const GlaParams& p = params.forward;
  PlainWalk values = {p, params.d_o, params.dv, params.dh_final};
  TIDEGATE_RETURN_IF_CUDA_ERROR((launch_walk<Real, true>(values, stream)));

  PlainBackward work;
  int blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(divide_backward<Real>(params, &work, &blocks));
  work.states = p.workspace;
  work.gate_channels = static_cast<char*>(p.workspace) + state_bytes<Real>(work, blocks);
  const int bytes = work.tile_time * plain_backward_bytes_a_token<Real>(p.value_dim);
  plain_backward_kernel<Real><<<blocks, kPlainThreads, bytes, stream>>>(work);
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  const int64_t gates = p.layout.batch * p.layout.time * p.heads;
  if (p.gate_per_head && gates > 0) {
    constexpr int kGatesABlock = kPlainThreads / 32;
    plain_gate_sum_kernel<Real>
        <<<static_cast<unsigned>(ceil_div(gates, kGatesABlock)), kPlainThreads, 0, stream>>>(work);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t gla_plain_forward(const GlaParams& p, cudaStream_t stream) {
  return dispatch_state(p.q.dtype, [&]<class Real>() {
    if (p.layout.time <= kStepTokens) {
      return states_align(p) ? launch_step<Real, 16 / sizeof(Real)>(p, stream)
                             : launch_step<Real, 1>(p, stream);
    }
    return launch_walk<Real, false>({p, {}, p.o, p.h0, p.h_final}, stream);
  });
}

cudaError_t gla_plain_backward_plan(const GlaBackwardParams& params, GlaPlan* plan) {
  const GlaParams& p = params.forward;
  return dispatch_state(p.q.dtype, [&]<class Real>() {
    PlainBackward work;
    int blocks = 0;
    TIDEGATE_RETURN_IF_CUDA_ERROR(divide_backward<Real>(params, &work, &blocks));
    plan->partials = p.layout.sequences;
    plan->workspace_bytes = state_bytes<Real>(work, blocks);
    if (p.gate_per_head) {
      plan->workspace_bytes +=
          p.layout.batch * p.layout.time * p.heads * p.key_dim * int64_t{sizeof(Real)};
    }
    return cudaSuccess;
  });
}

cudaError_t gla_plain_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  return dispatch_state(params.forward.q.dtype,
                         [&]<class Real>() { return launch_backward<Real>(params, stream); });
}

}  // namespace tidegate::kernels::gla
