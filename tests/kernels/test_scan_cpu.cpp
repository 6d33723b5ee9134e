// The CPU scans on raw pointers, in each instruction set that this machine runs.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/cpu_isa.h"
#include "kernels/scan/scan.h"
#include "support/lru_problem.h"
#include "support/scan_problem.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;

void run(LinearScanProblem& problem, int threads) {
  const auto parallel = thread_parallel(threads);
  kernels::scan::linear_scan_forward_cpu(problem.forward_params(), parallel);
  kernels::scan::linear_scan_backward_cpu(problem.backward_params(), parallel);
}

void run(HgruProblem& problem, int threads) {
  const auto parallel = thread_parallel(threads);
  kernels::scan::hgru_forward_cpu(problem.forward_params(), parallel);
  kernels::scan::hgru_backward_cpu(problem.backward_params(), parallel);
}

void run(LruProblem& problem, int threads) {
  const auto parallel = thread_parallel(threads);
  kernels::scan::LruParams forward = problem.forward_params();
  kernels::scan::LruBackwardParams backward = problem.backward_params();
  const auto plan = kernels::scan::lru_plan_cpu(forward);
  std::vector<unsigned char> workspace(plan.workspace_bytes);
  forward.workspace = backward.forward.workspace = workspace.data();
  kernels::scan::lru_forward_cpu(forward, parallel);
  kernels::scan::lru_backward_cpu(backward, parallel);
}

/// Runs with the instruction set of the test's parameter.
class ScanCpu : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    before_ = kernels::active_cpu_isa();
    if (!kernels::use_cpu_isa(GetParam())) GTEST_SKIP() << "this machine cannot run it";
  }
  void TearDown() override { kernels::use_cpu_isa(before_); }

  template <class Problem>
  void expect_right(const ScanShape& shape) {
    SCOPED_TRACE(shape.name());
    Problem problem(shape);
    run(problem, 1);
    problem.check();
    for (TypedSeries* output : problem.outputs()) EXPECT_TRUE(output->surroundings_untouched());
  }

 private:
  CpuIsa before_ = CpuIsa::kGeneric;
};

INSTANTIATE_TEST_SUITE_P(Isa, ScanCpu,
                         ::testing::Values(CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& isa) { return kernels::cpu_isa_name(isa.param); });

struct DTypes {
  DType data;
  DType gate;
};
const DTypes kRealDTypes[] = {
    {DType::kFloat32, DType::kFloat32},   {DType::kFloat64, DType::kFloat64},
    {DType::kBFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat32},
    {DType::kFloat16, DType::kFloat16},   {DType::kFloat16, DType::kFloat32},
};
const DTypes kComplexDTypes[] = {
    {DType::kComplex64, DType::kComplex64},
    {DType::kComplex128, DType::kComplex128},
};
const Gates kAllGates[] = {Gates::kRandom,      Gates::kOpen,    Gates::kShut,
                           Gates::kAlternating, Gates::kNearOne, Gates::kZero};

std::vector<DTypes> all_dtypes() {
  std::vector<DTypes> all(std::begin(kRealDTypes), std::end(kRealDTypes));
  all.insert(all.end(), std::begin(kComplexDTypes), std::end(kComplexDTypes));
  return all;
}

// Every size of time, with the options taking turns so that all of them meet all dtypes.
TEST_P(ScanCpu, HgruAtAllLengths) {
  int64_t count = 0;
  for (int64_t time : {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097}) {
    for (const DTypes& dtypes : kRealDTypes) {
      for (bool turns : {false, true}) {
        ScanShape shape;
        shape.dtype = dtypes.data;
        shape.gate = dtypes.gate;
        shape.batch = time > 1000 ? 1 : 2;
        shape.time = time;
        shape.channels = time > 1000 ? 5 : 19;
        shape.turns = turns;
        shape.reverse = count % 2 == 1;
        shape.has_states = count % 5 != 0;
        shape.has_gamma = count % 7 != 0;
        shape.activation = count % 3 == 0 ? Activation::kNone : Activation::kSilu;
        ++count;
        expect_right<HgruProblem>(shape);
      }
    }
  }
}

