#pragma once

// A decoding step of 16-bit data on tensor cores. A warp takes a split alone: its keys and values
// come 16 at a time into a ring of its own, kStepStages - 1 tiles ahead, so that no warp waits for
// another. The rows of its products are query heads: eight with weights rounded to 16 bits, and the
// same eight with what the rounding has left, which keeps the weights' digits for nothing.

#include "kernels/attention/cuda/decode/splits.cuh"
#include "kernels/attention/cuda/rows.cuh"
#include "kernels/attention/cuda/smem_tiles.cuh"

namespace tidegate::kernels::attention {

constexpr int kStepStages = 3;
constexpr int kStepKeys = 16;  // of a tile
constexpr int kStepHeads = 8;  // query heads that read a key together

/// Key of a tile that lies in row r of shared memory: lane c of four then holds the scores of keys
/// 4c .. 4c + 3, and its weights are the operand that rows 2c, 2c + 1, 2c + 8, 2c + 9 of V want.
__device__ inline int step_key_of_row(int r) { return (r & 6) * 2 + (r & 1) + (r >> 3) * 2; }

/// The weights of a lane's four keys, of which the first `missing` do not exist, and what earlier
/// weights shrink by. Gates go from the newest
/// token back: `gates` is their sum over the split's newer tiles.
struct StepSoftmax {
  float maximum = -INFINITY;
  float total = 0;  // of this lane's keys
  double gates = 0;

  __device__ float weigh(const float (&dots)[2][4], const float (&log_f)[4], double scale,
                         int missing, float (&weights)[4]) {
    const int c = threadIdx.x % 4;
    double after[4], sum = 0;  // of this lane's gates, newer ones first
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      after[i] = sum;
      const double gate = static_cast<double>(log_f[i]);
      sum += gate < kLeastLogGate ? kLeastLogGate : gate;
    }
    double through = sum;  // and of the lanes whose keys are newer
#pragma unroll
    for (int s = 1; s < 4; s *= 2) {
      const double newer = __shfl_down_sync(~0u, through, s, 4);
      through += c + s < 4 ? newer : 0.0;
    }
    const double newer = __shfl_down_sync(~0u, through, 1, 4);
    const double offset = gates + (c < 3 ? newer : 0.0);
    gates += __shfl_sync(~0u, through, 0, 4);
    float scores[4], top = maximum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double score = fma(static_cast<double>(dots[i / 2][i % 2]), scale, after[i] + offset);
      scores[i] = i >= missing ? static_cast<float>(score) : -INFINITY;
      top = fmaxf(top, scores[i]);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float against = top == -INFINITY ? 0.0f : top;
    const float factor = expf(maximum - against);
    maximum = top;
    total *= factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = expf(scores[i] - against);
      total += weights[i];
    }
    return factor;
  }
};

/// What rounding to E leaves of a number.
template <class E>
__device__ inline float rounded_off(float x) {
  return x - static_cast<float>(widen(narrow<E>(x)));
}

