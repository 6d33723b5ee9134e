// RWKV-4's token mixing on CUDA through raw pointers: every dtype, every way to split time, forward
// and backward, held against the naive reference.

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "kernels/scan/scan_cuda.h"
#include "support/device_mirror.h"
#include "support/wkv4_problem.h"

namespace tidegate::testing {
namespace {

using kernels::scan::TimeSplit;

void run_on_device(Wkv4Problem& p, TimeSplit split) {
  DeviceMirror mirror;
  for (TypedSeries* tensor : {&p.k, &p.v, &p.o, &p.w, &p.u, &p.state, &p.final_state, &p.saved}) {
    mirror.add(*tensor);
  }
  mirror.add(p.forward_params().layout);
  const auto move = [&](kernels::scan::Wkv4Params& params) {
    for (kernels::TimeSeries* series : {&params.k, &params.v, &params.o}) {
      mirror.translate(series->data);
    }
    for (const void** pointer : {&params.w, &params.u, &params.state}) mirror.translate(*pointer);
    mirror.translate(params.final_state);
    mirror.translate(params.saved);
    mirror.translate(params.layout.offsets);
    params.time_split = split;
  };
  kernels::scan::Wkv4Params forward = p.forward_params();
  move(forward);
  plan_and_launch(
      &forward.plan, &forward.workspace,
      [&](auto* plan) { return kernels::scan::wkv4_forward_plan(forward, plan); },
      [&] { return kernels::scan::wkv4_forward(forward, nullptr); });
  mirror.download();
  if (!p.shape().saves) return;

  p.fill_dfinal();
  for (TypedSeries* tensor : {&p.grad_o, &p.dk, &p.dv, &p.dfinal, &p.dstate}) mirror.add(*tensor);
  kernels::scan::Wkv4BackwardParams backward = p.backward_params();
  move(backward.forward);
  for (kernels::TimeSeries* series : {&backward.grad_o, &backward.dk, &backward.dv}) {
    mirror.translate(series->data);
  }
  mirror.translate(backward.dfinal_state);
  mirror.translate(backward.dstate);
  kernels::scan::ScanPlan sizes;
  check_cuda(kernels::scan::wkv4_backward_plan(backward, &sizes), "plan");
  p.dw_partial = p.du_partial =
      TypedSeries(p.w.dtype(), 1, std::max<int64_t>(sizes.partials, 1), p.shape().channels);
  mirror.add(p.dw_partial);
  mirror.add(p.du_partial);
  backward.dw_partial = p.dw_partial.at(0, 0);
  backward.du_partial = p.du_partial.at(0, 0);
  mirror.translate(backward.dw_partial);
  mirror.translate(backward.du_partial);
  plan_and_launch(
      &backward.forward.plan, &backward.forward.workspace,
      [&](auto* plan) { return kernels::scan::wkv4_backward_plan(backward, plan); },
      [&] { return kernels::scan::wkv4_backward(backward, nullptr); });
  mirror.download();
}

class Wkv4Cuda : public ::testing::TestWithParam<TimeSplit> {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
  }
};

/// A reduced set for compute-sanitizer.
class Wkv4CudaSanitize : public Wkv4Cuda {};

std::string name_of_split(const ::testing::TestParamInfo<TimeSplit>& split) {
  return split.param == TimeSplit::kSingleBlock ? "SingleBlock" : "MultiBlock";
}
const auto kSplits = ::testing::Values(TimeSplit::kSingleBlock, TimeSplit::kMultiBlock);
INSTANTIATE_TEST_SUITE_P(Split, Wkv4Cuda, kSplits, name_of_split);
INSTANTIATE_TEST_SUITE_P(Split, Wkv4CudaSanitize, kSplits, name_of_split);

void check(const Wkv4Shape& shape, TimeSplit split) {
  SCOPED_TRACE(shape.name() + " gap " + std::to_string(shape.gap) + " shift " +
               std::to_string(shape.shift));
  Wkv4Problem problem(shape);
  run_on_device(problem, split);
  problem.check();
  Wkv4Problem again(shape);
  run_on_device(again, split);
  for (size_t i = 0; i < problem.outputs().size(); ++i) {
    EXPECT_TRUE(problem.outputs()[i]->surroundings_untouched()) << "output " << i;
    EXPECT_TRUE(problem.outputs()[i]->same_bits(*again.outputs()[i]))
        << "output " << i << " differs from run to run";
  }
}

// A plain test runs before those with parameters: its launches are the first that the process makes
// of these kernels. On a chip with 99 KB of shared memory a block, then with all that there is,
// then with 99 KB again: what the driver was told under one limit must not bind launches under
// another.
TEST(Wkv4CudaLittleSharedMemory, BeforeAndAfterAll) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (TimeSplit split : {TimeSplit::kSingleBlock, TimeSplit::kMultiBlock, TimeSplit::kAuto}) {
      // For few channels and a long time the planner makes as many blocks as the device holds.
      const bool is_long = split == TimeSplit::kAuto;
      if (is_long && dtype != DType::kBFloat16) continue;
      Wkv4Shape shape;
      shape.dtype = dtype;
      shape.batch = 1;
      shape.time = is_long ? 60000 : 700;
      shape.channels = is_long ? 8 : 64;
      for (int bytes : {99 * 1024, std::numeric_limits<int>::max(), 99 * 1024}) {
        SCOPED_TRACE("of shared memory " + std::to_string(bytes));
        const SharedBytesLimit limit(bytes);
        check(shape, split);
      }
    }
  }
}

TEST_P(Wkv4Cuda, EveryLength) {
  for_each_wkv4_shape(4097, [](const Wkv4Shape& shape) { check(shape, GetParam()); });
}

TEST_P(Wkv4Cuda, LongSequencesOfSixteenBits) {
  for (Keys keys : {Keys::kNormal, Keys::kWide, Keys::kFalling, Keys::kHigh, Keys::kTurning}) {
    Wkv4Shape shape;
    shape.dtype = keys == Keys::kWide ? DType::kFloat16 : DType::kBFloat16;
    shape.batch = 1;
    shape.time = 20000;
    shape.channels = 64;
    shape.keys = keys;
    check(shape, GetParam());
  }
}

TEST_P(Wkv4Cuda, LongSequencesOfThirtyTwoBits) {
  for (Keys keys : {Keys::kNormal, Keys::kHigh, Keys::kOutliersFirst}) {
    Wkv4Shape shape;
    shape.batch = 1;
    shape.time = 4097;
    shape.channels = 37;
    shape.keys = keys;
    check(shape, GetParam());
  }
}

TEST_P(Wkv4Cuda, MoreSequencesThanMultiprocessors) {
  Wkv4Shape shape;
  shape.dtype = DType::kBFloat16;
  shape.batch = 300;
  shape.time = 70;
  shape.channels = 64;
  check(shape, GetParam());
}

TEST_P(Wkv4CudaSanitize, Tiny) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (Keys keys : {Keys::kNormal, Keys::kWide}) {
      Wkv4Shape shape;
      shape.dtype = dtype;
      shape.keys = keys;
      shape.time = 150;
      const bool in_packs = keys == Keys::kNormal;
      shape.channels = in_packs ? 64 : 5;
      if (!in_packs) {
        shape.batch = 1;
        shape.offsets = {0, 40, 40, 150};
      }
      check(shape, GetParam());
    }
  }
  Wkv4Shape tails;  // sequences that share a tile
  tails.dtype = DType::kBFloat16;
  tails.batch = 3;
  tails.time = 150;
  tails.channels = 66;
  check(tails, GetParam());
}

}  // namespace
}  // namespace tidegate::testing
