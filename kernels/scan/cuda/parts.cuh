#pragma once

// Real numbers in rows of [.., D], or complex ones in the two halves of rows of [.., 2D].

#include <type_traits>

#include "kernels/scan/cuda/rows.cuh"
#include "kernels/scan/cuda/walk_op.cuh"

namespace tidegate::kernels::scan {

template <class Data_, bool kComplex_, int kVec_>
struct Parts : WalkDefaults {
  using Data = Data_;
  using Real = typename Register<Data>::type;
  using Number = std::conditional_t<kComplex_, Complex<Real>, Real>;
  using State = StateRow<Number, kVec_, kComplex_>;
  static constexpr bool kComplex = kComplex_;
  static constexpr int kVec = kVec_;
  static constexpr int kParts = kComplex ? 2 : 1;

  /// Elements of the parts as one number.
  static __device__ Number number(const Pack<Data, kVec> (&parts)[kParts], int v) {
    if constexpr (kComplex) {
      return {parts[0].get(v), parts[1].get(v)};
    } else {
      return parts[0].get(v);
    }
  }
  static __device__ void split(const Number (&x)[kVec], Pack<Data, kVec> (&parts)[kParts]) {
    if constexpr (kComplex) {
      Real re[kVec], im[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        re[v] = x[v].re;
        im[v] = x[v].im;
      }
      parts[0] = pack<Data, kVec>(re);
      parts[1] = pack<Data, kVec>(im);
    } else {
      parts[0] = pack<Data, kVec>(x);
    }
  }
};

/// [B, T, D] rows, or the two halves of [B, T, 2D] rows.
template <class Data, int kVec, int kParts>
class PartRows {
 public:
  __device__ PartRows(const TimeSeries& series, const Sequence& seq, bool backwards,
                      const Lane& lane)
      : first_(series, seq, backwards, lane),
        half_(static_cast<int>(lane.channels) * static_cast<int>(sizeof(Data))) {}

  template <class Source>
  __device__ void gather(Source& source, Pack<Data, kVec> (&out)[kParts], int k) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      source(out[p], first_, k, p * half_);
    }
  }
  __device__ void store(int k, int i, const Pack<Data, kVec> (&x)[kParts]) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      first_.store(k, i, x[p], p * half_);
    }
  }

 private:
  Rows<Data, kVec> first_;
  int half_;  // bytes
};

}  // namespace tidegate::kernels::scan