template <class E, int kDim>
__global__ void __launch_bounds__(32) tensor_step_kernel(const ForgettingAttentionStepParams p) {
  using Tile = HalfTile<kDim>;
  constexpr int kSteps = kDim / 16, kTileBytes = Tile::bytes(kStepKeys);
  constexpr int kRowsAtOnce = 32 / Tile::kPieces;  // that the warp copies
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned ring = shared_address(shared);
  const int lane = threadIdx.x, row = lane / 4, c = lane % 4;
  const auto dim = static_cast<int>(p.head_dim);
  const int64_t batch = blockIdx.z, key_head = blockIdx.y, split = blockIdx.x;
  const Splits splits(p, batch);
  const int64_t begin = splits.begin(split), end = splits.begin(split + 1);
  const auto tiles = static_cast<int>((end - begin + kStepKeys - 1) / kStepKeys);
  const int64_t group = p.heads / p.key_heads;
  const AttentionRows<const E> keys(p.k, batch, 0, key_head), values(p.v, batch, 0, key_head);

  const auto stage = [&](int tile) { return ring + tile % kStepStages * 2 * kTileBytes; };
  const auto copy_tile = [&](int tile) {
    if (tile < tiles) {
      const int64_t first = end - (tile + int64_t{1}) * kStepKeys;  // may lie before `begin`
      const unsigned to = stage(tile);
      const int piece = lane % Tile::kPieces;
#pragma unroll
      for (int i = 0; i < kStepKeys; i += kRowsAtOnce) {
        const int r = i + lane / Tile::kPieces;
        const int64_t j = first + step_key_of_row(r);
        const bool exists = j >= begin && piece * 8 < dim;
        const int64_t at = exists ? j * keys.step + piece * 8 : 0;
        copy_async_or_zero(to + Tile::offset(r, piece), keys.first + at, exists);
        const int64_t value_at = exists ? j * values.step + piece * 8 : 0;
        copy_async_or_zero(to + kTileBytes + Tile::offset(r, piece), values.first + value_at,
                           exists);
      }
    }
    commit_copies();
  };

  for (int64_t first_head = key_head * group; first_head < (key_head + 1) * group;
       first_head += kStepHeads) {
    const int64_t head = first_head + row;
    const bool used = head < (key_head + 1) * group;
    for (int tile = 0; tile < kStepStages - 1; ++tile) {
      copy_tile(tile);
    }
    uint32_t query[kSteps][2];
    const AttentionRows<const E> queries(p.q, batch, 0, used ? head : first_head);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = 16 * s + 8 * half + 2 * c;
        E pair[2] = {narrow<E>(0.0f), narrow<E>(0.0f)};
        if (used && d < dim) {
          pair[0] = queries.first[d];
          pair[1] = queries.first[d + 1];
        }
        memcpy(&query[s][half], pair, sizeof(pair));
      }
    }
    const AttentionRows<const float> log_f(p.log_f, batch, 0, used ? head : first_head);
    float gates[4];
    const auto load_gates = [&](int tile) {
      const int64_t first = end - (tile + int64_t{1}) * kStepKeys + 4 * c;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gates[i] = used && tile < tiles && first + i >= begin ? *log_f.row(first + i) : 0.0f;
      }
    };
    load_gates(0);

    StepSoftmax softmax;
    float sums[2 * kSteps][4] = {};  // [0..1]: of rounded weights, [2..3]: of the rest
    for (int tile = 0; tile < tiles; ++tile) {
      wait_for_copies<kStepStages - 2>();
      __syncwarp();  // every lane has waited, and has read the tile before this one
      copy_tile(tile + kStepStages - 1);
      const unsigned at = stage(tile);
      float dots[2][4] = {};
      const auto key_reader = OperandReader<kDim>::b(at, lane);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t m[4];
        key_reader.load(m, 0, s);
        const uint32_t a[4] = {query[s][0], 0, query[s][1], 0};
        mma<E>(dots[0], a, m[0], m[1]);
        mma<E>(dots[1], a, m[2], m[3]);
      }
      // Keys before `begin` come first in a lane's four: those that exist are the last ones.
      const int64_t oldest = end - (tile + int64_t{1}) * kStepKeys + 4 * c;
      const int missing = static_cast<int>(max(int64_t{0}, min(int64_t{4}, begin - oldest)));
      float weights[4];
      const float factor = softmax.weigh(dots, gates, p.scale, missing, weights);
      load_gates(tile + 1);
      if (__any_sync(~0u, factor != 1.0f)) {
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[n][i] *= factor;
          }
        }
      }
      const uint32_t a[4] = {pack_pair<E>(weights[0], weights[1]),
                             pack_pair<E>(rounded_off<E>(weights[0]), rounded_off<E>(weights[1])),
                             pack_pair<E>(weights[2], weights[3]),
                             pack_pair<E>(rounded_off<E>(weights[2]), rounded_off<E>(weights[3]))};
      const auto value_reader = OperandReader<kDim>::b_transposed(at + kTileBytes, lane);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t m[4];
        value_reader.transposed(m, 0, s);
        mma<E>(sums[2 * s], a, m[0], m[1]);
        mma<E>(sums[2 * s + 1], a, m[2], m[3]);
      }
    }
    wait_for_copies<0>();
    __syncwarp();

    softmax.total += __shfl_xor_sync(~0u, softmax.total, 1);
    softmax.total += __shfl_xor_sync(~0u, softmax.total, 2);
    if (used) {
      float* const partial = static_cast<float*>(p.workspace) +
                             ((batch * p.heads + head) * gridDim.x + split) * partial_numbers(dim);
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        const int d = 8 * n + 2 * c;
        if (d < dim) {
          partial[d] = sums[n][0] + sums[n][2];
          partial[d + 1] = sums[n][1] + sums[n][3];
        }
      }
      if (c == 0) {
        partial[dim] = softmax.maximum;
        partial[dim + 1] = softmax.total;
        partial[dim + 2] = static_cast<float>(softmax.gates);
      }
    }
  }
}

template <class E, int kDim>
cudaError_t launch_tensor_step(const ForgettingAttentionStepParams& p, cudaStream_t stream) {
  constexpr int kBytes = kStepStages * 2 * HalfTile<kDim>::bytes(kStepKeys);
  static_assert(kBytes <= 48 * 1024);
  const dim3 grid(static_cast<unsigned>(p.plan.splits), static_cast<unsigned>(p.key_heads),
                  static_cast<unsigned>(p.layout.batch));
  tensor_step_kernel<E, kDim><<<grid, 32, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class E>
cudaError_t launch_tensor_step(const ForgettingAttentionStepParams& p, cudaStream_t stream) {
  return p.head_dim <= 64    ? launch_tensor_step<E, 64>(p, stream)
         : p.head_dim <= 128 ? launch_tensor_step<E, 128>(p, stream)
                             : launch_tensor_step<E, 256>(p, stream);
}

}  // namespace tidegate::kernels::attention
