// The entry points of forgetting_attention_cuda.h: which kernels take a set of params.

#include "kernels/attention/cuda/paths.h"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {
namespace {

template <class Params>
bool is_empty(const Params& p) {
  return p.layout.sequences == 0 || p.channels == 0;
}

}  // namespace

cudaError_t forgetting_attention_forward_plan(const ForgettingAttentionParams& params,
                                              ForgettingAttentionPlan* plan) {
  if (params.path != AttentionPath::kPlain && tensor_forward_fits(params)) {
    return tensor_forward_plan(params, plan);
  }
  if (params.path == AttentionPath::kTensorCore) {
    return cudaErrorNotSupported;
  }
  *plan = {.path = AttentionPath::kPlain};
  plain_attention_forward_plan(params, plan);
  return cudaSuccess;
}

cudaError_t forgetting_attention_backward_plan(const ForgettingAttentionBackwardParams& params,
                                               ForgettingAttentionPlan* plan) {
  const AttentionPath path = params.forward.path;
  if (path != AttentionPath::kPlain) {
    bool fits = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR(tensor_backward_fits(params, &fits));
    if (fits) {
      return tensor_backward_plan(params, plan);
    }
  }
  if (path == AttentionPath::kTensorCore) {
    return cudaErrorNotSupported;
  }
  *plan = {.path = AttentionPath::kPlain};
  plain_attention_backward_plan(params, plan);
  return cudaSuccess;
}

cudaError_t forgetting_attention_step_plan(const ForgettingAttentionStepParams& params,
                                           ForgettingAttentionPlan* plan) {
  *plan = {.path = AttentionPath::kPlain};
  return attention_step_plan(params, plan);
}

cudaError_t forgetting_attention_forward(const ForgettingAttentionParams& params,
                                         cudaStream_t stream) {
  if (is_empty(params)) {
    return cudaSuccess;
  }
  return params.plan.path == AttentionPath::kTensorCore ? tensor_forward(params, stream)
                                                        : plain_attention_forward(params, stream);
}

cudaError_t forgetting_attention_backward(const ForgettingAttentionBackwardParams& params,
                                          cudaStream_t stream) {
  if (is_empty(params.forward)) {
    return cudaSuccess;
  }
  return params.forward.plan.path == AttentionPath::kTensorCore
             ? tensor_backward(params, stream)
             : plain_attention_backward(params, stream);
}

cudaError_t forgetting_attention_step(const ForgettingAttentionStepParams& params,
                                      cudaStream_t stream) {
  return is_empty(params) ? cudaSuccess : attention_step(params, stream);
}

}  // namespace tidegate::kernels::attention
