// The kernels of a token but for attention's, for compute-sanitizer and beside the CPU: tiny
// shapes, each kernel once or twice, by blocks that share a row or a head where the device has
// clusters.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/gla/gla_cuda.h"
#include "kernels/gla/token_product_cuda.h"
#include "kernels/gla/token_step_cuda.h"
#include "kernels/product/product_cuda.h"
#include "kernels/sampling/sampling_cuda.h"
#include "kernels/scan/hgru_token_cuda.h"
#include "support/token_device.h"

namespace tidegate::testing {
namespace {

constexpr DType kHalf = DType::kBFloat16;

/// The norm of x and its product with w, [outer, inner], both on the device.
void set_normed_product(const TokenDevice& device, const TypedSeries& x, const TypedSeries& w,
                        kernels::product::FusedProductParams* params) {
  kernels::product::FewRowsParams& product = params->product;
  product.rows = x.tokens();
  product.inner = x.columns();
  product.outer = w.tokens();
  product.dtype = x.dtype();
  product.x = device.at(x.at(0, 0));
  product.w = device.at(w.at(0, 0));
  product.stride_x = product.stride_w = x.columns();
  params->has_norm = true;
  params->eps = 1e-5;
}

// ---- HGRN2 ----

TEST(TokenCudaSanitize, Hgrn2StepAndStepInAProduct) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = 2, kHeads = 2, kDim = 64, kInner = 136, kWidth = kHeads * kDim;
  TypedSeries x = numbers(kHalf, kRows, kInner), w = numbers(kHalf, 3 * kWidth, kInner, 0.1);
  TypedSeries qfv(kHalf, 1, kRows, 3 * kWidth), apart(kHalf, 1, kRows, kWidth), joined = apart;
  TypedSeries gamma = numbers(DType::kFloat32, 1, kWidth, 0);
  TypedSeries before = numbers(DType::kFloat32, kRows * kHeads * kDim, kDim);
  TypedSeries state = numbers(DType::kFloat32, kRows * kHeads * kDim, kDim);
  TypedSeries state_joined = numbers(DType::kFloat32, kRows * kHeads * kDim, kDim);
  TypedSeries state_written = numbers(DType::kFloat32, kRows * kHeads * kDim, kDim);
  TypedSeries state_deferred = numbers(DType::kFloat32, kRows * kHeads * kDim, kDim);
  TypedSeries written(kHalf, 1, kRows, kWidth), deferred(kHalf, 1, kRows, kWidth);
  TokenDevice device;
  for (TypedSeries* t : {&x, &w, &qfv, &apart, &joined, &gamma, &state, &state_joined,
                         &state_written, &state_deferred, &written, &deferred}) {
    device.add(*t);
  }
  kernels::gla::TokenProductParams params;
  kernels::product::FewRowsParams& product = params.product.product;
  set_normed_product(device, x, w, &params.product);
  kernels::gla::GlaParams& step = params.step;
  step.layout.batch = step.layout.sequences = kRows;
  step.layout.time = 1;
  step.heads = kHeads;
  step.key_dim = step.value_dim = kDim;
  step.channels = kWidth;
  step.gate_kind = kernels::gla::GateKind::kLogit;
  step.q_activation = kernels::gla::InputActivation::kSilu;
  step.gamma = device.at(gamma.at(0, 0));
  step.o = heads_of(joined, device.at(joined.at(0, 0)), kDim);
  step.h0 = step.h_final = device.at(state_joined.at(0, 0));
  bool fits = false;
  check_cuda(kernels::gla::token_product_fits(params, &fits), "fits");
  if (fits) check_cuda(kernels::gla::token_product(params, nullptr), "product and step");
  product.y = device.at(qfv.at(0, 0));
  product.stride_y = 3 * kWidth;
  check_cuda(kernels::product::fused_product_cuda(params.product, nullptr), "product");
  step.q = heads_of(qfv, device.at(qfv.at(0, 0)), kDim);
  step.gate = heads_of(qfv, device.at(qfv.at(0, kWidth)), kDim);
  step.v = heads_of(qfv, device.at(qfv.at(0, 2 * kWidth)), kDim);
  step.o = heads_of(apart, device.at(apart.at(0, 0)), kDim);
  step.h0 = step.h_final = device.at(state.at(0, 0));
  ASSERT_TRUE(kernels::gla::token_step_takes(step));
  check_cuda(kernels::gla::token_step(step, {.h0_is_settled = true}, nullptr), "step");
  // The token four times: with the state written each time, and by the last step alone.
  step.o = heads_of(written, device.at(written.at(0, 0)), kDim);
  step.h0 = step.h_final = device.at(state_written.at(0, 0));
  for (int i = 0; i < 4; ++i) check_cuda(kernels::gla::token_step(step, {}, nullptr), "written");
  step.o = heads_of(deferred, device.at(deferred.at(0, 0)), kDim);
  step.h0 = device.at(state_deferred.at(0, 0));
  kernels::gla::TokenStepOptions options{.h0_is_settled = true};
  for (int& i = options.pending.count; i < 4; ++i) {
    step.h_final = i == 3 ? const_cast<void*>(step.h0) : nullptr;
    check_cuda(kernels::gla::token_step(step, options, nullptr), "deferred");
    if (i == 3) break;
    options.pending.gate[i] = step.gate;
    options.pending.v[i] = step.v;
  }
  device.finish();
  EXPECT_TRUE(state_written.same_bits(state_deferred));
  EXPECT_TRUE(written.same_bits(deferred));

  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kWidth; ++c) {
      const int64_t head = c / kDim, column = c % kDim;
      double o = 0, size = 0;
      for (int64_t k = 0; k < kDim; ++k) {
        const double q = qfv.get(r, head * kDim + k).real();
        const double decay = sigmoid(qfv.get(r, kWidth + head * kDim + k).real());
        const double value = qfv.get(r, 2 * kWidth + c).real();
        const int64_t row = (r * kHeads + head) * kDim + k;
        const double s = decay * before.get(row, column).real() + (1 - decay) * value;
        ASSERT_NEAR(state.get(row, column).real(), s, 1e-5);
        o += q * sigmoid(q) * s;
        size += std::fabs(q * s);
      }
      ASSERT_NEAR(apart.get(r, c).real(), o, 0.01 * size) << r << ", " << c;
      if (fits) {
        ASSERT_NEAR(joined.get(r, c).real(), o, 0.01 * size) << r << ", " << c;
      }
    }
  }
  EXPECT_EQ(state_joined.same_bits(fits ? state : before), true);
}

