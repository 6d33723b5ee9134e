// The entry points of rnn_cuda.h: which kernel takes what, and the launch of the plain ones.

#include "kernels/rnn/rnn_cuda.h"

#include "kernels/rnn/cuda/chip_family.h"
#include "kernels/rnn/cuda/plain.cuh"

namespace tidegate::kernels {
namespace {

/// Calls visit<kWidth>() with the narrowest family that D fits.
template <class Visit>
cudaError_t with_chip_width(int64_t dim, Visit visit) {
  if (dim <= 128) return visit.template operator()<128>();
  if (dim <= 256) return visit.template operator()<256>();
  if (dim <= 512) return visit.template operator()<512>();
  return visit.template operator()<1024>();
}

cudaError_t find_plan(const GatedRnnParams& p, bool backward, GatedRnnPlan* plan) {
  *plan = {};
  if (p.allow_on_chip && p.x.dtype != DType::kFloat64 && p.channels <= kMaxChipWidth) {
    if (const cudaError_t error = with_chip_width(
            p.channels, [&]<int kWidth>() { return ChipFamily<kWidth>::plan(p, backward, plan); });
        error != cudaSuccess) {
      return error;
    }
  }
  if (!plan->on_chip) {
    plan->workspace_bytes =
        p.layout.sequences * kPlainRnnVectors * p.channels * element_size(state_dtype(p.x.dtype));
  }
  return cudaSuccess;
}

template <class Visit>
cudaError_t with_real(DType dtype, Visit visit) {
  return dtype == DType::kFloat64 ? visit.template operator()<double>()
                                  : visit.template operator()<float>();
}

}  // namespace

cudaError_t gated_rnn_forward_plan(const GatedRnnParams& params, GatedRnnPlan* plan) {
  return find_plan(params, /*backward=*/false, plan);
}

cudaError_t gated_rnn_backward_plan(const GatedRnnBackwardParams& params, GatedRnnPlan* plan) {
  return find_plan(params.forward, /*backward=*/true, plan);
}

cudaError_t gated_rnn_forward(const GatedRnnParams& params, cudaStream_t stream) {
  if (params.plan.on_chip) {
    return with_chip_width(
        params.channels, [&]<int kWidth>() { return ChipFamily<kWidth>::forward(params, stream); });
  }
  return with_real(params.x.dtype, [&]<class Real>() {
    const auto blocks = static_cast<unsigned>(params.layout.sequences);
    gated_rnn_plain_forward<Real><<<blocks, kPlainRnnThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t gated_rnn_backward(const GatedRnnBackwardParams& params, cudaStream_t stream) {
  const GatedRnnParams& forward = params.forward;
  if (forward.plan.on_chip) {
    return with_chip_width(forward.channels, [&]<int kWidth>() {
      return ChipFamily<kWidth>::backward(params, stream);
    });
  }
  return with_real(forward.x.dtype, [&]<class Real>() {
    const auto blocks = static_cast<unsigned>(forward.layout.sequences);
    gated_rnn_plain_backward<Real><<<blocks, kPlainRnnThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace tidegate::kernels
