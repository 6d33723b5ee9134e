// A step of HGRN's recurrence for one token of each sequence, with the norm and gate after it: a
// block has a sequence, and a thread four channels, of both parts where the state is complex. The
// product after it would otherwise make the norm and the gate in each of its blocks anew.
//
// A block reads the parameters and computes the turns exp(i theta) before the kernel that makes its
// inputs has ended.

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/norm/cuda/row_tile.cuh"
#include "kernels/scan/cuda/hgru/token_channel.cuh"
#include "kernels/scan/hgru_token_cuda.h"

namespace tidegate::kernels::scan {
namespace {

constexpr int kVec = 4;  // channels of a thread
constexpr int kMostThreads = 1024;

/// The sum over the block, for every thread. `sums`: a buffer that no thread may still be reading.
__device__ float block_sum(float mine, float* sums) {
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += sums[warp];
  return sum;
}

/// Four neighbouring numbers of a tensor's row, zeros where the thread has none. No __ldg: the
/// kernel before may write them while this one runs.
template <class E>
__device__ Pack<E, kVec> load_four(const E* row, int64_t at, bool exists) {
  Pack<E, kVec> four = {};
  if (exists) four.bits = *reinterpret_cast<const typename Pack<E, kVec>::Bits*>(row + at);
  return four;
}
template <class E>
__device__ Pack<E, kVec> load_four(const TimeSeries& series, int64_t row, int64_t at, bool exists) {
  return load_four(static_cast<const E*>(series.data) + row * series.stride_b, at,
                   exists && series.data != nullptr);
}

/// What a thread has of its sequence: kVec neighbouring channels of each part.
template <class E, bool kComplex>
struct HgruToken {
  static constexpr int kParts = kComplex ? 2 : 1;

  const HgruTokenParams& p;
  int64_t row, channels, channel, width;
  bool exists;
  Pack<float, kVec> gamma, state[kParts];
  float cosine[kVec], sine[kVec];  // of theta
  Pack<E, kVec> weight[kParts], bias[kParts], f, c[kParts], gate[kParts];
  float h[kParts][kVec];  // the new state
  float u[kParts][kVec];  // what the norm is of

  __device__ __forceinline__ explicit HgruToken(const HgruTokenParams& params)
      : p(params),
        row(blockIdx.x),
        channels(p.step.channels),
        channel(static_cast<int64_t>(threadIdx.x) * kVec),
        width(kParts * channels),
        exists(channel < channels) {}

  __device__ __forceinline__ int64_t at(int part) const { return part * channels + channel; }

  __device__ __forceinline__ void load_state(int part) {
    state[part] = load_four(static_cast<const float*>(p.step.h0) + row * width, at(part),
                            exists && p.step.h0 != nullptr);
  }

  /// Reads what no kernel of the chain writes: parameters and, once settled, the state.
  __device__ __forceinline__ void load_constants() {
    gamma = load_four(static_cast<const float*>(p.step.gamma), channel,
                      exists && p.step.gamma != nullptr);
#pragma unroll 1
    for (int v = 0; kComplex && v < kVec; ++v) {
      double s = 0, c = 1;
      if (exists) {
        exact_sincos(static_cast<const float*>(p.step.theta)[channel + v], &s, &c);
      }
#pragma unroll
      for (int u = 0; u < kVec; ++u) {  // registers have no index
        cosine[u] = u == v ? static_cast<float>(c) : cosine[u];
        sine[u] = u == v ? static_cast<float>(s) : sine[u];
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      weight[part] = load_four(static_cast<const E*>(p.norm_weight), at(part),
                               exists && p.norm_weight != nullptr);
      bias[part] =
          load_four(static_cast<const E*>(p.norm_bias), at(part), exists && p.norm_bias != nullptr);
      if (p.h0_is_settled) load_state(part);
    }
  }

  /// Reads what the kernel before writes: c, f and the gate.
  __device__ __forceinline__ void load_token() {
    f = load_four<E>(p.step.f, row, channel, exists);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      c[part] = load_four<E>(p.step.c, row, at(part), exists);
      gate[part] = load_four<E>(p.gate, row, at(part), exists);
      if (!p.h0_is_settled) load_state(part);
    }
  }

