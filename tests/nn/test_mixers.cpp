// HGRU2, GatedLinearAttention, the attentions and bounded gates from C++ alone;
// tests/python/test_parity.py holds every option against Python.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "support/module_test.h"
#include "tidegate/nn/attention.h"
#include "tidegate/nn/forgetting_attention.h"
#include "tidegate/nn/gated_linear_attention.h"
#include "tidegate/nn/hgru2.h"
#include "tidegate/nn/lru.h"

namespace tidegate::nn {
namespace {

using testing::expect_refused;
using testing::expect_same_with_gradients;
using testing::randn;
using torch::Tensor;

constexpr int64_t kMixerDim = 8;

HGRU2Options hgru2() { return HGRU2Options(kMixerDim).num_heads(2).dtype(torch::kDouble); }

GatedLinearAttentionOptions gla() {
  return GatedLinearAttentionOptions(kMixerDim).num_heads(2).dtype(torch::kDouble);
}

AttentionOptions attention() {
  return AttentionOptions(kMixerDim).num_heads(2).dtype(torch::kDouble);
}

ForgettingAttentionOptions forgetting() {
  return ForgettingAttentionOptions(kMixerDim).num_heads(2).dtype(torch::kDouble);
}

LRUOptions bounded_lru() {
  return LRUOptions(kMixerDim).state(5).gate("data").lower_bound(true).dtype(torch::kDouble);
}

// A module and what it can do as a mixer.
struct Mixer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  TokenMixer* mixer;
};

template <typename Impl, typename Options>
Mixer make(const std::string& name, const Options& options) {
  const auto module = std::make_shared<Impl>(options);
  return {name, module, module.get()};
}

std::vector<Mixer> causal_mixers() {
  const auto normal = gla().gate("scalar").normalize(true);
  return {
      make<HGRU2Impl>("hgru2", hgru2()),
      make<HGRU2Impl>("hgru2 fla", hgru2().preset("fla")),
      make<GatedLinearAttentionImpl>("gla", gla()),
      make<GatedLinearAttentionImpl>("gla normal",
                                     GatedLinearAttentionOptions(normal).feature_map("exp")),
      make<AttentionImpl>("attention", attention()),
      make<AttentionImpl>("attention pro", attention().preset("pro").num_kv_heads(1)),
      make<ForgettingAttentionImpl>("forgetting", forgetting()),
      make<ForgettingAttentionImpl>("forgetting pro", forgetting().preset("pro").window(3)),
      make<ForgettingAttentionImpl>("forgetting fixed",
                                    forgetting().gate("fixed").gate_init("long:2:8")),
      make<GatedLinearAttentionImpl>("gla bounded", gla().lower_bound(true)),
      make<GatedLinearAttentionImpl>("gla scalar bounded", gla().gate("scalar").lower_bound(true)),
      make<ForgettingAttentionImpl>("forgetting bounded", forgetting().lower_bound(true)),
      make<LRUImpl>("lru bounded", bounded_lru())};
}

std::optional<Tensor> gamma_for(const TokenMixer& mixer) {
  if (!mixer.takes_gamma()) return std::nullopt;
  return at::linspace(0.0, 0.9, mixer.gamma_size(), at::kDouble);
}

// Equation 3 with a loop over time, for the default options.
Tensor reference(HGRU2 mixer, const Tensor& x, const Tensor& gamma) {
  const auto parts = mixer->in_proj->forward(x).unflatten(-1, {3, 2, kMixerDim / 2}).unbind(-3);
  const Tensor bound = gamma.view({2, kMixerDim / 2});
  const Tensor f = bound + (1 - bound) * at::sigmoid(parts[1]);
  const Tensor q = at::sigmoid(parts[0]), v = at::silu(parts[2]);
  Tensor state = at::zeros({x.size(0), 2, kMixerDim / 2, kMixerDim / 2}, at::kDouble);
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < x.size(1); ++t) {
    const Tensor decay = f.select(1, t).unsqueeze(-1);
    state = decay * state + (1 - decay) * v.select(1, t).unsqueeze(-2);
    outputs.push_back((state * q.select(1, t).unsqueeze(-1)).sum(-2).flatten(1));
  }
  return mixer->out_proj->forward(mixer->norm->forward(at::stack(outputs, 1)));
}

