// Forgetting attention on CUDA through raw pointers: the tensor-core kernels in every head
// dimension and form, held against the equations in float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/attention/forgetting_attention_cuda.h"
#include "support/attention_problem.h"
#include "support/device_mirror.h"

namespace tidegate::testing {
namespace {

/// A problem's tensors on the device, and params that point there.
class AttentionOnDevice {
 public:
  explicit AttentionOnDevice(AttentionProblem& problem) : params_(problem.params()) {
    for (TypedSeries* t : problem.inputs()) mirror_.add(*t);
    for (TypedSeries* t : problem.outputs()) mirror_.add(*t);
    kernels::attention::ForgettingAttentionParams& p = params_.forward;
    mirror_.add(p.layout);
    mirror_.add(p.key_layout);
    for (kernels::HeadSeries* t : {&p.q, &p.k, &p.v, &p.log_f, &p.o, &params_.d_o, &params_.dq,
                                   &params_.dk, &params_.dv, &params_.dlog_f}) {
      mirror_.translate(t->data);
    }
    mirror_.translate(p.lse);
    mirror_.translate(params_.dlse);
    mirror_.translate(p.layout.offsets);
    mirror_.translate(p.key_layout.offsets);
  }

  void forward() {
    kernels::attention::ForgettingAttentionParams& p = params_.forward;
    p.path = kernels::attention::AttentionPath::kTensorCore;
    plan_and_launch(
        &p.plan, &p.workspace,
        [&](auto* plan) { return kernels::attention::forgetting_attention_forward_plan(p, plan); },
        [&] { return kernels::attention::forgetting_attention_forward(p, nullptr); });
  }
  void backward() {
    kernels::attention::ForgettingAttentionParams& p = params_.forward;
    p.path = kernels::attention::AttentionPath::kTensorCore;
    kernels::attention::ForgettingAttentionPlan found;
    const cudaError_t fits =
        kernels::attention::forgetting_attention_backward_plan(params_, &found);
    if (fits == cudaErrorNotSupported) GTEST_SKIP() << "this device has too little shared memory";
    plan_and_launch(
        &p.plan, &p.workspace,
        [&](auto* plan) {
          return kernels::attention::forgetting_attention_backward_plan(params_, plan);
        },
        [&] { return kernels::attention::forgetting_attention_backward(params_, nullptr); });
  }
  void download() { mirror_.download(); }

