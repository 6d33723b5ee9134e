// The backward pass on tensor cores: factors of all chunks, the states at their boundaries, then
// the gradients of all chunks.

#include "kernels/gla/cuda/tensor_backward.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "kernels/common/cuda/device.h"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/chunk_shared.cuh"
#include "kernels/gla/cuda/state_pass.cuh"

namespace tidegate::kernels::gla {
namespace {

int slices(int64_t dim) { return static_cast<int>(dim / kBlock); }

/// Whether rows can be copied 16 bytes at a time.
bool rows_align(const HeadSeries& t) {
  const int64_t pack = 16 / element_size(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride_b % pack == 0 &&
         t.stride_t % pack == 0 && t.stride_h % pack == 0;
}

/// Whether a chunk of a gradient's rows, which ChunkFactors uses, spans less than 2^31 bytes.
bool chunks_are_near(const HeadSeries& t) {
  return std::abs(t.stride_t) * element_size(t.dtype) * kChunk <= std::numeric_limits<int>::max();
}

const HeadSeries& lent_to_keys(const GlaBackwardParams& b) {
  return b.forward.gate_kind == GateKind::kLogit ? b.dgate : b.dk;
}

bool all_rows_align(const GlaBackwardParams& b) {
  const GlaParams& p = b.forward;
  for (const HeadSeries* t : {&p.q, &p.v, &b.d_o, &b.dq, &b.dv}) {
    if (!rows_align(*t)) {
      return false;
    }
  }
  for (const void* state : {p.h0, b.dh_final, const_cast<const void*>(b.dh0), p.gamma}) {
    if (reinterpret_cast<uintptr_t>(state) % 16 != 0) {
      return false;
    }
  }
  const bool keys = p.gate_kind == GateKind::kLogDecay;
  return (!keys || (rows_align(p.k) && rows_align(b.dk))) &&
         (p.gate_per_head || (rows_align(p.gate) && rows_align(b.dgate)));
}

/// Tokens of a segment of the state passes, or 0 where whole sequences fill the device: a block and
/// direction for every multiprocessor. Cut, the passes run twice, so few parts do not pay.
int64_t choose_segment_time(const GlaParams& p, int multiprocessors) {
  constexpr int64_t kFewestParts = 5, kFewestChunks = 4;
  const int64_t sequences = std::max<int64_t>(1, p.layout.sequences);
  const int64_t parts =
      multiprocessors / (sequences * p.heads * ceil_div(p.value_dim, kStateColumns));
  const int64_t chunks = ceil_div(p.layout.time * p.layout.batch / sequences, kChunk);
  return parts < kFewestParts || chunks < kFewestChunks * parts ? 0
                                                                : ceil_div(chunks, parts) * kChunk;
}

/// Bytes of the parts of the workspace, those of states for one direction.
struct Workspace {
  int64_t factors, decays, scores, states, segment_states, segment_decays;

  Workspace(const GlaParams& p, int64_t chunk_slots, int64_t segment_slots)
      : states(chunk_slots * p.heads * p.key_dim * p.value_dim * 2),
        segment_states(segment_slots * p.heads * p.key_dim * p.value_dim * 4),
        segment_decays(segment_slots * p.heads * p.key_dim * 4) {
    const ChunkFactors of = {.heads = p.heads, .key_slices = slices(p.key_dim)};
    factors = of.other_bytes(p.layout);
    decays = of.decay_bytes(chunk_slots);
    scores = of.score_bytes(chunk_slots);
  }
  int64_t bytes() const {
    return factors + decays + scores + 2 * (states + segment_states + segment_decays);
  }
};

template <class T>
cudaError_t launch(const StatePass& pass, const ChunkBackward& work, cudaStream_t stream) {
  using Unit = TensorBackwardUnit<T>;
  const GlaParams& p = pass.params;
  TIDEGATE_RETURN_IF_CUDA_ERROR(Unit::make_factors(work, stream));
  if (pass.split) {
    StatePass maps = pass;
    maps.map_only = true;
    TIDEGATE_RETURN_IF_CUDA_ERROR(Unit::walk_states(maps, stream));
    const int64_t blocks = ceil_div(p.key_dim * p.value_dim, kCombineThreads);
    const dim3 grid(static_cast<unsigned>(blocks * p.layout.sequences * p.heads), kDirections);
    combine_segments_kernel<float><<<grid, kCombineThreads, 0, stream>>>(pass);
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(Unit::walk_states(pass, stream));
  return Unit::chunks(work, stream);
}

}  // namespace

cudaError_t tensor_backward_fits(const GlaBackwardParams& b, bool* fits) {
  const GlaParams& p = b.forward;
  const auto dim_fits = [](int64_t dim) { return dim % kBlock == 0 && dim <= kMaxSlices * kBlock; };
  const bool half = p.q.dtype == DType::kBFloat16 || p.q.dtype == DType::kFloat16;
  *fits = half && dim_fits(p.key_dim) && dim_fits(p.value_dim) && all_rows_align(b) &&
          chunks_are_near(b.dq) && chunks_are_near(lent_to_keys(b));
  if (!*fits) {
    return cudaSuccess;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int bytes =
      std::max(ChunkShared::bytes(p.key_dim, p.value_dim) + static_cast<int>(sizeof(ChunkRows)),
               StatePassShared(p.key_dim, p.value_dim).bytes());
  *fits = limits.major >= 8 && bytes <= limits.shared_bytes;
  return cudaSuccess;
}

cudaError_t tensor_backward_plan(const GlaBackwardParams& b, GlaPlan* plan) {
  const GlaParams& p = b.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *plan = {.path = GlaPath::kTensorCore};
  plan->segment_time = choose_segment_time(p, limits.multiprocessors);
  if (plan->segment_time > 0) {
    plan->segments = time_tiles(p.layout, plan->segment_time).count;
  }
  plan->partials = time_tiles(p.layout, kChunk).count;
  plan->workspace_bytes = Workspace(p, plan->partials, plan->segments).bytes();
  return cudaSuccess;
}

cudaError_t tensor_backward(const GlaBackwardParams& b, cudaStream_t stream) {
  const GlaParams& p = b.forward;
  StatePass pass;
  pass.params = p;
  pass.d_o = b.d_o;
  pass.dh_final = b.dh_final;
  pass.dh0 = b.dh0;
  pass.chunks = time_tiles(p.layout, kChunk);
  pass.split = p.plan.segment_time > 0;
  const int64_t whole = std::max<int64_t>(1, ceil_div(p.layout.time, kChunk)) * kChunk;
  pass.segments = time_tiles(p.layout, pass.split ? p.plan.segment_time : whole);
  const Workspace space(p, pass.chunks.count, pass.split ? pass.segments.count : 0);
  auto* memory = static_cast<char*>(p.workspace);
  const auto take = [&memory](int64_t bytes) {
    char* part = memory;
    memory += bytes;
    return part;
  };
  pass.factors = {{b.dq, lent_to_keys(b)},
                  take(space.factors),
                  reinterpret_cast<float*>(take(space.decays)),
                  reinterpret_cast<uint4*>(take(space.scores)),
                  p.heads,
                  slices(p.key_dim)};
  pass.factors.piece = pass.factors.piece_bits();
  for (ChunkStates& states : pass.states) {
    states = {reinterpret_cast<uint4*>(take(space.states)), p.heads, slices(p.key_dim),
              slices(p.value_dim)};
  }
  pass.segment_states = reinterpret_cast<float*>(take(2 * space.segment_states));
  pass.segment_decays = reinterpret_cast<float*>(take(2 * space.segment_decays));
  const ChunkBackward work = {.backward = b,
                              .tensors = {p.q, p.k, p.v, p.gate, b.d_o, b.dq, b.dk, b.dv, b.dgate},
                              .chunks = pass.chunks,
                              .factors = pass.factors,
                              .states = pass.states[0],
                              .gradients = pass.states[1]};
  return p.q.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(pass, work, stream)
                                       : launch<__half>(pass, work, stream);
}

}  // namespace tidegate::kernels::gla
