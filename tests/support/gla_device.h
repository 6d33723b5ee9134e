#pragma once

// Runs problems of gated linear attention on a CUDA device.

#include "kernels/gla/gla_cuda.h"
#include "support/device_mirror.h"
#include "support/gla_problem.h"

namespace tidegate::testing {

/// A problem's buffers on the device, and params that point there.
class GlaOnDevice {
 public:
  GlaOnDevice(GlaProblem& problem, kernels::gla::GlaPath path) : problem_(problem), path_(path) {
    for (TypedSeries* tensor :
         {&problem.q, &problem.k, &problem.v, &problem.gate, &problem.gamma, &problem.o,
          &problem.h0, &problem.h_final, &problem.d_o, &problem.dh_final, &problem.dq, &problem.dk,
          &problem.dv, &problem.dgate, &problem.dgamma_partial, &problem.dh0}) {
      mirror_.add(*tensor);
    }
    mirror_.add(problem.forward_params().layout);
  }

  kernels::gla::GlaParams forward_params() {
    kernels::gla::GlaParams params = problem_.forward_params();
    move(params);
    return params;
  }

  void forward(kernels::gla::GlaParams params) {
    plan_and_launch(
        &params.plan, &params.workspace,
        [&](auto* plan) { return kernels::gla::gla_forward_plan(params, plan); },
        [&] { return kernels::gla::gla_forward(params, nullptr); });
  }

  void backward() {
    kernels::gla::GlaBackwardParams params = problem_.backward_params();
    move(params.forward);
    for (kernels::HeadSeries* series :
         {&params.d_o, &params.dq, &params.dk, &params.dv, &params.dgate}) {
      mirror_.translate(series->data);
    }
    mirror_.translate(params.dh_final);
    mirror_.translate(params.dh0);
    mirror_.translate(params.dgamma_partial);
    plan_and_launch(
        &params.forward.plan, &params.forward.workspace,
        [&](auto* plan) {
          const cudaError_t status = kernels::gla::gla_backward_plan(params, plan);
          // See GlaProblem::take_partials.
          EXPECT_EQ(plan->partials, problem_.dgamma_partial.tokens());
          return status;
        },
        [&] { return kernels::gla::gla_backward(params, nullptr); });
  }

  /// Brings all results back into the problem.
  void download() { mirror_.download(); }

 private:
  void move(kernels::gla::GlaParams& params) {
    for (kernels::HeadSeries* series : {&params.q, &params.k, &params.v, &params.gate, &params.o}) {
      mirror_.translate(series->data);
    }
    mirror_.translate(params.gamma);
    mirror_.translate(params.h0);
    mirror_.translate(params.h_final);
    mirror_.translate(params.layout.offsets);
    params.path = path_;
  }

  GlaProblem& problem_;
  kernels::gla::GlaPath path_;
  DeviceMirror mirror_;
};

}  // namespace tidegate::testing