// ---- HGRN ----

TEST(TokenCudaSanitize, HgrnStepNormAndGate) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = 3, kChannels = 136, kWidth = 2 * kChannels;
  TypedSeries c = numbers(kHalf, kRows, kWidth), f = numbers(kHalf, kRows, kChannels);
  TypedSeries gate = numbers(kHalf, kRows, kWidth, 1, 2), y(kHalf, 1, kRows, kWidth);
  TypedSeries theta = numbers(DType::kFloat32, 1, kChannels);
  TypedSeries before = numbers(DType::kFloat32, kRows, kWidth);
  TypedSeries state = numbers(DType::kFloat32, kRows, kWidth);
  TokenDevice device;
  for (TypedSeries* t : {&c, &f, &gate, &y, &theta, &state}) device.add(*t);
  kernels::scan::HgruTokenParams p;
  p.step.layout.batch = p.step.layout.sequences = kRows;
  p.step.layout.time = 1;
  p.step.channels = kChannels;
  p.step.c = row_of(c, device.at(c.at(0, 0)));
  p.step.f = row_of(f, device.at(f.at(0, 0)));
  p.step.theta = device.at(theta.at(0, 0));
  p.step.h0 = p.step.h_final = device.at(state.at(0, 0));
  p.step.activation = kernels::scan::Activation::kSilu;
  p.eps = 1e-5;
  p.gate = row_of(gate, device.at(gate.at(0, 0)));
  p.y = row_of(y, device.at(y.at(0, 0)));
  p.h0_is_settled = true;
  ASSERT_TRUE(kernels::scan::hgru_token_fits(p));
  check_cuda(kernels::scan::hgru_token_cuda(p, nullptr), "launch");
  device.finish();
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<double> h(static_cast<size_t>(kWidth));
    double square = 0;
    for (int64_t i = 0; i < kWidth; ++i) {
      const int64_t channel = i % kChannels;
      const double lambda = sigmoid(f.get(r, channel).real()), in = c.get(r, i).real();
      const double angle = theta.get(0, channel).real();
      const double re = before.get(r, channel).real(),
                   im = before.get(r, channel + kChannels).real();
      const double turned = i < kChannels ? std::cos(angle) * re - std::sin(angle) * im
                                          : std::cos(angle) * im + std::sin(angle) * re;
      h[i] = lambda * turned + (1 - lambda) * in * sigmoid(in);
      ASSERT_NEAR(state.get(r, i).real(), h[i], 1e-5);
      square += h[i] * h[i];
    }
    const double factor = 1 / std::sqrt(square / static_cast<double>(kWidth) + 1e-5);
    for (int64_t i = 0; i < kWidth; ++i) {
      const double g = gate.get(r, i).real(), want = h[i] * factor * g * sigmoid(g);
      ASSERT_NEAR(y.get(r, i).real(), want, 0.02 * std::fabs(want) + 1e-6) << r << ", " << i;
    }
  }
}

