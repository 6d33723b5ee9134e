#pragma once

// What the norms of rows share on CUDA, forward and backward. `lanes` threads have a row in
// registers: a power of two below a warp, or some warps. A thread has kPacks packs of eight
// neighbouring columns, a lane's every `lanes` packs, so that what a row costs beside its columns
// (addresses, exchanges, barriers) is paid by few threads. A block has `slots` such groups side by
// side, which go from row to row by themselves; the grid stays as large as fits on the chip, so
// that weights are loaded, and sums over rows begun, once a block.

#include <algorithm>

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/norm/norm_cuda.h"

namespace tidegate::kernels::norm {

constexpr int kVec = 8;                     // columns of a pack
constexpr int kPacks = 2;                   // packs of a thread
constexpr int kOwnColumns = kPacks * kVec;  // columns of a thread
constexpr int kMaxChannels = 4096;
constexpr int kNarrowThreads = 128;  // of a block whose rows are narrower than a warp
constexpr int kSumPlaces = 32;       // for sums of a block's warps, in fours a row
constexpr int kMostSlots = 5;        // of a block whose rows are not

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
__device__ inline void store_eight(T* to, const float* x) {
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
__device__ inline void store_rounded(T* to, bool writes, float* x) {
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
                                    float* w) {
  const auto load = [&](const auto* numbers) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      w[v] = widen(numbers[v]);
    }
  };
  if (from == nullptr) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      w[v] = otherwise;
    }
  } else if (dtype == DType::kFloat32) {
    const float* const numbers = static_cast<const float*>(from) + offset;
    if (reinterpret_cast<uintptr_t>(numbers) % 16 == 0) {
      const Eight<float> eight = load_eight(numbers);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        w[v] = eight.get(v);
      }
    } else {
      load(numbers);
    }
  } else {
    load(static_cast<const Data*>(from) + offset);
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
  int lanes = 0;         // threads of a row
  int slots = 0;         // rows that a block has side by side
  int channels = 0;      // of a row
  int places = 0;        // for the sums of a row's warps: a multiple of four
  bool is_bulk = false;  // rows are copied whole: lane i of a slot copies those of tensor i
  unsigned rows = 0;     // of all
  unsigned stride = 0;   // from a slot's row to its next: slots of the whole grid

  __host__ __device__ int threads() const { return lanes * slots; }
};

/// What the sums of a row's warps take, which are read four at once.
inline int places_of(int warps) { return (warps + 3) / 4 * 4; }

/// Rows of `warps` warps, with `bytes` each, that a block of at most `limit` bytes of shared memory
/// has side by side: as many as make the chip hold most rows, whose warps can have kRegisters a
/// thread, and among these most, which leaves fewest partial sums.
template <int kRegisters>
int slots_of_rows(int warps, int bytes, int limit) {
  constexpr int kWarps = 65536 / (kWarpSize * kRegisters) / 4 * 4;  // four schedulers have alike
  int slots = 1;
  const auto fits = [&](int more) {
    return more <= kMostSlots && more * bytes <= limit && more * places_of(warps) <= kSumPlaces;
  };
  for (int more = 2; fits(more); ++more) {
    if (kWarps / (more * warps) * more >= kWarps / (slots * warps) * slots) {
      slots = more;
    }
  }
  return slots;
}

/// `thread_bytes`: of a thread's shared memory.
template <int kRegisters>
RowShape row_shape(const NormParams& p, int thread_bytes, const DeviceLimits& device) {
  constexpr int kOtherBytes = 4096;  // of shared memory, beside the ring: fewer
  RowShape shape;
  const int needed = static_cast<int>(ceil_div(p.channels, int64_t{kOwnColumns}));
  if (needed > kWarpSize) {
    shape.lanes = static_cast<int>(ceil_div(needed, kWarpSize)) * kWarpSize;
  } else {
    for (shape.lanes = 1; shape.lanes < needed; shape.lanes *= 2) {
    }
  }
  shape.slots = shape.lanes < kWarpSize
                    ? kNarrowThreads / shape.lanes
                    : slots_of_rows<kRegisters>(shape.lanes / kWarpSize, shape.lanes * thread_bytes,
                                                device.shared_bytes - kOtherBytes);
  shape.rows = static_cast<unsigned>(row_count(p));
  shape.channels = static_cast<int>(p.channels);
  shape.places = places_of(shape.lanes / kWarpSize);
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
cudaError_t count_blocks(const NormParams& p, const RowShape& shape, const DeviceLimits& device,
                         int shared_bytes, int64_t* blocks) {
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

/// Whether the copy engine is to bring whole rows: code of compute capability 9.0, rows of a warp
/// or more, one stride of 32 bits for all rows of a tensor; and a ring of three stages, since with
/// one row on its way while one is read, what is whole comes later than its first part (float32
/// streams backward: 119 us instead of 106).
template <auto* kKernel, class... Series>
cudaError_t find_bulk(int stages, const NormParams& p, RowShape* shape, const Series&... series) {
  int version = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(compiled_for<kKernel>(&version));
  const auto fits = [](const HeadSeries& s) {
    return s.data == nullptr || std::abs(s.stride_h) * element_size(s.dtype) < (int64_t{1} << 31);
  };
  shape->is_bulk = stages > 2 && version >= 90 && shape->lanes >= kWarpSize && p.batch == 1 &&
                   p.time == 1 && (fits(series) && ...);
  return cudaSuccess;
}

/// Whether rows are such that a thread can have eight columns.
template <class... Series>
bool rows_fit(const NormParams& p, const Series&... series) {
  // Rows of a launch are counted in 32 bits, with room for a stride past the last.
  return p.channels % kVec == 0 && p.channels <= kMaxChannels && p.channels > 0 &&
         row_count(p) < (int64_t{1} << 30) && p.x.dtype != DType::kFloat64 &&
         ((series.data == nullptr ||
           (rows_aligned(series, 16) && std::abs(series.stride_h) < (int64_t{1} << 31))) &&
          ...);
}

}  // namespace tidegate::kernels::norm
