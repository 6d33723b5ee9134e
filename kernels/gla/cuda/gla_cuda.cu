// The entry points of gla_cuda.h: which kernels take a set of params.

#include "kernels/common/cuda/device.h"
#include "kernels/gla/cuda/plain.h"

namespace tidegate::kernels {
namespace {

bool is_empty(const GlaParams& p) { return p.layout.sequences == 0 || p.channels == 0; }

}  // namespace

cudaError_t gla_forward_plan(const GlaParams& params, GlaPlan* plan) {
  if (params.path == GlaPath::kTensorCore) {
    return cudaErrorNotSupported;
  }
  *plan = {.path = GlaPath::kPlain};
  return cudaSuccess;
}

cudaError_t gla_backward_plan(const GlaBackwardParams& params, GlaPlan* plan) {
  if (params.forward.path == GlaPath::kTensorCore) {
    return cudaErrorNotSupported;
  }
  *plan = {.path = GlaPath::kPlain};
  return gla_plain_backward_plan(params, plan);
}

cudaError_t gla_forward(const GlaParams& params, cudaStream_t stream) {
  return is_empty(params) ? cudaSuccess : gla_plain_forward(params, stream);
}

cudaError_t gla_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  return is_empty(params.forward) ? cudaSuccess : gla_plain_backward(params, stream);
}

}  // namespace tidegate::kernels
