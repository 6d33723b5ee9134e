// A step of AdamW for many parameters in one launch, bound by memory. The grid is as large as fits
// on the chip, and its blocks take chunks of all parameters in turn, so that none is idle while
// others finish a parameter.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/optim/adamw_cuda.h"
#include "kernels/optim/cuda/tensor_chunks.cuh"

namespace tidegate::kernels::optim {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kPacks = 2;  // of four numbers, that a thread has at once
constexpr int kChunk = kThreads * kPacks * 4;

using AdamwChunks = TensorChunks<AdamwParams::kMost>;

static_assert(sizeof(AdamwParams) + sizeof(AdamwChunks) <= 4096,
              "adamw_kernel has more than 4096 bytes of parameters");

/// What is one for all weights of a parameter.
struct StepFactors {
  float decay, step_size, root_correction;

  __device__ StepFactors(const AdamwParams& p, const AdamwTensor& tensor) {
    const double lr = p.device_lr == nullptr ? p.lr : static_cast<double>(*p.device_lr);
    const auto count = static_cast<double>(*tensor.step);
    decay = static_cast<float>(1.0 - lr * p.weight_decay);
    step_size = static_cast<float>(lr / (1.0 - pow(p.beta1, count)));
    root_correction = static_cast<float>(1.0 / sqrt(1.0 - pow(p.beta2, count)));
  }
};

/// A weight and its moments after the step.
struct Stepped {
  float mean, square, parameter;
};

__device__ inline Stepped stepped(const AdamwParams& p, const StepFactors& f, float w, float g,
                                  float m, float v) {
  const auto rest1 = static_cast<float>(1.0 - p.beta1), rest2 = static_cast<float>(1.0 - p.beta2);
  m = fmaf(static_cast<float>(p.beta1), m, rest1 * g);
  v = fmaf(static_cast<float>(p.beta2), v, rest2 * g * g);
  const float root = fmaf(sqrtf(v), f.root_correction, static_cast<float>(p.eps));
  return {m, v, fmaf(-f.step_size, m / root, w * f.decay)};
}

/// Four gradients, from 16 or 8 bytes.
__device__ inline float4 load_four(const float* from) {
  return __ldg(reinterpret_cast<const float4*>(from));
}
__device__ inline float4 load_four(const __nv_bfloat16* from) {
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from));
  const Pack<__nv_bfloat16, 2> low{bits.x}, high{bits.y};
  return make_float4(low.get(0), low.get(1), high.get(0), high.get(1));
}

/// Weights `at` .. at + 3.
__device__ inline void step_four(const AdamwParams& p, const StepFactors& f,
                                 const AdamwTensor& tensor, int64_t at, float4 w, float4 g,
                                 float4 m, float4 v) {
  const float *const ws = &w.x, *const gs = &g.x, *const ms = &m.x, *const vs = &v.x;
  float parameter[4], mean[4], square[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Stepped next = stepped(p, f, ws[i], gs[i], ms[i], vs[i]);
    parameter[i] = next.parameter, mean[i] = next.mean, square[i] = next.square;
  }
  const auto store = [&](float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to + at) = make_float4(x[0], x[1], x[2], x[3]);
  };
  store(tensor.parameter, parameter);
  store(tensor.mean, mean);
  store(tensor.square, square);
  if (tensor.rounded != nullptr) {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(tensor.rounded) + at) =
        make_uint2(pack_bf16(parameter[0], parameter[1]), pack_bf16(parameter[2], parameter[3]));
  }
}

template <class Gradient>
__device__ inline void step_chunk(const AdamwParams& p, const StepFactors& f,
                                  const AdamwTensor& tensor, int64_t begin) {
  const auto* const gradient = static_cast<const Gradient*>(tensor.gradient);
  const auto address =
      reinterpret_cast<uintptr_t>(tensor.parameter) | reinterpret_cast<uintptr_t>(tensor.gradient) |
      reinterpret_cast<uintptr_t>(tensor.mean) | reinterpret_cast<uintptr_t>(tensor.square) |
      reinterpret_cast<uintptr_t>(tensor.rounded);
  if (begin + kChunk <= tensor.size && address % sizeof(float4) == 0) {
    float4 w[kPacks], g[kPacks], m[kPacks], v[kPacks];
    const int64_t first = begin + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t at = first + i * kThreads * 4;
      w[i] = *reinterpret_cast<const float4*>(tensor.parameter + at);
      g[i] = load_four(gradient + at);
      m[i] = *reinterpret_cast<const float4*>(tensor.mean + at);
      v[i] = *reinterpret_cast<const float4*>(tensor.square + at);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      step_four(p, f, tensor, first + i * kThreads * 4, w[i], g[i], m[i], v[i]);
    }
    return;
  }
  const int64_t end = begin + kChunk < tensor.size ? begin + kChunk : tensor.size;
  for (int64_t at = begin + threadIdx.x; at < end; at += kThreads) {
    const Stepped next = stepped(p, f, tensor.parameter[at], widen(gradient[at]), tensor.mean[at],
                                 tensor.square[at]);
    tensor.parameter[at] = next.parameter;
    if (tensor.rounded != nullptr) {
      static_cast<__nv_bfloat16*>(tensor.rounded)[at] = narrow<__nv_bfloat16>(next.parameter);
    }
    tensor.mean[at] = next.mean;
    tensor.square[at] = next.square;
  }
}

template <class Gradient>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    adamw_kernel(const __grid_constant__ AdamwParams p,
                 const __grid_constant__ AdamwChunks chunks) {
  const unsigned end = chunks.first[p.count];
  unsigned chunk = blockIdx.x;
  int index = 0;
  while (chunk < end) {
    while (chunk >= chunks.first[index + 1]) {
      ++index;
    }
    const AdamwTensor& tensor = p.tensors[index];
    const StepFactors factors(p, tensor);
    const unsigned first = chunks.first[index], last = chunks.first[index + 1];
    for (; chunk < last; chunk += gridDim.x) {
      step_chunk<Gradient>(p, factors, tensor, static_cast<int64_t>(chunk - first) * kChunk);
    }
  }
}

}  // namespace

cudaError_t adamw(const AdamwParams& params, cudaStream_t stream) {
  AdamwChunks chunks = {};
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(lay_out_chunks(
      params.count, kChunk, kBlocksPerMultiprocessor, [&](int i) { return params.tensors[i].size; },
      &chunks, &blocks));
  const auto kernel =
      params.gradients == DType::kBFloat16 ? &adamw_kernel<__nv_bfloat16> : &adamw_kernel<float>;
  return launch_unless_empty(kernel, blocks, dim3(kThreads), 0, stream, params, chunks);
}

}  // namespace tidegate::kernels::optim
