#pragma once

// The maps of time segments for HGRN2, where the forward pass divides time: what a segment makes of
// a state of zero, and the product of its decays. What segment_maps_fit refuses (other gates, key
// tiles below 128, V that is no multiple of 128, rows that are no whole pieces of 16 bytes) goes
// through the ring of the forward pass itself (tensor_forward.cuh).
//
// Nobody asks for a state within the segment, so no state is ever decayed. Time is gone through
// from the segment's end, and a key is multiplied by the decays of all tokens after it:
//
//   map = K^T V    K_s = k_s f_{s+1} f_{s+2} .. f_{end}
//
// which is one matrix product over all tokens. A block of threads has one head of one segment, each
// half of its warps a half of the segment's time; in the end the earlier half's sum is multiplied
// by the later half's decays. A warp has 16 channels and all columns of V. Its lane 4r + c has
// channels 2r and 2r + 1 of eight tokens in a row: their factors are A of the product as they are,
// and what comes after them, in other lanes, takes two exchanges.

#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/forward/stage.cuh"

namespace tidegate::kernels::gla {

/// Tokens of a step: eight for each of the four lanes that share a channel.
constexpr int kMapTokens = kSegmentStep;
constexpr int kMapSlice = 16;                                                  // channels of a warp
constexpr int kMapWarps = kKeyTile / kMapSlice, kMapThreads = kMapWarps * 32;  // of a half
constexpr int kMapHalves = 2;
constexpr int kMapStages = 3;  // 96 KB, of which two thirds are on their way

/// 32 tokens x 128 elements of 16 bits. Pieces of 16 bytes are permuted, so that neither the rows
/// that ldmatrix reads at once nor the tokens of lanes that read logits at once meet in a bank.
struct MapTile {
  static constexpr int kPieces = kKeyTile / 8;  // a row
  static constexpr int kRowBytes = kKeyTile * 2;
  char bytes[kMapTokens * kRowBytes];

  static __device__ unsigned offset(int token, int piece) {
    const int swizzle = (token >> 3 & 3) << 1 | (token & 1);
    return token * kRowBytes + ((piece ^ swizzle) << 4);
  }
};

struct MapStage {
  MapTile logits, values;
};

/// The shared memory of a block of threads: the stages of both halves, which in the end give way to
/// the earlier half's sums.
struct MapShared {
  static constexpr int kStageBytes = kMapHalves * kMapStages * int{sizeof(MapStage)};
  static constexpr int kSumBytes = kMapThreads * kKeyTile / 2 * int{sizeof(float)};
  static constexpr int kBytes = std::max(kStageBytes, kSumBytes);

  MapStage* stages;

  __device__ MapStage& stage(int half, int index) const {
    return stages[half * kMapStages + index];
  }
  /// The thread's place for part i of its sums.
  __device__ float4& sums(int thread, int i) const {
    return reinterpret_cast<float4*>(stages)[i * kMapThreads + thread];
  }
};

/// Copies the rows of one half of a segment into its stages, from the last tokens to the first: a
/// thread has a piece of two rows of each tensor.
class MapLoader {
 public:
  __device__ MapLoader(const TensorForward& w, const WorkTile& work, int end, int thread)
      : row_(thread / MapTile::kPieces),
        piece_(thread % MapTile::kPieces),
        first_(end - kMapTokens + row_) {
    const GlaParams& p = w.params;
    const HeadRows logits(p.gate, work.segment.sequence, p.layout.reverse, work.head);
    const HeadRows values(p.v, work.segment.sequence, p.layout.reverse, work.head);
    logits_ = logits.row(first_) + (work.first_key + piece_ * 8) * 2;
    values_ = values.row(first_) + (work.first_value + piece_ * 8) * 2;
    logit_stride_ = logits.stride_bytes();
    value_stride_ = values.stride_bytes();
  }

  /// Starts copying the 32 tokens before the last ones.
  __device__ void copy(MapStage& stage) {
#pragma unroll
    for (int i = 0; i < kMapTokens / kRowsAtOnce; ++i) {
      const unsigned offset = MapTile::offset(row_ + i * kRowsAtOnce, piece_);
      const int64_t rows = i * kRowsAtOnce;
      copy_async<16>(stage.logits.bytes + offset, logits_ + rows * logit_stride_);
      copy_async<16>(stage.values.bytes + offset, values_ + rows * value_stride_);
    }
    logits_ -= kMapTokens * int64_t{logit_stride_};
    values_ -= kMapTokens * int64_t{value_stride_};
  }

  /// Activates the values that it has copied, once they have arrived, and makes them bf16.
  template <class Data>
  __device__ void finish(MapStage& stage, InputActivation activation) const {
    if (std::is_same_v<Data, __nv_bfloat16> && activation == InputActivation::kNone) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kMapTokens / kRowsAtOnce; ++i) {
      auto* const place = reinterpret_cast<uint4*>(stage.values.bytes +
                                                   MapTile::offset(row_ + i * kRowsAtOnce, piece_));
      *place = activated_bf16(activation, Eight<Data>{*place});
    }
  }

