// The CUDA kernels through raw pointers: every dtype and form, every way to split time, forward and
// backward, held against the naive reference.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/scan/cuda/engine/shared_tails.h"
#include "support/device_mirror.h"
#include "support/packed_shapes.h"

namespace tidegate::testing {
namespace {

using kernels::scan::ScanPlan;
using kernels::scan::TimeSplit;

constexpr TimeSplit kSplits[] = {TimeSplit::kSingleBlock, TimeSplit::kMultiBlock};
constexpr int64_t kTimes[] = {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097};
constexpr int64_t kChannels[] = {3, 8, 33, 64, 130};

/// Why nothing can run here, or an empty string.
std::string why_skip() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    return "no CUDA device";
  }
  return "";
}

/// Holds a case against the reference, looks at what surrounds its results, and runs it again.
template <class Problem>
void check(const ScanShape& shape, TimeSplit split) {
  SCOPED_TRACE(shape.name() + " gap " + std::to_string(shape.gap) + " shift " +
               std::to_string(shape.shift));
  Problem problem(shape);
  run_on_device(problem, split);
  problem.check();
  for (TypedSeries* output : problem.outputs()) {
    EXPECT_TRUE(output->surroundings_untouched());
  }
  Problem again(shape);
  run_on_device(again, split);
  const auto first = problem.outputs();
  const auto second = again.outputs();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(first[i]->same_bits(*second[i])) << "output " << i << " differs from run to run";
  }
}

// Plain tests run before those with parameters, so these launches are the first that their process
// makes of the kernels: what the driver was told of a kernel, and what was asked about it, under
// one limit must not bind launches under another.

/// On a chip with 99 KB of shared memory a block, then with all that there is, then with 99 KB
/// again.
template <class Problem>
void check_with_little_shared_memory(ScanShape shape) {
  if (const std::string why = why_skip(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const TimeSplit split :
         {TimeSplit::kSingleBlock, TimeSplit::kMultiBlock, TimeSplit::kAuto}) {
      // For few channels and a long time the planner makes as many blocks as the device holds.
      const bool is_long = split == TimeSplit::kAuto;
      if (is_long && dtype != DType::kBFloat16) continue;
      shape.dtype = shape.gate = dtype;
      shape.batch = 1;
      shape.time = is_long ? 60000 : 700;
      shape.channels = is_long ? 8 : 64;
      for (const int bytes : {99 * 1024, std::numeric_limits<int>::max(), 99 * 1024}) {
        SCOPED_TRACE("of shared memory " + std::to_string(bytes));
        const SharedBytesLimit limit(bytes);
        check<Problem>(shape, split);
      }
    }
  }
}

TEST(CudaLittleSharedMemory, Hgru) { check_with_little_shared_memory<HgruProblem>({}); }
TEST(CudaLittleSharedMemory, ComplexHgru) {
  check_with_little_shared_memory<HgruProblem>({.turns = true});
}
TEST(CudaLittleSharedMemory, LinearScan) { check_with_little_shared_memory<LinearScanProblem>({}); }
TEST(CudaLittleSharedMemory, LinearScanOfConstantDecay) {
  check_with_little_shared_memory<LinearScanProblem>({.a_is_constant = true});
}
TEST(CudaLittleSharedMemory, Lru) { check_with_little_shared_memory<LruProblem>({}); }
TEST(CudaLittleSharedMemory, ComplexLru) {
  check_with_little_shared_memory<LruProblem>({.turns = true});
}

/// Options beside dtype and split, cycled through so that every length meets many of them.
ScanShape vary(ScanShape shape, uint32_t i) {
  shape.seed = i + 1;
  shape.channels = kChannels[i % 5];
  shape.gap = i % 4 == 3 ? 7 : i % 4 == 2 ? 64 : 0;
  shape.shift = i % 5 == 4 ? 1 : i % 5 == 3 ? 8 : 0;
  shape.reverse = i % 2 == 1;
  shape.gate = i % 3 == 2 ? state_dtype(shape.dtype) : shape.dtype;
  shape.activation = i % 7 == 6 ? Activation::kNone : Activation::kSilu;
  shape.has_gamma = i % 5 != 2;
  shape.has_states = i % 6 != 5;
  shape.offsets_are_int64 = i % 2 == 0;
  shape.gates = static_cast<Gates>(i / 2 % 5);
  return shape;
}

