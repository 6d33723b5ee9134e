// linear_scan, hgru, lru_scan and their steps through the C++ API, on every device that is there:
// values and gradients against loops of torch ops in double precision, states, errors.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <tidegate/ops/hgru.h>
#include <tidegate/ops/init.h>
#include <tidegate/ops/linear_scan.h>
#include <tidegate/ops/lru_scan.h>
#include <torch/csrc/autograd/autograd.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "support/op_test.h"

namespace tidegate::testing {
namespace {

/// h_t = a_t h_{t-1} + x_t, one step of torch ops after another.
std::pair<Tensor, Tensor> loop(const Tensor& x, const Tensor& a, Tensor h, bool reverse) {
  Tensors states(x.size(1));
  for (int64_t i = 0; i < x.size(1); ++i) {
    const int64_t t = reverse ? x.size(1) - 1 - i : i;
    h = a.select(1, t) * h + x.select(1, t);
    states[t] = h;
  }
  return {at::stack(states, 1), h};
}

std::pair<Tensor, Tensor> scan_loop(const Tensors& in, bool reverse) {
  return loop(in[0], in[1].expand_as(in[0]), in[2], reverse);
}

Tensor complex(const Tensor& halves) {
  const Tensors parts = halves.chunk(2, -1);
  return at::complex(parts[0], parts[1]);
}
Tensor halves(const Tensor& z) { return at::cat({at::real(z), at::imag(z)}, -1); }

/// {x, nu_log, theta_log, gamma_log, h0}, complex as [Re | Im].
std::pair<Tensor, Tensor> lru_loop(const Tensors& in, bool reverse) {
  const Tensor lambda = at::polar(at::exp(-at::exp(in[1])), at::exp(in[2]));
  const Tensor x = at::exp(in[3]) * complex(in[0]);
  const auto [h, last] = loop(x, lambda.expand_as(x), complex(in[4]), reverse);
  return {halves(h), halves(last)};
}

/// {c, f, gamma, theta, h0}, complex as [Re | Im].
std::pair<Tensor, Tensor> hgru_loop(const Tensors& in, bool reverse) {
  const Tensor lambda = in[2] + (1 - in[2]) * at::sigmoid(in[1]);
  const Tensor turn = at::polar(at::ones_like(in[3]), in[3]);
  const auto [h, last] =
      loop((1 - lambda) * complex(at::silu(in[0])), lambda * turn, complex(in[4]), reverse);
  return {halves(h), halves(last)};
}

using ScanOps = OpTest;

INSTANTIATE_TEST_SUITE_P(Cpu, ScanOps, ::testing::Values(at::kCPU));
INSTANTIATE_TEST_SUITE_P(Cuda, ScanOps, ::testing::Values(at::kCUDA));

TEST_P(ScanOps, LinearScanAndItsGradients) {
  for (const bool reverse : {false, true}) {
    const Function op = [&](const Tensors& in) -> std::pair<Tensor, Tensor> {
      auto [h, last] = linear_scan(in[0], in[1], in[2], reverse);
      return {h, last};
    };
    const Function reference = [&](const Tensors& in) { return scan_loop(in, reverse); };
    const Tensor x = random({2, 21, 5});
    const Tensor h0 = random({2, 5});
    expect_same(device(), {x, at::sigmoid(random({2, 21, 5})), h0}, op, reference);
    expect_same(device(), {x, at::sigmoid(random({5})), h0}, op, reference);
    const auto complex = at::kComplexDouble;
    expect_same(
        device(),
        {random({2, 21, 5}, complex), 0.5 * random({2, 21, 5}, complex), random({2, 5}, complex)},
        op, reference);
  }
}

TEST_P(ScanOps, HgruAndItsGradients) {
  for (const bool reverse : {false, true}) {
    const Tensors inputs = {random({2, 21, 10}), random({2, 21, 5}), at::rand({5}, at::kDouble),
                            random({5}), random({2, 10})};
    expect_same(
        device(), inputs,
        [&](const Tensors& in) -> std::pair<Tensor, Tensor> {
          auto [h, last] = hgru(in[0], in[1], in[2], in[3], in[4], "silu", reverse);
          return {h, last};
        },
        [&](const Tensors& in) { return hgru_loop(in, reverse); });
  }
}

TEST_P(ScanOps, LruScanAndItsGradients) {
  for (const bool reverse : {false, true}) {
    const Tensors inputs = {random({2, 21, 10}), random({5}) - 2, random({5}), random({5}),
                            random({2, 10})};
    expect_same(
        device(), inputs,
        [&](const Tensors& in) -> std::pair<Tensor, Tensor> {
          auto [h, last] = lru_scan(in[0], in[1], in[2], in[3], in[4], reverse);
          return {h, last};
        },
        [&](const Tensors& in) { return lru_loop(in, reverse); });
  }
}

TEST_P(ScanOps, LruStepsEqualTheWhole) {
  const at::NoGradGuard no_grad;
  const Tensor x = at::randn({2, 9, 4}, options());
  const Tensor nu_log = at::randn({4}, options()) - 2;
  const Tensor gamma_log = at::randn({4}, options());
  const auto [h, last] = lru_scan(x, nu_log, {}, gamma_log);
  const Tensor state = at::zeros({2, 4}, options());
  for (int64_t t = 0; t < x.size(1); ++t) {
    const Tensor row = lru_scan_step(x.select(1, t), nu_log, {}, gamma_log, state);
    EXPECT_TRUE(at::allclose(row, h.select(1, t), 1e-5, 1e-6));
  }
  EXPECT_TRUE(at::allclose(state, last, 1e-5, 1e-6));
}

TEST_P(ScanOps, PackedSequencesAreEachOnTheirOwn) {
  for (const bool reverse : {false, true}) {
    const Tensor c = at::randn({1, 12, 3}, options());
    const Tensor f = at::randn({1, 12, 3}, options());
    const Tensor h0 = at::randn({3, 3}, options());
    const Tensor offsets = at::tensor({0, 5, 5, 12}, at::kInt);  // on the CPU: copied
    const auto [h, last] = hgru(c, f, {}, {}, h0, "none", reverse, offsets);
    int n = 0;
    for (const auto& [start, end] : {std::pair(0, 5), std::pair(5, 5), std::pair(5, 12)}) {
      const auto [part, part_last] = hgru(c.slice(1, start, end), f.slice(1, start, end), {}, {},
                                          h0.slice(0, n, n + 1), "none", reverse);
      EXPECT_TRUE(at::allclose(h.slice(1, start, end), part, 1e-5, 1e-6));
      EXPECT_TRUE(at::allclose(last.slice(0, n, n + 1), part_last, 1e-5, 1e-6));
      ++n;
    }
  }
}

TEST_P(ScanOps, StepsEqualTheWholeAndWriteTheState) {
  const at::NoGradGuard no_grad;
  const Tensor c = at::randn({2, 9, 8}, options());
  const Tensor f = at::randn({2, 9, 4}, options());
  const Tensor gamma = at::rand({4}, options());
  const Tensor theta = at::rand({4}, options());
  const auto [h, last] = hgru(c, f, gamma, theta);
  Tensor state = at::zeros({2, 8}, options());
  const void* where = state.data_ptr();
  for (int64_t t = 0; t < 9; ++t) {
    const Tensor row = hgru_step(c.select(1, t), f.select(1, t), gamma, theta, state);
    EXPECT_TRUE(at::allclose(row, h.select(1, t), 1e-5, 1e-6));
  }
  EXPECT_TRUE(at::allclose(state, last, 1e-5, 1e-6));
  EXPECT_EQ(state.data_ptr(), where);
  const Tensor half = at::full({2, 8}, 0.5, options());
  linear_scan_step(half, half, state.fill_(1));
  EXPECT_TRUE(at::equal(state, at::ones_like(state)));
}

TEST_P(ScanOps, Float32GatesBoundsAndStatesBesideFloat64Data) {
  const at::ScalarType narrow = at::kFloat;
  const Tensor c = random({2, 9, 8}).to(device());
  const Tensors small = {random({2, 9, 4}), at::rand({4}), random({4}), random({2, 8})};
  const auto run = [&](at::ScalarType dtype) {
    Tensors leaves;
    for (const Tensor& value : small) {
      leaves.push_back(value.to(device(), narrow).to(dtype).requires_grad_());
    }
    const auto [h, last] = hgru(c, leaves[0], leaves[1], leaves[2], leaves[3]);
    Tensors out = torch::autograd::grad({at::sum(h * h) + at::sum(last)}, leaves);
    for (const Tensor& gradient : out) EXPECT_EQ(gradient.scalar_type(), dtype);
    out.insert(out.end(), {h, last});
    return out;
  };
  const Tensors expected = run(at::kDouble);
  const Tensors found = run(narrow);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], expected[i].to(found[i].scalar_type()))) << "result " << i;
  }

  const at::NoGradGuard no_grad;
  Tensor state = random({2, 4}).to(device(), narrow);
  const Tensor x = random({2, 4}).to(device());
  const Tensor sum = x + 0.5 * state.to(at::kDouble);
  const void* where = state.data_ptr();
  EXPECT_TRUE(at::allclose(linear_scan_step(x, at::full_like(state, 0.5), state), sum, 1e-14));
  EXPECT_TRUE(at::allclose(state, sum.to(narrow)));
  EXPECT_EQ(state.data_ptr(), where);
}

