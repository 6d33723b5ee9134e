#pragma once

// The forward pass on tensor cores: a block of threads walks a segment of one head through a ring
// of 16-token blocks in shared memory: a loader warp ahead of producers ahead of consumers.

#include "kernels/common/cuda/async_copy.cuh"
#include "kernels/common/cuda/mbarrier.cuh"
#include "kernels/gla/cuda/consumer.cuh"
#include "kernels/gla/cuda/producer.cuh"

namespace tidegate::kernels::gla {

constexpr int kMaxWarps = 16;  // of a block, of 128 registers a thread
constexpr int kMaxSlots = 16;

struct TensorForward {
  GlaParams params = {};
  int first_key = 0, keys = 0;  // a slice of K
  int value_tile = 0;           // columns of V a block, a multiple of 16
  int producers = 0, slots = 0;
  TimeTiles segments = {};
  // Where time is cut: per slot, [slots, H, K, V] and [slots, H, K]. First the map of each segment
  // (the state it makes of zero, and the product of its decays), then in the place of the former
  // the state after it.
  float* states = nullptr;
  float* products = nullptr;
  // Slices of K: the sum over the slices before this one, and up to it. [B, T, H, V].
  const float* sum_before = nullptr;
  float* sum_after = nullptr;
};

__device__ inline BlockWork find_work(const TensorForward& w) {
  const GlaParams& p = w.params;
  const int tiles = static_cast<int>((p.value_dim + w.value_tile - 1) / w.value_tile);
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int64_t pair = blockIdx.x / tiles;
  const int first = tile * w.value_tile;
  return {find_time_tile(w.segments, static_cast<int>(pair / p.heads)),
          pair % p.heads,
          w.first_key,
          w.keys,
          first,
          min(w.value_tile, static_cast<int>(p.value_dim) - first)};
}

/// Where the state of the block's keys and values begins in a tensor [.., H, K, V].
__device__ inline int64_t state_offset(const GlaParams& p, const BlockWork& work, int64_t row) {
  return ((row * p.heads + work.head) * p.key_dim + work.first_key) * p.value_dim +
         work.first_value;
}

/// What a launch computes.
enum class Pass : uint8_t {
  kOutput,
  kOutputOfSlice,  // of a slice of K: sums_before and sums_after
  kMaps,           // the maps of segments instead of outputs
};

/// o of 16 tokens after 16 tokens, of a warp's 16 columns. Two lanes exchange halves, so that each
/// stores four neighbouring columns of two tokens, and four lanes a whole 32-byte sector.
template <class Data, bool kSlices>
class OutputRows {
 public:
  __device__ OutputRows(const TensorForward& w, const BlockWork& work, int lane, int first_column)
      : w_(w),
        work_(work),
        lane_(lane),
        column_(work.first_value + first_column),
        step_(work.segment.first + lane / 4) {
    const HeadRows o(w.params.o, work.segment.sequence, w.params.layout.reverse, work.head);
    at_ = o.row(step_) + (column_ + lane % 2 * 8 + lane % 4 / 2 * 4) * int{sizeof(Data)};
    stride_ = 8 * int64_t{o.stride_bytes()};
  }

  __device__ void store(float (&o)[2][4]) {
    if constexpr (kSlices) {
      if (w_.sum_before != nullptr) {
        each(o, [&](int64_t index, float& x) { x += w_.sum_before[index]; });
      }
      if (w_.sum_after != nullptr) {
        each(o, [&](int64_t index, float& x) { w_.sum_after[index] = x; });
      }
    }
    if (!kSlices || w_.sum_after == nullptr) {
      const auto scale = static_cast<float>(w_.params.scale);
      const bool odd = lane_ % 2 != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float left[2] = {o[0][2 * i] * scale, o[0][2 * i + 1] * scale};
        const float right[2] = {o[1][2 * i] * scale, o[1][2 * i + 1] * scale};
        const uint32_t a = pack<Data, 2>(left).bits, b = pack<Data, 2>(right).bits;
        const uint32_t got = __shfl_xor_sync(~0u, odd ? a : b, 1);
        if (step_ + 8 * i < work_.segment.end()) {
          *reinterpret_cast<uint2*>(at_ + i * stride_) = odd ? uint2{got, b} : uint2{a, got};
        }
      }
    }
    step_ += kDyadicTokens;
    at_ += 2 * stride_;
  }

 private:
  /// Visits what this lane holds, as elements of [B, T, H, V].
  template <class Visit>
  __device__ void each(float (&o)[2][4], Visit visit) const {
    const GlaParams& p = w_.params;
    const Sequence& seq = work_.segment.sequence;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int step = step_ + i % 4 / 2 * 8;
      if (step < work_.segment.end()) {
        const int64_t token = seq.batch * p.layout.time + seq.start +
                              (p.layout.reverse ? seq.length - 1 - step : step);
        visit((token * p.heads + work_.head) * p.value_dim + column_ + i / 4 * 8 + lane_ % 4 * 2 +
                  i % 2,
              o[i / 4][i % 4]);
      }
    }
  }

  const TensorForward& w_;
  const BlockWork& work_;
  const int lane_, column_;
  int step_;  // of this lane's first token
  char* at_;
  int64_t stride_;  // eight rows, in bytes
};