TEST(Hgru2, EqualsItsEquation) {
  torch::manual_seed(0);
  HGRU2 mixer(hgru2());
  const Tensor x = randn({2, 9, kMixerDim}).requires_grad_();
  const Tensor gamma = at::linspace(0.0, 0.9, kMixerDim, at::kDouble).requires_grad_();
  const auto [y, state] = mixer->forward(x, std::nullopt, gamma);
  const Tensor expected = reference(mixer, x, gamma);
  std::vector<Tensor> targets = mixer->parameters();
  targets.insert(targets.end(), {x, gamma});
  expect_same_with_gradients(y, expected, targets);
}

// Equation 11 for one sequence and head after another.
void expect_equation_11(ForgettingAttention mixer, const std::optional<Tensor>& gamma) {
  const Tensor x = randn({1, 6, kMixerDim});
  const auto qkv = mixer->in_proj->forward(x)[0].unflatten(-1, {3, 2, kMixerDim / 2}).unbind(1);
  Tensor f = at::sigmoid(mixer->gate_proj->forward(x)[0] + mixer->gate_bias);
  if (gamma) f = *gamma + (1 - *gamma) * f;
  std::vector<Tensor> rows;
  for (int64_t i = 0; i < 6; ++i) {
    std::vector<Tensor> heads;
    for (int64_t h = 0; h < 2; ++h) {
      Tensor sum = at::zeros({}, at::kDouble), out = at::zeros({kMixerDim / 2}, at::kDouble);
      for (int64_t j = 0; j <= i; ++j) {
        const Tensor score = (qkv[0][i][h] * qkv[1][j][h]).sum() / 2.0;
        const Tensor weight = f.slice(0, j + 1, i + 1).select(1, h).prod() * score.exp();
        sum = sum + weight;
        out = out + weight * qkv[2][j][h];
      }
      heads.push_back(out / sum);
    }
    rows.push_back(at::cat(heads));
  }
  const Tensor expected = mixer->out_proj->forward(at::stack(rows));
  EXPECT_TRUE(at::allclose(std::get<0>(mixer->forward(x, {}, gamma))[0], expected, 1e-10, 1e-12));
}

TEST(ForgettingAttention, EqualsItsEquation) {
  torch::manual_seed(0);
  expect_equation_11(ForgettingAttention(forgetting()), std::nullopt);
  expect_equation_11(ForgettingAttention(forgetting().lower_bound(true)),
                     at::tensor({0.2, 0.9}, at::kDouble));
}

// QK-norm bounds the keys of a state, so that a step leaves old ones unread; without it all are
// read.
TEST(ForgettingAttention, APrunedStepReadsWhatCanBeSeen) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  for (const char* preset : {"pro", "llama"}) {
    ForgettingAttention mixer(forgetting().preset(preset).prune(1e-6));
    mixer->gate_bias.fill_(-2.0);
    const Tensor x = randn({2, 301, kMixerDim});
    const Tensor whole = std::get<0>(mixer->forward(x)).select(1, 300);
    const auto state = std::get<1>(
        mixer->forward(x.narrow(1, 0, 300), mixer->init_state(2, std::nullopt, std::nullopt, 301)));
    nn::AttentionState(state).k.narrow(1, 0, 200).fill_(std::nan(""));
    const Tensor y = mixer->step(x.select(1, 300), state);
    const bool is_pruned = preset == std::string("pro");
    EXPECT_EQ(at::isnan(y).any().item<bool>(), !is_pruned);
    EXPECT_TRUE(!is_pruned || at::allclose(y, whole, 0.0, 1e-5));
  }
}

