// norm, add_norm and glu through the C++ API: values and gradients against torch's ops in double
// precision, dtypes, errors.

#include <tidegate/ops/glu.h>
#include <tidegate/ops/norm.h>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

using NormOps = OpTest;
INSTANTIATE_TEST_SUITE_P(Cpu, NormOps, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, NormOps, ::testing::Values(at::kCUDA));

TEST_P(NormOps, NormEqualsTorchsWithTheGateOnEitherSide) {
  for (int64_t width : {5, 24}) {
    const Tensors inputs = {random({3, 9, width}), random({width}), random({width}),
                            random({3, 9, width})};
    expect_same(
        device(), inputs,
        [](const Tensors& in) {
          return std::pair(tidegate::norm(in[0], in[1], in[2], in[3], "layer", "sigmoid", true),
                           tidegate::norm(in[0], in[1], {}, in[3]));
        },
        [width](const Tensors& in) {
          const Tensor u = in[0] * at::sigmoid(in[3]);
          return std::pair(at::layer_norm(u, {width}, in[1], in[2]),
                           at::rms_norm(in[0], {width}, in[1], 1e-5) * at::silu(in[3]));
        });
  }
}

TEST_P(NormOps, AddNormEqualsTorchsSumAndNormAHead) {
  const Tensors inputs = {random({2, 7, 3, 8}), random({2, 7, 3, 8}), random({3, 8})};
  expect_same(
      device(), inputs,
      [](const Tensors& in) {
        auto [y, sum] = add_norm(in[0], in[1], in[2]);
        return std::pair(y, sum);
      },
      [](const Tensors& in) {
        const Tensor sum = in[0] + in[1];
        return std::pair(at::rms_norm(sum, {8}, std::nullopt, 1e-5) * in[2], sum);
      });
}

TEST_P(NormOps, GluEqualsTheProduct) {
  expect_same(
      device(), {random({3, 9, 20})},
      [](const Tensors& in) {
        return std::pair(tidegate::glu(in[0]), tidegate::glu(in[0], "none"));
      },
      [](const Tensors& in) {
        const auto parts = in[0].chunk(2, -1);
        return std::pair(at::silu(parts[0]) * parts[1], parts[0] * parts[1]);
      });
}

TEST_P(NormOps, TheResidualStreamMayBeWider) {
  const Tensor x = random({4, 16}).to(device(), at::kBFloat16);
  const Tensor residual = random({4, 16}).to(device(), at::kFloat);
  const auto [y, sum] = add_norm(x, residual);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(sum, residual + x));
  EXPECT_TRUE(
      at::equal(y, tidegate::norm(sum, {}, {}, {}, "rms", "silu", false, 1e-5, at::kBFloat16)));
}

TEST_P(NormOps, ErrorsNameWhatIsWrong) {
  const Tensor x = at::zeros({2, 8}, options());
  const auto message = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_EQ(message([&] { tidegate::norm(x, at::zeros({7}, options())); }),
            "norm: weight must have shape [D] = [8], got [7]");
  EXPECT_EQ(message([] { tidegate::norm({}); }), "norm: x must be a tensor, got an undefined one");
  EXPECT_EQ(message([&] { tidegate::glu(x, "relu"); }),
            R"(glu: activation must be "silu", "sigmoid" or "none", got "relu")");
}

}  // namespace
}  // namespace tidegate::testing
