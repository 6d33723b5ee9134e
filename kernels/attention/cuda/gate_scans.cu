// The two scans over time as launches of their own.

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels::attention {
namespace {

int64_t count_of(const ForgettingAttentionParams& p) {
  return p.key_layout.batch * p.heads * p.key_layout.time;
}

template <class Scan>
cudaError_t run(const Scan& scan, double* totals, cudaStream_t stream) {
  const GateChunks<Scan> chunks(scan, totals);
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&gate_totals_kernel<Scan>, chunks.blocks(),
                                                    kGateChunk, 0, stream, chunks));
  return launch_unless_empty(&gate_scan_kernel<Scan>, chunks.blocks(), kGateChunk, 0, stream,
                             chunks);
}

}  // namespace

int64_t gate_totals_count(const ForgettingAttentionParams& p) {
  return time_tiles(p.key_layout, kGateChunk).count * p.heads;
}

int64_t gate_sums_count(const ForgettingAttentionParams& p) {
  return count_of(p) + gate_totals_count(p);
}

cudaError_t scan_gates(const ForgettingAttentionParams& p, double* c, cudaStream_t stream) {
  return run(GateSumScan{p, c}, c + count_of(p), stream);
}

cudaError_t gate_gradients(const ForgettingAttentionBackwardParams& p, const double* row_sums,
                           const double* column_sums, double* totals, cudaStream_t stream) {
  return run(GateGradientScan<double>{p.forward, p.dlog_f, row_sums, column_sums}, totals, stream);
}

}  // namespace tidegate::kernels::attention
