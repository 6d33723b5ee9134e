// Products of a few rows, which decoding is made of: src/nn/products.h.

#include "src/nn/products.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <optional>
#include <string>
#include <utility>

namespace tidegate::nn {
namespace {

using at::Tensor;

// Twice the error of torch's own product in the type, and a floor for those that happen to be
// exact.
void expect_product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const std::string& what) {
  const auto wide = [](const std::optional<Tensor>& t) {
    return t ? std::optional<Tensor>(t->to(at::kDouble)) : std::nullopt;
  };
  const Tensor exact = at::linear(*wide(x), *wide(weight), wide(bias));
  const auto error = [&](const Tensor& y) {
    return (y.to(at::kDouble) - exact).norm().item<double>();
  };
  const double theirs = error(at::linear(x, weight, bias));
  Tensor y;
  {
    const FewRowsGuard guard;
    y = tidegate::nn::linear(x, weight, bias);
  }
  ASSERT_EQ(y.sizes(), exact.sizes()) << what;
  EXPECT_EQ(y.scalar_type(), x.scalar_type()) << what;
  const double floor =
      exact.norm().item<double>() * (x.scalar_type() == at::kDouble ? 1e-14 : 1e-7);
  EXPECT_LE(error(y), 2 * theirs + floor) << what;
}

TEST(Products, OfFewRowsAreAsExactAsTorchs) {
  torch::manual_seed(1);
  const torch::NoGradGuard no_grad;
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t rows : {1, 2, 3, 4, 5}) {
      for (const auto& [outer, inner] : {std::pair<int64_t, int64_t>{1, 1},
                                         {7, 13},
                                         {64, 96},
                                         {33, 8},
                                         {257, 1000},
                                         {96, 4104}}) {
        const Tensor weight = at::randn({outer, inner}).to(type);
        const Tensor x = at::randn({rows, inner}).to(type);
        const Tensor bias = at::randn({outer}).to(type);
        const std::string what = std::string(at::toString(type)) + " " + std::to_string(rows) +
                                 "x" + std::to_string(inner) + "x" + std::to_string(outer);
        expect_product(x, weight, std::nullopt, what);
        expect_product(x, weight, bias, what + " bias");
        expect_product(x.unsqueeze(1), weight, bias, what + " in time");
        // Rows of larger matrices, misaligned, and with another last stride.
        const Tensor wide = at::randn({outer, inner + 3}).to(type);
        expect_product(x, wide.narrow(1, 3, inner), bias, what + " in rows");
        expect_product(x, wide.narrow(1, 0, inner).t().contiguous().t(), bias, what + " turned");
      }
    }
  }
}

TEST(Products, OfARowDoNotDependOnTheOthers) {
  const torch::NoGradGuard no_grad;
  const FewRowsGuard guard;
  const Tensor weight = at::randn({129, 515}), x = at::randn({4, 515});
  const Tensor whole = tidegate::nn::linear(x, weight, std::nullopt);
  for (int64_t count = 1; count < 4; ++count) {
    const Tensor some = tidegate::nn::linear(x.narrow(0, 4 - count, count), weight, std::nullopt);
    EXPECT_TRUE(at::equal(some, whole.narrow(0, 4 - count, count))) << count << " rows";
  }
}

}  // namespace
}  // namespace tidegate::nn