TEST_P(ScanCpu, LruAtAllLengths) {
  int64_t count = 0;
  for (int64_t time : {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      for (bool turns : {false, true}) {
        ScanShape shape;
        shape.dtype = dtype;
        shape.batch = time > 1000 ? 1 : 2;
        shape.time = time;
        shape.channels = time > 1000 ? 5 : 19;
        shape.turns = turns;
        shape.reverse = count % 2 == 1;
        shape.has_states = count % 5 != 0;
        ++count;
        expect_right<LruProblem>(shape);
      }
    }
  }
}

TEST_P(ScanCpu, LinearScanAtAllLengths) {
  int64_t count = 0;
  for (int64_t time : {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097}) {
    for (const DTypes& dtypes : all_dtypes()) {
      for (bool constant : {false, true}) {
        ScanShape shape;
        shape.dtype = dtypes.data;
        shape.gate = dtypes.gate;
        shape.batch = time > 1000 ? 1 : 2;
        shape.time = time;
        shape.channels = time > 1000 ? 5 : 19;
        shape.a_is_constant = constant;
        shape.reverse = count % 2 == 1;
        shape.has_states = count % 5 != 0;
        ++count;
        expect_right<LinearScanProblem>(shape);
      }
    }
  }
}

// Vector tails, blocks of more than one row, rows that begin nowhere in particular.
TEST_P(ScanCpu, AnyWidthAndStride) {
  for (int64_t channels : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1025, 4099}) {
    for (const DTypes& dtypes : all_dtypes()) {
      ScanShape shape;
      shape.dtype = dtypes.data;
      shape.gate = dtypes.gate;
      shape.time = channels > 1000 ? 3 : 6;
      shape.channels = channels;
      shape.gap = channels % 3;
      shape.shift = channels % 2;
      expect_right<LinearScanProblem>(shape);
      if (is_complex(dtypes.data)) continue;
      expect_right<HgruProblem>(shape);
      expect_right<LruProblem>(shape);
      shape.turns = true;
      expect_right<HgruProblem>(shape);
      expect_right<LruProblem>(shape);
    }
  }
}

TEST_P(ScanCpu, GatesAtTheExtremes) {
  for (Gates gates : kAllGates) {
    for (const DTypes& dtypes : all_dtypes()) {
      ScanShape shape;
      shape.dtype = dtypes.data;
      shape.gate = dtypes.gate;
      shape.gates = gates;
      shape.time = 131;
      expect_right<LinearScanProblem>(shape);
      if (is_complex(dtypes.data)) continue;
      for (bool turns : {false, true}) {
        shape.turns = turns;
        shape.has_gamma = true;
        expect_right<HgruProblem>(shape);
        shape.has_gamma = false;
        expect_right<HgruProblem>(shape);
        expect_right<LruProblem>(shape);
      }
    }
  }
}

TEST_P(ScanCpu, PackedSequencesStartAfresh) {
  int64_t count = 0;
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 0, 5, 5, 5, 69, 70, 133, 133}, {0}, {0, 133}, {0, 0, 0, 0}}) {
    for (const DTypes& dtypes : all_dtypes()) {
      ScanShape shape;
      shape.dtype = dtypes.data;
      shape.gate = dtypes.gate;
      shape.batch = 1;
      shape.time = offsets.back();
      shape.channels = 21;
      shape.offsets = offsets;
      shape.offsets_are_int64 = count % 2 == 0;
      shape.reverse = count % 3 == 0;
      shape.a_is_constant = count % 4 == 0;
      shape.turns = count % 5 < 2;
      ++count;
      expect_right<LinearScanProblem>(shape);
      if (is_complex(dtypes.data)) continue;
      expect_right<HgruProblem>(shape);
      expect_right<LruProblem>(shape);
    }
  }
}

// Large enough for streaming stores, which need aligned rows; the shifted copy has none.
TEST_P(ScanCpu, LargeOutputs) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ScanShape shape;
    shape.dtype = shape.gate = dtype;
    shape.batch = 1;
    shape.time = dtype == DType::kFloat32 ? 2080 : 4160;
    shape.channels = 1024;
    HgruProblem aligned(shape);
    run(aligned, 2);
    shape.shift = 1;
    HgruProblem shifted(shape);
    run(shifted, 2);
    for (size_t i = 0; i < aligned.outputs().size(); ++i) {
      EXPECT_TRUE(aligned.outputs()[i]->same_bits(*shifted.outputs()[i])) << i;
    }
  }
}

