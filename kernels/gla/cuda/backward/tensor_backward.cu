// The backward pass on tensor cores: whether it takes a call, its plan, its workspace and its
// launches, which are factors of all chunks, states at their boundaries, gradients of all chunks.

#include "kernels/gla/cuda/backward/tensor_backward.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "kernels/common/cuda/alignment.h"
#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/dispatch.h"
#include "kernels/common/cuda/segment_carries.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/backward/chunk_shared.cuh"
#include "kernels/gla/cuda/backward/state_pass.cuh"

namespace tidegate::kernels::gla {
namespace {

int slices(int64_t dim) { return static_cast<int>(dim / kSlice); }

/// Whether a chunk of a gradient's rows, which ChunkFactors uses, spans less than 2^31 bytes.
bool chunks_are_near(const HeadSeries& t) {
  return std::abs(t.stride_t) * element_size(t.dtype) * kChunk <= std::numeric_limits<int>::max();
}

const HeadSeries& key_factor_rows(const GlaBackwardParams& b) {
  return b.forward.gate_kind == GateKind::kLogit ? b.dgate : b.dk;
}

bool all_rows_aligned(const GlaBackwardParams& b) {
  const GlaParams& p = b.forward;
  for (const HeadSeries* t : {&p.q, &p.v, &b.d_o, &b.dq, &b.dv}) {
    if (!rows_aligned(*t, 16)) {
      return false;
    }
  }
  for (const void* state : {p.h0, b.dh_final, static_cast<const void*>(b.dh0), p.gamma}) {
    if (!is_aligned(state, 16)) {
      return false;
    }
  }
  const bool keys = p.gate_kind == GateKind::kLogDecay;
  return (!keys || (rows_aligned(p.k, 16) && rows_aligned(b.dk, 16))) &&
         (p.gate_per_head || (rows_aligned(p.gate, 16) && rows_aligned(b.dgate, 16)));
}

/// Tokens of a segment of the state passes, or 0 where whole sequences fill the device: a block of
/// threads and direction for every multiprocessor. With segments the passes run twice, so few parts
/// do not pay.
int64_t choose_state_segment(const GlaParams& p, int multiprocessors) {
  constexpr int64_t kFewestParts = 5, kFewestChunks = 4;
  const int64_t sequences = std::max<int64_t>(1, p.layout.sequences);
  const int64_t parts =
      multiprocessors / (sequences * p.heads * ceil_div(p.value_dim, kStateColumns));
  const int64_t chunks = ceil_div(p.layout.time * p.layout.batch / sequences, kChunk);
  return parts < kFewestParts || chunks < kFewestChunks * parts ? 0
                                                                : ceil_div(chunks, parts) * kChunk;
}

/// The workspace: the factors of all chunks, the states at their boundaries in both directions, and
/// what segments hand on. The plan asks for its size, the launch has it hand out its parts.
class BackwardWorkspace {
 public:
  BackwardWorkspace(const GlaParams& p, int64_t chunks, int64_t segments)
      : heads_(p.heads),
        key_slices_(slices(p.key_dim)),
        value_slices_(slices(p.value_dim)),
        states_(chunks * p.heads * p.key_dim * p.value_dim * 2),
        segment_states_(segments * p.heads * p.key_dim * p.value_dim * 4),
        segment_decays_(segments * p.heads * p.key_dim * 4) {
    const ChunkFactors of = {.heads = heads_, .key_slices = key_slices_};
    tail_factors_ = of.tail_bytes(p.layout);
    decays_ = of.decay_bytes(chunks);
    scores_ = of.score_bytes(chunks);
  }

  int64_t bytes() const {
    return tail_factors_ + decays_ + scores_ +
           kDirections * (states_ + segment_states_ + segment_decays_);
  }

  /// The pass's factors, states and segments, in this order.
  void assign(void* workspace, StatePass* pass) const {
    auto* memory = static_cast<char*>(workspace);
    const auto take = [&memory](int64_t bytes) {
      char* part = memory;
      memory += bytes;
      return part;
    };
    ChunkFactors& factors = pass->factors;
    factors.tail_rows = take(tail_factors_);
    factors.decays = reinterpret_cast<float*>(take(decays_));
    factors.scores = reinterpret_cast<uint4*>(take(scores_));
    factors.heads = heads_;
    factors.key_slices = key_slices_;
    factors.piece = factors.piece_bits();
    for (ChunkStates& states : pass->states) {
      states = {reinterpret_cast<uint4*>(take(states_)), heads_, key_slices_, value_slices_};
    }
    pass->segment_states = reinterpret_cast<float*>(take(kDirections * segment_states_));
    pass->segment_decays = reinterpret_cast<float*>(take(kDirections * segment_decays_));
  }