 private:
  static constexpr int kRowsAtOnce = kMapThreads / MapTile::kPieces;

  const int row_, piece_, first_;
  const char *logits_, *values_;
  int logit_stride_, value_stride_;
};

/// logit_gate (head_inputs.cuh) in fewer instructions: both sigmoids from 2^t = exp(-x), which the
/// bound on t keeps finite. A NaN stays one.
__device__ inline LogitGate<float> bounded_logit_gate(float x, float gamma, float open) {
  float t;
  asm("min.NaN.f32 %0, %1, 0f42FC0000;" : "=f"(t) : "f"(x * -kLog2E));  // 126
  const float e = exp2_approx(t);
  const float positive = reciprocal_approx(1.0f + e);
  const float key = open * (positive * e);
  return {.decay = x > 0.0f ? 1.0f - key : fmaf(open, positive, gamma), .key = key};
}

/// A lane's keys of a step, eight tokens of two channels, each times the decays of all tokens after
/// it.
template <class Data>
class MapKeys {
 public:
  /// `product` has the decays of all tokens after the step, and gains those of the step.
  __device__ void make(const MapStage& stage, int slice, int lane, const float2& gamma,
                       float2& product) {
    const int r = lane / 4, c = lane % 4;
    float total[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = kLaneTokens - 1; i >= 0; --i) {
      const unsigned at = MapTile::offset(c * kLaneTokens + i, slice * 2 + r / 4) + r % 4 * 4;
      const Pack<Data, 2> x = {*reinterpret_cast<const uint32_t*>(stage.logits.bytes + at)};
      add(0, i, x.get(0), gamma.x, total);
      add(1, i, x.get(1), gamma.y, total);
    }
    multiply_by_later(0, c, total[0], product.x);
    multiply_by_later(1, c, total[1], product.y);
  }

  /// A of the product's step j: tokens 4j to 4j + 3 of each lane.
  __device__ void operand(int j, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 4 * j + i / 2 * 2;
      a[i] = pack_bf16(keys_[i % 2][token], keys_[i % 2][token + 1]);
    }
  }

 private:
  static constexpr int kLaneTokens = kMapTokens / 4;

  __device__ void add(int channel, int i, float x, float gamma, float (&total)[2]) {
    const auto made = bounded_logit_gate(x, gamma, 1.0f - gamma);
    keys_[channel][i] = made.key * total[channel];
    total[channel] *= made.decay;
  }

  /// What lies after the lane's tokens: the lanes after it, and what came before.
  __device__ void multiply_by_later(int channel, int c, float total, float& product) {
    const float neighbour = __shfl_xor_sync(~0u, total, 1);
    const float pair = total * neighbour;
    const float other_pair = __shfl_xor_sync(~0u, pair, 2);
    float later = c % 2 == 0 ? product * neighbour : product;
    later = c < 2 ? later * other_pair : later;
#pragma unroll
    for (float& key : keys_[channel]) {
      key *= later;
    }
    product *= pair * other_pair;
  }

  float keys_[2][kLaneTokens];
};

/// A warp's part of a map: channels 2r (and 2r + 1) of its slice are row r (and r + 8) of the
/// accumulators.
struct MapSums {
  static constexpr int kTiles = kValueTile / 8;
  float sum[kTiles][4] = {};

  /// Adds a step's product. `rows`: what the lane gives ldmatrix (row_offset), in this stage.
  template <class Data>
  __device__ void add(const MapKeys<Data>& keys, unsigned rows) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t a[4];
      keys.operand(j, a);
#pragma unroll
      for (int v = 0; v < kTiles / 2; ++v) {
        // Neither of the sums carries into the bits that the permutation of pieces changes.
        const unsigned at = (rows ^ (v % 4 << 5)) + v / 4 * 128 + j * 4 * MapTile::kRowBytes;
        uint32_t b[4];
        load_matrices_transposed(b, at);
        mma_bf16(sum[2 * v], a, b[0], b[1]);
        mma_bf16(sum[2 * v + 1], a, b[2], b[3]);
      }
    }
  }

  /// Where in a tile the row lies whose address a lane gives ldmatrix, for the first columns of the
  /// first four tokens of each lane: the inner index n of B is token n % 2 of four, or from 8 on
  /// two further, of lane n % 8 / 2.
  static __device__ unsigned row_offset(int lane) {
    const int n = lane % 8, later = lane / 8 % 2, right = lane / 16;
    return MapTile::offset(n / 2 * 8 + later * 2 + n % 2, right);
  }
};

