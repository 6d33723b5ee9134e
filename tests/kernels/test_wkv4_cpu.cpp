// RWKV-4's token mixing on the CPU, on raw pointers, in each instruction set that this machine
// runs.

#include <gtest/gtest.h>

#include "kernels/common/cpu_isa.h"
#include "support/thread_parallel.h"
#include "support/wkv4_problem.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;

void run(Wkv4Problem& problem, int threads) {
  const auto parallel = thread_parallel(threads);
  kernels::scan::wkv4_forward_cpu(problem.forward_params(), parallel);
  if (!problem.shape().saves) return;
  problem.fill_dfinal();
  kernels::scan::wkv4_backward_cpu(problem.backward_params(), parallel);
}

class Wkv4Cpu : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    before_ = kernels::active_cpu_isa();
    if (!kernels::use_cpu_isa(GetParam())) GTEST_SKIP() << "this machine cannot run it";
  }
  void TearDown() override { kernels::use_cpu_isa(before_); }

 private:
  CpuIsa before_ = CpuIsa::kGeneric;
};

INSTANTIATE_TEST_SUITE_P(Isa, Wkv4Cpu,
                         ::testing::Values(CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& isa) { return kernels::cpu_isa_name(isa.param); });

TEST_P(Wkv4Cpu, EveryLength) {
  for_each_wkv4_shape(4097, [](const Wkv4Shape& shape) {
    SCOPED_TRACE(shape.name());
    Wkv4Problem problem(shape);
    run(problem, 1);
    problem.check();
    for (TypedSeries* output : problem.outputs()) EXPECT_TRUE(output->surroundings_untouched());
  });
}

// Large enough for streaming stores and several blocks of channels; the shifted copy has no aligned
// rows.
TEST_P(Wkv4Cpu, LargeOutputsAndThreadsDoNotChangeABit) {
  Wkv4Shape shape;
  shape.batch = 1;
  shape.time = 420;
  shape.channels = 5120;
  Wkv4Problem aligned(shape);
  run(aligned, 2);
  shape.shift = 1;
  Wkv4Problem shifted(shape);
  run(shifted, 1);
  for (size_t i = 0; i < aligned.outputs().size(); ++i) {
    EXPECT_TRUE(aligned.outputs()[i]->same_bits(*shifted.outputs()[i])) << i;
  }
}

TEST(Wkv4Unsupported, SaysWhy) {
  Wkv4Shape shape;
  Wkv4Problem problem(shape);
  auto params = problem.forward_params();
  EXPECT_EQ(kernels::scan::wkv4_unsupported(params), nullptr);
  params.v.dtype = DType::kBFloat16;
  EXPECT_STREQ(kernels::scan::wkv4_unsupported(params),
               "v must have k's dtype, float32, got bfloat16");
  params = problem.forward_params();
  params.layout.reverse = true;
  EXPECT_STREQ(kernels::scan::wkv4_unsupported(params),
               "layout.reverse must be false, got true: sequences are scanned forwards only");
  params = problem.forward_params();
  params.k.stride_t = int64_t{1} << 30;
  EXPECT_STREQ(kernels::scan::wkv4_unsupported(params),
               "rows of k must be less than 2^31 bytes apart along the time axis, got 4294967296");
  params = problem.forward_params();
  params.layout.time = (int64_t{1} << 30) + 1;
  EXPECT_STREQ(kernels::scan::wkv4_unsupported(params),
               "T must be at most 2^30 time steps, got 1073741825");
  params = problem.forward_params();
  params.layout.batch = -2;
  params.layout.time = 5;
  params.layout.sequences = 3;
  EXPECT_STREQ(kernels::scan::wkv4_unsupported(params),
               "B, T and N must not be negative, got -2, 5 and 3");
}

}  // namespace
}  // namespace tidegate::testing
