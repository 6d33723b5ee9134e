// forgetting_attention and its step through the C++ API: values and gradients against torch ops in
// double precision, errors.

#include <tidegate/ops/forgetting_attention.h>

#include <cmath>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

/// o and lse from whole matrices of scores: q [B, Tq, Hq, D], k and v [B, Tk, Hkv, D].
std::pair<Tensor, Tensor> matrices(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& log_f, double scale, int64_t window) {
  const int64_t group = q.size(2) / k.size(2), queries = q.size(1), keys = k.size(1);
  const auto heads_first = [&](const Tensor& x) {
    return x.repeat_interleave(group, 2).transpose(1, 2);
  };
  const Tensor c = log_f.cumsum(1).transpose(1, 2);
  const Tensor position = at::arange(keys - queries, keys).unsqueeze(1);
  const Tensor key = at::arange(keys).unsqueeze(0);
  const Tensor seen = (key <= position).logical_and(key > position - window);
  const Tensor gates = c.slice(2, keys - queries).unsqueeze(-1) - c.unsqueeze(-2);
  const Tensor scores =
      (scale * at::matmul(q.transpose(1, 2), heads_first(k).transpose(2, 3)) + gates)
          .masked_fill(seen.logical_not(), -INFINITY);
  return {at::matmul(scores.softmax(-1), heads_first(v)).transpose(1, 2), scores.logsumexp(-1)};
}

using AttentionOps = OpTest;
INSTANTIATE_TEST_SUITE_P(Cpu, AttentionOps, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, AttentionOps, ::testing::Values(at::kCUDA));

TEST_P(AttentionOps, EqualsMatricesOfScores) {
  for (int64_t past : {0, 70}) {
    for (int64_t window : {5, 1000}) {
      const Tensors inputs = {random({2, 19, 4, 6}), random({2, 19 + past, 2, 6}),
                              random({2, 19 + past, 2, 6}), -random({2, 19 + past, 4}).abs()};
      expect_same(
          device(), inputs,
          [&](const Tensors& in) {
            auto [o, lse] = forgetting_attention(in[0], in[1], in[2], in[3], 0.5, window);
            return std::pair(o, lse);
          },
          [&](const Tensors& in) { return matrices(in[0], in[1], in[2], in[3], 0.5, window); });
    }
  }
}

TEST_P(AttentionOps, PackedSequencesStayApart) {
  const Tensor q = random({1, 12, 2, 4}).to(device()),
               log_f = -random({1, 12, 2}).abs().to(device());
  const Tensor offsets = at::tensor({0, 5, 5, 12}, at::kLong);
  const auto [o, lse] = forgetting_attention(q, q, q, log_f, std::nullopt, std::nullopt, offsets);
  const Tensor first = q.slice(1, 0, 5), last = q.slice(1, 5);
  const Tensor alone[] = {
      std::get<0>(forgetting_attention(first, first, first, log_f.slice(1, 0, 5))),
      std::get<0>(forgetting_attention(last, last, last, log_f.slice(1, 5)))};
  EXPECT_TRUE(at::allclose(o, at::cat({alone[0], alone[1]}, 1), 1e-12, 1e-13));
  EXPECT_TRUE(at::isfinite(lse).all().item<bool>());
}

TEST_P(AttentionOps, AStepIsTheLastRow) {
  const Tensor q = random({2, 9, 4, 8}).to(device()), k = random({2, 9, 2, 8}).to(device());
  const Tensor log_f = -random({2, 9, 4}).abs().to(device());
  const Tensor o = std::get<0>(forgetting_attention(q, k, k, log_f));
  const Tensor lengths = at::full({2}, 9, at::TensorOptions(device()).dtype(at::kInt));
  const Tensor row = forgetting_attention_step(q.select(1, 8), k, k, log_f, lengths);
  EXPECT_TRUE(at::allclose(row, o.select(1, 8), 1e-12, 1e-13));
}

TEST_P(AttentionOps, ErrorsNameWhatIsWrong) {
  const Tensor q = random({1, 5, 3, 4}).to(device()), k = random({1, 5, 2, 4}).to(device());
  const Tensor log_f = -random({1, 5, 3}).abs().to(device());
  EXPECT_EQ(error_of([&] { forgetting_attention(q, k, k, log_f); }),
            "forgetting_attention: q's heads must be a multiple of k's, got Hq = 3 and Hkv = 2");
  EXPECT_EQ(error_of([&] { forgetting_attention(q, q, q, log_f, std::nullopt, 0); }),
            "forgetting_attention: window must be at least 1, got 0");
  EXPECT_EQ(error_of([&] { forgetting_attention(Tensor(), q, q, log_f); }),
            "forgetting_attention: q must be a tensor, got an undefined one");
}

}  // namespace
}  // namespace tidegate::testing
