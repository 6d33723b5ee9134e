#pragma once

// Runs problems of gated linear attention on a CUDA device, and what the tests of its kernels
// share.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

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

// ---- What tests of several paths share ----

enum class GlaForm : uint8_t { kDecays, kDecayAHead, kLogits };
constexpr GlaForm kGlaForms[] = {GlaForm::kDecays, GlaForm::kDecayAHead, GlaForm::kLogits};

using GlaCudaParam = std::tuple<DType, bool, GlaForm>;  // bool: gates in the state's type

inline std::string gla_cuda_name(const ::testing::TestParamInfo<GlaCudaParam>& info) {
  const char* forms[] = {"decays", "decay_a_head", "logits"};
  return std::string(dtype_name(std::get<0>(info.param))) +
         (std::get<1>(info.param) ? "_wide_gates_" : "_") +
         forms[static_cast<int>(std::get<2>(info.param))];
}

/// Tests of one dtype and form.
class GlaCuda : public ::testing::TestWithParam<GlaCudaParam> {
 protected:
  void SetUp() override {
    if (no_device()) GTEST_SKIP() << "no CUDA device";
    const auto& [dtype, wide_gates, form] = GetParam();
    shape_.dtype = dtype;
    shape_.gate = wide_gates ? state_dtype(dtype) : dtype;
    shape_.gate_per_head = form == GlaForm::kDecayAHead;
    shape_.gate_kind = form == GlaForm::kLogits ? GateKind::kLogit : GateKind::kLogDecay;
  }

  /// The options that go with any size, by `i`.
  GlaShape vary(uint32_t i) const {
    constexpr InputActivation kActivations[] = {InputActivation::kNone, InputActivation::kSilu,
                                                InputActivation::kSigmoid};
    GlaShape shape = shape_;
    shape.seed = i + 1;
    shape.reverse = i % 2 == 1;
    shape.has_states = i % 5 != 4;
    shape.has_gamma = i % 3 != 2;
    shape.offsets_are_int64 = i % 2 == 0;
    shape.gates = static_cast<Gates>(i / 2 % 5);
    shape.q_activation = kActivations[i % 3];
    shape.v_activation = kActivations[i / 3 % 3];
    return shape;
  }

  /// Both passes, twice for their bits.
  static void check_both_passes(const GlaShape& shape, kernels::gla::GlaPath path) {
    SCOPED_TRACE(shape.full_name());
    GlaProblem problem(shape), again(shape);
    for (GlaProblem* p : {&problem, &again}) {
      kernels::gla::GlaBackwardParams params = p->backward_params();
      params.forward.path = path;
      check_cuda(kernels::gla::gla_backward_plan(params, &params.forward.plan), "plan");
      p->take_partials(params.forward.plan.partials);
      GlaOnDevice device(*p, path);
      device.forward(device.forward_params());
      device.backward();
      device.download();
    }
    problem.check();
    for (size_t i = 0; i < problem.outputs().size(); ++i) {
      EXPECT_TRUE(problem.outputs()[i]->surroundings_untouched());
      EXPECT_TRUE(problem.outputs()[i]->same_bits(*again.outputs()[i])) << "output " << i;
    }
  }

  /// A NaN or infinity at token t reaches no output of an earlier token, in whatever place of a
  /// sub-chunk t is; and what it does not reach is as it would be without it.
  void check_that_nan_reaches_later_tokens_only(kernels::gla::GlaPath path) const {
    for (const int64_t step : {0, 3, 15, 16, 21, 31, 32, 39}) {
      for (const int in : {0, 1, 2, 3}) {
        for (const double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
          GlaShape shape = shape_;
          shape.batch = shape.heads = 1;
          shape.time = 40;
          shape.key_dim = shape.value_dim = 16;
          if (in == 1 && shape.logits()) continue;  // there is no k
          const int column = shape.gate_per_head && in == 3 ? 0 : 4;
          GlaProblem clean(shape), problem(shape);
          TypedSeries* inputs[] = {&problem.q, &problem.k, &problem.v, &problem.gate};
          inputs[in]->set(step, column, in == 3 ? NAN : poison);
          for (GlaProblem* p : {&clean, &problem}) {
            GlaOnDevice device(*p, path);
            device.forward(device.forward_params());
            device.download();
          }
          for (int64_t t = 0; t < shape.time; ++t) {
            for (int64_t j = 0; j < shape.value_dim; ++j) {
              // A query reaches its own token; v its column; keys and gates all columns.
              const bool hit = in == 0 ? t == step : t >= step && (in != 2 || j == 4);
              const double got = problem.o.get(t, j).real();
              EXPECT_EQ(std::isfinite(got), !hit) << in << " at " << step << ": " << t << ", " << j;
              if (!hit) {
                EXPECT_EQ(got, clean.o.get(t, j).real());
              }
            }
          }
        }
      }
    }
  }

  GlaShape shape_;
};

}  // namespace tidegate::testing
