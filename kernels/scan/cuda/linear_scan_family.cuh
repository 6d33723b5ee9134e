#pragma once

#include "kernels/scan/cuda/launch.cuh"
#include "kernels/scan/cuda/linear_scan.cuh"

namespace tidegate::kernels {

/// All of linear_scan for one data type. Defined here, instantiated in one unit a type
/// (linear_scan_*.cu).
template <class Data>
struct LinearScanFamily {
  using Number = typename Register<Data>::type;
  // Four bytes a thread and row: a warp's row of a tile is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  template <class Gate>
  using Forward = WalkFamily<LinearScanForward<Data, Gate, kVec>, LinearScanForward<Data, Gate, 1>>;
  template <class Gate, bool kConstant>
  using Backward = WalkFamily<LinearScanBackward<Data, Gate, kConstant, kVec>,
                              LinearScanBackward<Data, Gate, kConstant, 1>>;

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

  static cudaError_t forward_plan(const LinearScanParams& p, ScanPlan* plan) {
    return choose(p, [&]<class Gate, bool>() {
      return Forward<Gate>::plan(p, p.time_split, {&p.x, &p.a, &p.h}, plan);
    });
  }
  static cudaError_t forward(const LinearScanParams& p, cudaStream_t stream) {
    return choose(p, [&]<class Gate, bool>() {
      return Forward<Gate>::launch(p, p.plan, p.workspace, {&p.x, &p.a, &p.h}, stream);
    });
  }
  static cudaError_t backward_plan(const LinearScanBackwardParams& p, ScanPlan* plan) {
    const LinearScanParams& f = p.forward;
    return choose(f, [&]<class Gate, bool kConstant>() {
      return Backward<Gate, kConstant>::plan(p, f.time_split, {&f.a, &f.h, &p.dh, &p.dx, &p.da},
                                             plan);
    });
  }
  static cudaError_t backward(const LinearScanBackwardParams& p, cudaStream_t stream) {
    const LinearScanParams& f = p.forward;
    return choose(f, [&]<class Gate, bool kConstant>() {
      return Backward<Gate, kConstant>::launch(p, f.plan, f.workspace,
                                               {&f.a, &f.h, &p.dh, &p.dx, &p.da}, stream);
    });
  }
};

}  // namespace tidegate::kernels
