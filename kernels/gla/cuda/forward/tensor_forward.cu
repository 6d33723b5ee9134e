// The forward pass on tensor cores: whether it takes a call, its plan, and its launches.

#include "kernels/gla/cuda/forward/tensor_forward.h"

#include <algorithm>

#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/cuda/segment_carries.cuh"
#include "kernels/gla/cuda/forward/schedule.cuh"

namespace tidegate::kernels::gla {
namespace {

/// One launch of the kernel for one key tile; `maps`: of the maps of segments instead of outputs.
cudaError_t launch_key_tile(const TensorForward& w, bool maps, cudaStream_t stream) {
  const GlaParams& p = w.params;
  return dispatch_16_bit(p.q.dtype, [&]<class Data>() {
    return p.gate_kind == GateKind::kLogit
               ? TensorForwardUnit<Data, GateKind::kLogit>::launch(w, maps, stream)
               : TensorForwardUnit<Data, GateKind::kLogDecay>::launch(w, maps, stream);
  });
}

/// Calls visit(work) for each key tile.
template <class Visit>
cudaError_t for_each_key_tile(TensorForward work, Visit visit) {
  const auto key_dim = static_cast<int>(work.params.key_dim);
  for (int first = 0; first < key_dim; first += kKeyTile) {
    work.first_key = first;
    work.keys = std::min(kKeyTile, key_dim - first);
    TIDEGATE_RETURN_IF_CUDA_ERROR(visit(work));
  }
  return cudaSuccess;
}

/// The state after every segment but a sequence's last: each segment's map, then all of them in the
/// order of time.
cudaError_t find_segment_states(const TensorForward& work, cudaStream_t stream) {
  const GlaParams& p = work.params;
  TIDEGATE_RETURN_IF_CUDA_ERROR(for_each_key_tile(
      work, [&](const TensorForward& w) { return launch_key_tile(w, /*maps=*/true, stream); }));
  const SegmentCarries carries = {.segments = work.segments,
                                  .heads = p.heads,
                                  .rows = p.key_dim,
                                  .columns = p.value_dim,
                                  .initial = p.h0,
                                  .decays = work.products,
                                  .states = work.states};
  // After: a segment starts from its predecessor's place, and a sequence's last one needs no map.
  return compose_segments(&carries, 1, CarryPlace::kAfter, stream);
}

}  // namespace

bool tensor_forward_fits(const GlaParams& p) {
  const auto dim_fits = [](int64_t dim) { return dim % kSubChunk == 0 && dim <= kMaxDim; };
  return is_16_bit(p.q.dtype) && dim_fits(p.key_dim) && dim_fits(p.value_dim) &&
         rows_aligned(p.q, 16) && (p.k.data == nullptr || rows_aligned(p.k, 16)) &&
         rows_aligned(p.v, 16) && (p.gate_per_head || rows_aligned(p.gate, 16)) &&
         rows_aligned(p.o, 8) && is_aligned(p.h0, 16) && is_aligned(p.h_final, 4);
}

cudaError_t tensor_forward_plan(const GlaParams& params, GlaPlan* plan) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *plan = {.path = GlaPath::kTensorCore};
  plan->segment_time = choose_forward_segment(params, limits.multiprocessors);
  if (plan->segment_time != 0) {
    plan->segments = time_tiles(params.layout, plan->segment_time).count;
  }
  plan->workspace_bytes = ForwardWorkspace(params, plan->segments).bytes();
  return cudaSuccess;
}

cudaError_t tensor_forward(const GlaParams& p, cudaStream_t stream) {
  const bool divided = p.plan.segment_time != 0;
  const ForwardWorkspace space(p, p.plan.segments);
  TensorForward work;
  work.params = p;
  work.value_tile = value_tile(p);
  work.segments = time_tiles(p.layout, divided ? p.plan.segment_time : p.layout.time + 1);
  work.states = space.states_in(p.workspace);
  work.products = space.products_in(p.workspace);
  float* const sums = space.sums_in(p.workspace);
  if (divided) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_segment_states(work, stream));
  }
  return for_each_key_tile(work, [&](TensorForward w) {
    w.sum_before = w.first_key > 0 ? sums : nullptr;
    w.sum_after = w.first_key + kKeyTile < p.key_dim ? sums : nullptr;
    return launch_key_tile(w, /*maps=*/false, stream);
  });
}

}  // namespace tidegate::kernels::gla
