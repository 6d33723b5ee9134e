// A step of HGRN2 for a few sequences with the product before it: alone, the step's kernel would
// take as long as its token's way from the product's kernel to it and on to the next one.
//
// A cluster of eight blocks has a head. Each makes an eighth of the head's q, f and v, as a fused
// product does (kernels/product/cuda/fused_product.cu), and hands queries, keys and decays to all
// eight through their shared memory; then each has the columns of the head's state that its own
// values belong to. The states are on their way since the kernel before has ended.

#include <algorithm>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/integers.h"
#include "kernels/gla/cuda/head_inputs.cuh"
#include "kernels/gla/token_product_cuda.h"
#include "kernels/product/cuda/fused_tiles.cuh"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::gla {
namespace {

using product::kChunk;
using product::kItemBytes;
using product::kRowBytes;
using product::kStages;
using product::kThreads;
using product::kTile;
using product::kWarps;

constexpr int kBlocks = 8;  // of a cluster
constexpr int kParts = 3;   // q, f and v; or queries, keys and decays
constexpr int kVec = 4;     // columns of a state that a thread has
// Rows of a state that a thread has. Code for a chip without clusters has no kernel that uses it.
[[maybe_unused]] constexpr int kPasses = 2;
constexpr int kMostDim = kBlocks * kTile;

product::Shape shape_of(const product::FusedProductParams& p) {
  product::Shape shape;
  shape.blocks = kBlocks;
  shape.chunks = static_cast<int>(ceil_div(p.product.inner, int64_t{kChunk}));
  shape.tile_channels = kTile;
  const int64_t items = kParts * ceil_div(shape.chunks, kWarps);
  shape.stages = static_cast<int>(std::min<int64_t>(items, kStages));
  shape.x_stride = shape.chunks * kRowBytes + 16;
  shape.ring_bytes = kWarps * shape.stages * kItemBytes;
  shape.x_bytes = static_cast<int>(p.product.rows) * shape.x_stride;
  shape.batch = kParts;
  shape.sums_bytes = kParts * kWarps * static_cast<int>(p.product.rows) * kTile * 4;
  return shape;
}

/// What the blocks of a head tell each other of one row.
struct Token {
  float part[kParts][kMostDim];  // queries, keys, decays
};

/// A block's columns of the states of one head: a thread has kVec of them, of kPasses rows.
struct StateTile {
  int dim, columns, quads;  // of a head; of the block; threads that share a row
  int row, column;          // the thread's first ones, the latter of the block
  int first_column;         // of the block

  __device__ StateTile(int head_dim, int rank) : dim(head_dim) {
    columns = dim / kBlocks;
    quads = columns / kVec;
    row = static_cast<int>(threadIdx.x) / quads;
    column = static_cast<int>(threadIdx.x) % quads * kVec;
    first_column = rank * columns;
  }
  __device__ int at(int pass) const { return row + pass * (kThreads / quads); }
};

/// Where, among all states, the thread's columns of a row begin. Unused where kPasses is.
[[maybe_unused]] __device__ inline int64_t offset_of(const StateTile& tile, int64_t pair,
                                                     int pass) {
  return (pair * tile.dim + tile.at(pass)) * tile.dim + tile.first_column + tile.column;
}

#if TIDEGATE_HOPPER_CODE  // elsewhere nobody launches the kernel

/// Which head a block has, and of how many rows.
struct Place {
  int rows, heads, head;

  __device__ int64_t pair(int row) const { return int64_t{row * heads + head}; }
};

/// Begins to bring the block's part of the states into the second-level cache: a part of a row is
/// one piece of it.
__device__ __forceinline__ void prefetch_states(const GlaParams& step, const StateTile& tile,
                                                const Place& at) {
  for (int i = static_cast<int>(threadIdx.x); step.h0 != nullptr && i < at.rows * tile.dim;
       i += kThreads) {
    const int row = i / tile.dim;
    prefetch_line(static_cast<const float*>(step.h0) +
                  (at.pair(row) * tile.dim + i - row * tile.dim) * tile.dim + tile.first_column);
  }
}

/// The thread's numbers of the states: zero where there is no h0.
template <int kRows>
__device__ __forceinline__ void load_states(const GlaParams& step, const StateTile& tile,
                                            const Place& at,
                                            Pack<float, kVec> (&states)[kRows][kPasses]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      states[r][pass] = {};
      if (step.h0 != nullptr && r < at.rows && tile.at(pass) < tile.dim) {
        states[r][pass] = load_streaming<float, kVec>(static_cast<const float*>(step.h0) +
                                                      offset_of(tile, at.pair(r), pass));
      }
    }
  }
}

