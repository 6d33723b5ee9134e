#pragma once

// The forward pass on tensor cores. A block of threads scans one head of a segment, 16 tokens (a
// sub-chunk) at a time, through a ring of stages in shared memory:
//
//   loader warp      q, k or logits, and v of a sub-chunk into a free stage       loader.cuh
//   producer warps   gates, scores, q~ = q pre and k~ = k suf, in place           compute_warps.cuh
//   consumer warps   o = q~ S + scores v, then S = diag(total) S + k~^T v         compute_warps.cuh
//
// pre(t) is the product of the sub-chunk's decays up to t, suf(t) of those after t, total of all
// (dyadic.cuh). Each consumer keeps 16 columns of S in registers. The tile is in stage.cuh. The
// maps of segments are made by the same warps without outputs, or for HGRN2 by a kernel of their
// own (segment_maps.cuh).
//
// Every stage has three mbarriers. `loaded`: the loader's 32 lanes arrive as their copies land, a
// producer waits. `full`: that producer's 32 lanes arrive, all consumers wait. `empty`: a lane of
// each consumer arrives, the loader waits. Sub-chunk b is producer b % producers' alone, so warps
// of one kind never wait for each other.

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/forward/compute_warps.cuh"
#include "kernels/gla/cuda/forward/segment_maps.cuh"
#include "kernels/gla/forward_rows.h"
#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

/// What a launch computes.
enum class Pass : uint8_t {
  kOutput,
  kOutputOfKeyTile,  // of a part of K: with sum_before and sum_after
  kMaps,             // the maps of segments instead of outputs
};

/// The barriers of the ring's stages.
struct RingBarriers {
  uint64_t *loaded, *full, *empty;

  /// By all threads, before a __syncthreads.
  __device__ void init(int stages, int consumers) const {
    if (threadIdx.x < stages) {
      mbarrier_init(&loaded[threadIdx.x], 32);
      mbarrier_init(&full[threadIdx.x], 32);
      mbarrier_init(&empty[threadIdx.x], consumers);
    }
  }
};

/// gamma of the key tile's channels. Past its end it is one, so that whatever logit lies there
/// makes no key and a decay of one.
template <int kKeys>
__device__ inline void load_tile_gamma(const TensorForward& w, const WorkTile& work,
                                       float (&bounds)[kKeys]) {
  const GlaParams& p = w.params;
  for (int i = threadIdx.x; i < kKeys; i += blockDim.x) {
    float gamma = i < w.keys ? 0.0f : 1.0f;
    if (p.gamma != nullptr && i < w.keys) {
      gamma = static_cast<const float*>(p.gamma)[work.head * p.key_dim + w.first_key + i];
    }
    bounds[i] = gamma;
  }
}

/// The loader warp: every sub-chunk into the next stage that is empty.
template <class Load>
__device__ inline void run_loader(const TensorForward& w, const WorkTile& work,
                                  typename Load::Stage* ring, const RingBarriers& barriers,
                                  int sub_chunks, int lane) {
  Load loader(w, work, lane);
  for (int b = 0, at = 0, phase = 1; b < sub_chunks; ++b) {
    if (b >= w.stages) {
      mbarrier_wait(&barriers.empty[at], phase);
    }
    loader.copy(ring[at]);
    mbarrier_arrive_after_copies(&barriers.loaded[at]);
    if (++at == w.stages) {
      at = 0;
      phase ^= 1;
    }
  }
  commit_copies();
  wait_for_copies<0>();  // nobody leaves with copies under way
}

/// A producer warp: every `w.producers`-th sub-chunk from `first` on.
template <class Make>
__device__ inline void run_producer(const TensorForward& w, const WorkTile& work,
                                    const float* bounds, typename Make::Stage* ring,
                                    const RingBarriers& barriers, int first, int sub_chunks,
                                    int lane) {
  const Make producer(w.params, work, bounds, lane);
  for (int b = first; b < sub_chunks; b += w.producers) {
    const int at = b % w.stages;
    mbarrier_wait(&barriers.loaded[at], b / w.stages % 2);
    producer.make(ring[at], b);
    mbarrier_arrive(&barriers.full[at]);
  }
}

