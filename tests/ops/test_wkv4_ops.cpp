// wkv4 and its step through the C++ API: values and gradients against a loop of torch ops in double
// precision, states, errors.

#include <tidegate/ops/wkv4.h>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

/// What a state means, whatever its scaling exponent: the mean of the values and the logarithm of
/// the weights' sum.
Tensor meaning(const Tensor& state) {
  const Tensor y = state.select(1, 0), z = state.select(1, 1), m = state.select(1, 2).detach();
  return at::stack({y / z, m + z.log()}, 1);
}

/// The equations as they stand, in double precision, from a state's sums.
std::pair<Tensor, Tensor> wkv4_loop(const Tensor& w, const Tensor& u, const Tensor& k,
                                    const Tensor& v, const Tensor& state) {
  const Tensor scale = state.select(1, 2).detach().exp();
  Tensor y = state.select(1, 0) * scale, z = state.select(1, 1) * scale;
  Tensors out;
  for (int64_t t = 0; t < k.size(1); ++t) {
    const Tensor key = k.select(1, t), value = v.select(1, t);
    const Tensor bonus = (u + key).exp(), token = key.exp();
    out.push_back((y + bonus * value) / (z + bonus));
    y = (-w).exp() * y + token * value;
    z = (-w).exp() * z + token;
  }
  return {at::stack(out, 1), meaning(at::stack({y, z, at::zeros_like(z)}, 1))};
}

using Wkv4Ops = OpTest;
INSTANTIATE_TEST_SUITE_P(Cpu, Wkv4Ops, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, Wkv4Ops, ::testing::Values(at::kCUDA));

TEST_P(Wkv4Ops, EqualsTheLoop) {
  for (int64_t time : {1, 9, 30}) {
    // Keys far apart; sums above zero.
    const Tensors inputs = {random({5}).abs(), random({5}), 20 * random({3, time, 5}),
                            random({3, time, 5}), random({3, 3, 5}).abs() + 0.1};
    expect_same(
        device(), inputs,
        [](const Tensors& in) {
          const auto [o, last] = wkv4(in[0], in[1], in[2], in[3], in[4]);
          return std::pair(o, meaning(last));
        },
        [](const Tensors& in) { return wkv4_loop(in[0], in[1], in[2], in[3], in[4]); });
  }
}

TEST_P(Wkv4Ops, StepsEqualTheWholeAndPackedSequencesTheirParts) {
  const at::NoGradGuard no_grad;
  const auto placed = [&](at::IntArrayRef shape) { return random(shape).to(device(), at::kFloat); };
  const Tensor w = placed({6}).abs(), u = placed({6}), k = 5 * placed({1, 8, 6}),
               v = placed({1, 8, 6});
  const auto [whole, last] = wkv4(w, u, k, v);
  const Tensor state = at::zeros({1, 3, 6}, options());
  for (int64_t t = 0; t < 8; ++t) {
    const Tensor o = wkv4_step(w, u, k.select(1, t), v.select(1, t), state);
    EXPECT_TRUE(at::allclose(o, whole.select(1, t), 1e-5, 1e-6)) << "token " << t;
  }
  EXPECT_TRUE(at::allclose(meaning(state), meaning(last), 1e-5, 1e-6));
  // Offsets may be on the CPU.
  const auto [packed, states] = wkv4(w, u, k, v, {}, at::tensor({0, 5, 5, 8}, at::kInt));
  const auto [first, first_state] = wkv4(w, u, k.narrow(1, 0, 5), v.narrow(1, 0, 5));
  const auto [rest, rest_state] = wkv4(w, u, k.narrow(1, 5, 3), v.narrow(1, 5, 3));
  EXPECT_TRUE(at::allclose(packed, at::cat({first, rest}, 1), 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(meaning(states[0].unsqueeze(0)), meaning(first_state), 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(meaning(states[2].unsqueeze(0)), meaning(rest_state), 1e-5, 1e-6));
  EXPECT_TRUE(at::equal(states[1], at::zeros({3, 6}, options())));
}

TEST(Wkv4Errors, NameTheOpAndTheArgument) {
  const Tensor k = at::zeros({2, 3, 4}), w = at::zeros({4});
  EXPECT_EQ(error_of([&] { wkv4({}, w, k, k); }), "wkv4: w must be a tensor, got an undefined one");
  EXPECT_EQ(error_of([&] { wkv4(w, at::zeros({5}), k, k); }),
            "wkv4: u must have shape [D] = [4], got [5]");
  EXPECT_EQ(error_of([&] { wkv4(w, w, k, k, at::zeros({2, 4})); }),
            "wkv4: state must have shape [N, 3, D] = [2, 3, 4], got [2, 4]");
  EXPECT_EQ(error_of([&] { wkv4_step(w, w, k, k, at::zeros({2, 3, 4})); }),
            "wkv4_step: k must have shape [B, D], got [2, 3, 4]");
}

}  // namespace
}  // namespace tidegate::testing
