// Attention's kernels of a token, for compute-sanitizer and beside the CPU: tiny shapes, each
// kernel once or twice, by blocks that share a head where the device has clusters.

#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "kernels/attention/append_cuda.h"
#include "kernels/attention/attention_step_cuda.h"
#include "kernels/attention/forgetting_attention_cuda.h"
#include "support/token_device.h"

namespace tidegate::testing {
namespace {

using kernels::HeadSeries;
using kernels::attention::AttentionAppendParams;
using kernels::attention::ForgettingAttentionStepParams;

constexpr DType kHalf = DType::kBFloat16;

/// The projections of a token and the cache that it enters, in the host's memory and, after
/// upload(), the device's.
struct TokenAndCache {
  int64_t rows, heads, key_heads, dim, capacity;
  std::vector<int32_t> lengths;  // tokens held
  float gate_bias;
  std::vector<int64_t> seen = {lengths.begin(), lengths.end()};
  std::vector<float> bias = std::vector<float>(static_cast<size_t>(heads), gate_bias);
  TypedSeries projected = numbers(kHalf, rows, (heads + 2 * key_heads) * dim);
  TypedSeries q = TypedSeries(kHalf, 1, rows, heads* dim);
  TypedSeries k = numbers(kHalf, rows* capacity, key_heads* dim, 1, 6);
  TypedSeries v = numbers(kHalf, rows* capacity, key_heads* dim, 1, 7);
  TypedSeries log_f = numbers(DType::kFloat32, rows* capacity, heads, 0);
  TokenDevice device = {};

  void upload() {
    for (TypedSeries* t : {&projected, &q, &k, &v, &log_f}) device.add(*t);
    device.add(bias);
    device.add(lengths);
    device.add(seen);
  }
  /// A tensor of the cache, of which `data` is the first element.
  HeadSeries cached(const TypedSeries& t, const void* data, int64_t width) const {
    const int64_t stride = t.columns();
    return {const_cast<void*>(data), capacity * stride, stride, width, t.dtype()};
  }

  /// What appends the token as it was projected, without norms, positions and shifts, on the
  /// device.
  AttentionAppendParams append_params() {
    AttentionAppendParams append;
    append.batch = rows;
    append.heads = append.gate_heads = heads;
    append.key_heads = key_heads;
    append.head_dim = dim;
    append.capacity = capacity;
    append.dtype = kHalf;
    append.projected = device.at(projected.at(0, 0));
    append.stride_projected = projected.columns();
    append.gate_bias = device.at(bias.data());
    append.q = device.at(q.at(0, 0));
    append.k = cached(k, device.at(k.at(0, 0)), dim);
    append.v = cached(v, device.at(v.at(0, 0)), dim);
    append.log_f = cached(log_f, device.at(log_f.at(0, 0)), 1);
    append.lengths = device.at(lengths.data());
    append.seen = device.at(seen.data());
    return append;
  }
  /// The step of q over the cache, both in the host's memory.
  ForgettingAttentionStepParams step_params(const TypedSeries& o) const {
    ForgettingAttentionStepParams step;
    step.layout.batch = step.layout.sequences = rows;
    step.layout.time = 1;
    step.heads = heads;
    step.key_heads = key_heads;
    step.head_dim = dim;
    step.channels = heads * dim;
    step.capacity = capacity;
    step.scale = 0.125;
    step.q = heads_of(q, q.at(0, 0), dim);
    step.k = cached(k, k.at(0, 0), dim);
    step.v = cached(v, v.at(0, 0), dim);
    step.log_f = cached(log_f, log_f.at(0, 0), 1);
    step.o = heads_of(o, o.at(0, 0), dim);
    step.lengths = lengths.data();
    return step;
  }
  /// `step` over the copies on the device.
  ForgettingAttentionStepParams on_device(ForgettingAttentionStepParams step) const {
    for (HeadSeries* t : {&step.q, &step.k, &step.v, &step.log_f, &step.key_norms, &step.o}) {
      device.translate(t->data);
    }
    device.translate(step.lengths);
    return step;
  }
};

/// Plans `step`, whose tensors are on the device, and calls `launch`.
template <class Launch>
void run_on_device(ForgettingAttentionStepParams* step, Launch launch) {
  plan_and_launch(
      &step->plan, &step->workspace,
      [&](auto* plan) { return kernels::attention::forgetting_attention_step_plan(*step, plan); },
      launch);
}
void run_on_device(ForgettingAttentionStepParams step) {
  run_on_device(&step,
                [&] { return kernels::attention::forgetting_attention_step(step, nullptr); });
}

/// The CPU, from the same cache, makes of `step` what the device has left in `o`.
void expect_as_on_cpu(const TypedSeries& o, ForgettingAttentionStepParams step) {
  TypedSeries expected(o.dtype(), 1, o.tokens(), o.columns());
  step.o.data = expected.at(0, 0);
  step.plan = kernels::attention::forgetting_attention_step_plan_cpu(step);
  std::vector<char> scratch(static_cast<size_t>(step.plan.workspace_bytes) + 16);
  step.workspace = scratch.data();
  kernels::attention::forgetting_attention_step_cpu(step, kernels::ParallelFor{});
  for (int64_t r = 0; r < o.tokens(); ++r) {
    for (int64_t i = 0; i < o.columns(); ++i) {
      ASSERT_NEAR(o.get(r, i).real(), expected.get(r, i).real(), 0.03) << r << ", " << i;
    }
  }
}

/// One token into a cache, by more warps than a block has, then a step over it.
TEST(AttentionTokenCudaSanitize, TokenIntoACacheAndStepOverIt) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = 2, kHeads = 12, kKeyHeads = 4, kDim = 64, kCapacity = 200;
  TokenAndCache at = {kRows, kHeads, kKeyHeads, kDim, kCapacity, {150, 3}, 2.0f};
  TypedSeries mixes = numbers(kHalf, kRows, 2 * kKeyHeads);
  TypedSeries last_k = numbers(kHalf, kRows, kKeyHeads * kDim, 1, 3);
  TypedSeries last_v = numbers(kHalf, kRows, kKeyHeads * kDim, 1, 4);
  TypedSeries weight = numbers(kHalf, 1, kDim, 1, 5);
  TypedSeries o = at.q;
  at.upload();
  TokenDevice& device = at.device;
  for (TypedSeries* t : {&mixes, &last_k, &last_v, &weight, &o}) device.add(*t);
  AttentionAppendParams append = at.append_params();
  append.mixes = device.at(mixes.at(0, 0));
  append.stride_mixes = mixes.columns();
  append.last_k = device.at(last_k.at(0, 0));
  append.last_v = device.at(last_v.at(0, 0));
  append.q_weight = append.k_weight = device.at(weight.at(0, 0));
  append.eps = 1e-5;
  append.theta = 10000;
  check_cuda(kernels::attention::attention_append_cuda(append, nullptr), "append");
  const ForgettingAttentionStepParams step = at.step_params(o);
  run_on_device(at.on_device(step));
  device.finish();

