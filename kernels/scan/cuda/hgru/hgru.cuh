#pragma once

// Which kernels hgru has for a data type, and which of them params ask for.

#include <array>

#include "kernels/scan/cuda/engine/launch.cuh"
#include "kernels/scan/cuda/hgru/hgru_backward.cuh"
#include "kernels/scan/cuda/hgru/hgru_forward.cuh"
#include "kernels/scan/cuda/op_kernels.h"

namespace tidegate::kernels::scan {

template <class Data>
struct HgruChoice {
  using Real = typename Register<Data>::type;
  // Four bytes a thread and row: a warp's row of an input is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate, bool kComplex>
  struct Forward : ScanRecurrence<Forward<Gate, kComplex>, HgruParams> {
    template <int kPack, Regime kRegime>
    using Op = HgruForward<Data, Gate, kComplex, kPack, kRegime>;
    static constexpr int kVec = HgruChoice::kVec;
    static auto tensors(const HgruParams& p) { return std::array{&p.c, &p.f, &p.h}; }
  };
  template <class Gate, bool kComplex>
  struct Backward : ScanRecurrence<Backward<Gate, kComplex>, HgruBackwardParams> {
    template <int kPack, Regime kRegime>
    using Op = HgruBackward<Data, Gate, kComplex, kPack, kRegime>;
    static constexpr int kVec = HgruChoice::kVec;
    static auto tensors(const HgruBackwardParams& p) {
      return std::array{&p.forward.c, &p.forward.f, &p.forward.h, &p.dh, &p.dc, &p.df};
    }
  };

  /// Calls `visit` with the gate's type and whether the recurrence is complex, as template
  /// arguments of a lambda.
  template <class Visit>
  static cudaError_t choose(const HgruParams& p, Visit visit) {
    const bool complex = p.theta != nullptr;
    if (element_size(p.f.dtype) == int64_t{sizeof(Data)}) {
      return complex ? visit.template operator()<Data, true>()
                     : visit.template operator()<Data, false>();
    }
    return complex ? visit.template operator()<Real, true>()
                   : visit.template operator()<Real, false>();
  }
};

template <class Data>
cudaError_t HgruKernels<Data>::forward_plan(const HgruParams& p, ScanPlan* plan) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool kComplex>() {
    return Choice::template Forward<Gate, kComplex>::plan(p, plan);
  });
}

template <class Data>
cudaError_t HgruKernels<Data>::forward(const HgruParams& p, cudaStream_t stream) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool kComplex>() {
    return Choice::template Forward<Gate, kComplex>::launch(p, stream);
  });
}

template <class Data>
cudaError_t HgruKernels<Data>::backward_plan(const HgruBackwardParams& p, ScanPlan* plan) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p.forward, [&]<class Gate, bool kComplex>() {
    return Choice::template Backward<Gate, kComplex>::plan(p, plan);
  });
}

template <class Data>
cudaError_t HgruKernels<Data>::backward(const HgruBackwardParams& p, cudaStream_t stream) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p.forward, [&]<class Gate, bool kComplex>() {
    return Choice::template Backward<Gate, kComplex>::launch(p, stream);
  });
}

}  // namespace tidegate::kernels::scan
