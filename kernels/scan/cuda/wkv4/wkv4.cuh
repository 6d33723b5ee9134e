#pragma once

// RWKV-4's token mixing: its Ops' own chunks and carry, and which of their kernels params ask for.

#include <array>

#include "kernels/scan/cuda/engine/launch.cuh"
#include "kernels/scan/cuda/op_kernels.h"
#include "kernels/scan/cuda/wkv4/wkv4_backward.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_forward.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_multi_block.cuh"

namespace tidegate::kernels::scan {

/// WarpChunk<Op> (warp_chunk.cuh) of these Ops is their own.
template <class Op>
  requires(Op::kHasOwnChunk)
struct WarpChunk<Op> : Op::Chunk {};

template <class Data>
struct Wkv4Choice {
  // Four bytes a thread and row: a warp's row of an input is 128 bytes.
  static constexpr int kVec = sizeof(Data) == 2 ? 2 : 1;

  struct Forward : ScanRecurrence<Forward, Wkv4Params> {
    template <int kPack, Regime kRegime>
    using Op = Wkv4Forward<Data, kPack, kRegime>;
    static constexpr int kVec = Wkv4Choice::kVec;
    static auto tensors(const Wkv4Params& p) { return std::array{&p.k, &p.v, &p.o}; }
  };
  struct Backward : ScanRecurrence<Backward, Wkv4BackwardParams> {
    template <int kPack, Regime kRegime>
    using Op = Wkv4Backward<Data, kPack, with_one_single_block(kRegime)>;
    static constexpr int kVec = Wkv4Choice::kVec;
    static auto tensors(const Wkv4BackwardParams& p) {
      return std::array{&p.forward.k, &p.forward.v, &p.grad_o, &p.dk, &p.dv};
    }
  };
};

template <class Data>
cudaError_t Wkv4Kernels<Data>::forward_plan(const Wkv4Params& p, ScanPlan* plan) {
  return Wkv4Choice<Data>::Forward::plan(p, plan);
}

template <class Data>
cudaError_t Wkv4Kernels<Data>::forward(const Wkv4Params& p, cudaStream_t stream) {
  return Wkv4Choice<Data>::Forward::launch(p, stream);
}

template <class Data>
cudaError_t Wkv4Kernels<Data>::backward_plan(const Wkv4BackwardParams& p, ScanPlan* plan) {
  return Wkv4Choice<Data>::Backward::plan(p, plan);
}

template <class Data>
cudaError_t Wkv4Kernels<Data>::backward(const Wkv4BackwardParams& p, cudaStream_t stream) {
  return Wkv4Choice<Data>::Backward::launch(p, stream);
}

}  // namespace tidegate::kernels::scan