/// The columns from `first_column` on of the state in which a work tile starts; null: zero.
__device__ inline const float* start_state(const TensorForward& w, const WorkTile& work,
                                           int64_t segment_index, int first_column) {
  const GlaParams& p = w.params;
  const float* start = nullptr;
  if (work.segment.index > 0) {
    start = w.states + state_offset(p, work, segment_index - 1) + first_column;
  } else if (p.h0 != nullptr) {
    start = static_cast<const float*>(p.h0) + state_offset(p, work, work.segment.sequence.index) +
            first_column;
  }
  return start;
}

/// The product of a segment's decays, by the warp that has seen them all.
template <int kKeys>
__device__ inline void store_products(const TensorForward& w, const WorkTile& work,
                                      int64_t segment_index, int lane, const float (&product)[4]) {
  const GlaParams& p = w.params;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = ChannelFactors<kKeys>::channel(lane, i);
    if (key < work.keys) {
      w.products[(segment_index * p.heads + work.head) * p.key_dim + w.first_key + key] =
          product[i];
    }
  }
}

/// A consumer warp: its 16 columns of the outputs and of the state, sub-chunk by sub-chunk.
template <class Data, class Stage, int kKeys, Pass kPass>
__device__ inline void run_consumer(const TensorForward& w, const WorkTile& work, Stage* ring,
                                    const RingBarriers& barriers, int sub_chunks, int warp,
                                    int lane) {
  constexpr bool kMaps = kPass == Pass::kMaps;
  const GlaParams& p = w.params;
  const int column = warp * kConsumerColumns;
  const int columns = work.values - column;  // of the warp's, those that exist
  const int64_t segment_index = find_segment_index(w);
  Consumer<kKeys> consumer(lane, warp * 2);
  if (!kMaps) {
    consumer.load(start_state(w, work, segment_index, column), work.keys, p.value_dim, columns);
  }
  [[maybe_unused]] float product[4] = {1, 1, 1, 1};  // of the decays of the lane's four channels
  OutputRows<Data, kPass == Pass::kOutputOfKeyTile> output(w, work, lane, column);
  for (int b = 0, at = 0, phase = 0; b < sub_chunks; ++b) {
    const SubChunkStage<kKeys>& stage = ring[at];
    mbarrier_wait(&barriers.full[at], phase);
    [[maybe_unused]] float o[2][4] = {};
    if constexpr (kMaps) {
      consumer.update(stage);
      stage.total.multiply_into(product, lane);
    } else {
      consumer.output_and_update(stage, o);
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&barriers.empty[at]);
    }
    if (!kMaps && columns > 0) {
      output.store(o);
    }
    if (++at == w.stages) {
      at = 0;
      phase ^= 1;
    }
  }
  if constexpr (kMaps) {
    consumer.store(w.states + state_offset(p, work, segment_index) + column, work.keys, p.value_dim,
                   columns);
    if (warp == 0 && work.first_value == 0 && lane * 4 < kKeys) {
      store_products<kKeys>(w, work, segment_index, lane, product);
    }
  } else if (work.segment.last() && p.h_final != nullptr) {
    consumer.store(static_cast<float*>(p.h_final) +
                       state_offset(p, work, work.segment.sequence.index) + column,
                   work.keys, p.value_dim, columns);
  }
}

