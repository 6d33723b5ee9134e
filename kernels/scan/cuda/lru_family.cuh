#pragma once

#include "kernels/scan/cuda/launch.cuh"
#include "kernels/scan/cuda/lru.cuh"
#include "kernels/scan/cuda/lru_family.h"

namespace tidegate::kernels::scan {

/// Which kernels a data type has, and which of them params ask for.
template <class Data>
struct LruChoice {
  // Four bytes a thread and row: a warp's row of a tile is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <bool kComplex>
  struct Forward : WalkFamily<Forward<kComplex>, LruParams> {
    template <int kPack, WalkUse kUse>
    using Op = LruForward<Data, kComplex, kPack, kUse>;
    static constexpr int kVec = LruChoice::kVec;
  };
  template <bool kComplex>
  struct Backward : WalkFamily<Backward<kComplex>, LruBackwardParams> {
    template <int kPack, WalkUse kUse>
    using Op = LruBackward<Data, kComplex, kPack, kUse>;
    static constexpr int kVec = LruChoice::kVec;
  };

  /// Calls `visit` with whether the recurrence is complex, as a template argument of a lambda.
  template <class Visit>
  static cudaError_t choose(const LruParams& p, Visit visit) {
    return p.theta_log != nullptr ? visit.template operator()<true>()
                                  : visit.template operator()<false>();
  }
};

template <class Data>
cudaError_t LruFamily<Data>::forward_plan(const LruParams& p, ScanPlan* plan) {
  using Choice = LruChoice<Data>;
  return Choice::choose(p, [&]<bool kComplex>() {
    return Choice::template Forward<kComplex>::plan(p, p.time_split, {&p.x, &p.h}, plan);
  });
}

template <class Data>
cudaError_t LruFamily<Data>::forward(const LruParams& p, cudaStream_t stream) {
  using Choice = LruChoice<Data>;
  return Choice::choose(p, [&]<bool kComplex>() {
    return Choice::template Forward<kComplex>::launch(p, p.plan, p.workspace, {&p.x, &p.h}, stream);
  });
}

template <class Data>
cudaError_t LruFamily<Data>::backward_plan(const LruBackwardParams& p, ScanPlan* plan) {
  using Choice = LruChoice<Data>;
  const LruParams& f = p.forward;
  return Choice::choose(f, [&]<bool kComplex>() {
    return Choice::template Backward<kComplex>::plan(p, f.time_split, {&f.x, &f.h, &p.dh, &p.dx},
                                                     plan);
  });
}

template <class Data>
cudaError_t LruFamily<Data>::backward(const LruBackwardParams& p, cudaStream_t stream) {
  using Choice = LruChoice<Data>;
  const LruParams& f = p.forward;
  return Choice::choose(f, [&]<bool kComplex>() {
    return Choice::template Backward<kComplex>::launch(p, f.plan, f.workspace,
                                                       {&f.x, &f.h, &p.dh, &p.dx}, stream);
  });
}

}  // namespace tidegate::kernels::scan