TEST_P(ScanOps, InitialisersFollowTheDefaultGenerator) {
  at::manual_seed(5);
  const Tensor expected = at::empty({7}).uniform_(-1, 2);
  at::manual_seed(5);
  Tensor p = at::empty({7}, options());
  init_uniform_(p, -1, 2);
  EXPECT_TRUE(at::equal(p.cpu(), expected));
}

TEST(ScanErrors, NameOpArgumentExpectedAndGiven) {
  const Tensor x = at::zeros({2, 6, 4});
  const auto contains = [](const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  };
  contains(error_of([&] { linear_scan(x, at::zeros({2, 5, 4})); }),
           {"linear_scan", "a must have shape", "[2, 6, 4]", "[2, 5, 4]"});
  contains(error_of([&] { linear_scan(x, x.to(at::kBFloat16)); }),
           {"linear_scan", "a must be float32", "got bfloat16"});
  contains(error_of([&] { linear_scan(x, x, at::zeros({3, 4})); }),
           {"linear_scan", "h0 must have shape", "[2, 4]", "[3, 4]"});
  contains(error_of([&] { linear_scan(x, x.to(at::kMeta)); }),
           {"linear_scan", "all tensors on cpu", "a on meta"});
  contains(error_of([&] { linear_scan(x, {}); }), {"linear_scan", "a must be a tensor"});
  contains(error_of([&] { hgru({}, x); }), {"hgru", "c must be a tensor"});
  contains(error_of([&] { hgru(x, x, {}, {}, {}, "tanh"); }), {"hgru", "activation", "tanh"});
  contains(error_of([&] { hgru(x, x, at::zeros({3})); }), {"hgru", "gamma", "[4]", "[3]"});
  contains(error_of([&] { hgru(x, x, {}, {}, {}, "silu", false, at::tensor({0, 6})); }),
           {"hgru", "batch of 1", "[2, 6, 4]"});
  contains(error_of([&] {
             hgru(x.slice(0, 0, 1), x.slice(0, 0, 1), {}, {}, {}, "silu", false,
                  at::tensor({0, 4, 5}));
           }),
           {"hgru", "cu_seqlens", "T = 6", "[0, 4, 5]"});
  contains(error_of([] { init_rope_theta_(at::zeros({2, 2})); }),
           {"init_rope_theta_", "p must have shape [D]", "[2, 2]"});
  const Tensor leaf = at::zeros({2, 4}).requires_grad_();
  contains(error_of([&] { linear_scan_step(leaf, leaf, at::zeros({2, 4})); }),
           {"linear_scan_step", "x requires a gradient"});
  contains(error_of([&] { hgru_step(leaf, leaf, {}, {}, Tensor()); }),
           {"hgru_step", "state must be a tensor"});
}

TEST(ScanErrors, DoubleBackward) {
  const Tensor x = at::ones({1, 3, 2}).requires_grad_();
  const Tensor h = std::get<0>(linear_scan(x, 0.5 * at::ones({2})));
  const auto grads = torch::autograd::grad({at::sum(h * h)}, {x}, {}, true, /*create_graph=*/true);
  const std::string message = error_of([&] { torch::autograd::grad({at::sum(grads[0])}, {x}); });
  EXPECT_NE(message.find("linear_scan: double backward is not supported"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace tidegate::testing