template <class Data, class Gate, GateKind kKind, int kKeys, Pass kPass>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    tensor_forward_kernel(const __grid_constant__ TensorForward w) {
  constexpr bool kMaps = kPass == Pass::kMaps;
  using Load = Loader<Data, Gate, kKind, kKeys, kMaps>;
  using Block = typename Load::Block;
  extern __shared__ __align__(128) char shared[];
  Block* const ring = reinterpret_cast<Block*>(shared);
  // Of a slot: copied, made, and free again.
  __shared__ uint64_t loaded[kMaxSlots], full[kMaxSlots], empty[kMaxSlots];
  __shared__ __align__(16) float bounds[kKeys];

  const GlaParams& p = w.params;
  const BlockWork work = find_work(w);
  const TimeTile& segment = work.segment;
  if (!segment.exists() || (kMaps && segment.last())) {
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int consumers = w.value_tile / 16;
  if (threadIdx.x < w.slots) {
    mbarrier_init(&loaded[threadIdx.x], 32);
    mbarrier_init(&full[threadIdx.x], 32);
    mbarrier_init(&empty[threadIdx.x], consumers);
  }
  for (int i = threadIdx.x; i < kKeys; i += blockDim.x) {
    bounds[i] = p.gamma != nullptr && i < w.keys
                    ? static_cast<const float*>(p.gamma)[work.head * p.key_dim + w.first_key + i]
                    : 0.0f;
  }
  __syncthreads();
  const int blocks = (segment.tokens + kDyadicTokens - 1) / kDyadicTokens;

  if (warp == consumers) {
    Load loader(p, work, lane);
    for (int b = 0, at = 0, phase = 1; b < blocks; ++b) {
      if (b >= w.slots) {
        mbarrier_wait(&empty[at], phase);
      }
      loader.copy(ring[at]);
      mbarrier_arrive_after_copies(&loaded[at]);
      if (++at == w.slots) {
        at = 0;
        phase ^= 1;
      }
    }
    commit_copies();
    wait_for_copies<0>();  // nobody leaves with copies under way
    return;
  }
  if (warp > consumers) {
    const Producer<Data, Gate, kKind, kKeys, kMaps> producer(p, work, bounds, lane);
    for (int b = warp - consumers - 1; b < blocks; b += w.producers) {
      const int at = b % w.slots;
      mbarrier_wait(&loaded[at], b / w.slots % 2);
      producer.make(ring[at], b);
      mbarrier_arrive(&full[at]);
    }
    return;
  }

  const bool exists = warp * 16 < work.values;
  const int64_t slot = blockIdx.x / ((p.value_dim + w.value_tile - 1) / w.value_tile) / p.heads;
  Consumer<kKeys> consumer(lane, warp * 2);
  if (!kMaps) {
    const float* start = nullptr;
    if (segment.index > 0) {
      start = w.states + state_offset(p, work, slot - 1) + warp * 16;
    } else if (p.h0 != nullptr) {
      start = static_cast<const float*>(p.h0) + state_offset(p, work, segment.sequence.index) +
              warp * 16;
    }
    consumer.load(start, work.keys, p.value_dim, exists);
  }
  [[maybe_unused]] float product[4] = {1, 1, 1, 1};  // of the channels of a quad
  OutputRows<Data, kPass == Pass::kOutputOfSlice> output(w, work, lane, warp * 16);
  for (int b = 0, at = 0, phase = 0; b < blocks; ++b) {
    const TokenBlock<kKeys>& block = ring[at];
    mbarrier_wait(&full[at], phase);
    [[maybe_unused]] float o[2][4] = {};
    if constexpr (kMaps) {
      consumer.update(block);
      if (lane * 4 < kKeys) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          product[i] *= reinterpret_cast<const float*>(&block.total.quads[lane])[i];
        }
      }
    } else {
      consumer.output_and_update(block, o);
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&empty[at]);
    }
    if (!kMaps && exists) {
      output.store(o);
    }
    if (++at == w.slots) {
      at = 0;
      phase ^= 1;
    }
  }

  if constexpr (kMaps) {
    consumer.store(w.states + state_offset(p, work, slot) + warp * 16, work.keys, p.value_dim,
                   exists);
    if (warp == 0 && work.first_value == 0 && lane * 4 < kKeys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = ChannelFactors<kKeys>::channel(lane, i);
        if (key < work.keys) {
          w.products[(slot * p.heads + work.head) * p.key_dim + w.first_key + key] = product[i];
        }
      }
    }
  } else if (segment.last() && p.h_final != nullptr) {
    consumer.store(
        static_cast<float*>(p.h_final) + state_offset(p, work, segment.sequence.index) + warp * 16,
        work.keys, p.value_dim, exists);
  }
}

}  // namespace tidegate::kernels::gla