/// Against the product and the step apart.
TEST(TokenCudaSanitize, HgrnStepInAProduct) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kRows = 7, kChannels = 48, kWidth = 2 * kChannels, kInner = 136;
  constexpr int64_t kOuter = 5 * kChannels;
  TypedSeries x = numbers(kHalf, kRows, kInner), w = numbers(kHalf, kOuter, kInner, 0.1);
  TypedSeries made(kHalf, 1, kRows, kOuter), y(kHalf, 1, kRows, kWidth), u = y;
  TypedSeries theta = numbers(DType::kFloat32, 1, kChannels);
  TypedSeries state = numbers(DType::kFloat32, kRows, kWidth);
  TypedSeries joined = numbers(DType::kFloat32, kRows, kWidth);
  const int64_t parts = kernels::scan::hgru_square_parts(kChannels);
  std::vector<float> squares(static_cast<size_t>(64 * parts), 0.0f);
  TokenDevice device;
  for (TypedSeries* t : {&x, &w, &made, &y, &u, &theta, &state, &joined}) device.add(*t);
  device.add(squares);
  kernels::scan::HgruTokenProductParams params;
  kernels::product::FewRowsParams& product = params.product.product;
  set_normed_product(device, x, w, &params.product);
  kernels::scan::HgruTokenParams& token = params.token;
  token.step.layout.batch = token.step.layout.sequences = kRows;
  token.step.layout.time = 1;
  token.step.channels = kChannels;
  token.step.theta = device.at(theta.at(0, 0));
  token.step.h0 = token.step.h_final = device.at(joined.at(0, 0));
  token.step.activation = kernels::scan::Activation::kSilu;
  token.eps = 1e-5;
  token.y = row_of(u, device.at(u.at(0, 0)));
  token.h0_is_settled = true;
  params.squares = device.at(squares.data());
  bool fits = false;
  check_cuda(kernels::scan::hgru_token_product_fits(params, &fits), "fits");
  if (!fits) GTEST_SKIP() << "no clusters";
  check_cuda(kernels::scan::hgru_token_product(params, nullptr), "product and step");
  product.y = device.at(made.at(0, 0));
  product.stride_y = kOuter;
  check_cuda(kernels::product::fused_product_cuda(params.product, nullptr), "product");
  token.step.c = row_of(made, device.at(made.at(0, 0)));
  token.step.f = row_of(made, device.at(made.at(0, kWidth)));
  token.gate = row_of(made, device.at(made.at(0, kWidth + kChannels)));
  token.step.h0 = token.step.h_final = device.at(state.at(0, 0));
  token.y = row_of(y, device.at(y.at(0, 0)));
  check_cuda(kernels::scan::hgru_token_cuda(token, nullptr), "step");
  device.finish();
  for (int64_t r = 0; r < kRows; ++r) {
    double square = 0;
    for (int64_t part = 0; part < parts; ++part) square += squares[part * 64 + r];
    const double factor = 1 / std::sqrt(square / static_cast<double>(kWidth) + 1e-5);
    for (int64_t i = 0; i < kWidth; ++i) {
      ASSERT_NEAR(joined.get(r, i).real(), state.get(r, i).real(), 0.02) << r << ", " << i;
      const double want = y.get(r, i).real();
      ASSERT_NEAR(u.get(r, i).real() * factor, want, 0.02 * std::fabs(want) + 0.02)
          << r << ", " << i;
    }
  }
}

