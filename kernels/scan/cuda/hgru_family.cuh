#pragma once

#include "kernels/scan/cuda/hgru.cuh"
#include "kernels/scan/cuda/launch.cuh"

namespace tidegate::kernels {

/// All of hgru for one data type. Defined here, instantiated in one unit a type (hgru_*.cu).
template <class Data>
struct HgruFamily {
  using Real = typename Register<Data>::type;
  // Four bytes a thread and row: a warp's row of a tile is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate, bool kComplex>
  using Forward =
      WalkFamily<HgruForward<Data, Gate, kComplex, kVec>, HgruForward<Data, Gate, kComplex, 1>>;
  template <class Gate, bool kComplex>
  using Backward =
      WalkFamily<HgruBackward<Data, Gate, kComplex, kVec>, HgruBackward<Data, Gate, kComplex, 1>>;

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

  static cudaError_t forward_plan(const HgruParams& p, ScanPlan* plan) {
    return choose(p, [&]<class Gate, bool kComplex>() {
      return Forward<Gate, kComplex>::plan(p, p.time_split, {&p.c, &p.f, &p.h}, plan);
    });
  }
  static cudaError_t forward(const HgruParams& p, cudaStream_t stream) {
    return choose(p, [&]<class Gate, bool kComplex>() {
      return Forward<Gate, kComplex>::launch(p, p.plan, p.workspace, {&p.c, &p.f, &p.h}, stream);
    });
  }
  static cudaError_t backward_plan(const HgruBackwardParams& p, ScanPlan* plan) {
    const HgruParams& f = p.forward;
    return choose(f, [&]<class Gate, bool kComplex>() {
      return Backward<Gate, kComplex>::plan(p, f.time_split,
                                            {&f.c, &f.f, &f.h, &p.dh, &p.dc, &p.df}, plan);
    });
  }
  static cudaError_t backward(const HgruBackwardParams& p, cudaStream_t stream) {
    const HgruParams& f = p.forward;
    return choose(f, [&]<class Gate, bool kComplex>() {
      return Backward<Gate, kComplex>::launch(p, f.plan, f.workspace,
                                              {&f.c, &f.f, &f.h, &p.dh, &p.dc, &p.df}, stream);
    });
  }
};

}  // namespace tidegate::kernels
