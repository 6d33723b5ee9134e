// The host's side of the float32 chunks: what they take, their plans, workspaces and launches.
//
// Forward: the factors; S before every chunk, unless outputs take whole sequences; the outputs.
// Backward: the factors; S and, unless dv takes whole sequences and makes it, D; dv; the other
// gradients. By chunks, the gradients run beside dv's kernel; by whole sequences they need its D,
// and S runs beside it, if there is room. Where few blocks would go through long sequences, the
// states are found in segments: their maps, these composed, then the states.

#include <algorithm>
#include <limits>

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/fp32_chunks/chunk_factors.cuh"
#include "kernels/gla/cuda/fp32_chunks/chunk_gradients.cuh"
#include "kernels/gla/cuda/fp32_chunks/chunk_outputs.cuh"
#include "kernels/gla/cuda/fp32_chunks/chunk_states.cuh"
#include "kernels/gla/cuda/segment_carries.h"
#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {
namespace fp32_chunks {
namespace {

// ---- Tiles ----
//
// Outputs: 64 columns of V, so that gates and scores are made for as many at once, where that many
// exist and their states have room; else 32. Gradients: 32 channels, where their states have room;
// else 16.

int output_bytes(const GlaParams& p, int tiles) {
  const auto key_dim = static_cast<int>(p.key_dim);
  return tiles == 2 ? OutputShared<2>::bytes(key_dim) : OutputShared<1>::bytes(key_dim);
}
int output_tiles(const GlaParams& p, int shared_bytes) {
  return p.value_dim > 32 && output_bytes(p, 2) <= shared_bytes ? 2 : 1;
}

int gradient_bytes(const GlaParams& p, int rows, ChunkSize chunk) {
  const auto value_dim = static_cast<int>(p.value_dim);
  return rows == 32 ? GradientShared<32>::bytes(value_dim, chunk)
                    : GradientShared<16>::bytes(value_dim, chunk);
}
int gradient_rows(const GlaParams& p, ChunkSize chunk, int shared_bytes) {
  return p.key_dim > 16 && gradient_bytes(p, 32, chunk) <= shared_bytes ? 32 : 16;
}

/// Chunks of 64 tokens, whose states take a quarter of the memory of those of 16; of 16 where those
/// would be few waves of blocks, since each of these is done sooner; where sequences are shorter,
/// the shortest that holds a sequence of average length.
ChunkSize choose_chunk(const GlaParams& p, const DeviceLimits& limits) {
  const int64_t tokens = p.layout.batch * p.layout.time;
  const int64_t chunks = std::max<int64_t>(1, tokens / kMostChunk);
  if (chunks * p.heads * ceil_div(p.key_dim, 32) < 4 * limits.multiprocessors) {
    return {};
  }
  ChunkSize chunk = {.bits = kMostChunkBits};
  const int64_t mean = ceil_div(tokens, std::max<int64_t>(1, p.layout.sequences));
  while (chunk.bits > 0 && chunk.tokens() / 2 >= mean) {
    --chunk.bits;
  }
  return chunk;
}

/// At least as many blocks as any of the launches has, which are sub-chunks of a head, or tiles of
/// its chunks or sequences.
int64_t most_blocks(const GlaParams& p, ChunkSize chunk) {
  const int64_t of_chunk = std::max(
      {int64_t{chunk.sub_chunks()}, ceil_div(p.value_dim, 32), ceil_div(p.key_dim, 16),
       ceil_div(p.key_dim, kStateRows) * ceil_div(p.value_dim, state_columns(p.value_dim))});
  return time_tiles(p.layout, chunk.tokens()).count * p.heads * of_chunk;
}

/// Tokens of a segment of the state scans, or 0 where their blocks keep the device busy as they
/// are: with segments the scans run twice, and two more launches are made, so few parts do not pay.
int64_t choose_segment(const GlaParams& p, int directions, int multiprocessors) {
  constexpr int64_t kFewestParts = 4, kFewestChunks = 8;
  const int64_t sequences = std::max<int64_t>(1, p.layout.sequences);
  const int64_t heads = std::max<int64_t>(1, p.heads);
  const int64_t blocks = directions * sequences * heads * ceil_div(p.key_dim, kStateRows) *
                         ceil_div(p.value_dim, state_columns(p.value_dim));
  const int64_t chunks = ceil_div(p.layout.time * p.layout.batch / sequences, kMostChunk);
  const int64_t parts = std::min(4 * multiprocessors / blocks, chunks / kFewestChunks);
  return parts < kFewestParts ? 0 : ceil_div(chunks, parts) * kMostChunk;
}

// ---- The workspace ----

ChunkFactors factors_of(const GlaParams& p, ChunkSize chunk) {
  return {.heads = p.heads, .width = rounded_to_fours(static_cast<int>(p.key_dim)), .chunk = chunk};
}

/// Its parts, in floats: factors of all sub-chunks, states of chunks, maps of segments, and dlog f
/// a channel. A forward pass by whole sequences stores no states, and has factors alone.
struct Workspace {
  int64_t factors, states, segment_states, segment_decays, gate_channels;
  int stored_directions;

