#pragma once

// RWKV-4's token mixing as Ops of the walk, which bring runs of their own.

#include "kernels/scan/cuda/wkv4_backward.cuh"
#include "kernels/scan/cuda/wkv4_forward.cuh"

namespace tidegate::kernels::scan {

/// Run<Op> (run.cuh) of these Ops is their own.
template <class Op>
  requires(Op::kOwnsRun)
struct Run<Op> : Op::Run {};

}  // namespace tidegate::kernels::scan