  __device__ __forceinline__ void step() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      float before[kParts], in[kParts], after[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        before[part] = state[part].get(v);
        in[part] = c[part].get(v);
      }
      step_channel(p.step.activation, f.get(v), gamma.get(v), cosine[v], sine[v], before, in,
                   after);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        h[part][v] = after[part];
        u[part][v] = widen(narrow<E>(h[part][v]));
        if (p.gate.data != nullptr && p.gate_first) {
          u[part][v] *= norm::activated<TokenMath>(p.gate_activation, gate[part].get(v));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!exists || p.step.h_final == nullptr) continue;
      *reinterpret_cast<float4*>(static_cast<float*>(p.step.h_final) + row * width +
                                 part * channels + channel) =
          make_float4(h[part][0], h[part][1], h[part][2], h[part][3]);
    }
  }

  /// The norm's factor, after which u has no mean where the norm takes it away. Threads without
  /// channels add nothing.
  __device__ __forceinline__ float find_factor(float (&sums)[2][32]) {
    float mean = 0.0f, sum = 0.0f, square = 0.0f;
    if (p.norm_kind == norm::NormKind::kLayer) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum += exists ? u[part][v] : 0.0f;
      }
      mean = block_sum(sum, sums[0]) / static_cast<float>(width);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        u[part][v] -= mean;
        square = exists ? fmaf(u[part][v], u[part][v], square) : 0.0f;
      }
    }
    return rsqrtf(block_sum(square, sums[1]) / static_cast<float>(width) +
                  static_cast<float>(p.eps));
  }

  __device__ __forceinline__ void write(float factor) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!exists) continue;
      float y[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        y[v] = fmaf(u[part][v] * factor, p.norm_weight != nullptr ? weight[part].get(v) : 1.0f,
                    p.norm_bias != nullptr ? bias[part].get(v) : 0.0f);
        if (p.gate.data != nullptr && !p.gate_first) {
          y[v] *= norm::activated<TokenMath>(p.gate_activation, gate[part].get(v));
        }
      }
      *reinterpret_cast<typename Pack<E, kVec>::Bits*>(
          static_cast<E*>(p.y.data) + row * p.y.stride_b + part * channels + channel) =
          pack<E, kVec>(y).bits;
    }
  }
};

template <class E, bool kComplex>
__global__ void __launch_bounds__(kMostThreads)
    hgru_token_kernel(const __grid_constant__ HgruTokenParams p) {
  __shared__ float sums[2][32];
  let_next_kernel_begin();
  HgruToken<E, kComplex> token(p);
  token.load_constants();
  wait_for_kernels_before();
  token.load_token();
  token.step();
  token.write(token.find_factor(sums));
}

bool is_in_fours(const TimeSeries& series) {
  return is_aligned(series.data, 8) && series.stride_b % kVec == 0;
}

}  // namespace

bool hgru_token_fits(const HgruTokenParams& p) {
  const HgruParams& step = p.step;
  const DType data = step.c.dtype;
  return is_16_bit(data) && step.f.dtype == data && p.y.dtype == data &&
         (p.gate.data == nullptr || p.gate.dtype == data) && step.layout.time == 1 &&
         step.layout.offsets == nullptr && step.layout.batch >= 1 &&
         step.layout.batch <= std::numeric_limits<int>::max() && step.channels >= kVec &&
         step.channels % kVec == 0 && step.channels <= kVec * kMostThreads && is_in_fours(step.c) &&
         is_in_fours(step.f) && is_in_fours(p.gate) && is_in_fours(p.y) &&
         is_aligned(step.h0, 16) && is_aligned(step.h_final, 16) && is_aligned(step.gamma, 16) &&
         is_aligned(p.norm_weight, 8) && is_aligned(p.norm_bias, 8);
}

cudaError_t hgru_token_cuda(const HgruTokenParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.step.layout.batch));
  const dim3 block(static_cast<unsigned>(ceil_div(p.step.channels, int64_t{kVec * 32}) * 32));
  return dispatch_16_bit(p.step.c.dtype, [&]<class E>() {
    return p.step.theta != nullptr
               ? launch_in_chain<&hgru_token_kernel<E, true>>(grid, block, 0, stream, p)
               : launch_in_chain<&hgru_token_kernel<E, false>>(grid, block, 0, stream, p);
  });
}

}  // namespace tidegate::kernels::scan
