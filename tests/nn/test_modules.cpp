// tidegate::nn from C++ alone; tests/python/test_parity.py holds every option against Python.
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <cmath>
#include <complex>
#include <sstream>
#include <string>
#include <vector>

#include "support/module_test.h"
#include "tidegate/nn/gated_linear_rnn.h"
#include "tidegate/nn/gated_rnn.h"
#include "tidegate/nn/glu.h"
#include "tidegate/nn/hgru.h"
#include "tidegate/nn/init.h"
#include "tidegate/nn/lower_bounds.h"
#include "tidegate/nn/lru.h"

namespace tidegate::nn {
namespace {

using testing::expect_refused;
using testing::expect_same_with_gradients;
using testing::randn;
using torch::Tensor;

constexpr int64_t kDim = 4;

HGRUOptions wide(HGRUOptions options = HGRUOptions(kDim)) { return options.dtype(torch::kDouble); }

// Combinations that take different ways through the code.
std::vector<HGRUOptions> variants() {
  const auto make = [] { return wide(); };
  return {make(),
          make().complex(false).expand(2),
          make().preset("official").norm("rms_no_weight").bias(false),
          make().preset("fla"),
          make().theta("fixed").output_gate(false),
          make().theta("data").input_gate("free"),
          make().forget_gate("bound").input_gate("none"),
          make().forget_gate("none").input_gate("free"),
          make().expansion("naive").expand(2),
          make().expansion("lr").expand(2).preset("official"),
          make().expansion("glti").expand(4),
          make().expansion("krp").expand(2).output_gate(false),
          make().expansion("kp").expand(3)};
}

std::optional<Tensor> gamma_for(const HGRU& mixer) {
  if (!mixer->takes_gamma()) return std::nullopt;
  return at::linspace(0.0, 0.9, mixer->channels(), at::kDouble);
}

// Equations 2 and 3 with a loop over time and complex numbers, for the default options.
Tensor reference(HGRU mixer, const Tensor& x, const Tensor& gamma) {
  const int64_t s = mixer->channels();
  const auto parts = mixer->in_proj->forward(x).split_with_sizes({s, s, s, 2 * s}, -1);
  const Tensor c = at::complex(at::silu(parts[0]), at::silu(parts[1]));
  const Tensor lambda = gamma + (1 - gamma) * at::sigmoid(parts[2]);
  const Tensor turn = at::complex(mixer->theta.cos(), mixer->theta.sin());
  Tensor h = at::zeros({x.size(0), s}, at::kComplexDouble);
  std::vector<Tensor> states;
  for (int64_t t = 0; t < x.size(1); ++t) {
    h = lambda.select(1, t) * turn * h + (1 - lambda.select(1, t)) * c.select(1, t);
    states.push_back(at::cat({at::real(h), at::imag(h)}, -1));
  }
  return mixer->out_proj->forward(
      mixer->norm->forward(at::sigmoid(parts[3]) * at::stack(states, 1)));
}

TEST(Hgru, EqualsItsEquations) {
  torch::manual_seed(0);
  HGRU mixer(wide());
  const Tensor x = randn({2, 9, kDim}).requires_grad_();
  const Tensor gamma = at::linspace(0.0, 0.9, kDim, at::kDouble).requires_grad_();
  const auto [y, state] = mixer->forward(x, std::nullopt, gamma);
  const Tensor expected = reference(mixer, x, gamma);
  std::vector<Tensor> targets = mixer->parameters();
  targets.insert(targets.end(), {x, gamma});
  expect_same_with_gradients(y, expected, targets);
}

TEST(Hgru, StepsAndSplitsEqualTheWhole) {
  for (const HGRUOptions& options : variants()) {
    torch::manual_seed(1);
    HGRU mixer(options);
    const torch::NoGradGuard no_grad;
    const Tensor x = randn({3, 7, kDim});
    const auto gamma = gamma_for(mixer);
    const auto [y, last] = mixer->forward(x, {}, gamma);
    const auto [first, middle] = mixer->forward(x.narrow(1, 0, 4), {}, gamma);
    const auto [second, end] = mixer->forward(x.narrow(1, 4, 3), middle, gamma);
    EXPECT_TRUE(at::allclose(at::cat({first, second}, 1), y, 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(end, last, 1e-9, 1e-11));
    Tensor state = mixer->init_state(3);
    for (int64_t t = 0; t < x.size(1); ++t) {
      const Tensor token = mixer->step(x.select(1, t), state, gamma);
      EXPECT_TRUE(at::allclose(token, y.select(1, t), 1e-9, 1e-11)) << options.preset() << t;
    }
    EXPECT_TRUE(at::allclose(state, last, 1e-9, 1e-11));
  }
}

TEST(Hgru, PackedSequencesAreSequencesOfTheirOwn) {
  for (HGRUOptions options : {wide(), wide().bidirectional(true), wide().theta("data")}) {
    torch::manual_seed(2);
    HGRU mixer(options);
    const Tensor x = randn({1, 6, kDim});
    const Tensor bounds = at::tensor({0, 2, 2, 6}, at::kLong);
    const auto [packed, state] = mixer->forward(x, {}, gamma_for(mixer), bounds);
    const Tensor alone = std::get<0>(mixer->forward(x.narrow(1, 2, 4), {}, gamma_for(mixer)));
    EXPECT_TRUE(at::allclose(packed.narrow(1, 2, 4), alone, 1e-9, 1e-11));
    EXPECT_EQ(state.defined(), !options.bidirectional());
  }
}

TEST(Hgru, GradientsReachEveryParameter) {
  for (const HGRUOptions& options : variants()) {
    HGRU mixer(options);
    const auto [y, state] = mixer->forward(randn({2, 5, kDim}), {}, gamma_for(mixer));
    (y * randn(y.sizes())).sum().backward();
    for (const auto& item : mixer->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_TRUE(item.value().grad().abs().sum().item<double>() > 0.0) << item.key();
    }
  }
}

TEST(Hgru, RefusesWhatCannotWork) {
  const auto make = [](const HGRUOptions& options) { return [=] { HGRU mixer(options); }; };
  expect_refused(make(HGRUOptions(0)), "HGRU: dim: expected a positive integer; got 0");
  expect_refused(make(HGRUOptions(4).expand(0)), "HGRU: expand");
  expect_refused(make(HGRUOptions(4).preset("mine")),
                 "HGRU: preset: expected one of 'paper', 'official', 'fla'; got 'mine'");
  expect_refused(make(HGRUOptions(4).theta("rope")), "HGRU: theta: expected one of");
  expect_refused(make(HGRUOptions(4).complex(false).theta("fixed")), "a real state is not rotated");
  expect_refused(make(HGRUOptions(4).forget_gate("none")), "nothing would enter the state");
  expect_refused(make(HGRUOptions(4).expansion("cp")), "HGRU: expansion: expected one of None, 'n");
  expect_refused(make(HGRUOptions(4).expansion("glt").expand(3)), "expected a divisor of dim=4");
  expect_refused(make(HGRUOptions(4).norm("batch")), "HGRU: norm");
  HGRU mixer(wide());
  expect_refused([&] { mixer->forward(randn({2, 3, 5})); },
                 "HGRU: x: expected [B, T, dim=4]; got (2, 3, 5)");
  expect_refused([&] { mixer->forward(randn({2, 3, 4}), randn({2, 4})); },
                 "HGRU: state: expected [2, 8]; got (2, 4)");
  expect_refused([&] { mixer->forward(randn({2, 3, 4}), {}, randn({3})); },
                 "HGRU: gamma: expected [expand*dim=4]; got (3,)");
  HGRU bound(wide().forget_gate("bound"));
  expect_refused([&] { bound->forward(randn({2, 3, 4})); }, "got None");
  HGRU both(wide().bidirectional(true));
  expect_refused([&] { both->init_state(2); }, "has no state");
  expect_refused([&] { both->step(randn({2, 4}), randn({2, 8})); }, "has no state");
}

TEST(Hgru, ClonesWithoutDrawing) {
  for (const HGRUOptions& options : variants()) {
    HGRU mixer(options);
    const Tensor before = at::detail::getDefaultCPUGenerator().get_state();
    const HGRU copy(std::dynamic_pointer_cast<HGRUImpl>(mixer->clone()));
    EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
    const auto mine = mixer->named_parameters(), others = copy->named_parameters();
    ASSERT_EQ(mine.size(), others.size());
    for (const auto& item : mine) {
      EXPECT_TRUE(at::equal(item.value(), others[item.key()])) << item.key();
      EXPECT_NE(item.value().data_ptr(), others[item.key()].data_ptr()) << item.key();
    }
    const Tensor x = randn({1, 3, kDim});
    EXPECT_TRUE(at::equal(std::get<0>(mixer->forward(x, {}, gamma_for(mixer))),
                          std::get<0>(HGRU(copy)->forward(x, {}, gamma_for(mixer)))));
  }
}

TEST(Hgru, SavesAndLoadsThroughArchives) {
  torch::manual_seed(3);
  HGRU saved(wide().theta("fixed")), loaded(wide().theta("fixed"));
  std::stringstream stream;
  torch::save(saved, stream);
  torch::load(loaded, stream);
  const Tensor x = randn({1, 4, kDim});
  EXPECT_TRUE(at::equal(std::get<0>(saved->forward(x)), std::get<0>(loaded->forward(x))));
}

TEST(Hgru, KeepsThetaInFloat32) {
  for (const char* theta : {"learned", "fixed"}) {
    HGRU mixer(HGRUOptions(kDim).theta(theta));
    const Tensor before = mixer->theta.detach().clone();
    mixer->to(torch::kBFloat16);
    EXPECT_EQ(mixer->theta.scalar_type(), torch::kFloat);
    EXPECT_TRUE(at::equal(mixer->theta, before));
    EXPECT_EQ(mixer->in_proj->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(mixer->init_state(2).scalar_type(), torch::kFloat);
    const auto [y, state] = mixer->forward(at::randn({1, 3, kDim}, at::kBFloat16));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    mixer->to(torch::kDouble);
    EXPECT_EQ(mixer->theta.scalar_type(), torch::kDouble);
  }
}

TEST(Hgru, RunsOnCudaAsOnTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const HGRUOptions& options : variants()) {
    HGRU mixer(options);
    const Tensor x = randn({2, 33, kDim});
    const auto gamma = gamma_for(mixer);
    const Tensor expected = std::get<0>(mixer->forward(x, {}, gamma));
    mixer->to(torch::kCUDA);
    const auto there = gamma ? std::optional<Tensor>(gamma->cuda()) : std::nullopt;
    const Tensor y = std::get<0>(mixer->forward(x.cuda(), {}, there));
    EXPECT_TRUE(at::allclose(y.cpu(), expected, 1e-8, 1e-10));
  }
}

TEST(Glu, IsAGatedProduct) {
  torch::manual_seed(4);
  GLU glu(GLUOptions(3).hidden(5).bias(true).dtype(torch::kDouble));
  const Tensor x = randn({2, 3});
  const auto parts = glu->in_proj->forward(x).split(5, -1);
  const Tensor expected = glu->out_proj->forward(parts[0] * at::sigmoid(parts[0]) * parts[1]);
  EXPECT_TRUE(at::allclose(glu->forward(x), expected));
  EXPECT_EQ(*GLU(7)->options.hidden(), 14);
  EXPECT_FALSE(GLU(7)->in_proj->bias.defined());
  expect_refused([] { GLU bad(GLUOptions(3).activation("gelu")); }, "GLU: activation");
  expect_refused([&] { glu->forward(randn({2, 4})); }, "GLU: x: expected [..., dim=3]; got (2, 4)");
}

TEST(LowerBounds, StartAtTheirPlacesAndNeverReachOne) {
  LowerBounds cumulative(4, 3);
  const Tensor rows = cumulative->forward();
  for (int64_t k = 0; k < 4; ++k) {
    EXPECT_TRUE(at::allclose(rows[k], at::full({3}, 0.25 * static_cast<double>(k))));
  }
  LowerBounds decreasing(LowerBoundsOptions(4, 3).mode("decreasing"));
  EXPECT_TRUE(at::equal(decreasing->forward(), rows.flip(0)));
  EXPECT_FALSE(LowerBounds(LowerBoundsOptions(4, 3).mode("none"))->forward().defined());
  for (const char* mode : {"cumulative", "decreasing", "independent"}) {
    LowerBounds extreme(LowerBoundsOptions(3, 2).mode(mode));
    {
      const torch::NoGradGuard no_grad;
      extreme->logits.copy_(
          at::tensor({-200.0F, -200.0F, 0.0F, 200.0F, 200.0F, 200.0F}).view({3, 2}));
    }
    EXPECT_LT(extreme->forward().max().item<float>(), 1.0F) << mode;
    EXPECT_GE(extreme->forward().min().item<float>(), 0.0F) << mode;
  }
  expect_refused([] { LowerBounds bad(LowerBoundsOptions(2, 2).mode("up")); }, "LowerBounds: mode");
}

TEST(GateInit, DrawsWhatItsNameSays) {
  const auto drawn = [](const auto& draw) {
    torch::manual_seed(5);
    Tensor p = at::empty({50});
    draw(p);
    return p;
  };
  const Tensor ugi = drawn([](const Tensor& p) { init::ugi_(p); });
  const Tensor gates = at::sigmoid(ugi);
  EXPECT_GE(gates.min().item<float>(), 0.02F - 1e-6F);
  EXPECT_LE(gates.max().item<float>(), 0.98F + 1e-6F);
  EXPECT_TRUE(at::equal(
      ugi, drawn([](const Tensor& p) { init::gumbel_softmax_(p, std::nullopt, 0.0, 1.0); })));
  EXPECT_TRUE(at::allclose(drawn([](const Tensor& p) { init::gumbel_softmax_(p); }), 2 * ugi));
  const Tensor chrono = drawn([](const Tensor& p) { init::chrono_(p, 100); });
  EXPECT_GE(chrono.min().item<float>(), 0.0F);
  EXPECT_LE(chrono.max().item<float>(), std::log(99.0F) + 1e-5F);
  EXPECT_LE(drawn([](const Tensor& p) { init::standard_(p, 100); }).abs().max().item<float>(),
            0.1F);
  const HGRU mixer(HGRUOptions(4).preset("fla").gate_init("chrono:9"));
  EXPECT_EQ(mixer->gate_bias.sizes(), at::IntArrayRef({4}));
  EXPECT_GE(mixer->gate_bias.min().item<float>(), 0.0F);
  expect_refused([] { HGRU bad(HGRUOptions(4).gate_init("chrono:0")); },
                 "HGRU: gate_init: expected 'standard', 'ugi', 'chrono:T_max'");
}

TEST(Lru, StepsEqualTheEquations) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  LRU mixer(LRUOptions(kDim).state(3).skip(true).dtype(torch::kDouble));
  const Tensor x = randn({2, 6, kDim});
  const auto [y, last] = mixer->forward(x);
  const Tensor into = mixer->in_proj->weight, out = mixer->out_proj->weight;
  const Tensor lambda = at::polar(at::exp(-at::exp(mixer->nu_log)), at::exp(mixer->theta_log));
  Tensor h = at::zeros({2, 3}, at::kComplexDouble), state = mixer->init_state(2);
  for (int64_t t = 0; t < x.size(1); ++t) {
    const Tensor u = at::linear(x.select(1, t), into);
    h = lambda * h + at::exp(mixer->gamma_log) * at::complex(u.narrow(-1, 0, 3).contiguous(),
                                                             u.narrow(-1, 3, 3).contiguous());
    const Tensor halves = at::cat({at::real(h), at::imag(h)}, -1);
    const Tensor wanted = at::linear(halves, out) + mixer->skip_weight * x.select(1, t);
    EXPECT_TRUE(at::allclose(y.select(1, t), wanted, 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(mixer->step(x.select(1, t), state), wanted, 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(state, halves, 1e-9, 1e-11));
  }
  EXPECT_TRUE(at::allclose(last, state, 1e-9, 1e-11));
  mixer->to(torch::kBFloat16);  // what stays fp32 in a 16-bit module is fp32, as its kernels ask
  EXPECT_EQ(mixer->nu_log.scalar_type(), torch::kFloat);
  EXPECT_TRUE(at::allclose(std::get<0>(mixer->forward(x.to(torch::kBFloat16))).to(torch::kDouble),
                           y, 5e-2, 5e-2));
  expect_refused([] { SLRU bad(SLRUOptions(4).r_max(1.5)); }, "SLRU: r_min, r_max: expected 0 <=");
}

TEST(GatedLinearRnn, StepsEqualTheEquations) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  GatedLinearRNN mixer(GatedLinearRNNOptions(kDim).gate_init("ugi").dtype(torch::kDouble));
  const Tensor x = randn({2, 6, kDim});
  const auto [y, last] = mixer->forward(x);
  const Tensor rows = at::linear(x, mixer->in_proj->weight, mixer->in_proj->bias);
  const Tensor z = at::sigmoid(rows.narrow(-1, 0, kDim)), entering = rows.narrow(-1, kDim, kDim);
  Tensor h = at::zeros({2, kDim}, at::kDouble), state = mixer->init_state(2);
  for (int64_t t = 0; t < x.size(1); ++t) {
    h = z.select(1, t) * h + (1 - z.select(1, t)) * entering.select(1, t);
    EXPECT_TRUE(at::allclose(y.select(1, t), h, 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(mixer->step(x.select(1, t), state), h, 1e-9, 1e-11));
  }
  EXPECT_TRUE(at::allclose(last, h, 1e-9, 1e-11));
  EXPECT_TRUE(at::allclose(state, h, 1e-9, 1e-11));
}

TEST(GatedRnn, StepsEqualTheEquations) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  GatedRNN mixer(GatedRNNOptions(kDim).gate_init("ugi").lower_bound(true).dtype(torch::kDouble));
  const Tensor x = randn({2, 6, kDim}), gamma = at::linspace(0, 0.9, kDim, at::kDouble);
  const auto [y, last] = mixer->forward(x, std::nullopt, gamma);
  const Tensor rows = at::linear(x, mixer->in_proj->weight, mixer->in_proj->bias);
  const Tensor from_x = rows.narrow(-1, 0, kDim), entering = rows.narrow(-1, kDim, kDim);
  Tensor h = at::zeros({2, kDim}, at::kDouble), state = mixer->init_state(2);
  for (int64_t t = 0; t < x.size(1); ++t) {
    const Tensor a = from_x.select(1, t) + at::linear(h, mixer->state_proj->weight);
    const Tensor z = gamma + (1 - gamma) * at::sigmoid(a);
    h = z * h + (1 - z) * entering.select(1, t);
    EXPECT_TRUE(at::allclose(y.select(1, t), h, 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(mixer->step(x.select(1, t), state, gamma), h, 1e-9, 1e-11));
  }
  EXPECT_TRUE(at::allclose(last, h, 1e-9, 1e-11));
  EXPECT_TRUE(at::allclose(state, h, 1e-9, 1e-11));
  GatedRNN unbounded(GatedRNNOptions(kDim).dtype(torch::kDouble));
  expect_refused([&] { unbounded->forward(x, std::nullopt, gamma); },
                 "GatedRNN: gamma: expected None with lower_bound=False; got a tensor");
}

TEST(Modules, DrawNothingOnMeta) {
  const Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  HGRU mixer(HGRUOptions(1 << 14).device(torch::kMeta));
  EXPECT_TRUE(mixer->in_proj->weight.is_meta());
  EXPECT_EQ(mixer->in_proj->weight.size(0), 5 << 14);
  EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
}

}  // namespace
}  // namespace tidegate::nn
