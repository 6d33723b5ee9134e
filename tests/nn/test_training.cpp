// What training in C++ has besides the modules: the loss's options, the fused optimiser, blocks
// that are computed again.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <tidegate/models/causal_lm.h>
#include <tidegate/optim/adamw.h>
#include <tidegate/version.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tidegate::models {
namespace {

using torch::Tensor;

LMConfig three_layers(const std::string& mixer) {
  LMConfig config;
  config.mixer = mixer;
  config.vocab_size = 19;
  config.dim = 16;
  config.layers = 3;
  return config;
}

Tensor some_ids(at::DeviceType device = at::kCPU) {
  return at::arange(2 * 13, at::TensorOptions(device).dtype(at::kLong)).remainder(19).view({2, 13});
}

bool has_cuda() {
  return at::globalContext().hasCUDA() &&
         std::string(build_info()).find("cuda: off") == std::string::npos;
}

// The loss and all gradients, under autocast where it is asked for.
std::vector<Tensor> gradients_of(CausalLM& model, bool is_bf16) {
  const at::DeviceType device = model->embedding->weight.device().type();
  torch::manual_seed(7);
  at::autocast::set_autocast_enabled(device, is_bf16);
  at::autocast::set_autocast_dtype(device, at::kBFloat16);
  const Tensor loss = model->forward(some_ids(device), "next").loss;
  at::autocast::set_autocast_enabled(device, false);
  at::autocast::clear_cache();
  std::vector<Tensor> found = torch::autograd::grad({loss}, model->parameters());
  found.push_back(loss.detach());
  return found;
}

void expect_equal(const std::vector<Tensor>& one, const std::vector<Tensor>& two) {
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << i;
}

TEST(Training, LogitsComeWhereTheyAreAskedFor) {
  torch::manual_seed(0);
  CausalLM model(three_layers("hgrn2"));
  const Tensor ids = some_ids();
  const Tensor logits = model->forward(ids).logits;
  const Output plain = model->forward(ids, "next");
  EXPECT_FALSE(plain.logits.defined());
  const Output both = model->forward(ids, "next", {}, {}, {.return_logits = true});
  EXPECT_TRUE(at::equal(both.logits, logits));
  EXPECT_TRUE(at::equal(both.loss, plain.loss));
  const Tensor flat = logits.slice(1, 0, -1).flatten(0, 1);
  const Tensor wanted =
      at::cross_entropy_loss(flat, ids.slice(1, 1).flatten(), {}, at::Reduction::Mean, -100, 0.1);
  const LossOptions smooth{.label_smoothing = 0.1};
  EXPECT_TRUE(at::allclose(model->forward(ids, "next", {}, {}, smooth).loss, wanted, 1e-5, 1e-6));
}

void expect_the_same_computed_again(const std::vector<std::string>& mixers, at::DeviceType device) {
  for (const std::string& mixer : mixers) {
    LMConfig config = three_layers(mixer);
    config.dropout = mixer == "hgrn" ? 0.2 : 0.0;
    torch::manual_seed(1);
    CausalLM model(config);
    model->to(device);
    for (const bool is_bf16 : {false, true}) {
      model->recompute = "none";
      const auto wanted = gradients_of(model, is_bf16);
      for (const char* recompute : {"norms", "blocks"}) {
        SCOPED_TRACE(mixer + " " + recompute);
        model->recompute = recompute;
        expect_equal(gradients_of(model, is_bf16), wanted);
      }
    }
  }
}

TEST(Training, WhatIsComputedAgainHasTheSameGradients) {
  expect_the_same_computed_again(
      {"hgrn", "hgrn2", "gla", "lru", "rwkv4", "fox", "fox-pro", "transformer", "transformer-pro"},
      at::kCPU);
}

TEST(TrainingCuda, WhatIsComputedAgainHasTheSameGradients) {
  if (!has_cuda()) GTEST_SKIP() << "no CUDA device";
  expect_the_same_computed_again({"hgrn", "hgrn2", "gla", "rwkv4"}, at::kCUDA);
}

// Bytes that the CPU's allocator has given out on this thread, and not yet taken back.
class Allocated : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* /*at*/, int64_t size, size_t /*all*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    bytes += size;
  }
  int64_t bytes = 0;
};

// What a forward pass under autocast leaves for the backward pass.
int64_t bytes_kept(LMConfig config, int64_t layers, int64_t tokens, const std::string& recompute) {
  config.layers = layers;
  torch::manual_seed(1);
  CausalLM model(config);
  model->recompute = recompute;
  const Tensor ids = at::zeros({1, tokens}, at::kLong);
  const auto allocated = std::make_shared<Allocated>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocated);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const Tensor loss = model->forward(ids, "next").loss;
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  return allocated->bytes;
}

// Bytes a token, channel and layer: what a layer and 128 tokens more add.
double bytes_a_channel(const LMConfig& config, const std::string& recompute) {
  const auto kept = [&](int64_t layers, int64_t tokens) {
    return bytes_kept(config, layers, tokens, recompute);
  };
  const int64_t added = (kept(3, 256) - kept(3, 128)) - (kept(2, 256) - kept(2, 128));
  return static_cast<double>(added) / static_cast<double>(128 * config.dim);
}

// The table of docs/training_memory.md, whose figures Python's test counts in Python.
TEST(Training, NormsThatAreComputedAgainAreNotKept) {
  const std::pair<const char*, double> saved[] = {
      {"hgrn", 4},        {"hgrn2", 4},           {"gla", 6},       {"lru", 4},
      {"slru", 4},        {"rwkv4", 4},           {"fox", 4},       {"fox-pro", 10},
      {"transformer", 4}, {"transformer-pro", 6}, {"gated-rnn", 4}, {"gated-linear-rnn", 4}};
  for (const auto& [mixer, bytes] : saved) {
    LMConfig config = three_layers(mixer);
    config.dim = 64;
    EXPECT_NEAR(bytes_a_channel(config, "none") - bytes_a_channel(config, "norms"), bytes, 0.1)
        << mixer;
  }
}

TEST(Training, AGraphMayBeWalkedTwice) {
  torch::manual_seed(4);
  CausalLM model(three_layers("fox-pro"));
  model->recompute = "norms";
  for (const bool is_bf16 : {false, true}) {
    at::autocast::set_autocast_enabled(at::kCPU, is_bf16);
    const Tensor loss = model->forward(some_ids(), "next").loss;
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    const auto once = torch::autograd::grad({loss}, model->parameters(), {}, true);
    expect_equal(torch::autograd::grad({loss}, model->parameters()), once);
  }
}

TEST(Training, WhatChangedSinceIsNotComputedAgain) {
  CausalLM model(three_layers("hgrn2"));
  model->recompute = "norms";
  const Tensor loss = model->forward(some_ids(), "next").loss;
  {
    const at::NoGradGuard no_grad;
    model->block(1).mixer_norm->weight.add_(1);
  }
  try {
    torch::autograd::grad({loss}, model->parameters());
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"),
              std::string::npos);
  }
}

TEST(Training, TheResidualStreamMayBeNarrow) {
  torch::manual_seed(2);
  CausalLM model(three_layers("hgrn2"));
  const auto wide = gradients_of(model, true);
  model->residual_dtype = at::kBFloat16;
  const auto narrow = gradients_of(model, true);
  EXPECT_FALSE(at::equal(narrow[0], wide[0]));
  for (size_t i = 0; i < wide.size(); ++i) {
    EXPECT_TRUE(at::allclose(narrow[i], wide[i], 0.1, 0.05)) << i;
  }
}

TEST(Training, StepsRoundTheResidualStreamAsAPassDoes) {
  torch::manual_seed(3);
  CausalLM model(three_layers("hgrn2"));
  model->eval();
  model->residual_dtype = at::kBFloat16;
  const at::NoGradGuard no_grad;
  const Tensor ids = some_ids();
  const ModelState state = model->init_state(ids.size(0));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Tensor logits = model->forward(ids).logits;
  std::vector<Tensor> steps;
  for (int64_t t = 0; t < ids.size(1); ++t) {
    steps.push_back(model->step(ids.select(1, t), state));
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_TRUE(at::equal(at::stack(steps, 1), logits));
}

TEST(Training, AnUnknownChoiceIsNamed) {
  CausalLM model(three_layers("hgrn2"));
  model->recompute = "all";
  try {
    model->forward(some_ids());
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(
        std::string(error.what()).find("recompute: expected one of 'none', 'norms', 'blocks'"),
        std::string::npos);
  }
}

void expect_fused_adamw_to_step_as_torchs(at::DeviceType device) {
  for (const bool amsgrad : {false, true}) {
    const auto options =
        torch::optim::AdamWOptions(1e-2).weight_decay(0.1).betas({0.8, 0.95}).amsgrad(amsgrad);
    std::vector<Tensor> ours, theirs;
    torch::manual_seed(3);
    for (const int64_t rows : {1, 5, 300}) {
      ours.push_back(at::randn({rows, 7}, device).requires_grad_());
      theirs.push_back(ours.back().detach().clone().requires_grad_());
    }
    const auto wide = at::TensorOptions(device).dtype(at::kDouble);
    ours.push_back(at::randn({4, 6}, wide).t().detach().requires_grad_());
    theirs.push_back(ours.back().detach().clone().requires_grad_());
    optim::AdamW fused(ours, options);
    torch::optim::AdamW plain(theirs, options);
    for (int step = 0; step < 4; ++step) {
      for (size_t i = 0; i < ours.size(); ++i) {
        const bool is_left_out = i == 1 && step == 0;  // and so is a step behind
        const Tensor gradient = at::randn_like(ours[i]).contiguous();
        ours[i].mutable_grad() = is_left_out ? Tensor() : gradient;
        theirs[i].mutable_grad() = is_left_out ? Tensor() : gradient.clone();
      }
      fused.step();
      plain.step();
    }
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-6)) << i;
    }
    EXPECT_EQ(fused.state().size(), ours.size());
  }
}

TEST(Training, TheFusedAdamWStepsAsTorchsDoes) { expect_fused_adamw_to_step_as_torchs(at::kCPU); }

TEST(TrainingCuda, TheFusedAdamWStepsAsTorchsDoes) {
  if (!has_cuda()) GTEST_SKIP() << "no CUDA device";
  expect_fused_adamw_to_step_as_torchs(at::kCUDA);
}

/// The moment as a file may have it that was written by a parameter that lay otherwise, or a view.
Tensor restored_otherwise(const Tensor& moment) {
  if (moment.size(1) == 1) return moment.as_strided(moment.sizes(), {1, 7});
  return moment.t().contiguous().t();
}

void expect_restored_moments_to_be_laid_out(at::DeviceType device) {
  for (const bool amsgrad : {false, true}) {
    const auto options = torch::optim::AdamWOptions(1e-2).amsgrad(amsgrad);
    std::vector<Tensor> ours{at::ones({5, 1}, device), at::ones({3, 4}, device)}, theirs;
    for (Tensor& t : ours) theirs.push_back(t.clone().requires_grad_());
    for (Tensor& t : ours) t.requires_grad_();
    optim::AdamW restored(ours, options), plain(theirs, options);
    torch::manual_seed(3);
    for (int step = 0; step < 3; ++step) {
      for (size_t i = 0; i < ours.size(); ++i) {
        ours[i].mutable_grad() = at::randn_like(ours[i]);
        theirs[i].mutable_grad() = ours[i].grad().clone();
      }
      restored.step();
      plain.step();
      for (auto& [key, any] : restored.state()) {
        auto& state = static_cast<torch::optim::AdamWParamState&>(*any);
        state.exp_avg(restored_otherwise(state.exp_avg()));
        state.exp_avg_sq(restored_otherwise(state.exp_avg_sq()));
        if (amsgrad) state.max_exp_avg_sq(restored_otherwise(state.max_exp_avg_sq()));
      }
    }
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::equal(ours[i], theirs[i])) << i;
    }
  }
}

TEST(Training, MomentsOfAFileAreLaidOutAsTheirWeight) {
  expect_restored_moments_to_be_laid_out(at::kCPU);
}

TEST(TrainingCuda, MomentsOfAFileAreLaidOutAsTheirWeight) {
  if (!has_cuda()) GTEST_SKIP() << "no CUDA device";
  expect_restored_moments_to_be_laid_out(at::kCUDA);
}

}  // namespace
}  // namespace tidegate::models