// Bounded gates of a state that nothing enters: what is left of it after a token.
TEST(Lru, FadesByItsBoundedModulus) {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  LRU mixer(bounded_lru());
  mixer->in_proj->weight.zero_();
  const Tensor x = randn({2, 1, kMixerDim}), state = randn({2, 10});
  const Tensor gamma = at::linspace(0.0, 0.9, 5, at::kDouble);
  const Tensor sharpness = at::sigmoid(mixer->gate_proj->forward(x.select(1, 0)));
  const Tensor modulus = gamma + (1 - gamma) * at::exp(-mixer->nu_log.exp() * sharpness);
  const auto size = [](const Tensor& h) { return at::hypot(h.chunk(2, -1)[0], h.chunk(2, -1)[1]); };
  const Tensor after = std::get<1>(mixer->forward(x, state, gamma));
  EXPECT_TRUE(at::allclose(size(after), modulus * size(state), 1e-10, 1e-12));
}

TEST(Lru, HasItsBoundsWidthWhetherOrNotItTakesOne) {
  for (const bool bounded : {false, true}) {
    LRU mixer(bounded_lru().lower_bound(bounded));
    EXPECT_EQ(mixer->takes_gamma(), bounded);
    EXPECT_EQ(mixer->gamma_size(), 5);
  }
}

TEST(Mixers, AStateWithoutACapacityGrows) {
  const torch::NoGradGuard no_grad;
  ForgettingAttention mixer(forgetting());
  const auto state = mixer->init_state(1);
  const Tensor x = randn({1, 100, kMixerDim});
  const Tensor whole = std::get<0>(mixer->forward(x));
  for (int64_t t = 0; t < 100; ++t) {
    const Tensor y = mixer->step(x.select(1, t), state);
    EXPECT_TRUE(at::allclose(y, whole.select(1, t), 1e-9, 1e-11)) << t;
  }
  EXPECT_EQ(AttentionState(state).capacity(), 128);
}

TEST(Mixers, StepsAndSplitsEqualTheWhole) {
  for (const Mixer& it : causal_mixers()) {
    torch::manual_seed(1);
    const torch::NoGradGuard no_grad;
    const Tensor x = randn({3, 7, kMixerDim});
    const auto gamma = gamma_for(*it.mixer);
    const auto empty = [&] { return it.mixer->make_state(3, {}, {}, 7); };
    const auto [y, last] = it.mixer->mix(x, empty(), gamma, {});
    const auto [first, middle] = it.mixer->mix(x.narrow(1, 0, 4), empty(), gamma, {});
    const auto [second, end] = it.mixer->mix(x.narrow(1, 4, 3), middle, gamma, {});
    EXPECT_TRUE(at::allclose(at::cat({first, second}, 1), y, 1e-9, 1e-11)) << it.name;
    const MixerState state = empty();
    for (int64_t t = 0; t < x.size(1); ++t) {
      const Tensor token = it.mixer->mix_step(x.select(1, t), state, gamma);
      EXPECT_TRUE(at::allclose(token, y.select(1, t), 1e-9, 1e-11)) << it.name << t;
    }
    for (size_t i = 0; i < last.size(); ++i) {
      EXPECT_TRUE(at::allclose(end[i], last[i], 1e-9, 1e-11)) << it.name;
      EXPECT_TRUE(at::allclose(state[i], last[i], 1e-9, 1e-11)) << it.name;
    }
  }
}

TEST(Mixers, PackedSequencesAreSequencesOfTheirOwn) {
  for (const Mixer& it : causal_mixers()) {
    const Tensor x = randn({1, 6, kMixerDim});
    const Tensor bounds = at::tensor({0, 2, 2, 6}, at::kLong);
    const auto gamma = gamma_for(*it.mixer);
    const Tensor packed = std::get<0>(it.mixer->mix(x, {}, gamma, bounds));
    const Tensor alone = std::get<0>(it.mixer->mix(x.narrow(1, 2, 4), {}, gamma, {}));
    EXPECT_TRUE(at::allclose(packed.narrow(1, 2, 4), alone, 1e-9, 1e-11)) << it.name;
  }
}

