// A step of HGRN's recurrence for a batch with the product before it, and what of the norm and gate
// after it needs no sum over channels: a launch less a layer.
//
// A cluster has a tile of channels, with all of their kinds of numbers: c of both parts where the
// state is complex, f, the gates. Its blocks share the inner channels of the product as those of
// the batch's fused product do (kernels/product/cuda/batch_product.cu), and a block's warpgroups
// share its part of them; when the blocks have met, a thread reads all parts of two channels of a
// row and makes their step. A row's norm is over more channels than a cluster has, so its factor is
// left to the next product, with the sums of squares.

#include <algorithm>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/integers.h"
#include "kernels/norm/cuda/row_tile.cuh"
#include "kernels/product/cuda/batch_output.cuh"
#include "kernels/product/cuda/batch_rows.cuh"
#include "kernels/product/cuda/batch_shape.cuh"
#include "kernels/product/cuda/batch_tiles.cuh"
#include "kernels/product/cuda/fused_tiles.cuh"
#include "kernels/product/product_cuda.h"
#include "kernels/scan/cuda/hgru/token_channel.cuh"
#include "kernels/scan/hgru_token_cuda.h"

namespace tidegate::kernels::scan {
namespace {

using product::BatchShape;
using product::BatchWork;
using product::kBatchRows;
using product::kThreads;
using product::kTile;

using E = __nv_bfloat16;

constexpr int kVec = 2;  // channels of a thread
constexpr int kRowThreads = kTile / kVec;
constexpr int kLeastBlocks = kBatchRows * kRowThreads / kThreads;  // then a thread has one row
// A block with this much shared memory leaves room for a block of the product before it. Where a
// block would need more, more blocks share the channels.
constexpr int kMostBytes = 150 << 10;

/// Kinds of numbers that a channel has of the product.
template <bool kComplex>
constexpr int kKindsOf = kComplex ? 5 : 3;
int kinds(bool is_complex) { return is_complex ? kKindsOf<true> : kKindsOf<false>; }

int bytes_of_sums(const BatchShape& s) { return kBatchRows * s.part_stride * 4; }  // a warpgroup

BatchShape shape_of(const HgruTokenProductParams& params, int blocks, const DeviceLimits& limits) {
  const product::FusedProductParams& p = params.product;
  BatchShape s;
  s.blocks = blocks;
  while (1 << s.log_blocks < blocks) ++s.log_blocks;
  s.tile_channels = kTile;
  s.tiles = s.clusters = static_cast<int>(hgru_square_parts(params.token.step.channels));
  s.least_tiles = 1;
  s.chunks = static_cast<int>(ceil_div(p.product.inner, int64_t{product::kChunk}));
  s.own_chunks = static_cast<int>(ceil_div(s.chunks, blocks));
  s.columns = kinds(params.token.step.theta != nullptr) * kTile;
  product::lay_out(p, s.columns, limits, &s);
  // The warpgroups take the block's chunks in turns, so each has a ring for half of them.
  s.stages = static_cast<int>(
      std::min<int64_t>(ceil_div(s.own_chunks, product::kWarpgroups), product::kMostBatchStages));
  s.ring_bytes = s.stages * product::kWarpgroups * s.columns * product::kRowBytes;
  s.part_stride = s.columns + 4;
  s.parts_at = 0;
  s.parts_bytes = product::kWarpgroups * bytes_of_sums(s);
  s.main_bytes = std::max(s.x_bytes + s.ring_bytes, s.parts_bytes + BatchShape::kOtherBytes);
  return s;
}

int shared_bytes(const HgruTokenProductParams& params, const BatchShape& s) {
  return 1024 + s.main_bytes + (params.product.norm_weight != nullptr ? s.constant_bytes() : 0);
}

BatchShape shape_of(const HgruTokenProductParams& params, const DeviceLimits& limits) {
  for (int blocks = kLeastBlocks; blocks < product::kMostClusterBlocks; blocks *= 2) {
    const BatchShape s = shape_of(params, blocks, limits);
    if (shared_bytes(params, s) <= std::min(kMostBytes, limits.shared_bytes)) return s;
  }
  return shape_of(params, product::kMostClusterBlocks, limits);
}

#if TIDEGATE_HOPPER_CODE  // elsewhere nobody launches the kernel

__device__ inline float2 load_two_from(unsigned address) {
  float2 two = {};
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(two.x), "=f"(two.y)
               : "r"(address)
               : "memory");
  return two;
}

/// A thread's two channels of a row.
template <bool kComplex>
struct TokenPair {
  static constexpr int kParts = kComplex ? 2 : 1, kKinds = kKindsOf<kComplex>;
  static constexpr int kGates = kParts + 1;  // the first kind of the gates; f is the one before

  const HgruTokenProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  int row, within, channel;
  bool exists;
  float gamma[kVec], cosine[kVec], sine[kVec];
  float2 state[kParts];
  float z[kKinds][kVec];

