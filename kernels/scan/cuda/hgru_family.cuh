#pragma once

#include "kernels/scan/cuda/hgru.cuh"
#include "kernels/scan/cuda/hgru_family.h"
#include "kernels/scan/cuda/launch.cuh"

namespace tidegate::kernels::scan {

/// Which kernels a data type has, and which of them params ask for.
template <class Data>
struct HgruChoice {
  using Real = typename Register<Data>::type;
  // Four bytes a thread and row: a warp's row of a tile is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate, bool kComplex>
  struct Forward : WalkFamily<Forward<Gate, kComplex>, HgruParams> {
    template <int kPack, WalkUse kUse>
    using Op = HgruForward<Data, Gate, kComplex, kPack, kUse>;
    static constexpr int kVec = HgruChoice::kVec;
  };
  template <class Gate, bool kComplex>
  struct Backward : WalkFamily<Backward<Gate, kComplex>, HgruBackwardParams> {
    template <int kPack, WalkUse kUse>
    using Op = HgruBackward<Data, Gate, kComplex, kPack, kUse>;
    static constexpr int kVec = HgruChoice::kVec;
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
cudaError_t HgruFamily<Data>::forward_plan(const HgruParams& p, ScanPlan* plan) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool kComplex>() {
    return Choice::template Forward<Gate, kComplex>::plan(p, p.time_split, {&p.c, &p.f, &p.h},
                                                          plan);
  });
}

template <class Data>
cudaError_t HgruFamily<Data>::forward(const HgruParams& p, cudaStream_t stream) {
  using Choice = HgruChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool kComplex>() {
    return Choice::template Forward<Gate, kComplex>::launch(p, p.plan, p.workspace,
                                                            {&p.c, &p.f, &p.h}, stream);
  });
}

template <class Data>
cudaError_t HgruFamily<Data>::backward_plan(const HgruBackwardParams& p, ScanPlan* plan) {
  using Choice = HgruChoice<Data>;
  const HgruParams& f = p.forward;
  return Choice::choose(f, [&]<class Gate, bool kComplex>() {
    return Choice::template Backward<Gate, kComplex>::plan(
        p, f.time_split, {&f.c, &f.f, &f.h, &p.dh, &p.dc, &p.df}, plan);
  });
}

template <class Data>
cudaError_t HgruFamily<Data>::backward(const HgruBackwardParams& p, cudaStream_t stream) {
  using Choice = HgruChoice<Data>;
  const HgruParams& f = p.forward;
  return Choice::choose(f, [&]<class Gate, bool kComplex>() {
    return Choice::template Backward<Gate, kComplex>::launch(
        p, f.plan, f.workspace, {&f.c, &f.f, &f.h, &p.dh, &p.dc, &p.df}, stream);
  });
}

}  // namespace tidegate::kernels::scan