 private:
  kernels::attention::ForgettingAttentionBackwardParams params_;
  DeviceMirror mirror_;
};

void run(AttentionProblem* problem) {
  AttentionOnDevice device(*problem);
  device.forward();
  device.backward();
  device.download();
}

/// Deterministic passes twice, bit for bit.
void check(const AttentionShape& shape) {
  AttentionProblem problem(shape);
  run(&problem);
  problem.check();
  if (!shape.deterministic) return;
  AttentionProblem again(shape);
  run(&again);
  for (size_t i = 0; i < problem.outputs().size(); ++i) {
    EXPECT_TRUE(problem.outputs()[i]->same_bits(*again.outputs()[i]))
        << shape.name() << ", output " << i;
  }
}

/// A row whose weight lies on one key has gradients near zero, beside which the rounding of o as it
/// is stored is large in any implementation: of a handful of rows, their norm is chance.
constexpr int64_t kRowsOfFewTokens = 64;

/// Parameters: the dtype; whether deterministic; whether the kernels for Hopper are left out where
/// there are some (they want all of the 227 KB that a block may have there).
class AttentionCuda : public ::testing::TestWithParam<std::tuple<DType, bool, bool>> {
 protected:
  void SetUp() override {
    if (no_device()) GTEST_SKIP() << "no CUDA device";
    const auto [dtype, deterministic, is_portable] = GetParam();
    shape_.dtype = dtype;
    shape_.deterministic = deterministic;
    if (is_portable) {
      kernels::DeviceLimits limits;
      ASSERT_EQ(kernels::read_device_limits(&limits), cudaSuccess);
      if (limits.major != 9) GTEST_SKIP() << "this device has the portable kernels only";
      portable_.emplace(226 * 1024);
    }
  }
  AttentionShape shape_;
  std::optional<SharedBytesLimit> portable_;
};

std::string name_of(const ::testing::TestParamInfo<std::tuple<DType, bool, bool>>& info) {
  return std::string(dtype_name(std::get<0>(info.param))) +
         (std::get<1>(info.param) ? "_deterministic" : "") +
         (std::get<2>(info.param) ? "_portable" : "");
}

TEST_P(AttentionCuda, EveryHeadDim) {
  uint32_t i = 0;
  for (const int64_t dim : {16, 24, 32, 40, 64, 72, 96, 104, 128, 136, 192, 200, 256}) {
    AttentionShape shape = shape_;
    shape.head_dim = dim;
    shape.queries = 130;
    shape.keys = i % 2 == 0 ? 130 : 171;
    shape.heads = i % 3 == 0 ? 2 : 1;
    shape.gates = static_cast<ForgetGates>(i % 5);
    shape.gap = i % 2 * 8;
    shape.seed = ++i;
    check(shape);
  }
}

TEST_P(AttentionCuda, EveryLength) {
  uint32_t i = 0;
  for (const int64_t time : {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 600}) {
    AttentionShape shape = shape_;
    shape.queries = shape.keys = time;
    shape.batch = time < 16 ? kRowsOfFewTokens : time < 100 ? 3 : 1;
    shape.head_dim = i % 2 == 0 ? 64 : 128;
    shape.gates = static_cast<ForgetGates>(i % 5);
    shape.seed = ++i;
    check(shape);
  }
}

TEST_P(AttentionCuda, NoQueriesOrKeys) {
  AttentionShape shape = shape_;
  shape.queries = 0;
  shape.keys = 70;
  AttentionProblem problem(shape);
  run(&problem);
  problem.check();
  shape.queries = 5;  // queries before all keys see none
  shape.keys = 2;
  shape.batch = kRowsOfFewTokens;
  check(shape);
}

TEST_P(AttentionCuda, GroupedHeads) {
  AttentionShape shape = shape_;
  shape.batch = 2;
  shape.queries = 100;
  shape.keys = 140;
  shape.heads = 6;
  shape.key_heads = 2;
  check(shape);
}

/// More heads, those of all batch rows together, than a grid's second dimension has blocks.
TEST_P(AttentionCuda, ManyHeads) {
  AttentionShape shape = shape_;
  shape.batch = 16600;
  shape.heads = 4;
  shape.queries = shape.keys = 3;
  shape.head_dim = 16;
  check(shape);
}

TEST_P(AttentionCuda, Windows) {
  for (const int64_t window : {1, 2, 63, 64, 65, 200, 1000}) {
    AttentionShape shape = shape_;
    shape.queries = 290;
    shape.keys = 333;
    shape.window = window;
    shape.gates = window % 2 == 0 ? ForgetGates::kWeak : ForgetGates::kResets;
    shape.head_dim = window % 3 == 0 ? 128 : 64;
    check(shape);
  }
}

TEST_P(AttentionCuda, PackedSequences) {
  for (const int64_t window : {0, 40}) {
    AttentionShape shape = shape_;
    shape.query_offsets = {0, 0, 1, 130, 230, 230, 300};
    shape.key_offsets = {0, 7, 8, 208, 330, 330, 500};
    shape.queries = 300;
    shape.keys = 500;
    shape.heads = 2;
    shape.window = window;
    check(shape);
  }
}

/// Many tiles of queries and keys, of which some are full and some are not, one or several heads.
TEST_P(AttentionCuda, LongerThanTiles) {
  uint32_t i = 0;
  for (const int64_t dim : {64, 96, 128, 72, 40}) {
    AttentionShape shape = shape_;
    shape.queries = i % 2 == 0 ? 900 : 512;
    shape.keys = i % 2 == 0 ? 1100 : 512;
    shape.heads = 2;
    shape.key_heads = i % 3 == 0 ? 1 : 2;
    shape.window = i == 2 ? 300 : 0;
    shape.head_dim = dim;
    shape.gates = static_cast<ForgetGates>(i % 5);
    shape.gap = i % 2 * 8;
    shape.seed = ++i;
    check(shape);
  }
}

TEST_P(AttentionCuda, Pruned) {
  for (const ForgetGates gates : {ForgetGates::kStrong, ForgetGates::kMixed, ForgetGates::kWeak}) {
    AttentionShape shape = shape_;
    shape.queries = shape.keys = 700;
    shape.prune = 1e-3;
    shape.gates = gates;
    check(shape);
  }
}

// With large tiles and with small ones, head by head.
TEST_P(AttentionCuda, PrunedByHead) {
  for (const int64_t key_heads : {4, 2, 1}) {
    for (const bool packed : {false, true}) {
      AttentionShape shape = shape_;
      shape.queries = shape.keys = 700;
      shape.heads = 4;
      shape.key_heads = key_heads;
      shape.head_dim = 128;
      shape.prune = 1e-3;
      shape.gates = ForgetGates::kByHead;
      if (packed) shape.query_offsets = shape.key_offsets = {0, 0, 3, 130, 700};
      check(shape);
    }
  }
}

/// Gates that leave a key a few dozen queries: on Hopper, from D = 65 to 128, a kernel of its own
/// iterates over them, in parts of 256 tokens here.
TEST_P(AttentionCuda, PrunedShortRange) {
  struct Part {
    int64_t queries, keys, head_dim, heads, key_heads, window;
  };
  const Part parts[] = {{700, 700, 128, 1, 1, 0},  {300, 777, 72, 4, 2, 0},
                        {641, 641, 104, 2, 2, 40}, {190, 193, 128, 2, 1, 70},
                        {65, 65, 96, 1, 1, 0},     {5, 300, 128, 1, 1, 0},
                        {600, 600, 192, 2, 1, 0},  {140, 70, 128, 1, 1, 0}};
  uint32_t i = 0;
  for (const Part& part : parts) {
    AttentionShape shape = shape_;
    shape.queries = part.queries;
    shape.keys = part.keys;
    shape.head_dim = part.head_dim;
    shape.heads = part.heads;
    shape.key_heads = part.key_heads;
    shape.window = part.window;
    shape.batch = part.queries < 10 ? kRowsOfFewTokens : 2;
    shape.prune = 1e-3;
    // -1e4 at every eighth token or so leaves some keys no other query, and some many.
    shape.gates = i % 3 == 1 ? ForgetGates::kResets : ForgetGates::kStrong;
    shape.gap = i % 2 * 8;
    shape.seed = ++i;
    check(shape);
  }
}

TEST_P(AttentionCuda, PrunedShortRangePacked) {
  for (const int64_t key_heads : {2, 1}) {
    AttentionShape shape = shape_;
    shape.query_offsets = {0, 0, 1, 130, 230, 230, 900};
    shape.key_offsets = {0, 7, 8, 208, 330, 330, 1000};
    shape.queries = 900;
    shape.keys = 1000;
    shape.head_dim = 128;
    shape.heads = 2;
    shape.key_heads = key_heads;
    shape.prune = 1e-3;
    shape.window = key_heads == 1 ? 50 : 0;
    check(shape);
  }
}

/// Above D = 128, where warpgroups of the Hopper backward pass have roles.
TEST_P(AttentionCuda, LargeHeadDims) {
  uint32_t i = 0;
  for (const int64_t dim : {192, 136, 160, 184}) {
    AttentionShape shape = shape_;
    shape.head_dim = dim;
    shape.queries = i % 2 == 0 ? 400 : 256;
    shape.keys = i % 2 == 0 ? 500 : 256;
    shape.heads = 2;
    shape.key_heads = i % 3 == 0 ? 1 : 2;
    shape.window = i == 2 ? 150 : 0;
    shape.gates = static_cast<ForgetGates>(i % 5);
    shape.gap = i % 2 * 8;
    shape.seed = ++i;
    check(shape);
  }
  AttentionShape shape = shape_;
  shape.head_dim = 192;
  shape.query_offsets = {0, 0, 1, 130, 130, 230};
  shape.key_offsets = {0, 7, 8, 208, 300, 400};
  shape.queries = 230;
  shape.keys = 400;
  shape.heads = 2;
  check(shape);
}

// The tiles of a chip with 99 KB of shared memory a block.
TEST_P(AttentionCuda, LittleSharedMemory) {
  const SharedBytesLimit limit(99 * 1024);
  for (const int64_t dim : {32, 64, 96, 128, 192}) {
    AttentionShape shape = shape_;
    shape.head_dim = dim;
    shape.queries = 130;
    shape.keys = 171;
    shape.prune = dim == 128 ? 1e-3 : 0;
    check(shape);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionCuda,
                         ::testing::Combine(::testing::Values(DType::kBFloat16, DType::kFloat16),
                                            ::testing::Bool(), ::testing::Bool()),
                         name_of);

TEST(AttentionCudaWide, ManyKeys) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  AttentionShape shape;  // enough for the wide tiles of D = 128
  shape.head_dim = 120;
  shape.queries = 300;
  shape.keys = 8300;
  shape.gates = ForgetGates::kResets;
  check(shape);
}

/// The forward pass alone.
void check_forward(const AttentionShape& shape) {
  AttentionProblem problem(shape);
  AttentionOnDevice device(problem);
  device.forward();
  device.download();
  problem.check(/*backward=*/false);
}

// Batch rows of at most 128 tokens, of heads of any dimension, in rows that begin anywhere: the
// kernel that takes them as they are, one tile each.
TEST(AttentionCudaSingleTile, RowsOfAnyWidth) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  uint32_t i = 0;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t dim : {1, 2, 7, 8, 20, 31, 44, 50, 55, 61, 62, 63}) {
      for (const int64_t time : {1, 2, 17, 64, 85, 128}) {
        AttentionShape shape;
        shape.dtype = dtype;
        shape.batch = time < 17 || dim < 7 ? kRowsOfFewTokens : 3;
        shape.queries = time;
        shape.keys = i % 3 == 0 ? std::min<int64_t>(128, time + 40) : time;
        shape.heads = i % 2 == 0 ? 2 : 4;
        shape.key_heads = 2;
        shape.head_dim = dim;
        shape.window = i % 4 == 3 ? 20 : 0;
        shape.gates = static_cast<ForgetGates>(i % 5);
        shape.gap = static_cast<int64_t>(i % 5);
        shape.seed = ++i;
        check_forward(shape);
      }
    }
  }
}

