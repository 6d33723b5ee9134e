// The gated RNN on the CPU, on raw pointers, in each instruction set that this machine runs.

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/common/cpu_isa.h"
#include "support/rnn_problem.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;

/// Runs with the instruction set of the test's parameter.
class GatedRnnCpu : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    before_ = kernels::active_cpu_isa();
    if (!kernels::use_cpu_isa(GetParam())) GTEST_SKIP() << "this machine cannot run it";
  }
  void TearDown() override { kernels::use_cpu_isa(before_); }

 private:
  CpuIsa before_ = CpuIsa::kGeneric;
};

INSTANTIATE_TEST_SUITE_P(Isa, GatedRnnCpu,
                         ::testing::Values(CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& isa) { return kernels::cpu_isa_name(isa.param); });

const std::vector<int64_t> kPadded[] = {{1}, {9, 9}, {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}};
const std::vector<int64_t> kPacked[] = {{5, 0, 17, 1, 0, 10}, {0, 0}, {3, 3, 3, 3, 3, 3, 3, 3, 8}};

TEST_P(GatedRnnCpu, EqualsTheEquations) {
  for (int64_t dim : {1, 7, 16, 33, 130}) {
    SCOPED_TRACE("D " + std::to_string(dim));
    for (bool packed : {false, true}) {
      for (const auto& lengths : packed ? kPacked : kPadded) {
        for (bool bounded : {false, true}) {
          RnnProblem<float> single(lengths, packed, dim, 1, bounded);
          single.run(thread_parallel(1));
          EXPECT_LT(single.error(), 2e-6);
          RnnProblem<double> wide(lengths, packed, dim, 2, bounded);
          wide.run(thread_parallel(2));
          EXPECT_LT(wide.error(), 1e-13);
        }
      }
    }
  }
}

TEST_P(GatedRnnCpu, ThreadsAndNeighboursChangeNoBit) {
  const std::vector<int64_t> lengths = {40, 3, 40, 0, 17, 40, 40, 9, 40, 1, 40};
  RnnProblem<float> one(lengths, true, 67, 3), many(lengths, true, 67, 3);
  one.run(thread_parallel(1));
  many.run(thread_parallel(5));
  const auto equal = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  EXPECT_TRUE(equal(one.h, many.h));
  EXPECT_TRUE(equal(one.h_final, many.h_final));
  EXPECT_TRUE(equal(one.dz, many.dz));
  EXPECT_TRUE(equal(one.dx, many.dx));
  EXPECT_TRUE(equal(one.dh0, many.dh0));
  EXPECT_TRUE(equal(one.dgamma, many.dgamma));
}

TEST(GatedRnn, SaysWhatNoKernelTakes) {
  RnnProblem<float> problem({3}, false, 4, 4);
  kernels::rnn::GatedRnnParams params = problem.forward();
  EXPECT_EQ(kernels::rnn::gated_rnn_unsupported(params), nullptr);
  params.z.dtype = kernels::DType::kBFloat16;
  EXPECT_STREQ(kernels::rnn::gated_rnn_unsupported(params),
               "z must have x's dtype, float32, or that of the state, float32, got bfloat16");
  params = problem.forward();
  params.x.stride_t = int64_t{1} << 30;
  EXPECT_STREQ(kernels::rnn::gated_rnn_unsupported(params),
               "rows of x must be less than 2^31 bytes apart along the time axis, got 4294967296");
  params = problem.forward();
  params.logits.stride_t = 5;
  EXPECT_EQ(std::string(kernels::rnn::gated_rnn_unsupported(params))
                .rfind("the gate's logits must be contiguous, got rows 5 elements apart", 0),
            0u);
}

}  // namespace
}  // namespace tidegate::testing
