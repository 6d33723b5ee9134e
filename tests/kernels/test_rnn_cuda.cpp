// The gated RNN on CUDA through raw pointers: every way to hold the matrix, forward and backward,
// held against the equations.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/rnn/rnn_cuda.h"
#include "support/device_mirror.h"
#include "support/rnn_problem.h"

namespace tidegate::testing {
namespace {

/// Where the matrix is, and how the blocks that share it exchange states.
enum class Way { kCluster, kMemory, kPlain };

struct Kind {
  Way way;
  bool is_16_bit;  // the matrix

  friend void PrintTo(const Kind& kind, std::ostream* out) {
    *out << (kind.way == Way::kCluster  ? "Cluster"
             : kind.way == Way::kMemory ? "Memory"
                                        : "Plain")
         << (kind.is_16_bit ? "BFloat16" : "");
  }
};

using Problem = RnnProblem<float>;

/// The plan that the kernels ran by.
kernels::rnn::GatedRnnPlan run_on_device(Problem& p, const Kind& kind) {
  DeviceMirror mirror;
  for (Problem::Row* row : {&p.z, &p.x, &p.w, &p.gamma, &p.h0, &p.dh, &p.dh_final, &p.h, &p.logits,
                            &p.h_final, &p.dz, &p.dx, &p.h_before, &p.dh0, &p.dgamma}) {
    mirror.add(row->data(), row->size() * sizeof(float));
  }
  mirror.add(p.forward().layout);
  kernels::rnn::GatedRnnBackwardParams params = p.backward();
  kernels::rnn::GatedRnnParams& forward = params.forward;
  for (kernels::TimeSeries* series : {&forward.z, &forward.x, &forward.h, &forward.logits,
                                      &params.dh, &params.dz, &params.dx, &params.h_before}) {
    mirror.translate(series->data);
  }
  mirror.translate(forward.layout.offsets);
  for (const void** pointer : {&forward.w, &forward.gamma, &forward.h0, &params.dh_final}) {
    mirror.translate(*pointer);
  }
  mirror.translate(forward.h_final);
  mirror.translate(params.dh0);
  mirror.translate(params.dgamma_partial);
  forward.w_is_16_bit = kind.is_16_bit;
  forward.allow_clusters = kind.way == Way::kCluster;
  forward.allow_on_chip = kind.way != Way::kPlain;
  plan_and_launch(
      &forward.plan, &forward.workspace,
      [&](auto* plan) { return kernels::rnn::gated_rnn_forward_plan(forward, plan); },
      [&] { return kernels::rnn::gated_rnn_forward(forward, nullptr); });
  plan_and_launch(
      &forward.plan, &forward.workspace,
      [&](auto* plan) { return kernels::rnn::gated_rnn_backward_plan(params, plan); },
      [&] { return kernels::rnn::gated_rnn_backward(params, nullptr); });
  mirror.download();
  return forward.plan;
}

/// Every number of `row` becomes the bf16 number below it.
void make_bf16(Problem::Row& row) {
  for (float& value : row) {
    value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000u);
  }
}

class GatedRnnCuda : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
  }

  /// Compares the results of a run with the equations.
  static void check(Problem& problem, int64_t dim) {
    SCOPED_TRACE("D " + std::to_string(dim));
    if (GetParam().is_16_bit) make_bf16(problem.w);
    const kernels::rnn::GatedRnnPlan plan = run_on_device(problem, GetParam());
    EXPECT_LT(problem.error(), 2e-6);
    if (GetParam().way == Way::kMemory && dim > 128 && dim <= 512) {
      EXPECT_TRUE(plan.on_chip && plan.exchanges_in_memory);
    }
    if (GetParam().way == Way::kPlain) {
      EXPECT_FALSE(plan.on_chip);
    }
    const bool is_padded = problem.forward().layout.offsets == nullptr;
    EXPECT_EQ(plan.by_products, !plan.on_chip && is_padded && dim > 256);
  }

  static void check(const std::vector<int64_t>& lengths, bool packed, int64_t dim, unsigned seed) {
    for (bool bounded : {false, true}) {
      Problem problem(lengths, packed, dim, seed, bounded);
      check(problem, dim);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Way, GatedRnnCuda,
                         ::testing::Values(Kind{Way::kCluster, false}, Kind{Way::kCluster, true},
                                           Kind{Way::kMemory, false}, Kind{Way::kMemory, true},
                                           Kind{Way::kPlain, false}),
                         ::testing::PrintToStringParamName());

const std::vector<int64_t> kPadded(11, 4);
const std::vector<int64_t> kPacked = {5, 0, 17, 1, 0, 10};

TEST_P(GatedRnnCuda, EqualsTheEquations) {
  for (int64_t dim : {1, 7, 33, 128, 130, 256, 257, 300, 449, 511, 512, 600, 1024}) {
    check(kPadded, false, dim, 1);
    check(kPacked, true, dim, 2);
  }
}

TEST_P(GatedRnnCuda, MoreSequencesThanRunAtOnce) {
  const std::vector<int64_t> lengths(300, 3);
  check(lengths, false, 320, 3);
}

TEST_P(GatedRnnCuda, RunsOfManyTokensAreTheSame) {
  const std::vector<int64_t> lengths = {300, 7, 300, 0, 299, 300, 300};
  Problem first(lengths, true, 500, 4);
  check(first, 500);
  for (int run = 0; run < 3; ++run) {
    Problem again(lengths, true, 500, 4);
    check(again, 500);
    EXPECT_EQ(first.h, again.h);
    EXPECT_EQ(first.dz, again.dz);
    EXPECT_EQ(first.dx, again.dx);
    EXPECT_EQ(first.dh0, again.dh0);
    EXPECT_EQ(first.dgamma, again.dgamma);
  }
}

/// Numbers far from one, and channels of a group far from each other.
TEST_P(GatedRnnCuda, AnyRange) {
  for (int power : {-60, 0, 60}) {
    SCOPED_TRACE("2^" + std::to_string(power));
    constexpr int64_t kDim = 320;
    Problem problem({9, 9, 9}, false, kDim, 7);
    const auto scale = [&](Problem::Row& row, int by, int spread) {
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = std::ldexp(row[i], by - static_cast<int>(i) % kDim % (spread + 1));
      }
    };
    scale(problem.x, power, 20);
    scale(problem.h0, power, 20);
    scale(problem.w, -power, 0);
    scale(problem.dh, -30, 20);
    scale(problem.dh_final, -30, 20);
    check(problem, kDim);
  }
}

class GatedRnnCudaSanitize : public GatedRnnCuda {};
INSTANTIATE_TEST_SUITE_P(Way, GatedRnnCudaSanitize,
                         ::testing::Values(Kind{Way::kCluster, false}, Kind{Way::kCluster, true},
                                           Kind{Way::kMemory, false}, Kind{Way::kMemory, true}),
                         ::testing::PrintToStringParamName());

TEST_P(GatedRnnCudaSanitize, BlocksThatShareAMatrix) {
  check({6, 6, 6}, false, 300, 5);
  check({5, 0, 7, 1, 0, 3}, true, 130, 6);
}

}  // namespace
}  // namespace tidegate::testing
