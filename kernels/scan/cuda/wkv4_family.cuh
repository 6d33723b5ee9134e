#pragma once

#include "kernels/scan/cuda/launch.cuh"
#include "kernels/scan/cuda/wkv4.cuh"
#include "kernels/scan/cuda/wkv4_family.h"

namespace tidegate::kernels::scan {

template <class Data>
struct Wkv4Choice {
  // Four bytes a thread and row: a warp's row of a tile is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  struct Forward : WalkFamily<Forward, Wkv4Params> {
    template <int kPack, WalkUse kUse>
    using Op = Wkv4Forward<Data, kPack, kUse>;
    static constexpr int kVec = Wkv4Choice::kVec;
  };
  struct Backward : WalkFamily<Backward, Wkv4BackwardParams> {
    template <int kPack, WalkUse kUse>
    using Op = Wkv4Backward<Data, kPack, kUse>;
    static constexpr int kVec = Wkv4Choice::kVec;
  };
};

template <class Data>
cudaError_t Wkv4Family<Data>::forward_plan(const Wkv4Params& p, ScanPlan* plan) {
  return Wkv4Choice<Data>::Forward::plan(p, p.time_split, {&p.k, &p.v, &p.o}, plan);
}

template <class Data>
cudaError_t Wkv4Family<Data>::forward(const Wkv4Params& p, cudaStream_t stream) {
  return Wkv4Choice<Data>::Forward::launch(p, p.plan, p.workspace, {&p.k, &p.v, &p.o}, stream);
}

template <class Data>
cudaError_t Wkv4Family<Data>::backward_plan(const Wkv4BackwardParams& p, ScanPlan* plan) {
  const Wkv4Params& f = p.forward;
  return Wkv4Choice<Data>::Backward::plan(p, f.time_split, {&f.k, &f.v, &p.grad_o, &p.dk, &p.dv},
                                          plan);
}

template <class Data>
cudaError_t Wkv4Family<Data>::backward(const Wkv4BackwardParams& p, cudaStream_t stream) {
  const Wkv4Params& f = p.forward;
  return Wkv4Choice<Data>::Backward::launch(p, f.plan, f.workspace,
                                            {&f.k, &f.v, &p.grad_o, &p.dk, &p.dv}, stream);
}

}  // namespace tidegate::kernels::scan
