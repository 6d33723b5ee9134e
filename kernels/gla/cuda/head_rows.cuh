#pragma once

// One head of a tensor along a walk, and which sequence and head a block works on.

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/sequence.cuh"
#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// Rows of one head of one sequence: row k is what the k-th step of the walk sees.
class HeadRows {
 public:
  HeadRows() = default;

  __device__ HeadRows(const HeadSeries& series, const Sequence& seq, bool backwards, int64_t head)
      : dtype_(series.dtype) {
    const int64_t size = dtype_ == DType::kFloat64 ? 8 : dtype_ == DType::kFloat32 ? 4 : 2;
    const int64_t first = seq.start + (backwards ? seq.length - 1 : 0);
    base_ = static_cast<char*>(series.data) +
            (seq.batch * series.stride_b + first * series.stride_t + head * series.stride_h) * size;
    stride_ = (backwards ? -series.stride_t : series.stride_t) * size;
  }

  __device__ char* row(int64_t k) const { return base_ + k * stride_; }
  /// From one row to the next; see gla_unsupported.
  __device__ int stride_bytes() const { return static_cast<int>(stride_); }

  template <class Real>
  __device__ Real load(int64_t k, int channel) const {
    switch (dtype_) {
      case DType::kFloat32:
        return reinterpret_cast<const float*>(row(k))[channel];
      case DType::kFloat64:
        return static_cast<Real>(reinterpret_cast<const double*>(row(k))[channel]);
      case DType::kBFloat16:
        return widen(reinterpret_cast<const __nv_bfloat16*>(row(k))[channel]);
      default:
        return widen(reinterpret_cast<const __half*>(row(k))[channel]);
    }
  }

  template <class Real>
  __device__ void store(int64_t k, int channel, Real x) const {
    switch (dtype_) {
      case DType::kFloat32:
        reinterpret_cast<float*>(row(k))[channel] = static_cast<float>(x);
        return;
      case DType::kFloat64:
        reinterpret_cast<double*>(row(k))[channel] = x;
        return;
      case DType::kBFloat16:
        reinterpret_cast<__nv_bfloat16*>(row(k))[channel] =
            narrow<__nv_bfloat16>(static_cast<float>(x));
        return;
      default:
        reinterpret_cast<__half*>(row(k))[channel] = narrow<__half>(static_cast<float>(x));
    }
  }

 private:
  char* base_ = nullptr;
  int64_t stride_ = 0;  // bytes
  DType dtype_ = DType::kFloat32;
};

}  // namespace tidegate::kernels::gla
