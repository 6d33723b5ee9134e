// The entry points of rnn_cuda.h: which kernel takes what, and the launch of the plain ones.

#include "kernels/rnn/rnn_cuda.h"

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/rnn/cuda/on_chip/on_chip_family.h"
#include "kernels/rnn/cuda/plain.cuh"

namespace tidegate::kernels::rnn {
namespace {

template <int kWidth, bool kExchangesInMemory, class Visit>
cudaError_t with_fragments(const GatedRnnParams& p, Visit visit) {
  return p.w_is_16_bit
             ? visit.template operator()<OnChipFamily<kWidth, true, kExchangesInMemory>>()
             : visit.template operator()<OnChipFamily<kWidth, false, kExchangesInMemory>>();
}

/// Calls visit<Family>() with the least wide family that D fits.
template <class Visit>
cudaError_t with_on_chip_family(const GatedRnnParams& p, bool exchanges_in_memory, Visit visit) {
  if (p.channels <= 128) return visit.template operator()<OnChipFamily<128, false, false>>();
  if (exchanges_in_memory) return with_fragments<512, true>(p, visit);
  if (p.channels <= 256) return visit.template operator()<OnChipFamily<256, false, false>>();
  if (p.channels <= 512) return with_fragments<512, false>(p, visit);
  return visit.template operator()<OnChipFamily<1024, false, false>>();
}

cudaError_t find_plan(const GatedRnnParams& p, bool backward, GatedRnnPlan* plan) {
  *plan = {};
  if (p.allow_on_chip && p.x.dtype != DType::kFloat64) {
    for (const bool exchanges_in_memory : {false, true}) {
      const bool is_allowed =
          exchanges_in_memory || p.allow_clusters || p.channels <= kMaxBlockWidth;
      const int64_t widest = exchanges_in_memory ? kMaxMemoryWidth : kMaxChipWidth;
      if (!is_allowed || p.channels > widest) continue;
      if (const cudaError_t error =
              with_on_chip_family(p, exchanges_in_memory,
                                  [&]<class Family>() { return Family::plan(p, backward, plan); });
          error != cudaSuccess || plan->on_chip) {
        return error;
      }
    }
  }
  // The plain kernel takes any width. A product takes one token of every padded sequence at once.
  plan->by_products = p.layout.offsets == nullptr && p.channels > kMaxPlainWidth;
  plan->workspace_bytes = PlainWorkspace::bytes(p);
  return cudaSuccess;
}

}  // namespace

cudaError_t gated_rnn_forward_plan(const GatedRnnParams& params, GatedRnnPlan* plan) {
  return find_plan(params, /*backward=*/false, plan);
}

cudaError_t gated_rnn_backward_plan(const GatedRnnBackwardParams& params, GatedRnnPlan* plan) {
  TIDEGATE_RETURN_IF_CUDA_ERROR(find_plan(params.forward, /*backward=*/true, plan));
  plan->partials = params.forward.layout.sequences;
  return cudaSuccess;
}

cudaError_t gated_rnn_forward(const GatedRnnParams& params, cudaStream_t stream) {
  if (params.plan.on_chip) {
    return with_on_chip_family(params, params.plan.exchanges_in_memory,
                               [&]<class Family>() { return Family::forward(params, stream); });
  }
  return dispatch_state(params.x.dtype, [&]<class Real>() {
    const auto blocks = static_cast<unsigned>(params.layout.sequences);
    gated_rnn_plain_forward<Real><<<blocks, kPlainRnnThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t gated_rnn_backward(const GatedRnnBackwardParams& params, cudaStream_t stream) {
  const GatedRnnParams& forward = params.forward;
  if (forward.plan.on_chip) {
    return with_on_chip_family(forward, forward.plan.exchanges_in_memory,
                               [&]<class Family>() { return Family::backward(params, stream); });
  }
  return dispatch_state(forward.x.dtype, [&]<class Real>() {
    const auto blocks = static_cast<unsigned>(forward.layout.sequences);
    gated_rnn_plain_backward<Real><<<blocks, kPlainRnnThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace tidegate::kernels::rnn
