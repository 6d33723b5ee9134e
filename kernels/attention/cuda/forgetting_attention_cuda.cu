// The entry points of forgetting_attention_cuda.h: which kernels take a set of params.

#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {
namespace {

/// Whether there is nothing to compute (the op looks too: src/ops/launch.h). A backward pass
/// without queries still has gradients of keys, which are zero; a forward pass looks for that
/// itself.
template <class Params>
bool is_empty(const Params& p) {
  return p.layout.sequences == 0 || p.channels == 0;
}

/// Tensor cores where they take the params, unless another path is asked for.
template <class Params>
cudaError_t choose_path(AttentionPath asked, ForgettingAttentionPlan* plan, const Params& params,
                        cudaError_t (*tensor_plan)(const Params&, ForgettingAttentionPlan*),
                        void (*plain_plan)(const Params&, ForgettingAttentionPlan*)) {
  if (asked != AttentionPath::kPlain) {
    const cudaError_t status = tensor_plan(params, plan);
    if (status != cudaErrorNotSupported || asked == AttentionPath::kTensorCore) {
      return status;
    }
  }
  plain_plan(params, plan);
  return cudaSuccess;
}

}  // namespace

cudaError_t forgetting_attention_forward_plan(const ForgettingAttentionParams& params,
                                              ForgettingAttentionPlan* plan) {
  return choose_path(params.path, plan, params, &tensor_forward_plan,
                     &plain_attention_forward_plan);
}

cudaError_t forgetting_attention_backward_plan(const ForgettingAttentionBackwardParams& params,
                                               ForgettingAttentionPlan* plan) {
  return choose_path(params.forward.path, plan, params, &tensor_backward_plan,
                     &plain_attention_backward_plan);
}

cudaError_t forgetting_attention_step_plan(const ForgettingAttentionStepParams& params,
                                           ForgettingAttentionPlan* plan) {
  return attention_step_plan(params, plan);
}

cudaError_t forgetting_attention_forward(const ForgettingAttentionParams& params,
                                         cudaStream_t stream) {
  if (is_empty(params) || params.layout.time == 0) {
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