/// Adds up the warps' `sums` of the products, makes queries, keys and decays of them and hands
/// these to all blocks of the cluster, whose `barrier` counts their bytes; the block's own values
/// stay here.
template <class E, int kRows>
__device__ __forceinline__ void hand_out_token(const TokenProductParams& params,
                                               const StateTile& tile, const Place& at, int chunks,
                                               const float* sums, uint64_t* barrier,
                                               Token (&tokens)[kRows],
                                               float (&values)[kRows][kTile]) {
  using Math = GateMath<float, false>;
  const GlaParams& step = params.step;
  const void* const bias = params.product.product.bias;
  const int rows = at.rows, first_channel = at.head * tile.dim + tile.first_column;
  const int tile_sums = kWarps * rows * kTile;
  for (int i = static_cast<int>(threadIdx.x); i < kParts * rows * kTile; i += kThreads) {
    const int part = i / (rows * kTile), row = i / kTile % rows, channel = i % kTile;
    if (channel >= tile.columns) continue;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total += w < chunks ? sums[part * tile_sums + (w * rows + row) * kTile + channel] : 0.0f;
    }
    if (bias != nullptr) {
      total +=
          widen(static_cast<const E*>(bias)[part * at.heads * tile.dim + first_channel + channel]);
    }
    const float z = widen(narrow<E>(total));
    if (part == 2) {
      values[row][channel] = activate<Math>(step.v_activation, z);
      continue;
    }
    const auto give = [&](int kind, float number) {
      const unsigned to = shared_address(&tokens[row].part[kind][tile.first_column + channel]);
#pragma unroll
      for (int other = 0; other < kBlocks; ++other) {
        store_remote(address_in_block(to, other), number,
                     address_in_block(shared_address(barrier), other));
      }
    };
    if (part == 0) {
      give(0, static_cast<float>(step.scale) * activate<Math>(step.q_activation, z));
    } else {
      const float gamma = step.gamma == nullptr
                              ? 0.0f
                              : static_cast<const float*>(step.gamma)[first_channel + channel];
      const LogitGate<float> gate = logit_gate<Math>(z, gamma, 1.0f - gamma);
      give(1, gate.key);
      give(2, gate.decay);
    }
  }
}

/// S = decay S + key value in the thread's part of the state, which it writes; `acc` becomes its
/// part of query S.
__device__ __forceinline__ void step_state(const GlaParams& step, const StateTile& tile,
                                           int64_t pair, const Token& token, const float* value,
                                           const Pack<float, kVec> (&state)[kPasses],
                                           float (&acc)[kVec]) {
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int k = tile.at(pass);
    if (k >= tile.dim) break;
    const float q = token.part[0][k], key = token.part[1][k];
    const float decay = token.part[2][k];
    float s[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      s[v] = fmaf(decay, state[pass].get(v), key * value[tile.column + v]);
      acc[v] = fmaf(q, s[v], acc[v]);
    }
    if (step.h_final != nullptr) {
      __stcs(reinterpret_cast<float4*>(static_cast<float*>(step.h_final) +
                                       offset_of(tile, pair, pass)),
             make_float4(s[0], s[1], s[2], s[3]));
    }
  }
}

/// Over the lanes that have the same columns; the first of them put the sums into `to`.
__device__ __forceinline__ void add_lanes(const StateTile& tile, int lane, float (&acc)[kVec],
                                          float* to) {
#pragma unroll
  for (int distance = 16; distance > 1; distance /= 2) {
    if (distance < tile.quads) break;
#pragma unroll
    for (int v = 0; v < kVec; ++v) acc[v] += __shfl_xor_sync(~0u, acc[v], distance);
  }
  if (lane < tile.quads) {
    *reinterpret_cast<float4*>(&to[tile.column]) = make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
}

/// Adds up the warps' outputs, and writes them.
template <class E, int kRows>
__device__ __forceinline__ void write_outputs(const GlaParams& step, const StateTile& tile,
                                              const Place& at,
                                              const float (&outputs)[kWarps][kRows][kTile]) {
  const int row = static_cast<int>(threadIdx.x) / kTile, channel = threadIdx.x % kTile;
  if (row < at.rows && channel < tile.columns) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += outputs[w][row][channel];
    static_cast<E*>(step.o.data)[row * step.o.stride_b + at.head * step.o.stride_h +
                                 tile.first_column + channel] = narrow<E>(sum);
  }
}

#endif