// bool: hgru and lru complex, linear_scan constant a
using Param = std::tuple<DType, bool, TimeSplit>;
using ParamInfo = ::testing::TestParamInfo<Param>;

std::string name_of(const ParamInfo& info, const char* form) {
  const char* splits[] = {"auto", "single_block", "multi_block"};
  return std::string(dtype_name(std::get<0>(info.param))) + "_" + form + "_" +
         splits[static_cast<int>(std::get<2>(info.param))];
}
std::string real_or_complex(const ParamInfo& info) {
  return name_of(info, std::get<1>(info.param) ? "complex" : "real");
}
std::string constant_or_not(const ParamInfo& info) {
  return name_of(info, std::get<1>(info.param) ? "constant_a" : "a_per_step");
}

/// More sequences than multiprocessors: blocks then scan whole sequences in short chunks.
int64_t many_sequences() {
  kernels::DeviceLimits limits;
  check_cuda(kernels::read_device_limits(&limits), "limits");
  return limits.multiprocessors + 1;
}

class CudaKernel : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    split_ = std::get<2>(GetParam());
    if (const std::string why = why_skip(); !why.empty()) {
      GTEST_SKIP() << why;
    }
    shape_.dtype = shape_.gate = std::get<0>(GetParam());
    shape_.turns = shape_.a_is_constant = std::get<1>(GetParam());
  }

  template <class Problem>
  void every_length() {
    uint32_t i = 0;
    for (const int64_t time : kTimes) {
      for (const bool packed : {false, true}) {
        ScanShape shape = vary(shape_, i++);
        shape.time = time;
        shape.channels = time > 1000 ? std::min<int64_t>(shape.channels, 8) : shape.channels;
        if (packed) {
          pack(&shape, i / 2);
        }
        check<Problem>(shape, split_);
      }
    }
  }

  template <class Problem>
  void every_placement() {
    for (const int64_t channels : {1, 4, 5, 16, 31, 72, 104, 128, 257}) {
      for (const int64_t gap : {0, 1}) {
        for (const int64_t shift : {0, 1, 4}) {
          ScanShape shape = shape_;
          shape.time = 37;
          shape.channels = channels;
          shape.gap = gap;
          shape.shift = shift;
          check<Problem>(shape, split_);
        }
      }
    }
  }

  /// Rows that are whole and aligned, so that they are copied 16 bytes a thread, and many
  /// iterations.
  template <class Problem>
  void whole_rows() {
    for (uint32_t i = 0; i < 4; ++i) {
      ScanShape shape = vary(shape_, i);
      shape.gate = shape.dtype;
      shape.channels = 64;
      shape.gap = shape.shift = 0;
      shape.time = i < 2 ? 4097 : 1500;  // multi-block: blocks of two carry groups, and of one
      shape.batch = 1;
      if (i % 2 == 1) {
        pack(&shape, 0);
      }
      check<Problem>(shape, split_);
    }
  }

  ScanShape shape_;
  TimeSplit split_ = TimeSplit::kSingleBlock;
};

class CudaHgru : public CudaKernel {};
class CudaLinearScan : public CudaKernel {};
class CudaLru : public CudaKernel {};

