// Gated linear attention on the CPU, on raw pointers, in each instruction set that this machine
// runs.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/cpu_isa.h"
#include "kernels/gla/gla.h"
#include "support/gla_problem.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;

void run(GlaProblem& problem, int threads) {
  const auto parallel = thread_parallel(threads);
  kernels::gla::gla_forward_cpu(problem.forward_params(), parallel);
  kernels::gla::gla_backward_cpu(problem.backward_params(), parallel);
}

/// Runs with the instruction set of the test's parameter.
class GlaCpu : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    before_ = kernels::active_cpu_isa();
    if (!kernels::use_cpu_isa(GetParam())) GTEST_SKIP() << "this machine cannot run it";
  }
  void TearDown() override { kernels::use_cpu_isa(before_); }

  void expect_right(const GlaShape& shape) {
    SCOPED_TRACE(shape.full_name());
    GlaProblem problem(shape);
    run(problem, 1);
    problem.check();
    for (TypedSeries* output : problem.outputs()) EXPECT_TRUE(output->surroundings_untouched());
  }

 private:
  CpuIsa before_ = CpuIsa::kGeneric;
};

INSTANTIATE_TEST_SUITE_P(Isa, GlaCpu,
                         ::testing::Values(CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& isa) { return kernels::cpu_isa_name(isa.param); });

struct DTypes {
  DType data;
  DType gate;
};
const DTypes kDTypes[] = {
    {DType::kFloat32, DType::kFloat32},   {DType::kFloat64, DType::kFloat64},
    {DType::kBFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat32},
    {DType::kFloat16, DType::kFloat16},   {DType::kFloat16, DType::kFloat32},
};
const InputActivation kActivations[] = {InputActivation::kNone, InputActivation::kSilu,
                                        InputActivation::kSigmoid};

/// Shapes of the three kinds of gates, their other options by `count`.
std::vector<GlaShape> kinds(const DTypes& dtypes, int64_t count) {
  std::vector<GlaShape> all(3);
  for (GlaShape& shape : all) {
    shape.dtype = dtypes.data;
    shape.gate = dtypes.gate;
    shape.reverse = count % 2 == 1;
    shape.has_states = count % 5 != 0;
    shape.has_gamma = count % 7 != 0;
    shape.q_activation = kActivations[count % 3];
    shape.v_activation = kActivations[count / 3 % 3];
  }
  all[1].gate_per_head = true;
  all[2].gate_kind = GateKind::kLogit;
  return all;
}

TEST_P(GlaCpu, AllLengths) {
  int64_t count = 0;
  for (int64_t time : {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097}) {
    for (const DTypes& dtypes : kDTypes) {
      for (GlaShape shape : kinds(dtypes, count++)) {
        shape.time = time;
        if (time >= 1000) {
          shape.batch = shape.heads = 1;
          shape.key_dim = 9;
          shape.value_dim = 4;
        }
        expect_right(shape);
      }
    }
  }
}

// Vector tails, several tiles of columns, rows that begin nowhere in particular.
TEST_P(GlaCpu, AnySizeAndStride) {
  int64_t count = 0;
  for (int64_t key_dim : {1, 3, 16, 48, 64, 130}) {
    for (int64_t value_dim : {1, 5, 16, 32, 65, 144}) {
      for (GlaShape shape : kinds(kDTypes[count % 6], count)) {
        shape.batch = 1;
        shape.time = 18;
        shape.key_dim = key_dim;
        shape.value_dim = value_dim;
        shape.gap = count % 3;
        shape.shift = count % 2;
        expect_right(shape);
      }
      ++count;
    }
  }
  GlaShape largest;
  largest.batch = 1;
  largest.heads = 1;
  largest.key_dim = largest.value_dim = kernels::gla::kMaxHeadDim;
  expect_right(largest);
}

TEST_P(GlaCpu, GatesAtTheExtremes) {
  for (Gates gates : {Gates::kRandom, Gates::kOpen, Gates::kShut, Gates::kAlternating,
                      Gates::kNearOne, Gates::kZero}) {
    for (const DTypes& dtypes : kDTypes) {
      for (bool has_gamma : {false, true}) {
        for (GlaShape shape : kinds(dtypes, 1)) {
          shape.gates = gates;
          shape.time = 70;
          shape.has_gamma = has_gamma;
          expect_right(shape);
        }
      }
    }
  }
}

TEST_P(GlaCpu, PackedSequencesStartAfresh) {
  int64_t count = 0;
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 0, 5, 5, 5, 69, 70, 133, 133}, {0}, {0, 133}, {0, 0, 0, 0}}) {
    for (const DTypes& dtypes : kDTypes) {
      for (GlaShape shape : kinds(dtypes, count)) {
        shape.batch = 1;
        shape.time = offsets.back();
        shape.offsets = offsets;
        shape.offsets_are_int64 = count % 2 == 0;
        expect_right(shape);
      }
      ++count;
    }
  }
}

// Longer than what the backward pass keeps the states of.
TEST_P(GlaCpu, SegmentsOfLongSequences) {
  for (int64_t time : {1023, 1024, 1025, 2100}) {
    GlaShape shape;
    shape.batch = shape.heads = 1;
    shape.time = time;
    shape.key_dim = 20;
    shape.value_dim = 12;
    shape.gates = Gates::kNearOne;
    expect_right(shape);
    shape.gate_kind = GateKind::kLogit;
    shape.reverse = true;
    expect_right(shape);
  }
}

