#pragma once

#include "kernels/scan/cuda/launch.cuh"
#include "kernels/scan/cuda/linear_scan.cuh"
#include "kernels/scan/cuda/linear_scan_family.h"

namespace tidegate::kernels::scan {

/// Which kernels a data type has, and which of them params ask for.
template <class Data>
struct LinearScanChoice {
  using Number = typename Register<Data>::type;
  // Four bytes a thread and row (eight of complex64): a warp's row of a tile is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate>
  struct Forward : WalkFamily<Forward<Gate>, LinearScanParams> {
    template <int kPack, WalkUse kUse>
    using Op = LinearScanForward<Data, Gate, kPack, kUse>;
    static constexpr int kVec = LinearScanChoice::kVec;
  };
  template <class Gate, bool kConstant>
  struct Backward : WalkFamily<Backward<Gate, kConstant>, LinearScanBackwardParams> {
    template <int kPack, WalkUse kUse>
    using Op = LinearScanBackward<Data, Gate, kConstant, kPack, kUse>;
    static constexpr int kVec = LinearScanChoice::kVec;
  };

  static bool gate_is_data(const LinearScanParams& p) {
    return element_size(p.a.dtype) == int64_t{sizeof(Data)};
  }

  /// Calls `visit` with the gate's type and whether it is constant, as template arguments of a
  /// lambda.
  template <class Visit>
  static cudaError_t choose(const LinearScanParams& p, Visit visit) {
    if (gate_is_data(p)) {
      return p.a_is_constant ? visit.template operator()<Data, true>()
                             : visit.template operator()<Data, false>();
    }
    return p.a_is_constant ? visit.template operator()<Number, true>()
                           : visit.template operator()<Number, false>();
  }
};

template <class Data>
cudaError_t LinearScanFamily<Data>::forward_plan(const LinearScanParams& p, ScanPlan* plan) {
  using Choice = LinearScanChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool>() {
    return Choice::template Forward<Gate>::plan(p, p.time_split, {&p.x, &p.a, &p.h}, plan);
  });
}

template <class Data>
cudaError_t LinearScanFamily<Data>::forward(const LinearScanParams& p, cudaStream_t stream) {
  using Choice = LinearScanChoice<Data>;
  return Choice::choose(p, [&]<class Gate, bool>() {
    return Choice::template Forward<Gate>::launch(p, p.plan, p.workspace, {&p.x, &p.a, &p.h},
                                                  stream);
  });
}

template <class Data>
cudaError_t LinearScanFamily<Data>::backward_plan(const LinearScanBackwardParams& p,
                                                  ScanPlan* plan) {
  using Choice = LinearScanChoice<Data>;
  const LinearScanParams& f = p.forward;
  return Choice::choose(f, [&]<class Gate, bool kConstant>() {
    return Choice::template Backward<Gate, kConstant>::plan(
        p, f.time_split, {&f.a, &f.h, &p.dh, &p.dx, &p.da}, plan);
  });
}

template <class Data>
cudaError_t LinearScanFamily<Data>::backward(const LinearScanBackwardParams& p,
                                             cudaStream_t stream) {
  using Choice = LinearScanChoice<Data>;
  const LinearScanParams& f = p.forward;
  return Choice::choose(f, [&]<class Gate, bool kConstant>() {
    return Choice::template Backward<Gate, kConstant>::launch(
        p, f.plan, f.workspace, {&f.a, &f.h, &p.dh, &p.dx, &p.da}, stream);
  });
}

}  // namespace tidegate::kernels::scan