  EXPECT_EQ(at.lengths, (std::vector<int32_t>{151, 4}));
  EXPECT_EQ(at.seen, (std::vector<int64_t>{151, 4}));
  // The values' way is short: the mix of the last one and this one.
  for (int64_t r = 0; r < kRows; ++r) {
    const int64_t place = r * kCapacity + at.lengths[r] - 1;
    for (int64_t i = 0; i < kKeyHeads * kDim; ++i) {
      const double mix = sigmoid(mixes.get(r, kKeyHeads + i / kDim).real());
      const double last = numbers(kHalf, kRows, kKeyHeads * kDim, 1, 4).get(r, i).real();
      const double now = at.projected.get(r, (kHeads + kKeyHeads) * kDim + i).real();
      ASSERT_NEAR(at.v.get(place, i).real(), mix * last + (1 - mix) * now, 0.03) << r << ", " << i;
      ASSERT_EQ(last_v.get(r, i), now);
    }
    ASSERT_NEAR(at.log_f.get(place, 0).real(), std::log(sigmoid(2)), 1e-6);
  }
  expect_as_on_cpu(o, step);
}

/// Keys are read before the token is in the cache, but for those near the end: the same bits as
/// after it, for tokens that end a split and that begin one.
TEST(AttentionTokenCudaSanitize, StepOverALongCacheThatIsSettled) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kHeads = 2, kDim = 64, kTokens = 5;
  TokenAndCache at = {1, kHeads, kHeads, kDim, 4352, {4286}, 5.0f};
  TypedSeries early(kHalf, 1, kTokens, kHeads * kDim), late = early;
  at.upload();
  TokenDevice& device = at.device;
  for (TypedSeries* t : {&early, &late}) device.add(*t);
  const AttentionAppendParams append = at.append_params();
  ForgettingAttentionStepParams step = at.on_device(at.step_params(early));
  const auto token = [&] {
    for (int64_t i = 0; i < kTokens; ++i) {
      if (const auto error = kernels::attention::attention_append_cuda(append, nullptr))
        return error;
      for (const bool is_settled : {true, false}) {
        const TypedSeries& to = is_settled ? early : late;
        step.o = heads_of(to, device.at(to.at(i, 0)), kDim);
        const auto error = kernels::attention::attention_step(step, is_settled, nullptr);
        if (error != cudaSuccess) return error;
      }
    }
    return cudaSuccess;
  };
  run_on_device(&step, token);
  device.finish();
  EXPECT_EQ(at.lengths.front(), 4286 + kTokens);
  EXPECT_NE(early.get(0, 0).real(), 0.0);
  EXPECT_TRUE(early.same_bits(late));
}

/// Old keys are left out by every kernel of a step: by clusters, by splits of a long cache, and on
/// CUDA cores; what they read is the CPU's choice of keys.
TEST(AttentionTokenCudaSanitize, PrunedStep) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kHeads = 4, kKeyHeads = 2, kDim = 64, kRows = 2;
  for (const auto& [capacity, path] : {std::pair{300, kernels::attention::AttentionPath::kAuto},
                                       {4400, kernels::attention::AttentionPath::kAuto},
                                       {300, kernels::attention::AttentionPath::kPlain}}) {
    TokenAndCache at = {kRows, kHeads, kKeyHeads, kDim, capacity, {capacity, capacity - 77}, 0.0f};
    at.q = numbers(kHalf, kRows, kHeads * kDim);
    for (int64_t t = 0; t < at.log_f.tokens(); ++t) {
      for (int64_t h = 0; h < kHeads; ++h) at.log_f.set(t, h, h < 2 ? -2.0 : -0.01);
    }
    std::vector<float> norms(kKeyHeads, 20.0f);
    TypedSeries o = at.q;
    at.upload();
    at.device.add(o);
    at.device.add(norms);
    ForgettingAttentionStepParams step = at.step_params(o);
    step.prune = 1e-3;
    step.path = path;
    step.key_norms = {norms.data(), 0, 0, 1, DType::kFloat32};
    run_on_device(at.on_device(step));
    at.device.finish();
    expect_as_on_cpu(o, step);
  }
}

}  // namespace
}  // namespace tidegate::testing