TEST(AttentionCudaNaN, StaysWhereCausalityPutsIt) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  for (const auto& [window, in_key] :
       {std::pair{0, false}, {0, true}, {50, false}, {50, true}}) {  // else in a value
    for (const int64_t dim : {50, 64, 128, 256}) {
      AttentionShape shape;
      shape.head_dim = dim;
      shape.queries = shape.keys = dim == 50 ? 128 : 200;  // single_tile_forward_kernel's sizes
      shape.window = window;
      AttentionProblem clean(shape), problem(shape);
      constexpr int64_t kToken = 70;
      (in_key ? problem.k : problem.v).set(kToken, 3, NAN);
      for (AttentionProblem* p : {&clean, &problem}) {
        AttentionOnDevice device(*p);
        device.forward();
        device.download();
      }
      for (int64_t i = 0; i < shape.queries; ++i) {
        const bool sees = i >= kToken && (window == 0 || i < kToken + window);
        for (int64_t d = 0; d < dim; ++d) {
          const double x = problem.o.get(i, d).real();
          if (sees && (in_key || d == 3)) {
            EXPECT_TRUE(std::isnan(x)) << i;
          } else {
            EXPECT_EQ(x, clean.o.get(i, d).real()) << i << ", " << d;
          }
        }
      }
    }
  }
}