TEST(Mixers, GradientsReachEveryParameter) {
  for (const Mixer& it : causal_mixers()) {
    const Tensor x = randn({2, 5, kMixerDim});
    const Tensor y = std::get<0>(it.mixer->mix(x, {}, gamma_for(*it.mixer), {}));
    (y * randn(y.sizes())).sum().backward();
    for (const auto& item : it.module->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << it.name << item.key();
      EXPECT_TRUE(item.value().grad().abs().sum().item<double>() > 0.0) << it.name << item.key();
    }
  }
}

TEST(Mixers, ClonesAreTheirOwn) {
  for (const Mixer& it : causal_mixers()) {
    const Tensor before = at::detail::getDefaultCPUGenerator().get_state();
    const auto copy = it.module->clone();
    EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
    const auto mine = it.module->named_parameters(), others = copy->named_parameters();
    ASSERT_EQ(mine.size(), others.size());
    for (const auto& item : mine) {
      EXPECT_TRUE(at::equal(item.value(), others[item.key()])) << it.name << item.key();
      EXPECT_NE(item.value().data_ptr(), others[item.key()].data_ptr()) << it.name << item.key();
    }
  }
}

TEST(Mixers, RefuseWhatCannotWork) {
  expect_refused([] { HGRU2 bad(8, 3); }, "HGRU2: num_heads: expected a divisor of dim=8; got 3");
  expect_refused([] { HGRU2 bad(HGRU2Options(8).expand_ratio(3)); }, "HGRU2: expand_ratio");
  expect_refused([] { HGRU2 bad(HGRU2Options(8).preset("mine")); }, "HGRU2: preset");
  expect_refused([] { GatedLinearAttention bad(8, 3); }, "key_dim: expected a multiple of");
  expect_refused([] { GatedLinearAttention bad(gla().normalize(true)); }, "normalize=True, whose");
  expect_refused([] { Attention bad(8, 8); }, "expected an even number of channels");
  HGRU2 mixer(hgru2());
  expect_refused([&] { mixer->forward(randn({2, 3, 5})); },
                 "HGRU2: x: expected [B, T, dim=8]; got (2, 3, 5)");
  expect_refused([&] { mixer->forward(randn({2, 3, 8}), randn({2, 4})); },
                 "HGRU2: state: expected [2, 2, 4, 4]; got (2, 4)");
  HGRU2 both(hgru2().bidirectional(true));
  expect_refused([&] { both->init_state(2); }, "has no state");
  expect_refused([&] { mixer->init_state(-1); },
                 "HGRU2.init_state: batch: expected an integer of 0 or more; got -1");
  GatedLinearAttention attention(gla());
  expect_refused([&] { attention->forward(randn({2, 3, 8}), {}, randn({4})); },
                 "GatedLinearAttention: gamma: expected None with lower_bound=False; got a tensor");
  GatedLinearAttention bounded(gla().lower_bound(true));
  expect_refused([&] { bounded->forward(randn({2, 3, 8}), {}, randn({8})); },
                 "GatedLinearAttention: gamma: expected [key_dim=4]; got (8,)");
  expect_refused([] { ForgettingAttention bad(forgetting().gate("none").lower_bound(true)); },
                 "lower_bound: expected False with gate='none'");
  expect_refused([] { LRU bad(LRUOptions(8).lower_bound(true)); },
                 "LRU: lower_bound: expected False unless gate='data'");
  expect_refused([] { ForgettingAttention bad(forgetting().gate("open")); }, "gate: expected one");
  expect_refused([] { ForgettingAttention bad(forgetting().gate_init("long:0:2")); }, "gate_init");
  ForgettingAttention softmax(forgetting());
  const auto full = softmax->init_state(2, {}, {}, 1);
  const torch::NoGradGuard no_grad;
  softmax->step(randn({2, 8}), full);
  expect_refused([&] { softmax->step(randn({2, 8}), full); }, "expected room for 2 tokens");
  expect_refused([&] { softmax->forward(randn({2, 2, 8}), full); }, "expected room for 3 tokens");
}

}  // namespace
}  // namespace tidegate::nn
