// Norms of rows: which kernels take a call.

#include "kernels/norm/norm_cuda.h"

#include "kernels/norm/cuda/plain.cuh"
#include "kernels/norm/cuda/row_tile.cuh"

namespace tidegate::kernels::norm {
namespace {

/// Calls visit<Data, Stream>() with the types of y and x.
template <class Visit>
cudaError_t dispatch_pair(DType data, DType stream, Visit visit) {
  if (data == DType::kFloat32) {
    return visit.template operator()<float, float>();
  }
  return dispatch_16_bit(data, [&]<class Data>() {
    return stream == data ? visit.template operator()<Data, Data>()
                          : visit.template operator()<Data, float>();
  });
}

}  // namespace

cudaError_t norm_forward(const NormParams& params, cudaStream_t stream) {
  const NormParams p = with_merged_rows(params);
  if (row_count(p) == 0 || p.channels == 0) {
    return cudaSuccess;
  }
  if (rows_fit(p, p.x, p.addend, p.gate, p.y, p.sum)) {
    bool fits = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        dispatch_pair(p.y.dtype, p.x.dtype, [&]<class Data, class Stream>() {
          return NormKernels<Data, Stream>::forward(p, stream, &fits);
        }));
    if (fits) {
      return cudaSuccess;
    }
  }
  return plain_forward(p, stream);
}

cudaError_t norm_backward_plan(const NormBackwardParams& params, NormBackwardPlan* plan) {
  const NormBackwardParams p = with_merged_rows(params);
  const NormParams& f = p.forward;
  *plan = {};
  if (row_count(f) == 0 || f.channels == 0) {
    return cudaSuccess;
  }
  if (rows_fit(f, f.x, f.gate, f.y, p.dy, p.dsum, p.dx, p.daddend, p.dgate)) {
    int64_t blocks = 0;
    int slots = 0;
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        dispatch_pair(p.dy.dtype, f.x.dtype, [&]<class Data, class Stream>() {
          return NormKernels<Data, Stream>::backward_grid(p, &blocks, &slots);
        }));
    // Slots that share a weight leave one row a block, the others one row each.
    plan->partials = f.weight_heads == 1 ? blocks : blocks * slots / f.weight_heads;
    if (blocks > 0) {
      return cudaSuccess;
    }
  }
  plain_backward_plan(p, plan);
  return cudaSuccess;
}

cudaError_t norm_backward(const NormBackwardParams& params, cudaStream_t stream) {
  const NormBackwardParams p = with_merged_rows(params);
  if (row_count(p.forward) == 0 || p.forward.channels == 0) {
    return cudaSuccess;
  }
  if (p.plan.is_plain) {
    return plain_backward(p, stream);
  }
  return dispatch_pair(p.dy.dtype, p.forward.x.dtype, [&]<class Data, class Stream>() {
    return NormKernels<Data, Stream>::backward(p, stream);
  });
}

}  // namespace tidegate::kernels::norm