TEST_P(CudaHgru, EveryLength) { every_length<HgruProblem>(); }
TEST_P(CudaHgru, EveryPlacement) { every_placement<HgruProblem>(); }
TEST_P(CudaHgru, WholeRows) { whole_rows<HgruProblem>(); }
TEST_P(CudaLinearScan, EveryLength) { every_length<LinearScanProblem>(); }
TEST_P(CudaLinearScan, EveryPlacement) { every_placement<LinearScanProblem>(); }
TEST_P(CudaLinearScan, WholeRows) { whole_rows<LinearScanProblem>(); }
TEST_P(CudaLru, EveryLength) { every_length<LruProblem>(); }
TEST_P(CudaLru, EveryPlacement) { every_placement<LruProblem>(); }
TEST_P(CudaLru, WholeRows) { whole_rows<LruProblem>(); }

constexpr DType kReal[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
constexpr DType kAll[] = {DType::kFloat32, DType::kFloat64,   DType::kBFloat16,
                          DType::kFloat16, DType::kComplex64, DType::kComplex128};

INSTANTIATE_TEST_SUITE_P(Kernels, CudaHgru,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Bool(),
                                            ::testing::ValuesIn(kSplits)),
                         real_or_complex);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaLinearScan,
                         ::testing::Combine(::testing::ValuesIn(kAll), ::testing::Bool(),
                                            ::testing::ValuesIn(kSplits)),
                         constant_or_not);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaLru,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Bool(),
                                            ::testing::ValuesIn(kSplits)),
                         real_or_complex);

/// Where the planner is asked to choose, and chooses single blocks with short chunks: those have a
/// tile configuration of their own.
class CudaManySequences : public CudaKernel {
 protected:
  template <class Problem>
  void many() {
    uint32_t i = 0;
    // {blocks a multiprocessor, about; channels; time}: rows that are whole and aligned, packs of
    // channels and single ones, one iteration of the carry chain and several
    const std::tuple<int64_t, int64_t, int64_t> sizes[] = {{1, 64, 65}, {1, 8, 3},  {1, 5, 65},
                                                           {2, 33, 17}, {4, 8, 65}, {1, 70, 65}};
    for (const auto& [times, channels, time] : sizes) {
      ScanShape shape = vary(shape_, i++);
      shape.batch = times * many_sequences();
      shape.time = time;
      shape.channels = channels;
      shape.gap = shape.shift = channels == 64 ? 0 : shape.gap;
      check<Problem>(shape, split_);
    }
    for (const int way : {0, 1}) {  // packed, of 0 to 8 tokens, or of 20
      ScanShape shape = vary(shape_, i++);
      shape.offsets = {0};
      for (int64_t n = 0; n < many_sequences(); ++n) {
        shape.offsets.push_back(shape.offsets.back() + (way == 0 ? n % 9 : 20));
      }
      shape.time = shape.offsets.back();
      shape.batch = 1;
      shape.channels = 40;
      check<Problem>(shape, split_);
    }
  }
};
class CudaManySequencesHgru : public CudaManySequences {};
class CudaManySequencesLinearScan : public CudaManySequences {};
class CudaManySequencesLru : public CudaManySequences {};

TEST_P(CudaManySequencesHgru, ShortChunks) { many<HgruProblem>(); }
TEST_P(CudaManySequencesLinearScan, ShortChunks) { many<LinearScanProblem>(); }
TEST_P(CudaManySequencesLru, ShortChunks) { many<LruProblem>(); }

INSTANTIATE_TEST_SUITE_P(Kernels, CudaManySequencesHgru,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Bool(),
                                            ::testing::Values(TimeSplit::kAuto)),
                         real_or_complex);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaManySequencesLinearScan,
                         ::testing::Combine(::testing::ValuesIn(kAll), ::testing::Bool(),
                                            ::testing::Values(TimeSplit::kAuto)),
                         constant_or_not);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaManySequencesLru,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Bool(),
                                            ::testing::Values(TimeSplit::kAuto)),
                         real_or_complex);