template <class Data, class Gate, GateKind kKind, int kKeys, Pass kPass>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    tensor_forward_kernel(const __grid_constant__ TensorForward w) {
  constexpr bool kMaps = kPass == Pass::kMaps;
  using Load = Loader<Data, Gate, kKind, kKeys, kMaps>;
  using Make = Producer<Data, Gate, kKind, kKeys, kMaps>;
  using Stage = typename Load::Stage;
  extern __shared__ __align__(128) char shared[];
  Stage* const ring = reinterpret_cast<Stage*>(shared);
  __shared__ uint64_t loaded[kMaxStages], full[kMaxStages], empty[kMaxStages];
  __shared__ __align__(16) float bounds[kKeys];

  const WorkTile work = find_work_tile(w);
  const TimeTile& segment = work.segment;
  if (!segment.exists() || (kMaps && segment.last())) {
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int consumers = w.value_tile / kConsumerColumns;
  const RingBarriers barriers = {loaded, full, empty};
  barriers.init(w.stages, consumers);
  load_tile_gamma(w, work, bounds);
  __syncthreads();

  const int sub_chunks = (segment.tokens + kSubChunk - 1) / kSubChunk;
  if (warp == consumers) {
    run_loader<Load>(w, work, ring, barriers, sub_chunks, lane);
    return;
  }
  if (warp > consumers) {
    const int first = warp - consumers - 1;
    run_producer<Make>(w, work, bounds, ring, barriers, first, sub_chunks, lane);
    return;
  }
  run_consumer<Data, Stage, kKeys, kPass>(w, work, ring, barriers, sub_chunks, warp, lane);
}

template <class Data, class Gate, GateKind kKind, int kKeys, Pass kPass>
cudaError_t launch_tensor_forward(TensorForward work, cudaStream_t stream) {
  constexpr auto* kKernel = &tensor_forward_kernel<Data, Gate, kKind, kKeys, kPass>;
  constexpr int kStageBytes =
      sizeof(typename Loader<Data, Gate, kKind, kKeys, kPass == Pass::kMaps>::Stage);
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int consumers = work.value_tile / kConsumerColumns;
  const ForwardRing ring(kStageBytes, consumers, limits.shared_bytes);
  work.stages = ring.stages;
  work.producers = ring.producers;
  const int bytes = ring.stages * kStageBytes, threads = (consumers + 1 + ring.producers) * 32;
  const GlaParams& p = work.params;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  return launch_unless_empty(kKernel, work.segments.count * p.heads * value_tiles(p),
                             dim3(static_cast<unsigned>(threads)), bytes, stream, work);
}

template <class Data, GateKind kKind>
cudaError_t TensorForwardUnit<Data, kKind>::launch(const TensorForward& work, bool maps,
                                                   cudaStream_t stream) {
  if constexpr (kKind == GateKind::kLogit) {
    if (maps) {
      DeviceLimits limits;
      TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
      if (segment_maps_fit(work, limits.shared_bytes)) {
        return launch_segment_maps<Data>(work, stream);
      }
    }
  }
  const auto with_tile = [&]<class Gate, int kKeys>() {
    if (maps) {
      return launch_tensor_forward<Data, Gate, kKind, kKeys, Pass::kMaps>(work, stream);
    }
    if constexpr (kKeys == kKeyTile) {
      if (work.is_partial()) {
        return launch_tensor_forward<Data, Gate, kKind, kKeys, Pass::kOutputOfKeyTile>(work,
                                                                                       stream);
      }
    }
    return launch_tensor_forward<Data, Gate, kKind, kKeys, Pass::kOutput>(work, stream);
  };
  const auto with_gate = [&]<class Gate>() {
    const GlaParams& p = work.params;
    const auto fits = [&](const HeadSeries& rows) {
      return rows_fit_tile(rows, work.keys, kNarrowKeyTile);
    };
    const bool narrow = work.keys <= kNarrowKeyTile && !work.is_partial() && fits(p.q) &&
                        fits(p.k) && (p.gate_per_head || fits(p.gate));
    return narrow ? with_tile.template operator()<Gate, kNarrowKeyTile>()
                  : with_tile.template operator()<Gate, kKeyTile>();
  };
  return work.params.gate.dtype == DType::kFloat32 ? with_gate.template operator()<float>()
                                                   : with_gate.template operator()<Data>();
}

}  // namespace tidegate::kernels::gla
