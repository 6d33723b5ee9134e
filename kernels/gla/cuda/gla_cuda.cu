// The entry points of gla_cuda.h: which path takes a set of params. The plan decides it,
// here, and a launch only follows the plan; decode/ alone has no path of its own, plain.cu takes it
// where T <= kStepTokens. Whether there is anything to do is asked here alone, too.

#include "kernels/common/cuda/device.h"
#include "kernels/gla/cuda/backward/tensor_backward.h"
#include "kernels/gla/cuda/forward/tensor_forward.h"
#include "kernels/gla/cuda/plain/plain.h"

namespace tidegate::kernels::gla {
namespace {

/// No sequences or no heads: no output has an element. (T = 0 has final states to copy.)
bool is_empty(const GlaParams& p) { return p.layout.sequences == 0 || p.channels == 0; }

}  // namespace

cudaError_t gla_forward_plan(const GlaParams& params, GlaPlan* plan) {
  // One or two tokens are the plain entry's, which gives them to decode/step.cuh.
  const bool fits = params.layout.time > kStepTokens && tensor_forward_fits(params);
  if (fits && params.path != GlaPath::kPlain) {
    return tensor_forward_plan(params, plan);
  }
  *plan = {.path = GlaPath::kPlain};
  return params.path == GlaPath::kTensorCore ? cudaErrorNotSupported : cudaSuccess;
}

cudaError_t gla_backward_plan(const GlaBackwardParams& params, GlaPlan* plan) {
  const GlaPath path = params.forward.path;
  if (path != GlaPath::kPlain && params.forward.layout.time > kStepTokens) {
    bool fits = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR(tensor_backward_fits(params, &fits));
    if (fits) {
      return tensor_backward_plan(params, plan);
    }
  }
  if (path == GlaPath::kTensorCore) {
    return cudaErrorNotSupported;
  }
  *plan = {.path = GlaPath::kPlain};
  return gla_plain_backward_plan(params, plan);
}

cudaError_t gla_forward(const GlaParams& params, cudaStream_t stream) {
  if (is_empty(params)) {
    return cudaSuccess;
  }
  return params.plan.path == GlaPath::kTensorCore ? tensor_forward(params, stream)
                                                  : gla_plain_forward(params, stream);
}

cudaError_t gla_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  if (is_empty(params.forward)) {
    return cudaSuccess;
  }
  return params.forward.plan.path == GlaPath::kTensorCore ? tensor_backward(params, stream)
                                                          : gla_plain_backward(params, stream);
}

}  // namespace tidegate::kernels::gla