// ---- sampling ----

/// Rows are drawn from by clusters of eight blocks, of two, and by one block each.
TEST(TokenCudaSanitize, SamplingDrawsTheCpusTokens) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  for (const auto& [rows, vocab] : {std::pair{2, 5003}, {40, 4100}, {3, 300}}) {
    TypedSeries logits = numbers(kHalf, rows, vocab, 3);
    std::vector<double> settings;
    std::vector<int64_t> table, stops(static_cast<size_t>(rows), -1);
    for (int64_t r = 0; r < rows; ++r) {
      const bool is_greedy = r % 4 == 3;
      for (const double s : {is_greedy ? 0.0 : 0.8, r % 2 == 0 ? 0.0 : 50.0, 0.9, 0.01, 1.3}) {
        settings.push_back(s);
      }
      for (const int64_t t :
           {r + 5, int64_t{0}, int64_t{1}, int64_t{9}, int64_t{r == 2}, int64_t{7}}) {
        table.push_back(t);
      }
    }
    std::vector<uint8_t> seen(static_cast<size_t>(rows * vocab), 0);
    for (size_t i = 0; i < seen.size(); i += 3) seen[i] = 1;
    std::vector<int64_t> ids(static_cast<size_t>(rows), -1),
        tokens(static_cast<size_t>(4 * rows), -1);
    std::vector<float> log_probs(static_cast<size_t>(4 * rows), 0.0f);
    kernels::sampling::SamplingParams p;
    p.rows = rows;
    p.vocab = p.stride = vocab;
    p.dtype = kHalf;
    p.logits = logits.at(0, 0);
    p.settings = settings.data();
    p.table = table.data();
    p.stops_a_row = 1;
    p.stops = stops.data();
    p.seen = seen.data();
    p.ids = ids.data();
    p.window = 4;
    p.tokens = tokens.data();
    p.log_probs = log_probs.data();
    TokenDevice device;
    device.add(logits);
    device.add(settings);
    device.add(table);
    device.add(stops);
    device.add(seen);
    device.add(ids);
    device.add(tokens);
    device.add(log_probs);
    kernels::sampling::SamplingParams there = p;
    device.translate(there.logits);
    device.translate(there.settings);
    device.translate(there.table);
    device.translate(there.stops);
    device.translate(there.seen);
    device.translate(there.ids);
    device.translate(there.tokens);
    device.translate(there.log_probs);
    // The CPU first, into copies. It takes wider logits.
    std::vector<float> wide;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t v = 0; v < vocab; ++v) {
        wide.push_back(static_cast<float>(logits.get(r, v).real()));
      }
    }
    p.dtype = DType::kFloat32;
    p.logits = wide.data();
    std::vector<int64_t> cpu_table = table, cpu_ids = ids, cpu_tokens = tokens;
    std::vector<uint8_t> cpu_seen = seen;
    std::vector<float> cpu_log_probs = log_probs;
    p.table = cpu_table.data();
    p.ids = cpu_ids.data();
    p.tokens = cpu_tokens.data();
    p.seen = cpu_seen.data();
    p.log_probs = cpu_log_probs.data();
    kernels::sampling::sample_cpu(p, kernels::ParallelFor{});
    check_cuda(kernels::sampling::sample_cuda(there, nullptr), "launch");
    device.finish();
    EXPECT_EQ(ids, cpu_ids);
    EXPECT_EQ(tokens, cpu_tokens);
    EXPECT_EQ(table, cpu_table);
    EXPECT_EQ(seen, cpu_seen);
    for (size_t i = 0; i < log_probs.size(); ++i) EXPECT_NEAR(log_probs[i], cpu_log_probs[i], 1e-3);
  }
}

}  // namespace
}  // namespace tidegate::testing
