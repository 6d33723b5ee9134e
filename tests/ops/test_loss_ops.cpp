// linear_cross_entropy through the C++ API: values and gradients against torch's cross-entropy of
// whole logits in double precision, dtypes, errors.

#include <tidegate/ops/linear_cross_entropy.h>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

using LossOps = OpTest;
INSTANTIATE_TEST_SUITE_P(Cpu, LossOps, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, LossOps, ::testing::Values(at::kCUDA));

Tensor some_labels(int64_t rows, int64_t vocab) {
  Tensor labels = at::arange(rows, at::kLong).mul(7).remainder(vocab);
  labels.slice(0, 0, rows, 3).fill_(-100);
  return labels;
}

TEST_P(LossOps, LinearCrossEntropyIsThatOfTheLogits) {
  for (const int64_t vocab : {3, 50, 257}) {
    const Tensor labels = some_labels(18, vocab);
    expect_same(
        device(), {random({18, 12}), random({vocab, 12}), random({vocab})},
        [&](const Tensors& in) {
          const Tensor y = labels.to(in[0].device());
          const Tensor half = y.to(at::kInt).view({2, 9});
          return std::pair(
              linear_cross_entropy(in[0], in[1], y, in[2]),
              linear_cross_entropy(in[0].view({2, 9, 12}), in[1], half, {}, -100, 0.1, 0.01, "none")
                  .view({18}));
        },
        [&](const Tensors& in) {
          const Tensor z = at::linear(in[0], in[1]);
          const Tensor rows = at::cross_entropy_loss(z, labels, {}, at::Reduction::None, -100, 0.1);
          const Tensor squares = at::logsumexp(z, {-1}).square() * 0.01;
          return std::pair(at::cross_entropy_loss(z + in[2], labels),
                           rows + at::where(labels == -100, 0.0, squares));
        });
  }
}

TEST_P(LossOps, LinearCrossEntropyOfHalfRowsIsSingle) {
  const Tensor x = random({6, 8}).to(device(), at::kBFloat16).requires_grad_();
  const Tensor weight = random({11, 8}).to(device(), at::kFloat).requires_grad_();
  const Tensor labels = some_labels(6, 11).to(device());
  const Tensor loss = linear_cross_entropy(x, weight, labels);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  const auto gradients = torch::autograd::grad({loss}, {x, weight});
  EXPECT_EQ(gradients[0].scalar_type(), at::kBFloat16);
  EXPECT_EQ(gradients[1].scalar_type(), at::kFloat);
  const Tensor none = linear_cross_entropy(x, weight, at::full_like(labels, -100));
  EXPECT_EQ(none.item<double>(), 0.0);
}

TEST_P(LossOps, LinearCrossEntropyIsDifferentiatedOnce) {
  const Tensor x = random({4, 5}).to(device()).requires_grad_();
  const Tensor weight = random({7, 5}).to(device());
  const Tensor labels = some_labels(4, 7).to(device());
  const Tensor loss = linear_cross_entropy(x, weight, labels);
  const auto first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
  try {
    first[0].sum().backward();
    FAIL() << "a second derivative was made";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("linear_cross_entropy: double backward is not"),
              std::string::npos);
  }
}

TEST_P(LossOps, LinearCrossEntropyNamesWhatIsWrong) {
  const Tensor x = at::zeros({2, 4}, options());
  const Tensor labels = at::zeros({2}, options().dtype(at::kLong));
  const auto message = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_EQ(message([&] { linear_cross_entropy(x, at::zeros({9, 3}, options()), labels); }),
            "linear_cross_entropy: weight must have shape [V, D] = [9, 4] like x, got [9, 3]");
  EXPECT_EQ(message([&] {
              linear_cross_entropy(x, at::zeros({9, 4}, options()), labels, {}, -100, 2.0);
            }),
            "linear_cross_entropy: label_smoothing must lie in [0, 1], got 2");
  EXPECT_EQ(message([&] { linear_cross_entropy({}, x, labels); }),
            "linear_cross_entropy: x must be a tensor, got an undefined one");
}

}  // namespace
}  // namespace tidegate::testing
