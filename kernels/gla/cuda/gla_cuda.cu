// The host's side of gla_cuda.h: the entry points, which say which path takes a set of params; and
// of the path on tensor cores, whether it takes a call, its plans, its workspace and its launches,
// with the one kernel that both directions share, which puts the maps of time segments together.

#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstdlib>
#include <limits>

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/backward/chunk_place.cuh"
#include "kernels/gla/cuda/backward/state_pass.cuh"
#include "kernels/gla/cuda/forward/stage.cuh"
#include "kernels/gla/cuda/segment_carries.h"
#include "kernels/gla/forward_rows.h"
#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

// ---- The entry points ----
//
// The plan decides which path it is, and a launch only follows the plan. Decoding has no path of
// its own: plain.cu has its kernels, too, for T <= kStepTokens. Whether there is anything to do is
// asked here alone.

namespace {

/// No sequences or no heads: no output has an element. (T = 0 has final states to copy.)
bool is_empty(const GlaParams& p) { return p.layout.sequences == 0 || p.channels == 0; }

}  // namespace

cudaError_t gla_forward_plan(const GlaParams& params, GlaPlan* plan) {
  const auto may_be = [&params](GlaPath path) {
    return params.path == path || params.path == GlaPath::kAuto;
  };
  // One or two tokens are the plain entry's, which gives them to its kernels of decoding.
  if (may_be(GlaPath::kTensorCore) && params.layout.time > kStepTokens &&
      tensor_forward_fits(params)) {
    return tensor_forward_plan(params, plan);
  }
  if (may_be(GlaPath::kFp32Chunks)) {
    bool fits = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR(fp32_forward_fits(params, &fits));
    if (fits) return fp32_forward_plan(params, plan);
  }
  *plan = {.path = GlaPath::kPlain};
  return may_be(GlaPath::kPlain) ? cudaSuccess : cudaErrorNotSupported;
}

cudaError_t gla_backward_plan(const GlaBackwardParams& params, GlaPlan* plan) {
  const GlaPath asked = params.forward.path;
  const auto may_be = [asked](GlaPath path) { return asked == path || asked == GlaPath::kAuto; };
  bool fits = false;
  if (may_be(GlaPath::kTensorCore) && params.forward.layout.time > kStepTokens) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(tensor_backward_fits(params, &fits));
    if (fits) return tensor_backward_plan(params, plan);
  }
  if (may_be(GlaPath::kFp32Chunks)) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(fp32_backward_fits(params, &fits));
    if (fits) return fp32_backward_plan(params, plan);
  }
  if (!may_be(GlaPath::kPlain)) {
    return cudaErrorNotSupported;
  }
  *plan = {.path = GlaPath::kPlain};
  return gla_plain_backward_plan(params, plan);
}

cudaError_t gla_forward(const GlaParams& params, cudaStream_t stream) {
  if (is_empty(params)) {
    return cudaSuccess;
  }
  switch (params.plan.path) {
    case GlaPath::kTensorCore:
      return tensor_forward(params, stream);
    case GlaPath::kFp32Chunks:
      return fp32_forward(params, stream);
    default:
      return gla_plain_forward(params, stream);
  }
}

cudaError_t gla_backward(const GlaBackwardParams& params, cudaStream_t stream) {
  if (is_empty(params.forward)) {
    return cudaSuccess;
  }
  switch (params.forward.plan.path) {
    case GlaPath::kTensorCore:
      return tensor_backward(params, stream);
    case GlaPath::kFp32Chunks:
      return fp32_backward(params, stream);
    default:
      return gla_plain_backward(params, stream);
  }
}

// ---- The states of segments ----
//
// See segment_carries.h.

namespace {

constexpr int kThreads = 256;
constexpr int kMostScans = 2;

struct Scans {
  SegmentCarries of[kMostScans];
};

__device__ inline float carried(float decay, float state, float own) {
  return fmaf(decay, state, own);
}
__device__ inline float4 carried(float decay, const float4& s, const float4& own) {
  return {fmaf(decay, s.x, own.x), fmaf(decay, s.y, own.y), fmaf(decay, s.z, own.z),
          fmaf(decay, s.w, own.w)};
}

/// A thread takes four columns (a float4) or one of a row of one head through all segments of a
/// sequence.
template <class Columns, CarryPlace kPlace>
__global__ void __launch_bounds__(kThreads)
    compose_segments_kernel(const __grid_constant__ Scans scans) {
  constexpr int kColumns = sizeof(Columns) / sizeof(float);
  const SegmentCarries& scan = scans.of[blockIdx.y];
  const SequenceLayout& layout = scan.segments.layout;
  const int64_t parts = scan.rows * scan.columns / kColumns;  // of a state
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= layout.sequences * scan.heads * parts) {
    return;
  }
  const int64_t n = item / parts / scan.heads, head = item / parts % scan.heads;
  const int64_t at = item % parts, row = at * kColumns / scan.columns;
  const Sequence seq = find_sequence(layout, n);
  const int64_t first = first_tile_index(scan.segments, static_cast<int>(n));
  const int segments = tiles_of(scan.segments, seq);
  Columns s = {};
  if (scan.initial != nullptr) {
    s = static_cast<const Columns*>(scan.initial)[(n * scan.heads + head) * parts + at];
  }
  const int steps = kPlace == CarryPlace::kBefore ? segments : segments - 1;
  // Places of several segments are read before the first is written: to the compiler they might be
  // one another's, and a read that waits for the write before it waits for the memory every time.
  constexpr int kAhead = 8;
  for (int i = 0; i < steps; i += kAhead) {
    Columns own[kAhead];
    float decay[kAhead];
    const auto index_of = [&](int j) {
      const int step = i + j;
      return (first + (scan.adjoint ? segments - 1 - step : step)) * scan.heads + head;
    };
    Columns* const states = reinterpret_cast<Columns*>(scan.states) + at;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j < steps) {
        own[j] = states[index_of(j) * parts];
        decay[j] = scan.decays[index_of(j) * scan.rows + row];
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j < steps) {
        const Columns before = s;
        s = carried(decay[j], s, own[j]);
        states[index_of(j) * parts] = kPlace == CarryPlace::kBefore ? before : s;
      }
    }
  }
}

}  // namespace