TEST_P(GlaCpu, ThreadsDoNotChangeABit) {
  for (const DTypes& dtypes : kDTypes) {
    for (GlaShape shape : kinds(dtypes, 1)) {
      shape.time = 70;
      shape.key_dim = 73;
      shape.value_dim = 150;
      GlaProblem one(shape);
      run(one, 1);
      GlaProblem many(shape);
      for (int threads : {2, 3, 64}) {
        for (TypedSeries* output : many.outputs()) output->poison();
        run(many, threads);
        for (size_t i = 0; i < one.outputs().size(); ++i) {
          EXPECT_TRUE(one.outputs()[i]->same_bits(*many.outputs()[i])) << shape.full_name();
        }
      }
    }
  }
}

// A NaN at token t reaches no output of an earlier token, in whatever place of a sub-chunk t is.
TEST_P(GlaCpu, NanReachesLaterTokensOnly) {
  for (int64_t step : {0, 3, 15, 16, 21, 31, 32, 39}) {
    for (int in : {0, 1, 2, 3}) {
      for (double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
        GlaShape shape;
        shape.batch = shape.heads = 1;
        shape.time = 40;
        GlaProblem clean(shape), problem(shape);
        TypedSeries* inputs[] = {&problem.q, &problem.k, &problem.v, &problem.gate};
        inputs[in]->set(step, 4, in == 3 ? NAN : poison);
        kernels::gla::gla_forward_cpu(clean.forward_params(), thread_parallel(1));
        kernels::gla::gla_forward_cpu(problem.forward_params(), thread_parallel(1));
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

TEST_P(GlaCpu, StepUpdatesTheStateInPlace) {
  for (const DTypes& dtypes : kDTypes) {
    for (GlaShape shape : kinds(dtypes, 1)) {
      shape.time = 1;
      shape.batch = 3;
      shape.has_states = true;
      GlaProblem apart(shape), in_place(shape);
      auto params = in_place.forward_params();
      params.h_final = in_place.h0.at(0, 0);
      kernels::gla::gla_forward_cpu(apart.forward_params(), thread_parallel(1));
      kernels::gla::gla_forward_cpu(params, thread_parallel(2));
      EXPECT_TRUE(in_place.h0.same_bits(apart.h_final));
      EXPECT_TRUE(in_place.o.same_bits(apart.o));
    }
  }
}

TEST_P(GlaCpu, WithoutAFinalState) {
  for (int64_t time : {0, 1, 2, 40}) {
    GlaShape shape;
    shape.time = time;
    GlaProblem with(shape), without(shape);
    auto params = without.forward_params();
    params.h_final = nullptr;
    kernels::gla::gla_forward_cpu(with.forward_params(), thread_parallel(1));
    kernels::gla::gla_forward_cpu(params, thread_parallel(1));
    EXPECT_TRUE(with.o.same_bits(without.o));
  }
}

TEST_P(GlaCpu, LeavesTheThreadsArithmeticAsItWas) {
  GlaProblem problem{GlaShape{}};
  run(problem, 1);
  volatile float smallest_normal = std::numeric_limits<float>::min();
  EXPECT_GT(smallest_normal / 2, 0);
}

TEST(GlaCpuPlan, OnePartialSumASequence) {
  GlaShape shape;
  shape.batch = 1;
  shape.time = 10;
  shape.offsets = {0, 4, 4, 10};
  GlaProblem problem(shape);
  const auto plan = kernels::gla::gla_plan_cpu(problem.forward_params());
  EXPECT_EQ(plan.partials, 3);
  EXPECT_EQ(plan.workspace_bytes, 0);
}

TEST(GlaUnsupported, SaysWhy) {
  GlaProblem problem{GlaShape{}};
  const auto why = [&](auto change) {
    auto params = problem.forward_params();
    change(params);
    const char* text = kernels::gla::gla_unsupported(params);
    return std::string(text == nullptr ? "" : text);
  };
  using kernels::gla::GlaParams;
  EXPECT_EQ(why([](GlaParams&) {}), "");
  EXPECT_EQ(why([](GlaParams& p) { p.value_dim = 513; }),
            "K and V must be from 1 to 512, got 19 and 513");
  EXPECT_EQ(why([](GlaParams& p) { p.key_dim = p.channels = 0; }),
            "K and V must be from 1 to 512, got 0 and 21");
  EXPECT_EQ(why([](GlaParams& p) { p.v.dtype = DType::kBFloat16; }),
            "v must have q's dtype, float32, got bfloat16");
  EXPECT_EQ(why([](GlaParams& p) { p.gate.dtype = DType::kFloat64; }),
            "the gate must have q's dtype, float32, or that of the state, float32, got float64");
  EXPECT_EQ(why([](GlaParams& p) { p.gamma = p.h0; }), "bounds and activations belong to logits");
  EXPECT_EQ(why([](GlaParams& p) { p.q.stride_t = int64_t{1} << 30; }),
            "rows of q must be less than 2^31 bytes apart along the time axis, got 4294967296");
  EXPECT_EQ(why([](GlaParams& p) { ++p.channels; }).substr(0, 23), "channels must be H * K ");
}

}  // namespace
}  // namespace tidegate::testing