  __device__ __forceinline__ TokenPair(const HgruTokenProductParams& params,
                                       const BatchShape& shape, const BatchWork& own)
      : p(params), s(shape), work(own) {
    const int each = kBatchRows >> s.log_blocks, own_row = work.thread / kRowThreads;
    row = work.rank * each + own_row;
    within = work.thread % kRowThreads * kVec;
    channel = work.first_tile * kTile + within;
    exists = own_row < each && row < static_cast<int>(p.product.product.rows);
  }

  __device__ __forceinline__ int64_t at(int part) const {
    const int64_t channels = p.token.step.channels;
    return (row * kParts + part) * channels + channel;
  }

  /// Reads the parameters, which no kernel of the chain writes.
  __device__ __forceinline__ void load_constants() {
    const HgruParams& step = p.token.step;
#pragma unroll 1
    for (int v = 0; kComplex && v < kVec; ++v) {
      double s = 0, c = 1;
      exact_sincos(static_cast<const float*>(step.theta)[channel + v], &s, &c);
      (v == 0 ? cosine[0] : cosine[1]) = static_cast<float>(c);
      (v == 0 ? sine[0] : sine[1]) = static_cast<float>(s);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      gamma[v] = step.gamma != nullptr ? static_cast<const float*>(step.gamma)[channel + v] : 0.0f;
    }
  }

  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      state[part] = float2{};
      if (exists && p.token.step.h0 != nullptr) {
        state[part] =
            *reinterpret_cast<const float2*>(static_cast<const float*>(p.token.step.h0) + at(part));
      }
    }
  }

  /// Adds up what the blocks have of each kind, in their order, with the norm's factor.
  __device__ __forceinline__ void gather(unsigned parts, unsigned squares) {
    constexpr int kAtOnce = 2;  // blocks that are read at once
    const unsigned from = parts + static_cast<unsigned>((row * s.part_stride + within) * 4);
    const auto group_bytes = static_cast<unsigned>(s.parts_bytes / product::kWarpgroups);
    float square = 0.0f;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) z[kind][0] = z[kind][1] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < s.blocks; first += kAtOnce) {
      float2 sums[kAtOnce][product::kWarpgroups][kKinds];
      float part[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const unsigned block = address_in_block(from, first + r);
#pragma unroll
        for (int group = 0; group < product::kWarpgroups; ++group) {
#pragma unroll
          for (int kind = 0; kind < kKinds; ++kind) {
            sums[r][group][kind] =
                load_two_from(block + static_cast<unsigned>(group) * group_bytes +
                              static_cast<unsigned>(kind * kTile * 4));
          }
        }
        part[r] = product::load_from(
            address_in_block(squares + static_cast<unsigned>(row * 4), first + r));
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
        for (int group = 0; group < product::kWarpgroups; ++group) {
#pragma unroll
          for (int kind = 0; kind < kKinds; ++kind) {
            z[kind][0] += sums[r][group][kind].x;
            z[kind][1] += sums[r][group][kind].y;
          }
        }
        square += part[r];
      }
    }
    const product::FewRowsParams& f = p.product.product;
    const float factor =
        rsqrtf(square / static_cast<float>(f.inner) + static_cast<float>(p.product.eps));
    const E* const bias = static_cast<const E*>(f.bias);
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        float sum = z[kind][v] * factor;
        if (bias != nullptr && exists) {
          sum += widen(bias[kind * p.token.step.channels + channel + v]);
        }
        z[kind][v] = widen(narrow<E>(sum));
      }
    }
  }

  /// Makes the step of the pair of channels, writes the state and y, and returns the sum of the
  /// squares of h.
  __device__ __forceinline__ float step() const {
    const HgruParams& step = p.token.step;
    float h[kParts][kVec], y[kParts][kVec], square = 0.0f;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      float before[kParts], in[kParts], after[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        before[part] = v == 0 ? state[part].x : state[part].y;
        in[part] = z[part][v];
      }
      step_channel(step.activation, z[kGates - 1][v], gamma[v], kComplex ? cosine[v] : 1.0f,
                   kComplex ? sine[v] : 0.0f, before, in, after);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        h[part][v] = after[part];
        const float u = widen(narrow<E>(after[part]));
        square = fmaf(u, u, square);
        y[part][v] = u * norm::activated<TokenMath>(p.token.gate_activation, z[kGates + part][v]);
      }
    }
    if (!exists) return 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t column = part * step.channels + channel;
      if (p.token.norm_weight != nullptr) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          y[part][v] *= widen(static_cast<const E*>(p.token.norm_weight)[column + v]);
        }
      }
      if (step.h_final != nullptr) {
        *reinterpret_cast<float2*>(static_cast<float*>(step.h_final) + at(part)) =
            make_float2(h[part][0], h[part][1]);
      }
      *reinterpret_cast<typename Pack<E, kVec>::Bits*>(static_cast<E*>(p.token.y.data) +
                                                       row * p.token.y.stride_b + column) =
          pack<E, kVec>(y[part]).bits;
    }
    return square;
  }

  /// Leaves the sum of squares over the cluster's channels of a row, for the norm of the next
  /// product.
  __device__ __forceinline__ void leave_square(float mine) const {
#pragma unroll
    for (int distance = kRowThreads / 2; distance > 0; distance /= 2) {
      mine += __shfl_xor_sync(~0u, mine, distance);
    }
    if (exists && work.thread % kRowThreads == 0) {
      p.squares[work.cluster * kBatchRows + row] = mine;
    }
  }
};