  Workspace(const GlaParams& p, ChunkSize chunk, int64_t segments, int stored)
      : Workspace(p, factors_of(p, chunk), time_tiles(p.layout, chunk.tokens()).count, segments,
                  stored) {}
  Workspace(const GlaParams& p, const ChunkFactors& of, int64_t chunks, int64_t segments,
            int stored)
      : factors(of.floats(chunks)),
        states(chunks * p.heads * p.key_dim * p.value_dim),
        segment_states(segments * p.heads * p.key_dim * p.value_dim),
        segment_decays(segments * p.heads * p.key_dim),
        gate_channels(stored == kDirections && p.gate_per_head
                          ? p.layout.batch * p.layout.time * p.heads * p.key_dim
                          : 0),
        stored_directions(stored) {}

  int64_t bytes() const {
    return (factors + stored_directions * (states + segment_states + segment_decays) +
            gate_channels) *
           static_cast<int64_t>(sizeof(float));
  }

  /// The scan's parts; returns where dlog f a channel begins.
  float* assign(void* workspace, StateScan* scan) const {
    auto* memory = static_cast<float*>(workspace);
    const auto take = [&memory](int64_t count) {
      float* part = memory;
      memory += count;
      return part;
    };
    scan->factors.data = take(factors);
    for (int i = 0; i < stored_directions; ++i) {
      scan->states[i] = take(states);
      scan->segment_states[i] = take(segment_states);
      scan->segment_decays[i] = take(segment_decays);
    }
    return memory;
  }
};

/// Blocks of outputs that are made of whole sequences.
int64_t sequence_blocks(const GlaParams& p, const DeviceLimits& limits) {
  const int64_t columns = 32 * output_tiles(p, limits.shared_bytes);
  return p.layout.sequences * p.heads * ceil_div(p.value_dim, columns);
}

/// Whether outputs are made of whole sequences instead of chunks: where their blocks fill the
/// device. Then no states of chunks are needed for them. Packed sequences may be a long one and
/// short ones.
bool goes_by_sequences(const GlaParams& p, const DeviceLimits& limits) {
  return p.layout.offsets == nullptr && sequence_blocks(p, limits) >= limits.multiprocessors;
}

/// Whether S is found beside dv, which is made of whole sequences: where dv's blocks take at most
/// three quarters of their places on the device, of which a multiprocessor has two.
bool finds_states_beside(const GlaParams& p, const DeviceLimits& limits) {
  return p.plan.by_sequences && p.plan.segment_time == 0 &&
         2 * sequence_blocks(p, limits) <= 3 * limits.multiprocessors;
}

cudaError_t plan_chunks(const GlaParams& p, int directions, GlaPlan* plan) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *plan = {.path = GlaPath::kFp32Chunks};
  plan->by_sequences = goes_by_sequences(p, limits);
  // Whole sequences: D comes with dv, and S is needed by gradients alone.
  const int scanned_directions = plan->by_sequences ? directions - 1 : directions;
  plan->segment_time =
      scanned_directions == 0 ? 0 : choose_segment(p, scanned_directions, limits.multiprocessors);
  if (plan->segment_time > 0) {
    plan->segments = time_tiles(p.layout, plan->segment_time).count;
  }
  const ChunkSize chunk = choose_chunk(p, limits);
  plan->chunk_time = chunk.tokens();
  plan->partials = time_tiles(p.layout, chunk.tokens()).count;
  const int stored_directions = directions == 1 ? scanned_directions : directions;
  plan->workspace_bytes = Workspace(p, chunk, plan->segments, stored_directions).bytes();
  return cudaSuccess;
}

// ---- Launches ----

StateScan new_scan(const GlaParams& p) {
  StateScan scan;
  scan.params = p;
  scan.factors = factors_of(p, ChunkSize::of(p.plan.chunk_time));
  scan.chunks = time_tiles(p.layout, scan.factors.chunk.tokens());
  return scan;
}

cudaError_t launch_factors(const StateScan& scan, cudaStream_t stream) {
  const FactorWork work = {scan.params, scan.chunks, scan.factors};
  const int threads =
      std::min(kFactorThreads, static_cast<int>(ceil_div(scan.factors.width * kGroups, 32) * 32));
  const int64_t blocks = scan.chunks.count * scan.factors.chunk.sub_chunks() * scan.params.heads;
  return launch_early<&chunk_factors_kernel>(blocks, dim3(threads), 0, stream, work);
}

template <int kRows, int kColumns>
cudaError_t launch_states(const StateScan& scan, int64_t blocks, int directions,
                          cudaStream_t stream) {
  return launch_early<&chunk_states_kernel<kRows, kColumns>>(
      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(directions)),
      dim3(state_threads(kRows, kColumns)), 0, stream, scan);
}

