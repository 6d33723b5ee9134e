#pragma once

// Launches what params describe, on the device of the tensors: plan, scratch memory, partial sums,
// stream. This is the only place that knows how a kernel family is driven. Where an op
// itself does as the plan says (gated_rnn's products), it reads plan(): the kernels decide that,
// too.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/common/parallel_for.h"

#ifdef TIDEGATE_WITH_CUDA
#include <cuda_runtime_api.h>
#define TIDEGATE_CUDA_KERNEL(function) function
#else
#define TIDEGATE_CUDA_KERNEL(function) nullptr
#endif

namespace tidegate::ops {

#ifdef TIDEGATE_WITH_CUDA
using CudaStatus = cudaError_t;
using CudaStream = cudaStream_t;
#else
using CudaStatus = int;
using CudaStream = void*;
#endif

/// The part of params that describes the recurrence (members layout, channels, plan, workspace):
/// they themselves, or their member `forward`.
template <class Params>
auto& forward_of(Params& params) {
  if constexpr (requires { params.forward; }) {
    return params.forward;
  } else {
    return params;
  }
}

/// The functions of one direction of a kernel family.
template <class Params>
struct KernelSet {
  using Forward = std::remove_reference_t<decltype(forward_of(std::declval<Params&>()))>;
  using Plan = decltype(Forward::plan);

  const char* (*unsupported)(const Forward&);
  Plan (*plan_cpu)(const Forward&);
  void (*run_cpu)(const Params&, const kernels::ParallelFor&);
  CudaStatus (*plan_cuda)(const Params&, Plan*);
  CudaStatus (*run_cuda)(const Params&, CudaStream);
};

/// The KernelSet of params of this type: src/ops/kernel_sets.h has one for each.
struct NoKernelSet {};
template <class Params>
inline constexpr NoKernelSet kKernelSet = {};

/// torch's thread pool, for a CPU kernel to run on.
kernels::ParallelFor torch_threads();

CudaStream current_stream(at::Device device);
void check_launch(const char* op, const char* what, CudaStatus status);

/// Uninitialised memory on the device of `like`; undefined when it is none at all.
at::Tensor workspace(int64_t bytes, const at::Tensor& like);
/// [rows, columns], uninitialised, on the device of `like`.
at::Tensor matrix(int64_t rows, int64_t columns, at::ScalarType dtype, const at::Tensor& like);

/// The sums over the rows of up to three matrices of partial sums of one shape and type; undefined
/// ones stay undefined. Their order depends on the shape alone. `op` is named in errors.
std::vector<at::Tensor> sum_rows(const char* op, const std::vector<at::Tensor>& partials);

/// One run of a kernel: construct it with complete params, take the partial sums that the plan asks
/// for, then call run(). Only the partial sums' pointers may follow: the plan reads the alignment
/// of every other tensor, outputs included, and the launch must see the same.
template <class Params>
class Launch {
 public:
  Launch(const char* op, Params* params, const at::Tensor& like)
      : op_(op),
        params_(params),
        like_(like),
        empty_(forward().channels == 0 || forward().layout.sequences == 0),
        guard_(like.device()) {
    if (const char* why = kKernels.unsupported(forward())) {
      TORCH_CHECK(false, op_, ": ", why);
    }
    if (empty_) {
      return;
    }
    if (like_.is_cuda()) {
      check_launch(op_, "plan", kKernels.plan_cuda(*params_, &forward().plan));
    } else {
      forward().plan = kKernels.plan_cpu(forward());
    }
    workspace_ = workspace(forward().plan.workspace_bytes, like_);
    forward().workspace = workspace_.defined() ? workspace_.data_ptr() : nullptr;
  }

  /// [P, channels] of `dtype`, undefined unless `wanted`: the kernel writes all P rows, and the op
  /// adds them up, in an order that does not depend on the launch. P is `plan.partials`, a count of
  /// the family's own: the warp groups of a scan, the chunks of gated linear attention on tensor
  /// cores, the sequences for gated_rnn, on plain paths and on the CPU.
  at::Tensor partial_sums(at::ScalarType dtype, bool wanted = true) const {
    return wanted ? matrix(forward().plan.partials, forward().channels, dtype, like_)
                  : at::Tensor();
  }

  /// What the kernels have decided; default where there is no element at all.
  const typename KernelSet<Params>::Plan& plan() const { return forward().plan; }

  void run() {
    if (empty_) {
      return;
    }
    if (like_.is_cuda()) {
      check_launch(op_, "launch", kKernels.run_cuda(*params_, current_stream(like_.device())));
    } else {
      kKernels.run_cpu(*params_, torch_threads());
    }
  }

 private:
  auto& forward() const { return forward_of(*params_); }

  static constexpr KernelSet<Params> kKernels = kKernelSet<Params>;

  const char* op_;
  Params* params_;
  const at::Tensor& like_;
  /// No element at all, so that nothing is planned or launched. T = 0 is not empty, since states
  /// still have to be passed on.
  const bool empty_;
  c10::DeviceGuard guard_;
  at::Tensor workspace_;
};

}  // namespace tidegate::ops