TEST_P(ScanCpu, ThreadsDoNotChangeABit) {
  for (const DTypes& dtypes : all_dtypes()) {
    ScanShape shape;
    shape.dtype = dtypes.data;
    shape.gate = dtypes.gate;
    shape.batch = 3;
    shape.time = 70;
    shape.channels = 173;
    const auto expect_same = [&](auto one, auto many) {
      run(one, 1);
      for (int threads : {2, 3, 8, 64}) {
        for (TypedSeries* output : many.outputs()) output->poison();
        run(many, threads);
        for (size_t i = 0; i < one.outputs().size(); ++i) {
          EXPECT_TRUE(one.outputs()[i]->same_bits(*many.outputs()[i])) << shape.name();
        }
      }
    };
    expect_same(LinearScanProblem(shape), LinearScanProblem(shape));
    if (is_complex(dtypes.data)) continue;
    expect_same(HgruProblem(shape), HgruProblem(shape));
    expect_same(LruProblem(shape), LruProblem(shape));
    shape.turns = true;
    expect_same(HgruProblem(shape), HgruProblem(shape));
    expect_same(LruProblem(shape), LruProblem(shape));
  }
}

// A decay near one keeps errors for as long as it keeps the state.
TEST_P(ScanCpu, LongSequences) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ScanShape shape;
    shape.dtype = dtype;
    shape.batch = 1;
    shape.time = 131072;
    shape.channels = 2;
    shape.gates = Gates::kNearOne;
    expect_right<HgruProblem>(shape);
    shape.turns = true;
    expect_right<HgruProblem>(shape);
    expect_right<LruProblem>(shape);
    shape.turns = false;
    expect_right<LruProblem>(shape);
    shape.a_is_constant = true;
    expect_right<LinearScanProblem>(shape);
  }
}

TEST_P(ScanCpu, NanStaysInItsChannelFromItsStepOn) {
  const int64_t kStep = 5;
  const int64_t kChannel = 4;
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (bool turns : {false, true}) {
      for (bool in_gate : {false, true}) {
        ScanShape shape;
        shape.dtype = shape.gate = dtype;
        shape.batch = 1;
        shape.time = 9;
        shape.channels = 21;
        shape.turns = turns;
        HgruProblem problem(shape);
        (in_gate ? problem.f : problem.c).set(kStep, kChannel, NAN);
        kernels::scan::hgru_forward_cpu(problem.forward_params(), thread_parallel(1));
        for (int64_t t = 0; t < shape.time; ++t) {
          for (int64_t j = 0; j < problem.h.columns(); ++j) {
            const bool imaginary = j >= shape.channels;
            // The halves of a complex channel meet in the next step, unless the gate is the NaN.
            const bool reached = t > kStep || (t == kStep && (in_gate || !imaginary));
            EXPECT_EQ(std::isnan(problem.h.get(t, j).real()),
                      reached && j % shape.channels == kChannel)
                << shape.name() << " at " << t << ", " << j;
          }
        }
      }
    }
  }
}

TEST_P(ScanCpu, StepUpdatesTheStateInPlace) {
  ScanShape shape;
  shape.time = 1;
  shape.batch = 3;
  HgruProblem apart(shape);
  HgruProblem in_place(shape);
  auto params = in_place.forward_params();
  params.h_final = in_place.h0.at(0, 0);
  kernels::scan::hgru_forward_cpu(apart.forward_params(), thread_parallel(1));
  kernels::scan::hgru_forward_cpu(params, thread_parallel(1));
  EXPECT_TRUE(in_place.h0.same_bits(apart.h_final));

  LinearScanProblem scan_apart(shape);
  LinearScanProblem scan_in_place(shape);
  auto scan_params = scan_in_place.forward_params();
  scan_params.h_final = scan_in_place.h0.at(0, 0);
  kernels::scan::linear_scan_forward_cpu(scan_apart.forward_params(), thread_parallel(1));
  kernels::scan::linear_scan_forward_cpu(scan_params, thread_parallel(1));
  EXPECT_TRUE(scan_in_place.h0.same_bits(scan_apart.h_final));
}

