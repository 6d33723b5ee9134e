// gated_rnn and its step through the C++ API: values and gradients against a loop of torch ops in
// double precision, states, errors.

#include <tidegate/ops/gated_rnn.h>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

/// h_t = g_t h_{t-1} + (1 - g_t) x_t with g_t = gamma + (1 - gamma) sigmoid(z_t + W h_{t-1}), a
/// token after another.
std::pair<Tensor, Tensor> loop(const Tensor& z, const Tensor& x, const Tensor& w, Tensor state,
                               const Tensor& gamma) {
  Tensors out;
  for (int64_t t = 0; t < x.size(1); ++t) {
    const Tensor a = z.select(1, t) + at::matmul(state, w.t());
    const Tensor shut = (1 - gamma) * at::sigmoid(-a);
    state = (1 - shut) * state + shut * x.select(1, t);
    out.push_back(state);
  }
  return {at::stack(out, 1), state};
}

using RnnOps = OpTest;
INSTANTIATE_TEST_SUITE_P(Cpu, RnnOps, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, RnnOps, ::testing::Values(at::kCUDA));

TEST_P(RnnOps, GatedRnnEqualsTheLoop) {
  for (int64_t width : {5, 130}) {
    const Tensors inputs = {random({3, 9, width}), random({3, 9, width}),
                            0.3 * random({width, width}), random({3, width}),
                            0.5 + 0.4 * at::sin(random({width}))};
    expect_same(
        device(), inputs,
        [](const Tensors& in) {
          auto [h, last] = gated_rnn(in[0], in[1], in[2], in[3], {}, in[4]);
          return std::pair(h, last);
        },
        [](const Tensors& in) { return loop(in[0], in[1], in[2], in[3], in[4]); });
    expect_same(
        device(), {inputs.begin(), inputs.begin() + 4},
        [](const Tensors& in) {
          auto [h, last] = gated_rnn(in[0], in[1], in[2], in[3]);
          return std::pair(h, last);
        },
        [](const Tensors& in) {
          return loop(in[0], in[1], in[2], in[3], at::zeros({in[2].size(0)}, in[2].options()));
        });
  }
}

TEST_P(RnnOps, StepsEqualTheWholeAndPackedSequencesTheirParts) {
  const at::NoGradGuard no_grad;
  const auto placed = [&](at::IntArrayRef shape) { return random(shape).to(device(), at::kFloat); };
  const Tensor z = placed({1, 8, 6}), x = placed({1, 8, 6}), w = placed({6, 6});
  const auto [whole, last] = gated_rnn(z, x, w);
  for (const std::optional<Tensor>& gamma :
       {std::optional<Tensor>(), std::optional<Tensor>(placed({6}).sigmoid())}) {
    const auto [h, final_state] = gated_rnn(z, x, w, {}, {}, gamma);
    Tensor state = at::zeros({1, 6}, options());
    for (int64_t t = 0; t < 8; ++t) {
      EXPECT_TRUE(at::equal(gated_rnn_step(z.select(1, t), x.select(1, t), w, state, gamma),
                            h.select(1, t)));
    }
    EXPECT_TRUE(at::equal(state, final_state));
  }
  // Offsets may be on the CPU.
  const auto [packed, states] = gated_rnn(z, x, w, {}, at::tensor({0, 5, 5, 8}, at::kInt));
  EXPECT_TRUE(at::equal(packed.narrow(1, 0, 5), whole.narrow(1, 0, 5)));
  const auto [rest, final_state] = gated_rnn(z.narrow(1, 5, 3), x.narrow(1, 5, 3), w);
  EXPECT_TRUE(at::allclose(packed.narrow(1, 5, 3), rest));
  EXPECT_TRUE(at::allclose(states[2], final_state[0]));
  EXPECT_TRUE(at::equal(states[1], at::zeros({6}, options())));
}

TEST(RnnErrors, NameTheOpAndTheArgument) {
  const Tensor x = at::zeros({2, 3, 4}), w = at::zeros({4, 4});
  EXPECT_EQ(error_of([&] { gated_rnn({}, x, w); }),
            "gated_rnn: z must be a tensor, got an undefined one");
  EXPECT_EQ(error_of([&] { gated_rnn(x, x, at::zeros({4, 5})); }),
            "gated_rnn: w_zh must have shape [D, D] = [4, 4], got [4, 5]");
  EXPECT_EQ(error_of([&] { gated_rnn_step(x, x, w, at::zeros({2, 4})); }),
            "gated_rnn_step: x must have shape [B, D], got [2, 3, 4]");
}

}  // namespace
}  // namespace tidegate::testing