/// Two rows of a state a thread where few blocks work: each is done sooner; else four, which takes
/// fewer instructions. Of 32 columns, two: with four, too few threads would copy the factors.
cudaError_t launch_states(const StateScan& scan, int directions, cudaStream_t stream) {
  const GlaParams& p = scan.params;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t blocks = scan.segments.count * p.heads * scan.row_tiles() * scan.column_tiles();
  if (blocks > std::numeric_limits<int>::max()) {
    return cudaErrorInvalidConfiguration;
  }
  if (state_columns(p.value_dim) == 32) {
    return launch_states<2, 32>(scan, blocks, directions, stream);
  }
  return blocks * directions < 2 * limits.multiprocessors
             ? launch_states<2, 64>(scan, blocks, directions, stream)
             : launch_states<4, 64>(scan, blocks, directions, stream);
}

/// The states at all chunks, by way of segments where the plan has them: these are several
/// launches, of which only the first could run beside the kernel before.
cudaError_t find_states(StateScan scan, int directions, cudaStream_t stream) {
  const GlaParams& p = scan.params;
  scan.divided = p.plan.segment_time > 0;
  scan.segments =
      scan.divided ? time_tiles(p.layout, p.plan.segment_time) : whole_sequences(p.layout);
  if (scan.divided) {
    StateScan maps = scan;
    maps.maps = true;
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch_states(maps, directions, stream));
    SegmentCarries carries[kDirections];
    for (int i = 0; i < directions; ++i) {
      carries[i] = {.segments = scan.segments,
                    .heads = p.heads,
                    .rows = p.key_dim,
                    .columns = p.value_dim,
                    .initial = scan.initial[i],
                    .decays = scan.segment_decays[i],
                    .states = scan.segment_states[i],
                    .adjoint = i == 1};
    }
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        compose_segments(carries, directions, CarryPlace::kBefore, stream));
  }
  return launch_states(scan, directions, stream);
}

template <int kTiles, bool kAdjoint>
cudaError_t launch_outputs(const ChunkOutputs& work, cudaStream_t stream) {
  const GlaParams& p = work.params;
  const int bytes = output_bytes(p, kTiles);
  constexpr auto* kKernel = &chunk_outputs_kernel<kTiles, kAdjoint>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const int64_t blocks = work.blocks.count * p.heads * ceil_div(p.value_dim, 32 * kTiles);
  return launch_early<kKernel>(blocks, dim3(kThreads), bytes, stream, work);
}

/// o or dv, after the factors and, by chunks, the states.
template <bool kAdjoint>
cudaError_t launch_outputs(const StateScan& scan, const HeadSeries& values, const HeadSeries& out,
                           const DeviceLimits& limits, bool next_runs_beside, cudaStream_t stream) {
  const GlaParams& p = scan.params;
  ChunkOutputs work = {.params = p,
                       .values = values,
                       .out = out,
                       .factors = scan.factors,
                       .chunks = scan.chunks,
                       .blocks = scan.chunks,
                       .states = scan.states[kAdjoint],
                       .whole = p.plan.by_sequences,
                       .next_runs_beside = next_runs_beside};
  if (work.whole) {
    work.blocks = whole_sequences(p.layout);
    work.initial = static_cast<const float*>(scan.initial[kAdjoint]);
    work.final = static_cast<float*>(scan.final[kAdjoint]);
    work.kept = kAdjoint ? scan.states[kAdjoint] : nullptr;
  }
  return output_tiles(p, limits.shared_bytes) == 2 ? launch_outputs<2, kAdjoint>(work, stream)
                                                   : launch_outputs<1, kAdjoint>(work, stream);
}