 private:
  int64_t heads_;
  int key_slices_, value_slices_;
  int64_t tail_factors_, decays_, scores_;            // bytes
  int64_t states_, segment_states_, segment_decays_;  // bytes, of one direction
};

/// The maps that segments make of their start states, in both directions, composed in the order of
/// the scans: every segment's place gets the state in which it starts.
cudaError_t compose_segment_states(const StatePass& pass, cudaStream_t stream) {
  const GlaParams& p = pass.params;
  SegmentCarries carries[kDirections];
  for (int direction = 0; direction < kDirections; ++direction) {
    const int64_t rows = direction * pass.segments.count * p.heads * p.key_dim;
    carries[direction] = {.segments = pass.segments,
                          .heads = p.heads,
                          .rows = p.key_dim,
                          .columns = p.value_dim,
                          .initial = direction == 0 ? p.h0 : pass.dh_final,
                          .decays = pass.segment_decays + rows,
                          .states = pass.segment_states + rows * p.value_dim,
                          .adjoint = direction == 1};
  }
  // Before: a scan then starts from its own place, whichever neighbour its direction comes from.
  return compose_segments(carries, kDirections, CarryPlace::kBefore, stream);
}

template <class T>
cudaError_t launch(const StatePass& pass, const ChunkBackward& work, cudaStream_t stream) {
  using Unit = TensorBackwardUnit<T>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(Unit::make_factors(work, stream));
  if (pass.divided) {
    StatePass maps = pass;
    maps.map_only = true;
    TIDEGATE_RETURN_IF_CUDA_ERROR(Unit::scan_states(maps, stream));
    TIDEGATE_RETURN_IF_CUDA_ERROR(compose_segment_states(pass, stream));
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(Unit::scan_states(pass, stream));
  return Unit::chunks(work, stream);
}

}  // namespace

cudaError_t tensor_backward_fits(const GlaBackwardParams& b, bool* fits) {
  const GlaParams& p = b.forward;
  const auto dim_fits = [](int64_t dim) {
    return dim % kSlice == 0 && dim <= kMaxKeySlices * kSlice;
  };
  *fits = is_16_bit(p.q.dtype) && dim_fits(p.key_dim) && dim_fits(p.value_dim) &&
          all_rows_aligned(b) && chunks_are_near(b.dq) && chunks_are_near(key_factor_rows(b));
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
  plan->segment_time = choose_state_segment(p, limits.multiprocessors);
  if (plan->segment_time > 0) {
    plan->segments = time_tiles(p.layout, plan->segment_time).count;
  }
  plan->partials = time_tiles(p.layout, kChunk).count;
  plan->workspace_bytes = BackwardWorkspace(p, plan->partials, plan->segments).bytes();
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
  pass.divided = p.plan.segment_time > 0;
  const int64_t whole = std::max<int64_t>(1, ceil_div(p.layout.time, kChunk)) * kChunk;
  pass.segments = time_tiles(p.layout, pass.divided ? p.plan.segment_time : whole);
  BackwardWorkspace(p, pass.chunks.count, pass.divided ? pass.segments.count : 0)
      .assign(p.workspace, &pass);
  pass.factors.gradient_rows[kQueries] = b.dq;
  pass.factors.gradient_rows[kKeys] = key_factor_rows(b);
  const ChunkBackward work = {.backward = b,
                              .tensors = {p.q, p.k, p.v, p.gate, b.d_o, b.dq, b.dk, b.dv, b.dgate},
                              .chunks = pass.chunks,
                              .factors = pass.factors,
                              .states = pass.states[0],
                              .gradients = pass.states[1]};
  return dispatch_16_bit(p.q.dtype, [&]<class T>() { return launch<T>(pass, work, stream); });
}

}  // namespace tidegate::kernels::gla
