// The CUDA kernels through raw pointers: every dtype and form, every way to split time, forward and
// backward, held against the naive reference in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "support/hgru_problem.h"
#include "support/linear_scan_problem.h"

namespace tidegate::testing {
namespace {

constexpr TimeSplit kSplits[] = {TimeSplit::kNone, TimeSplit::kCluster, TimeSplit::kTwoPass};
constexpr int64_t kTimes[] = {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097};
constexpr int64_t kChannels[] = {1, 3, 8, 33, 64, 130};

/// Why `split` cannot run here, or an empty string.
std::string why_skip(TimeSplit split) {
  if (!has_cuda_device()) {
    return "no CUDA device";
  }
  int device = 0;
  int major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  if (split == TimeSplit::kCluster && major < 9) {
    return "clusters need compute capability 9.0";
  }
  return "";
}

/// Runs the case twice, holds it against the reference and the second run against the first.
template <class Problem>
void check(const ScanCase& config) {
  SCOPED_TRACE(config.describe());
  Problem problem(config);
  const Gradients found = problem.run();
  const bool wide = kernels::element_size(config.state()) >= (is_complex(config.dtype) ? 16 : 8);
  const Gradients exact = problem.template reference<double>(false);
  const Gradients yardstick =
      wide ? problem.template reference<double>(true) : problem.template reference<float>(true);
  ASSERT_EQ(found.size(), exact.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const std::string name = found[i].first;
    ASSERT_EQ(name, exact[i].first);
    expect_within_rule(name, problem.dtype_of(name), found[i].second, exact[i].second,
                       yardstick[i].second);
  }
  const Gradients again = problem.run();
  for (size_t i = 0; i < found.size(); ++i) {
    const size_t bytes = found[i].second.size() * sizeof(found[i].second[0]);
    EXPECT_TRUE(bytes == 0 ||
                std::memcmp(found[i].second.data(), again[i].second.data(), bytes) == 0)
        << found[i].first << " differs from run to run";
  }
}

/// Options beside dtype and split, cycled through so that every length meets many of them.
ScanCase vary(ScanCase config, uint32_t i) {
  config.seed = i + 1;
  config.channels = kChannels[i % 6];
  config.gap = i % 4 == 3 ? 7 : i % 4 == 2 ? 64 : 0;
  config.shift = i % 5 == 4 ? 1 : i % 5 == 3 ? 8 : 0;
  config.reverse = i % 2 == 1;
  config.wide_gate = i % 3 == 2;
  config.silu = i % 7 != 6;
  config.gamma = i % 5 != 2;
  config.initial_state = i % 6 != 5;
  config.offsets_are_int64 = i % 2 == 0;
  return config;
}

/// A few ways to cut `time` into packed sequences, empty ones among them.
std::vector<int64_t> packed(int64_t time, uint32_t i) {
  switch (i % 4) {
    case 0:
      return {0, time / 3, 0, time - time / 3, 0};
    case 1:
      return std::vector<int64_t>(3, time / 3);
    case 2:
      return {1, time, 2};
    default:
      return {time, 0, 0};
  }
}

using Param = std::tuple<DType, bool, TimeSplit>;  // bool: hgru complex, linear_scan constant a

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const char* splits[] = {"auto", "none", "cluster", "two_pass"};
  return std::string(dtype_name(std::get<0>(info.param))) +
         (std::get<1>(info.param) ? "_variant_" : "_plain_") +
         splits[static_cast<int>(std::get<2>(info.param))];
}

class CudaKernel : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (const std::string why = why_skip(std::get<2>(GetParam())); !why.empty()) {
      GTEST_SKIP() << why;
    }
    config_.dtype = std::get<0>(GetParam());
    config_.complex = config_.constant = std::get<1>(GetParam());
    config_.split = std::get<2>(GetParam());
  }

  template <class Problem>
  void every_length() {
    uint32_t i = 0;
    for (const int64_t time : kTimes) {
      for (const bool pack : {false, true}) {
        ScanCase config = vary(config_, i++);
        config.time = time;
        config.channels = time > 1000 ? std::min<int64_t>(config.channels, 8) : config.channels;
        if (pack) {
          config.lengths = packed(time, i);
        }
        check<Problem>(config);
      }
    }
  }

  template <class Problem>
  void every_placement() {
    for (const int64_t channels : {1, 4, 5, 16, 31, 128, 257}) {
      for (const int64_t gap : {0, 1}) {
        for (const int64_t shift : {0, 1, 4}) {
          ScanCase config = config_;
          config.time = 37;
          config.channels = channels;
          config.gap = gap;
          config.shift = shift;
          check<Problem>(config);
        }
      }
    }
  }

  ScanCase config_;
};