/// `in` came out as `got` where `want` was expected. The kernels treat single precision's subnormal
/// numbers as zero while they run (docs/numerics.md, Underflow), so such an `in` may become zero.
bool same_number(double in, double want, double got) {
  if (std::isnan(want)) return std::isnan(got);
  const bool may_be_zero = std::fabs(in) < std::numeric_limits<float>::min();
  return want == got || (may_be_zero && got == 0);
}

// All 65536 values pass through unchanged, float16's own subnormal ones too, and single-precision
// ones round to the nearest.
TEST_P(ScanCpu, SixteenBitConversions) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    ScanShape shape;
    shape.dtype = dtype;
    shape.gate = DType::kFloat32;
    shape.batch = 1;
    shape.time = 1;
    shape.channels = 65536;
    shape.gates = Gates::kOpen;
    LinearScanProblem problem(shape);
    for (int64_t j = 0; j < shape.channels; ++j) {
      const uint16_t bits = static_cast<uint16_t>(j);
      std::memcpy(problem.x.at(0, j), &bits, sizeof bits);
      problem.h0.set(0, j, 0.0);
    }
    kernels::scan::linear_scan_forward_cpu(problem.forward_params(), thread_parallel(1));
    for (int64_t j = 0; j < shape.channels; ++j) {
      const double in = problem.x.get(0, j).real();
      const double out = problem.h.get(0, j).real();
      EXPECT_TRUE(same_number(in, in, out)) << j << ": " << out;
    }
    // Halfway cases, their neighbours, subnormal numbers, the border of infinity.
    for (int64_t j = 0; j < shape.channels; ++j) {
      const uint32_t bits = static_cast<uint32_t>(j) * 65537u ^ (j % 3 == 0 ? 0x0fffu : 0u);
      float value;
      std::memcpy(&value, &bits, sizeof value);
      problem.x.set(0, j, 0.0);
      std::memcpy(problem.h0.at(0, j), &value, sizeof value);
    }
    kernels::scan::linear_scan_forward_cpu(problem.forward_params(), thread_parallel(1));
    for (int64_t j = 0; j < shape.channels; ++j) {
      const double in = problem.h0.get(0, j).real();
      const double want = rounded(dtype, in).real();
      const double out = problem.h.get(0, j).real();
      EXPECT_TRUE(same_number(in, want, out)) << j << ": " << want << " " << out;
    }
  }
}

// The kernels change how their thread treats subnormal numbers, for as long as they run.
TEST_P(ScanCpu, LeavesTheThreadsArithmeticAsItWas) {
  ScanShape shape;
  HgruProblem problem(shape);
  run(problem, 1);
  volatile float smallest_normal = std::numeric_limits<float>::min();
  EXPECT_GT(smallest_normal / 2, 0);
}

TEST(ScanCpuPlan, OnePartialSumASequence) {
  ScanShape shape;
  shape.batch = 1;
  shape.time = 10;
  shape.offsets = {0, 4, 4, 10};
  HgruProblem problem(shape);
  const auto plan = kernels::scan::hgru_plan_cpu(problem.forward_params());
  EXPECT_EQ(plan.partials, 3);
  EXPECT_EQ(plan.workspace_bytes, 0);
  LinearScanProblem scan(shape);
  EXPECT_EQ(kernels::scan::linear_scan_plan_cpu(scan.forward_params()).partials, 3);
}

TEST(ScanUnsupported, SaysWhy) {
  ScanShape shape;
  shape.batch = 2;
  LinearScanProblem scan(shape);
  kernels::scan::LinearScanParams linear = scan.forward_params();
  EXPECT_EQ(kernels::scan::linear_scan_unsupported(linear), nullptr);
  linear.h.dtype = DType::kFloat16;
  EXPECT_STREQ(kernels::scan::linear_scan_unsupported(linear),
               "h must have x's dtype, float32, got float16");
  HgruProblem problem(shape);
  kernels::scan::HgruParams params = problem.forward_params();
  params.c.dtype = DType::kComplex64;
  EXPECT_STREQ(kernels::scan::hgru_unsupported(params),
               "c must be real, got complex64; complex values are passed as [Re | Im] with theta");
  params = problem.forward_params();
  const int64_t offsets[] = {0, 1};
  params.layout.offsets = offsets;
  EXPECT_STREQ(kernels::scan::hgru_unsupported(params),
               "B must be 1 where sequences are packed, got 2");
}

}  // namespace
}  // namespace tidegate::testing