/// A reduced set for compute-sanitizer: tiny shapes, each kernel and each split once or twice.
class CudaSanitize : public CudaKernel {
 protected:
  template <class Problem>
  void tiny() {
    for (uint32_t i = 0; i < 2; ++i) {
      ScanShape shape = vary(shape_, 6 + i);
      shape.channels = i == 0 ? 40 : 5;  // packs of channels, and single ones
      shape.gap = shape.shift = i;
      shape.has_states = true;
      shape.time = 150;
      if (i == 1) {
        pack(&shape, 0);
      }
      check<Problem>(shape, split_);
    }
    if (split_ == TimeSplit::kMultiBlock && kernels::element_size(shape_.dtype) == 2) {
      ScanShape iterations = vary(shape_, 9);  // several, of several blocks, whose rows are whole
      iterations.gate = iterations.dtype;
      iterations.channels = 64;
      iterations.gap = iterations.shift = 0;
      iterations.batch = 1;
      iterations.time = 1500;
      check<Problem>(iterations, split_);
    }
    ScanShape step = shape_;
    step.time = 1;
    check<Problem>(step, split_);
    if (kernels::element_size(shape_.dtype) == 2) {  // sequences that share a tile
      ScanShape tails = vary(shape_, 7);
      tails.batch = 3;
      tails.time = 150;
      tails.channels = 66;
      tails.gap = tails.shift = 0;
      check<Problem>(tails, split_);
    }
    if (split_ == TimeSplit::kSingleBlock) {
      ScanShape many = vary(shape_, 8);
      many.batch = many_sequences();
      many.time = 20;
      many.channels = 8;
      check<Problem>(many, TimeSplit::kAuto);
    }
  }
};
class CudaSanitizeHgru : public CudaSanitize {};
class CudaSanitizeLinearScan : public CudaSanitize {};
class CudaSanitizeLru : public CudaSanitize {};

TEST_P(CudaSanitizeHgru, Tiny) { tiny<HgruProblem>(); }
TEST_P(CudaSanitizeLinearScan, Tiny) { tiny<LinearScanProblem>(); }
TEST_P(CudaSanitizeLru, Tiny) { tiny<LruProblem>(); }

INSTANTIATE_TEST_SUITE_P(Kernels, CudaSanitizeHgru,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Bool(), ::testing::ValuesIn(kSplits)),
                         real_or_complex);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaSanitizeLinearScan,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16,
                                                              DType::kComplex64),
                                            ::testing::Bool(), ::testing::ValuesIn(kSplits)),
                         constant_or_not);
INSTANTIATE_TEST_SUITE_P(Kernels, CudaSanitizeLru,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Bool(), ::testing::ValuesIn(kSplits)),
                         real_or_complex);

/// hgru in bf16 that has memory nowhere: enough for a plan.
kernels::scan::HgruParams params_to_plan(int64_t batch, int64_t time, int64_t channels) {
  kernels::scan::HgruParams params;
  params.layout.batch = params.layout.sequences = batch;
  params.layout.time = time;
  params.channels = channels;
  for (kernels::TimeSeries* t : {&params.c, &params.f, &params.h}) {
    *t = {nullptr, time * channels, channels, DType::kBFloat16};
  }
  return params;
}