// On Hopper, sequences that are one tile of the portable forward kernel take that.
TEST(AttentionCudaPlan, OnePortableTile) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr auto kHopper = kernels::attention::AttentionTile::kHopper;
  const auto tile = [](int64_t time, int64_t head_dim, int64_t keys) {
    kernels::attention::ForgettingAttentionParams p;
    p.layout = {.batch = 3, .time = time, .sequences = 3};
    p.key_layout = {.batch = 3, .time = keys, .sequences = 3};
    p.heads = p.key_heads = 2;
    p.head_dim = head_dim;
    p.channels = 2 * head_dim;
    for (kernels::HeadSeries* t : {&p.q, &p.k, &p.v, &p.o}) {
      *t = {nullptr, keys * p.channels, p.channels, head_dim, DType::kBFloat16};
    }
    kernels::attention::ForgettingAttentionPlan plan;
    EXPECT_EQ(kernels::attention::forgetting_attention_forward_plan(p, &plan), cudaSuccess);
    return plan.tile;
  };
  if (tile(129, 64, 129) != kHopper) GTEST_SKIP() << "this device has the portable kernels only";
  for (const int64_t time : {65, 99, 128}) {
    EXPECT_NE(tile(time, 64, 128), kHopper) << time;
    EXPECT_EQ(tile(time, 72, 128), kHopper) << time;
    EXPECT_EQ(tile(time, 64, 129), kHopper) << time;
  }
  EXPECT_NE(tile(99, 48, 99), kHopper);
  EXPECT_EQ(tile(64, 64, 128), kHopper);
}