template <int kRows>
cudaError_t launch_gradients(const ChunkGradients& work, cudaStream_t stream) {
  const GlaParams& p = work.params.forward;
  const int bytes = gradient_bytes(p, kRows, work.factors.chunk);
  constexpr auto* kKernel = &chunk_gradients_kernel<kRows>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  const int64_t blocks = work.chunks.count * p.heads * ceil_div(p.key_dim, kRows);
  return launch_early<kKernel>(blocks, dim3(kThreads), bytes, stream, work);
}

/// Whether the dtype, the time and the head dimensions are for chunks. The states of larger heads
/// would take many times the memory of the inputs.
bool is_for_chunks(const GlaParams& p) {
  return p.q.dtype == DType::kFloat32 && p.layout.time > kMostUnpaddedTokens &&
         std::max(p.key_dim, p.value_dim) <= kMostTensorCoreDim;
}

}  // namespace
}  // namespace fp32_chunks

using namespace fp32_chunks;

cudaError_t fp32_forward_fits(const GlaParams& p, bool* fits) {
  *fits = is_for_chunks(p);
  if (*fits) {
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    *fits = output_bytes(p, 1) <= limits.shared_bytes &&
            most_blocks(p, choose_chunk(p, limits)) <= std::numeric_limits<int>::max();
  }
  return cudaSuccess;
}

cudaError_t fp32_backward_fits(const GlaBackwardParams& b, bool* fits) {
  TIDEGATE_RETURN_IF_CUDA_ERROR(fp32_forward_fits(b.forward, fits));
  if (*fits) {
    DeviceLimits limits;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
    *fits = gradient_bytes(b.forward, 16, choose_chunk(b.forward, limits)) <= limits.shared_bytes;
  }
  return cudaSuccess;
}

cudaError_t fp32_forward_plan(const GlaParams& p, GlaPlan* plan) { return plan_chunks(p, 1, plan); }
cudaError_t fp32_backward_plan(const GlaBackwardParams& b, GlaPlan* plan) {
  return plan_chunks(b.forward, kDirections, plan);
}

cudaError_t fp32_forward(const GlaParams& p, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const bool by_sequences = p.plan.by_sequences;
  StateScan scan = new_scan(p);
  scan.initial[0] = p.h0;
  scan.final[0] = p.h_final;
  Workspace(p, scan.factors.chunk, p.plan.segments, by_sequences ? 0 : 1)
      .assign(p.workspace, &scan);
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_factors(scan, stream));
  if (!by_sequences) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_states(scan, 1, stream));
  }
  return launch_outputs<false>(scan, p.v, p.o, limits, /*next_runs_beside=*/false, stream);
}

cudaError_t fp32_backward(const GlaBackwardParams& b, cudaStream_t stream) {
  const GlaParams& p = b.forward;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  StateScan scan = new_scan(p);
  scan.d_o = b.d_o;
  scan.initial[0] = p.h0;
  scan.initial[1] = b.dh_final;
  scan.final[1] = b.dh0;
  float* const gate_channels =
      Workspace(p, scan.factors.chunk, p.plan.segments, kDirections).assign(p.workspace, &scan);
  TIDEGATE_RETURN_IF_CUDA_ERROR(launch_factors(scan, stream));
  // Beside dv's kernel, where there is one: S, if there is room, or gradients that need no D of it.
  const bool states_beside = finds_states_beside(p, limits);
  const bool gradients_beside = !p.plan.by_sequences && p.value_dim > 0;
  if (!states_beside) {
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_states(scan, p.plan.by_sequences ? 1 : kDirections, stream));
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      launch_outputs<true>(scan, b.d_o, b.dv, limits, states_beside || gradients_beside, stream));
  if (states_beside) {
    scan.runs_beside = true;
    TIDEGATE_RETURN_IF_CUDA_ERROR(find_states(scan, 1, stream));
  }
  const ChunkGradients work = {.params = b,
                               .factors = scan.factors,
                               .chunks = scan.chunks,
                               .states = scan.states[0],
                               .gradients = scan.states[1],
                               .gate_channels = gate_channels,
                               .runs_beside = gradients_beside};
  TIDEGATE_RETURN_IF_CUDA_ERROR(gradient_rows(p, scan.factors.chunk, limits.shared_bytes) == 32
                                    ? launch_gradients<32>(work, stream)
                                    : launch_gradients<16>(work, stream));
  return p.gate_per_head ? sum_gate_channels(b, gate_channels, stream) : cudaSuccess;
}

}  // namespace tidegate::kernels::gla