cudaError_t compose_segments(const SegmentCarries* scans, int count, CarryPlace place,
                             cudaStream_t stream) {
  Scans all = {};
  std::copy_n(scans, count, all.of);
  const SegmentCarries& s = scans[0];
  bool in_fours = s.columns % 4 == 0;
  for (int i = 0; i < count; ++i) {
    in_fours = in_fours && is_aligned(scans[i].initial, 16) && is_aligned(scans[i].states, 16);
  }
  const int64_t items =
      s.segments.layout.sequences * s.heads * s.rows * s.columns / (in_fours ? 4 : 1);
  const dim3 grid(static_cast<unsigned>(ceil_div(items, kThreads)), static_cast<unsigned>(count));
  const auto launch = [&](auto* kernel) {
    return launch_unless_empty(kernel, grid, kThreads, 0, stream, all);
  };
  if (place == CarryPlace::kBefore) {
    return in_fours ? launch(&compose_segments_kernel<float4, CarryPlace::kBefore>)
                    : launch(&compose_segments_kernel<float, CarryPlace::kBefore>);
  }
  return in_fours ? launch(&compose_segments_kernel<float4, CarryPlace::kAfter>)
                  : launch(&compose_segments_kernel<float, CarryPlace::kAfter>);
}

// ---- The forward pass on tensor cores ----

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

/// Whether rows of `dim` numbers are whole pieces of 16 bytes, aligned to as many.
bool is_whole(const HeadSeries& rows, int64_t dim) {
  return rows_aligned(rows, 16) && dim * element_size(rows.dtype) % 16 == 0;
}

}  // namespace

bool tensor_forward_fits(const GlaParams& p) {
  if (!is_16_bit(p.q.dtype) || std::max(p.key_dim, p.value_dim) > kMostTensorCoreDim) {
    return false;
  }
  const bool whole =
      is_whole(p.q, p.key_dim) && (p.k.data == nullptr || is_whole(p.k, p.key_dim)) &&
      is_whole(p.v, p.value_dim) && (p.gate_per_head || is_whole(p.gate, p.key_dim)) &&
      p.key_dim % kTensorCoreDims == 0 && p.value_dim % kTensorCoreDims == 0;
  return whole || (p.layout.time > kMostUnpaddedTokens && rows_fit_tile(p.q, p.key_dim) &&
                   rows_fit_tile(p.k, p.key_dim) && rows_fit_tile(p.v, p.value_dim) &&
                   (p.gate_per_head || rows_fit_tile(p.gate, p.key_dim)));
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
  work.whole_pieces[kForwardQ] = is_whole(p.q, p.key_dim);
  work.whole_pieces[kForwardK] = is_whole(p.k, p.key_dim);
  work.whole_pieces[kForwardV] = is_whole(p.v, p.value_dim);
  work.whole_pieces[kForwardGate] = is_whole(p.gate, p.key_dim);
  const auto stored_by = [&p](int64_t bytes) {
    return rows_aligned(p.o, bytes) && p.value_dim * element_size(p.o.dtype) % bytes == 0;
  };
  work.output_bytes = stored_by(8) ? 8 : stored_by(4) ? 4 : 2;
  work.segments = divided ? time_tiles(p.layout, p.plan.segment_time) : whole_sequences(p.layout);
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

// ---- The backward pass on tensor cores ----
//
// Three launches: factors of all chunks, states at their boundaries, gradients of all chunks. With
// segments they are five: before the states come the maps of segments, and their composition. With
// gamma the op adds up the chunks' partial sums of its gradient afterwards, by row_sums.

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
        units_(chunks * p.heads * p.key_dim * ChunkStates::column_tiles(slices(p.value_dim)) * 2),
        segment_states_(segments * p.heads * p.key_dim * p.value_dim * 4),
        segment_decays_(segments * p.heads * p.key_dim * 4) {
    const ChunkFactors of = {.heads = heads_, .key_slices = key_slices_};
    tail_factors_ = of.tail_bytes(p.layout);
    decays_ = of.decay_bytes(chunks);
    scores_ = of.score_bytes(chunks);
  }

  int64_t bytes() const {
    return tail_factors_ + decays_ + scores_ +
           kDirections * (states_ + units_ + segment_states_ + segment_decays_);
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
    factors.piece_bits = factors.find_piece_bits();
    for (ChunkStates& states : pass->states) {
      states = {reinterpret_cast<uint4*>(take(states_)), reinterpret_cast<uint16_t*>(take(units_)),
                heads_, key_slices_, value_slices_};
    }
    pass->segment_states = reinterpret_cast<float*>(take(kDirections * segment_states_));
    pass->segment_decays = reinterpret_cast<float*>(take(kDirections * segment_decays_));
  }

 private:
  int64_t heads_;
  int key_slices_, value_slices_;
  int64_t tail_factors_, decays_, scores_;   // bytes
  int64_t states_, units_;                   // bytes, of one direction
  int64_t segment_states_, segment_decays_;  // likewise
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
  const int bytes = std::max(ChunkShared::bytes(p.key_dim, p.value_dim),
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