/// What a block of a head's cluster does: weights begin to come, and states to the cache, before
/// the kernel before has ended; then the states to registers and the rows to shared memory; the
/// products; the token to all blocks; the states' step.
template <class E, int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    token_product_kernel(const __grid_constant__ TokenProductParams params,
                         const __grid_constant__ product::Shape shape) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(128) char shared[];
  __shared__ float row_sums[kWarps * product::RowStager<E, false>::kGroups];
  __shared__ Token tokens[kRows];
  __shared__ float values[kRows][kTile];
  __shared__ __align__(16) float outputs[kWarps][kRows][kTile];
  __shared__ uint64_t barrier;
  const product::FusedProductParams& p = params.product;
  const GlaParams& step = params.step;
  char* const x = shared + shape.ring_bytes;
  float* const sums = reinterpret_cast<float*>(x + shape.x_bytes);
  const Place at = {static_cast<int>(p.product.rows), static_cast<int>(step.heads),
                    static_cast<int>(blockIdx.x) / kBlocks};
  const StateTile tile(static_cast<int>(step.key_dim), cluster_rank());
  let_next_kernel_begin();

  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    publish_barriers();
    expect_bytes(shared_address(&barrier), static_cast<unsigned>(at.rows * kParts * tile.dim * 4));
  }
  const product::WarpItems items(shape, kParts);
  const unsigned ring_base =
      shared_address(shared) + static_cast<unsigned>(items.warp * shape.stages * kItemBytes);
  const int first_channel = at.head * tile.dim + tile.first_column;  // of each part
  const auto weights = [&](int part, int row) -> const E* {
    if (row >= tile.columns) return nullptr;
    return product::weight_row<E, false>(p, part * at.heads * tile.dim + first_channel + row);
  };
  product::WeightRing<E, decltype(weights)> ring{p, shape, items, weights, ring_base};
  ring.fill();
  product::RowStager<E, false> stager(p, shape, x, row_sums);
  stager.load_constants();
  prefetch_states(step, tile, at);
  cluster_meet();  // all blocks run, and their barriers wait for bytes
  wait_for_kernels_before();

  Pack<float, kVec> states[kRows][kPasses];
  load_states(step, tile, at, states);
  stager.run();
  const unsigned x_base = shared_address(x);
  int slot = 0;
  for (int part = 0; part < kParts; ++part) {
    product::multiply_tile<1>(ring, items, x_base, at.rows, slot)
        .leave(sums + part * kWarps * at.rows * kTile, at.rows, items);
  }
  __syncthreads();
  hand_out_token<E>(params, tile, at, shape.chunks, sums, &barrier, tokens, values);
  __syncthreads();  // the values are there
  wait_for_bytes(shared_address(&barrier), 0);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= at.rows) break;
    float acc[kVec] = {};
    step_state(step, tile, at.pair(r), tokens[r], values[r], states[r], acc);
    add_lanes(tile, items.lane, acc, outputs[items.warp][r]);
  }
  __syncthreads();
  write_outputs<E>(step, tile, at, outputs);
#endif
}

template <class E, int kRows>
cudaError_t launch(const TokenProductParams& params, cudaStream_t stream) {
  constexpr auto* kKernel = &token_product_kernel<E, kRows>;
  const product::Shape shape = shape_of(params.product);
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(shape.shared_bytes()));
  return launch_in_chain<kKernel, kBlocks>(dim3(static_cast<unsigned>(params.step.heads * kBlocks)),
                                           dim3(kThreads), shape.shared_bytes(), stream, params,
                                           shape);
}

}  // namespace

cudaError_t token_product_fits(const TokenProductParams& params, bool* fits) {
  const product::FewRowsParams& f = params.product.product;
  const GlaParams& step = params.step;
  const int64_t dim = step.key_dim;
  TIDEGATE_RETURN_IF_CUDA_ERROR(product::fused_product_fits(params.product, fits));
  *fits = *fits && f.rows <= kMostTokenRows && (dim == 64 || dim == kMostDim) &&
          step.value_dim == dim && f.outer == kParts * step.heads * dim && !params.product.is_glu &&
          params.product.residual == nullptr && params.product.more[0].w == nullptr &&
          params.product.gate == nullptr && step.gate_kind == GateKind::kLogit &&
          step.layout.time == 1 && step.layout.offsets == nullptr &&
          step.layout.sequences == f.rows && is_aligned(step.h0, 16) &&
          is_aligned(step.h_final, 16);
  if (!*fits) return cudaSuccess;
  TIDEGATE_RETURN_IF_CUDA_ERROR((can_cluster<&token_product_kernel<__nv_bfloat16, 1>>(fits)));
  if (!*fits) return cudaSuccess;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  constexpr int64_t kStatic = 12 << 10;  // what a block has beside it, and the driver's own
  const int64_t x_bytes = f.rows * (ceil_div(f.inner, int64_t{kChunk}) * kRowBytes + 16);
  product::Shape shape = shape_of(params.product);
  *fits = x_bytes + shape.ring_bytes + shape.sums_bytes + kStatic <= limits.shared_bytes;
  return cudaSuccess;
}

cudaError_t token_product(const TokenProductParams& params, cudaStream_t stream) {
  return dispatch_16_bit(params.product.product.dtype, [&]<class E>() {
    return params.product.product.rows == 1 ? launch<E, 1>(params, stream)
                                            : launch<E, kMostTokenRows>(params, stream);
  });
}

}  // namespace tidegate::kernels::gla
