#pragma once

// What the norms of rows share on CUDA, forward and backward. A thread has eight neighbouring
// columns of a few rows, in registers; `lanes` threads have a whole row: a power of two below a
// warp, or some warps. A block has `slots` such groups side by side, which go from row to row in
// step; the grid stays as large as fits on the chip, so that weights are loaded, and sums over rows
// begun, once a block.

#include <algorithm>

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/norm/norm_cuda.h"

namespace tidegate::kernels::norm {

constexpr int kVec = 8;             // columns of a thread
constexpr int kMaxThreads = 512;    // of a block, which bounds a thread's registers by 128
constexpr int kBlockThreads = 256;  // of a block of several slots
constexpr int kMaxChannels = kVec * kMaxThreads;

// ---- Where a row is ----

/// A row's place in the three dimensions of rows.
template <class Index>
struct RowPlace {
  Index batch = 0, time = 0, head = 0;

  template <class E>
  __device__ E* in(const HeadSeries& series) const {
    return static_cast<E*>(series.data) + static_cast<int64_t>(batch) * series.stride_b +
           static_cast<int64_t>(time) * series.stride_t +
           static_cast<int64_t>(head) * series.stride_h;
  }
};

/// Divisions are left out where merging has left nothing to divide. `Index` counts rows.
template <class Index, class Params>
__device__ inline RowPlace<Index> row_place(const Params& p, Index row) {
  const Index time = static_cast<Index>(p.time), heads = static_cast<Index>(p.heads);
  if (time == 1 && p.batch == 1) {
    return {0, 0, row};
  }
  const Index token = row / heads;
  if (p.batch == 1) {
    return {0, token, row - token * heads};
  }
  const Index batch = token / time;
  return {batch, token - batch * time, row - token * heads};
}

// ---- Eight columns ----

/// Eight numbers as they lie in memory, in accesses of 16 bytes.
template <class T>
struct Eight {
  static constexpr int kPart = 16 / static_cast<int>(sizeof(T));
  static constexpr int kParts = kVec / kPart;
  using Part = Pack<T, kPart>;
  Part parts[kParts];

  __device__ auto get(int v) const { return parts[v / kPart].get(v % kPart); }
};

template <class T>
__device__ inline Eight<T> load_eight(const T* from) {
  Eight<T> x;
#pragma unroll
  for (int i = 0; i < Eight<T>::kParts; ++i) {
    x.parts[i] = {__ldg(reinterpret_cast<const typename Eight<T>::Part::Bits*>(from) + i)};
  }
  return x;
}

/// Packs two numbers at once where the type has an instruction for that.
template <class T>
__device__ inline void store_eight(T* to, const float (&x)[kVec]) {
  if constexpr (sizeof(T) == 2) {
    uint4 bits;
    uint32_t* const pairs = &bits.x;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float pair[2] = {x[2 * i], x[2 * i + 1]};
      pairs[i] = pack<T, 2>(pair).bits;
    }
    *reinterpret_cast<uint4*>(to) = bits;
  } else {
    float4* const out = reinterpret_cast<float4*>(to);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

/// Stores x where `writes` and leaves what is in memory then: x rounded.
template <class T>
__device__ inline void store_rounded(T* to, bool writes, float (&x)[kVec]) {
  if constexpr (sizeof(T) == 2) {
    uint32_t words[kVec / 2];
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float pair[2] = {x[2 * i], x[2 * i + 1]};
      words[i] = pack<T, 2>(pair).bits;
      x[2 * i] = Pack<T, 2>{words[i]}.get(0);
      x[2 * i + 1] = Pack<T, 2>{words[i]}.get(1);
    }
    if (writes) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else if (writes) {
    store_eight(to, x);
  }
}

/// Eight of a weight's numbers, which come in `Data` or in float, or `otherwise` where there is
/// none.
template <class Data>
__device__ inline void load_weights(const void* from, DType dtype, int64_t offset, float otherwise,
                                    float (&w)[kVec]) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    w[v] = otherwise;
    if (from != nullptr) {
      w[v] = dtype == DType::kFloat32 ? static_cast<const float*>(from)[offset + v]
                                      : widen(static_cast<const Data*>(from)[offset + v]);
    }
  }
}

// ---- Gates ----

/// act(x) and its derivative.
template <class Math, class Real>
__device__ inline void activate(Activation kind, Real x, Real* value, Real* derivative) {
  if (kind == Activation::kNone) {
    *value = x;
    *derivative = Real(1);
    return;
  }
  const Sigmoids<Real> s = sigmoids<Math>(x);
  const bool is_silu = kind == Activation::kSilu;
  *value = is_silu ? x * s.pos : s.pos;
  *derivative = is_silu ? s.pos * fused(x, s.neg, Real(1)) : s.pos * s.neg;
}

template <class Math, class Real>
__device__ inline Real activated(Activation kind, Real x) {
  Real value, derivative;
  activate<Math>(kind, x, &value, &derivative);
  return value;
}

/// A variance, which rounding may have made less than zero. NaN stays.
template <class Real>
__device__ inline Real positive_part(Real x) {
  return x < Real(0) ? Real(0) : x;
}

// ---- How a launch is cut ----

struct RowShape {
  int lanes = 0;        // threads of a row
  int slots = 0;        // rows that a block has side by side
  unsigned rows = 0;    // of all
  unsigned stride = 0;  // from a slot's row to its next: slots of the whole grid

  __host__ __device__ int threads() const { return lanes * slots; }
};

inline RowShape row_shape(const NormParams& p) {
  RowShape shape;
  const int packs = static_cast<int>(p.channels / kVec);
  if (packs > kWarpSize) {
    shape.lanes = static_cast<int>(ceil_div(packs, kWarpSize)) * kWarpSize;
  } else {
    for (shape.lanes = 1; shape.lanes < packs; shape.lanes *= 2) {
    }
  }
  shape.slots = std::max(1, kBlockThreads / shape.lanes);
  shape.rows = static_cast<unsigned>(row_count(p));
  return shape;
}

inline int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/// Blocks of the grid: what fits on the chip at once, or less where the work is less, and so many
/// that a slot always meets rows of one head's weights. Zero where no such grid fits.
template <auto* kKernel>
cudaError_t count_blocks(const NormParams& p, const RowShape& shape, int shared_bytes,
                         int64_t* blocks) {
  DeviceLimits device;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&device));
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(shared_bytes));
  int each = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &each, kKernel, shape.threads(), static_cast<size_t>(shared_bytes)));
  const int64_t wanted = ceil_div(row_count(p), int64_t{shape.slots});
  const int64_t unit = p.weight_heads / greatest_common_divisor(p.weight_heads, shape.slots);
  const int64_t at_once = int64_t{each} * device.multiprocessors;
  *blocks = std::min(ceil_div(wanted, unit), at_once / unit) * unit;
  return cudaSuccess;
}

/// Whether rows are such that a thread can have eight columns.
template <class... Series>
bool rows_fit(const NormParams& p, const Series&... series) {
  // Rows of a launch are counted in 32 bits, with room for a stride past the last.
  return p.channels % kVec == 0 && p.channels <= kMaxChannels && p.channels > 0 &&
         row_count(p) < (int64_t{1} << 30) && p.x.dtype != DType::kFloat64 &&
         ((series.data == nullptr || rows_aligned(series, 16)) && ...);
}

}  // namespace tidegate::kernels::norm