// What is not known to weigh little is not dropped: NaN gates and scores reach every earlier key.
TEST(AttentionCudaSanitize, NaNIsNotPruned) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t dim : {64, 128, 192}) {
    // In a query's channel; in a gate; in a gate behind keys that everything would drop.
    for (const auto& [in_gate, falls] : {std::pair{false, false}, {true, false}, {true, true}}) {
      AttentionShape shape;
      shape.head_dim = dim;
      shape.queries = shape.keys = 300;
      shape.prune = 1e-3;
      AttentionProblem problem(shape);
      for (int64_t token = 0; falls && token < 200; ++token) problem.log_f.set(token, 0, -1);
      in_gate ? problem.log_f.set(200, 0, NAN) : problem.q.set(200, 5, NAN);
      run(&problem);
      EXPECT_TRUE(std::isnan(problem.o.get(200, 0).real()));
      EXPECT_FALSE(std::isnan(problem.o.get(199, 0).real()));
      EXPECT_TRUE(std::isnan(problem.dk.get(0, 0).real())) << in_gate << falls << ", " << dim;
    }
  }
}

// Packed sequences, and queries before all keys, which see none.
TEST(AttentionCudaSanitize, SingleTileRowsOfAnyWidth) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t dim : {44, 50, 53}) {  // rows aligned to 8, 4 and 2 bytes
    AttentionShape shape;
    shape.query_offsets = {0, 0, 1, 70, 70, 110};
    shape.key_offsets = {0, 7, 8, 80, 80, 128};
    shape.queries = 110;
    shape.keys = 128;
    shape.heads = 2;
    shape.head_dim = dim;
    shape.window = dim == 50 ? 30 : 0;
    check_forward(shape);
  }
  AttentionShape shape;
  shape.queries = 5;
  shape.keys = 2;
  shape.head_dim = 50;
  shape.batch = kRowsOfFewTokens;
  check_forward(shape);
}

/// A reduced set for compute-sanitizer.
TEST(AttentionCudaSanitize, Tiny) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  for (const bool deterministic : {false, true}) {
    for (const int64_t dim : {40, 128, 192}) {
      AttentionShape shape;
      shape.deterministic = deterministic;
      shape.head_dim = dim;
      shape.query_offsets = {0, 0, 70, 150};
      shape.key_offsets = {0, 3, 90, 170};
      shape.queries = 150;
      shape.keys = 170;
      shape.heads = 2;
      shape.prune = deterministic ? 1e-3 : 0;
      shape.window = dim == 40 ? 30 : 0;
      check(shape);
    }
  }
  AttentionShape shape;  // short-range heads and long-range ones
  shape.head_dim = 128;
  shape.queries = 300;
  shape.keys = 330;
  shape.heads = 4;
  shape.key_heads = 2;
  shape.prune = 1e-3;
  shape.gates = ForgetGates::kByHead;
  check(shape);
}

}  // namespace
}  // namespace tidegate::testing