/// The maps of one half of a segment, whose `steps` steps end before token `end`.
template <class Data>
__device__ inline void sum_half(const TensorForward& w, const WorkTile& work,
                                const MapShared& shared, int half, int end, int steps,
                                const float2& gamma, MapSums& sums, float2& product) {
  const int thread = threadIdx.x % kMapThreads, slice = thread / 32, lane = thread % 32;
  MapLoader loader(w, work, end, thread);
  for (int i = 0; i < kMapStages - 1; ++i) {
    if (i < steps) {
      loader.copy(shared.stage(half, i));
    }
    commit_copies();
  }
  int at = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    MapStage& stage = shared.stage(half, at);
    wait_for_copies<kMapStages - 2>();
    loader.finish<Data>(stage, w.params.v_activation);
    hopper::named_barrier_sync(1 + half, kMapThreads);  // the last stage is free, this one is full
    const int free = at == 0 ? kMapStages - 1 : at - 1;
    if (i + kMapStages - 1 < steps) {
      loader.copy(shared.stage(half, free));
    }
    commit_copies();
    MapKeys<Data> keys;
    keys.make(stage, slice, lane, gamma, product);
    sums.add(keys, shared_address(stage.values.bytes) + MapSums::row_offset(lane));
    at = at + 1 == kMapStages ? 0 : at + 1;
  }
}

/// Puts the halves together and stores the map.
__device__ inline void store_map(const TensorForward& w, const WorkTile& work,
                                 const MapShared& shared, int half, MapSums& sums,
                                 const float2& product) {
  __shared__ float2 early_products[kMapThreads / 4];
  const GlaParams& p = w.params;
  const int thread = threadIdx.x % kMapThreads, lane = thread % 32, slice = thread / 32;
  __syncthreads();  // no stage is read any more
  if (half == 0) {
#pragma unroll
    for (int i = 0; i < MapSums::kTiles; ++i) {
      const float (&x)[4] = sums.sum[i];
      shared.sums(thread, i) = make_float4(x[0], x[1], x[2], x[3]);
    }
    if (lane % 4 == 0) {
      early_products[thread / 4] = product;
    }
  }
  __syncthreads();
  if (half == 0) {
    return;
  }
  const int64_t segment = find_segment_index(w);
  const int key = slice * kMapSlice + lane / 4 * 2;
  float* const to = w.states + state_offset(p, work, segment) + key * p.value_dim + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < MapSums::kTiles; ++i) {
    const float4 early = shared.sums(thread, i);
    const float (&x)[4] = sums.sum[i];
    *reinterpret_cast<float2*>(to + i * 8) =
        make_float2(fmaf(product.x, early.x, x[0]), fmaf(product.x, early.y, x[1]));
    *reinterpret_cast<float2*>(to + p.value_dim + i * 8) =
        make_float2(fmaf(product.y, early.z, x[2]), fmaf(product.y, early.w, x[3]));
  }
  if (work.first_value == 0 && lane % 4 == 0) {
    const float2 early = early_products[thread / 4];
    *reinterpret_cast<float2*>(w.products + (segment * p.heads + work.head) * p.key_dim +
                               w.first_key + key) =
        make_float2(product.x * early.x, product.y * early.y);
  }
}

template <class Data>
__global__ void __launch_bounds__(kMapHalves* kMapThreads, 1)
    segment_maps_kernel(const __grid_constant__ TensorForward w) {
  extern __shared__ __align__(256) char memory[];
  const MapShared shared = {reinterpret_cast<MapStage*>(memory)};
  const WorkTile work = find_work_tile(w);
  const TimeTile& segment = work.segment;
  if (!segment.exists() || segment.last()) {
    return;
  }
  const GlaParams& p = w.params;
  const int half = threadIdx.x / kMapThreads, thread = threadIdx.x % kMapThreads;
  const int key = thread / 32 * kMapSlice + thread % 32 / 4 * 2;
  float2 gamma = {0.0f, 0.0f};
  if (p.gamma != nullptr) {
    gamma = *reinterpret_cast<const float2*>(static_cast<const float*>(p.gamma) +
                                             work.head * p.key_dim + w.first_key + key);
  }
  const int steps = segment.tokens / kMapTokens, early = steps / 2;
  MapSums sums;
  float2 product = {1.0f, 1.0f};
  sum_half<Data>(w, work, shared, half,
                 half == 0 ? segment.first + early * kMapTokens : segment.end(),
                 half == 0 ? early : steps - early, gamma, sums, product);
  store_map(w, work, shared, half, sums, product);
}

/// Whether segment_maps_kernel makes a launch's maps: whole tiles of 128 keys by 128 columns, and
/// rows of whole pieces of 16 bytes.
inline bool segment_maps_fit(const TensorForward& w, int shared_bytes) {
  const GlaParams& p = w.params;
  return p.gate_kind == GateKind::kLogit && p.gate.dtype == p.q.dtype &&
         w.whole_pieces[kForwardGate] && w.whole_pieces[kForwardV] && w.keys == kKeyTile &&
         p.value_dim % kValueTile == 0 && is_aligned(p.gamma, sizeof(float2)) &&
         MapShared::kBytes <= shared_bytes;
}

template <class Data>
cudaError_t launch_segment_maps(const TensorForward& work, cudaStream_t stream) {
  constexpr auto* kKernel = &segment_maps_kernel<Data>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(MapShared::kBytes));
  const GlaParams& p = work.params;
  return launch_unless_empty(kKernel, work.segments.count * p.heads * value_tiles(p),
                             dim3(kMapHalves * kMapThreads), MapShared::kBytes, stream, work);
}

}  // namespace tidegate::kernels::gla