#endif

template <bool kComplex>
__global__ void __launch_bounds__(kThreads, 2)
    hgru_token_product_kernel(const __grid_constant__ HgruTokenProductParams p,
                              const __grid_constant__ BatchShape s) {
#if TIDEGATE_HOPPER_CODE
  extern __shared__ __align__(128) char dynamic[];
  let_next_kernel_begin();
  constexpr int kKinds = kKindsOf<kComplex>, kN = kKinds * kTile;
  const BatchWork work(s);
  char* const x = product::aligned_panels(dynamic);
  float* const parts = reinterpret_cast<float*>(x + s.parts_at);
  // Sums of squares lie behind the sums, where x and the weights were.
  float* const exchanged = reinterpret_cast<float*>(x + s.parts_at + s.parts_bytes);
  char* const constants = x + s.main_bytes;
  const auto weights = [&](int column) -> const E* {
    const int64_t channel = work.first_tile * kTile + column % kTile;
    return product::weight_row<E, false>(p.product,
                                         column / kTile * p.token.step.channels + channel);
  };
  product::BatchRing<E, kN, decltype(weights), true> ring{
      p.product, s, work, weights, shared_address(x + s.x_bytes), 0};
  ring.items = ring.chunks();
#pragma unroll 1
  for (int i = 0; i < s.stages; ++i) ring.ask();
  using Stager = product::BatchStager<E, false>;
  const Stager stager(p.product, s, work, x, exchanged, constants, 0);
  if (p.product.norm_weight != nullptr) stager.load_constants(constants);
  TokenPair<kComplex> pair(p, s, work);
  pair.load_constants();
  if (p.token.h0_is_settled) pair.load_state();
  __syncthreads();
  wait_for_kernels_before();

  float square[Stager::kOwn] = {};
  stager.run(square);
  if (!p.token.h0_is_settled) pair.load_state();
  const bool is_all = product::wait_for_all(ring);
  int slot = 0;
  product::BatchSums<kN> d;
  product::multiply_chunks(ring, shared_address(x), is_all, slot, d);
  stager.add_squares_of_copies(square);
  hopper::wait_for_products<0>();
  hopper::keep(d);
  __syncthreads();  // nobody reads x and the weights, where the sums go
  stager.leave_squares(square);
  product::leave_sums<kN>(d, s, work, 0, kN,
                          parts + work.group * (s.parts_bytes / product::kWarpgroups / 4));
  publish_shared();
  cluster_meet();
  pair.gather(shared_address(parts), shared_address(stager.squares));
  cluster_arrive();
  pair.leave_square(pair.step());
  wait_for_copies<0>();
  cluster_wait();  // no block ends whose sums others still read
#endif
}

template <bool kComplex>
cudaError_t launch(const HgruTokenProductParams& p, const BatchShape& s, cudaStream_t stream) {
  const int bytes = shared_bytes(p, s);
  constexpr auto* kKernel = &hgru_token_product_kernel<kComplex>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  return product::launch_clusters<kKernel>(s, bytes, stream, p, s);
}

}  // namespace

int64_t hgru_square_parts(int64_t channels) { return ceil_div(channels, int64_t{kTile}); }

cudaError_t hgru_token_product_fits(const HgruTokenProductParams& params, bool* fits) {
  const product::FewRowsParams& f = params.product.product;
  const HgruTokenParams& token = params.token;
  const int64_t channels = token.step.channels;
  const bool is_complex = token.step.theta != nullptr;
  TIDEGATE_RETURN_IF_CUDA_ERROR(product::fused_product_fits(params.product, fits));
  *fits = *fits && f.dtype == DType::kBFloat16 && f.rows > product::kFewFusedRows &&
          channels % kTile == 0 && f.outer == kinds(is_complex) * channels &&
          !params.product.is_glu && params.product.residual == nullptr &&
          params.product.more[0].w == nullptr && params.product.gate == nullptr &&
          params.product.squares == nullptr && token.norm_kind == norm::NormKind::kRms &&
          token.norm_bias == nullptr && !token.gate_first && token.y.dtype == f.dtype &&
          token.y.stride_b % kVec == 0 && is_aligned(token.y.data, 4) &&
          is_aligned(token.step.h0, 8) && is_aligned(token.step.h_final, 8);
  if (!*fits) return cudaSuccess;
  TIDEGATE_RETURN_IF_CUDA_ERROR((can_cluster<&hgru_token_product_kernel<true>>(fits)));
  if (!*fits) return cudaSuccess;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const BatchShape s = shape_of(params, limits);
  *fits = s.scales_sums && shared_bytes(params, s) <= limits.shared_bytes;
  return cudaSuccess;
}

cudaError_t hgru_token_product(const HgruTokenProductParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const BatchShape s = shape_of(params, limits);
  return params.token.step.theta != nullptr ? launch<true>(params, s, stream)
                                            : launch<false>(params, s, stream);
}

}  // namespace tidegate::kernels::scan
