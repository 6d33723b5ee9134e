// Forgetting attention's CPU kernels from raw pointers, in every instruction set: against the
// equations pair by pair, and the same bits for any number of threads.

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cpu_isa.h"
#include "support/attention_problem.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;
using kernels::attention::ForgettingAttentionBackwardParams;

/// `bytes` bytes that are no numbers, 64-byte aligned.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : memory_(static_cast<size_t>(bytes) + 64, std::byte{0xff}) {}
  void* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - at % 64) % 64;
  }

 private:
  std::vector<std::byte> memory_;
};

void run(AttentionProblem& problem, int threads) {
  const kernels::ParallelFor parallel = thread_parallel(threads);
  ForgettingAttentionBackwardParams grads = problem.params();
  kernels::attention::ForgettingAttentionParams& params = grads.forward;
  ASSERT_EQ(kernels::attention::forgetting_attention_unsupported(params), nullptr);
  params.plan = kernels::attention::forgetting_attention_plan_cpu(params);
  Workspace forward(params.plan.workspace_bytes);
  params.workspace = forward.data();
  kernels::attention::forgetting_attention_forward_cpu(params, parallel);
  params.plan = kernels::attention::forgetting_attention_backward_plan_cpu(params);
  Workspace backward(params.plan.workspace_bytes);
  params.workspace = backward.data();
  kernels::attention::forgetting_attention_backward_cpu(grads, parallel);
}

class AttentionCpu : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    before_ = kernels::active_cpu_isa();
    if (!kernels::use_cpu_isa(GetParam())) GTEST_SKIP() << "this machine cannot run it";
  }
  void TearDown() override { kernels::use_cpu_isa(before_); }

  static void expect_right(AttentionShape shape) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      shape.dtype = dtype;
      AttentionProblem problem(shape);
      run(problem, 2);
      problem.check();
    }
  }

 private:
  CpuIsa before_ = CpuIsa::kGeneric;
};

INSTANTIATE_TEST_SUITE_P(Isa, AttentionCpu,
                         ::testing::Values(CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& info) { return kernels::cpu_isa_name(info.param); });

TEST_P(AttentionCpu, EveryRegimeOfGates) {
  for (const ForgetGates gates : {ForgetGates::kWeak, ForgetGates::kStrong, ForgetGates::kMixed,
                                  ForgetGates::kResets, ForgetGates::kNone}) {
    expect_right({.batch = 2,
                  .queries = 150,
                  .keys = 150,
                  .heads = 2,
                  .key_heads = 1,
                  .head_dim = 24,
                  .gates = gates});
  }
}

TEST_P(AttentionCpu, HeadDimensionsAndLengthsThatFillNoVector) {
  for (const int64_t dim : {1, 7, 17, 33, 64, 100, 256}) {
    expect_right(
        {.queries = 65, .keys = 67, .heads = 2, .key_heads = 2, .head_dim = dim, .gap = 3});
  }
}

TEST_P(AttentionCpu, WindowsAndMoreKeysThanQueries) {
  for (const int64_t window : {0, 1, 30, 64, 100}) {
    expect_right(
        {.queries = 70, .keys = 210, .heads = 4, .key_heads = 2, .head_dim = 16, .window = window});
  }
}

TEST_P(AttentionCpu, PackedSequences) {
  expect_right({.queries = 200,
                .keys = 300,
                .heads = 2,
                .key_heads = 1,
                .head_dim = 16,
                .query_offsets = {0, 0, 65, 66, 66, 200},
                .key_offsets = {0, 10, 75, 140, 150, 300}});
}

TEST_P(AttentionCpu, AnyNumberOfThreadsGivesTheSameBits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const AttentionShape shape = {.dtype = dtype,
                                  .queries = 300,
                                  .keys = 300,
                                  .heads = 4,
                                  .key_heads = 2,
                                  .head_dim = 40,
                                  .prune = 1e-3};
    AttentionProblem one(shape), many(shape);
    run(one, 1);
    for (const int threads : {2, 3, 8}) {
      run(many, threads);
      for (size_t t = 0; t < one.outputs().size(); ++t) {
        const TypedSeries &a = *one.outputs()[t], &b = *many.outputs()[t];
        for (int64_t i = 0; i < a.tokens(); ++i) {
          for (int64_t j = 0; j < a.columns(); ++j) ASSERT_EQ(a.get(i, j), b.get(i, j));
        }
      }
    }
  }
}

TEST(AttentionUnsupported, SaysWhy) {
  AttentionProblem problem({.dtype = DType::kFloat32,
                            .queries = 3,
                            .keys = 3,
                            .heads = 4,
                            .key_heads = 2,
                            .head_dim = 8});
  const auto why = [&](auto change) {
    ForgettingAttentionBackwardParams params = problem.params();
    change(params.forward);
    const char* text = kernels::attention::forgetting_attention_unsupported(params.forward);
    return std::string(text == nullptr ? "" : text);
  };
  using Params = kernels::attention::ForgettingAttentionParams;
  EXPECT_EQ(why([](Params&) {}), "");
  EXPECT_EQ(why([](Params& p) { p.head_dim = 257; }), "D must be from 1 to 256, got 257");
  EXPECT_EQ(why([](Params& p) { p.key_heads = 3; }), "Hq must be a multiple of Hkv, got 4 and 3");
  EXPECT_EQ(why([](Params& p) { p.v.dtype = DType::kBFloat16; }),
            "v must have q's dtype, float32, got bfloat16");
  EXPECT_EQ(why([](Params& p) { p.window = -7; }), "the window must not be negative, got -7");
  EXPECT_EQ(why([](Params& p) { p.prune = 1.5; }), "prune must lie in [0, 1), got 1.5");
}

}  // namespace
}  // namespace tidegate::testing