class CudaHgru : public CudaKernel {};
class CudaLinearScan : public CudaKernel {};

TEST_P(CudaHgru, EveryLength) { every_length<HgruProblem>(); }
TEST_P(CudaHgru, EveryPlacement) { every_placement<HgruProblem>(); }
TEST_P(CudaLinearScan, EveryLength) { every_length<LinearScanProblem>(); }
TEST_P(CudaLinearScan, EveryPlacement) { every_placement<LinearScanProblem>(); }

constexpr DType kReal[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
constexpr DType kAll[] = {DType::kFloat32, DType::kFloat64,   DType::kBFloat16,
                          DType::kFloat16, DType::kComplex64, DType::kComplex128};

INSTANTIATE_TEST_SUITE_P(Kernels, CudaHgru,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Bool(),
                                            ::testing::ValuesIn(kSplits)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaLinearScan,
                         ::testing::Combine(::testing::ValuesIn(kAll), ::testing::Bool(),
                                            ::testing::ValuesIn(kSplits)),
                         name_of);

/// A reduced set for compute-sanitizer: tiny shapes, each kernel and each split once or twice.
class CudaSanitize : public CudaKernel {
 protected:
  template <class Problem>
  void tiny() {
    for (uint32_t i = 0; i < 2; ++i) {
      ScanCase config = vary(config_, 4 + i);
      config.channels = i == 0 ? 40 : 5;  // packs of channels, and single ones
      config.gap = config.shift = i;
      config.time = 150;
      if (i == 1) {
        config.lengths = {3, 0, 130, 17};
      }
      check<Problem>(config);
    }
    ScanCase step = config_;
    step.time = 1;
    check<Problem>(step);
  }
};
class CudaSanitizeHgru : public CudaSanitize {};
class CudaSanitizeLinearScan : public CudaSanitize {};

TEST_P(CudaSanitizeHgru, Tiny) { tiny<HgruProblem>(); }
TEST_P(CudaSanitizeLinearScan, Tiny) { tiny<LinearScanProblem>(); }

constexpr DType kReduced[] = {DType::kFloat32, DType::kBFloat16, DType::kComplex64};

INSTANTIATE_TEST_SUITE_P(Kernels, CudaSanitizeHgru,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Bool(), ::testing::ValuesIn(kSplits)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaSanitizeLinearScan,
                         ::testing::Combine(::testing::ValuesIn(kReduced), ::testing::Bool(),
                                            ::testing::ValuesIn(kSplits)),
                         name_of);

TEST(CudaPlan, LongAndNarrowShapesSplitTime) {
  if (const std::string why = why_skip(TimeSplit::kAuto); !why.empty()) {
    GTEST_SKIP() << why;
  }
  kernels::HgruParams params;
  params.layout.batch = params.layout.sequences = 1;
  params.layout.time = 131072;
  params.channels = 256;
  for (kernels::TimeSeries* t : {&params.c, &params.f, &params.h}) {
    *t = {nullptr, 131072 * 256, 256, DType::kBFloat16};
  }
  ScanPlan plan;
  check_cuda(kernels::hgru_forward_plan(params, &plan), "plan");
  EXPECT_GT(plan.splits, 1);
  EXPECT_NE(plan.split, TimeSplit::kNone);
  params.time_split = TimeSplit::kTwoPass;
  check_cuda(kernels::hgru_forward_plan(params, &plan), "plan");
  EXPECT_EQ(plan.split, TimeSplit::kTwoPass);
  EXPECT_GT(plan.workspace_bytes, 0);
}

}  // namespace
}  // namespace tidegate::testing