TEST(CudaPlan, LongAndNarrowShapesSplitTime) {
  if (const std::string why = why_skip(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  kernels::scan::HgruParams params = params_to_plan(1, 131072, 256);
  ScanPlan plan;
  check_cuda(kernels::scan::hgru_forward_plan(params, &plan), "plan");
  EXPECT_EQ(plan.split, TimeSplit::kMultiBlock);
  EXPECT_GT(plan.blocks_per_sequence, 1);
  EXPECT_GT(plan.workspace_bytes, 0);
  params.time_split = TimeSplit::kSingleBlock;
  check_cuda(kernels::scan::hgru_forward_plan(params, &plan), "plan");
  EXPECT_EQ(plan.split, TimeSplit::kSingleBlock);
  EXPECT_EQ(plan.blocks_per_sequence, 1);
}

TEST(CudaPlan, ChunksThatRingsHoldAtOnceAreSharedOutEvenly) {
  if (const std::string why = why_skip(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  const auto warps = [](int64_t time) {
    ScanPlan plan;
    check_cuda(kernels::scan::hgru_forward_plan(params_to_plan(1, time, 64), &plan), "plan");
    EXPECT_EQ(plan.split, TimeSplit::kSingleBlock);
    return plan.warps;
  };
  const int16_t most = warps(256);
  EXPECT_GT(most, 8);
  EXPECT_LT(warps(274), most);  // chunks of 16 steps: one more than there are warps
}

TEST(ScanChains, LastChannelsShareATile) {
  using kernels::scan::ScanChains;
  constexpr int64_t kMultiprocessors = 132;
  const auto chains = [](int64_t batch, int64_t channels) {
    const int8_t sharing = ScanChains::worth_sharing(
        {.batch = batch, .time = 9, .sequences = batch}, channels, 64, kMultiprocessors);
    return ScanChains::of(batch, channels, 64, sharing);
  };
  // {sequences, channels; chains, whole tiles of a sequence, log2 of the sequences of a tail}
  const std::tuple<int64_t, int64_t, int64_t, int64_t, int> cases[] = {{28, 129, 28 * 2 + 7, 2, 2},
                                                                       {135, 70, 135 + 34, 1, 2},
                                                                       {18, 84, 18 + 9, 1, 1},
                                                                       {7, 88, 7 + 4, 1, 1},
                                                                       {7, 89, 7 * 2, 2, 0},
                                                                       {7, 128, 7 * 2, 2, 0},
                                                                       {5, 3, 2, 0, 2},
                                                                       {1, 129, 3, 3, 0},
                                                                       {0, 129, 0, 3, 0},
                                                                       {28, 323, 28 * 6, 6, 0},
                                                                       {126, 69, 126 * 2, 2, 0},
                                                                       {5, 81, 5 * 2, 2, 0}};
  for (const auto& [batch, channels, count, tiles, sharing] : cases) {
    const ScanChains found = chains(batch, channels);
    EXPECT_EQ(found.count, count) << batch << ", " << channels;
    EXPECT_EQ(found.tiles, tiles) << batch << ", " << channels;
    EXPECT_EQ(found.sharing, sharing) << batch << ", " << channels;
  }
  const int64_t offsets[] = {0, 4, 9};  // lengths differ
  EXPECT_EQ(ScanChains::worth_sharing({1, 9, 2, offsets}, 129, 64, kMultiprocessors), 0);
}

TEST(CudaPlan, LittleSharedMemoryHoldsFewerWarps) {
  if (const std::string why = why_skip(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  kernels::scan::HgruParams params = params_to_plan(1, 4096, 256);
  params.time_split = TimeSplit::kSingleBlock;
  ScanPlan all, few;
  check_cuda(kernels::scan::hgru_forward_plan(params, &all), "plan");
  const SharedBytesLimit limit(99 * 1024);
  check_cuda(kernels::scan::hgru_forward_plan(params, &few), "plan");
  EXPECT_GT(few.warps, 0);
  EXPECT_LT(few.warps, all.warps);
}

TEST(CudaPlan, MoreSequencesThanMultiprocessorsAreScannedInShortChunks) {
  if (const std::string why = why_skip(); !why.empty()) {
    GTEST_SKIP() << why;
  }
  const int64_t many = many_sequences();
  for (const int64_t batch : {many - 1, many, 4 * many}) {
    for (const int64_t time : {3, 65}) {
      ScanPlan plan;
      check_cuda(kernels::scan::hgru_forward_plan(params_to_plan(batch, time, 64), &plan), "plan");
      EXPECT_EQ(plan.split, TimeSplit::kSingleBlock) << "of " << batch;
      EXPECT_EQ(plan.one_block_per_sm, batch < many) << "of " << batch;
    }
  }
}

}  // namespace
}  // namespace tidegate::testing
