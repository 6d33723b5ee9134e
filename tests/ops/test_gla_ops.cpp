// gated_linear_attention, hgrn2 and their steps through the C++ API: values and gradients against
// loops of torch ops in double precision, states, errors.

#include <tidegate/ops/gated_linear_attention.h>
#include <tidegate/ops/hgrn2.h>

#include <optional>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

/// o_t = scale * q_t^T S_t with S_t = diag(f_t) S_{t-1} + k_t v_t^T, one step after another.
std::pair<Tensor, Tensor> loop(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& f,
                               Tensor state, double scale, bool reverse) {
  Tensors out(q.size(1));
  for (int64_t i = 0; i < q.size(1); ++i) {
    const int64_t t = reverse ? q.size(1) - 1 - i : i;
    const auto at = [t](const Tensor& x) { return x.select(1, t); };
    state = at(f).unsqueeze(-1) * state + at(k).unsqueeze(-1) * at(v).unsqueeze(-2);
    out[t] = scale * at::sum(at(q).unsqueeze(-1) * state, -2);
  }
  return {at::stack(out, 1), state};
}

using GlaOps = OpTest;
INSTANTIATE_TEST_SUITE_P(Cpu, GlaOps, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, GlaOps, ::testing::Values(at::kCUDA));

TEST_P(GlaOps, GatedLinearAttentionEqualsTheLoop) {
  for (bool reverse : {false, true}) {
    for (int64_t gates : {4, 1}) {
      const Tensors inputs = {random({2, 19, 3, 4}), random({2, 19, 3, 4}), random({2, 19, 3, 5}),
                              -random({2, 19, 3, gates}).abs(), random({2, 3, 4, 5})};
      expect_same(
          device(), inputs,
          [&](const Tensors& in) {
            auto [o, last] =
                gated_linear_attention(in[0], in[1], in[2], in[3], in[4], 0.5, reverse);
            return std::pair(o, last);
          },
          [&](const Tensors& in) {
            const Tensor f = at::exp(in[3]).expand_as(in[0]);
            return loop(in[0], in[1], in[2], f, in[4], 0.5, reverse);
          });
    }
  }
}

TEST_P(GlaOps, Hgrn2EqualsTheLoop) {
  const Tensors inputs = {random({2, 19, 3, 4}), random({2, 19, 3, 4}), random({2, 19, 3, 5}),
                          at::rand({3, 4}, at::kDouble), random({2, 3, 4, 5})};
  expect_same(
      device(), inputs,
      [](const Tensors& in) {
        auto [o, last] = hgrn2(in[0], in[1], in[2], in[3], in[4], 0.5, "silu", "sigmoid");
        return std::pair(o, last);
      },
      [](const Tensors& in) {
        const Tensor f = in[3] + (1 - in[3]) * at::sigmoid(in[1]);
        return loop(at::silu(in[0]), 1 - f, at::sigmoid(in[2]), f, in[4], 0.5, false);
      });
}

TEST_P(GlaOps, StepsEqualPrefill) {
  const at::NoGradGuard no_gradients;
  const auto make = [&](at::IntArrayRef shape) { return at::randn(shape, options()); };
  const Tensor q = make({2, 9, 3, 16}), f = make({2, 9, 3, 16}), v = make({2, 9, 3, 32});
  const Tensor h0 = make({2, 3, 16, 32});
  const auto [o, last] = hgrn2(q, f, v, std::nullopt, h0, 1.0, "silu");
  const auto [o_gla, last_gla] = gated_linear_attention(q, f, v, -f.abs(), h0);
  Tensor state = h0.clone(), state_gla = h0.clone();
  for (int64_t t = 0; t < 9; ++t) {
    const auto at = [t](const Tensor& x) { return x.select(1, t); };
    const Tensor row = hgrn2_step(at(q), at(f), at(v), std::nullopt, state, 1.0, "silu");
    EXPECT_TRUE(at::allclose(row, at(o), 1e-4, 1e-5)) << t;
    const Tensor row_gla =
        gated_linear_attention_step(at(q), at(f), at(v), -at(f).abs(), state_gla);
    EXPECT_TRUE(at::allclose(row_gla, at(o_gla), 1e-4, 1e-5)) << t;
  }
  EXPECT_TRUE(at::allclose(state, last, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(state_gla, last_gla, 1e-4, 1e-5));
}

TEST_P(GlaOps, PackedSequencesTakeOffsetsFromTheCpu) {
  const Tensor q = at::randn({1, 12, 2, 8}, options());
  const Tensor offsets = at::tensor({0, 5, 5, 12}, at::kInt);
  const auto [o, last] =
      hgrn2(q, q, q, std::nullopt, std::nullopt, 1.0, "none", "none", false, offsets);
  const auto [first, state] = hgrn2(q.narrow(1, 0, 5), q.narrow(1, 0, 5), q.narrow(1, 0, 5));
  EXPECT_TRUE(at::allclose(o.narrow(1, 0, 5), first, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(last[0], state[0], 1e-4, 1e-5));
  EXPECT_EQ(at::count_nonzero(last[1]).item<int64_t>(), 0);
}

TEST_P(GlaOps, ErrorsNameTheArgument) {
  const Tensor q = at::zeros({2, 5, 3, 4}, options());
  EXPECT_EQ(error_of([&] { hgrn2(q, q.narrow(3, 0, 2), q); }),
            "hgrn2: f must have shape [B, T, H, K] = [2, 5, 3, 4] like q, got [2, 5, 3, 2]");
  EXPECT_EQ(error_of([&] { gated_linear_attention(q, q, Tensor(), q); }),
            "gated_linear_attention: v must be a tensor, got an undefined one");
}

}  // namespace
}  // namespace tidegate::testing
