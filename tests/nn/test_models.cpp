// tidegate::models from C++ alone; tests/python/test_parity.py holds them against Python.
#include <gtest/gtest.h>

#include <dirent.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <torch/cuda.h>
#include "tidegate/models/causal_lm.h"
#include "tidegate/models/classifiers.h"
#include "tidegate/models/safetensors.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

const nn::Placement kWide{std::nullopt, torch::kDouble};

LMConfig small() {
  return {.mixer = "hgrn", .vocab_size = 11, .dim = 8, .layers = 2, .glu_hidden = 12};
}

int remove_entry(const char* path, const struct stat*, int, struct FTW*) { return ::remove(path); }

// A folder of this test's own, removed at its end. (Not by std::filesystem: see file_io.h.)
class Folder : public ::testing::Test {
 protected:
  Folder() {
    std::string name = ::testing::TempDir() + "tidegate-XXXXXX";
    if (::mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~Folder() override {
    if (!path_.empty()) ::nftw(path_.c_str(), remove_entry, 8, FTW_DEPTH | FTW_PHYS);
  }
  std::string path_;
};

int64_t count(const torch::nn::Module& model) {
  int64_t total = 0;
  for (const Tensor& parameter : model.parameters()) total += parameter.numel();
  return total;
}

std::string message_of(const std::function<void()>& use) {
  try {
    use();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// Greedy decoding from a state gives what forward() over the whole sequence does.
void expect_generation_is_forward(CausalLM model) {
  const Tensor prompt = at::randint(0, 11, {2, 4}, at::kLong);
  Tensor expected = prompt;
  {
    const torch::NoGradGuard no_grad;
    for (int k = 0; k < 6; ++k) {
      const Tensor next = model->forward(expected).logits.select(1, -1).argmax(-1, true);
      expected = at::cat({expected, next}, 1);
    }
  }
  const auto greedy = GenerateOptions(6).temperature(0.0);
  EXPECT_TRUE(at::equal(model->generate(prompt, greedy), expected));
}

TEST(Presets, HaveThePapersParameterCounts) {
  const std::map<std::string, int64_t> language = {
      {"hgrn-44m", 46'248'448},
      {"hgrn-real-d", 46'239'232},
      {"hgrn-real-2d", 45'462'016},
      {"hgrn-150m", 153'647'616},
      {"hgrn-350m", 378'683'392},
      {"hgrn-379m", 378'683'392},
      {"hgrn-1b", 1'084'497'920},
      {"pese-lr-4", 385'236'992},
      {"pese-lr-8", 385'822'720},
      {"pese-glt-4", 385'556'480},
      {"pese-glti-4", 385'557'728},
      {"pese-krp-4", 385'875'968},
      {"pese-kp-4", 385'556'792},
      {"hgrn2-44m", 44'661'244},
      {"hgrn2-150m", 144'788'736},
      {"hgrn2-385m", 385'476'608},
      {"hgrn2-1b", 1'027'837'952},
      {"hgrn2-2.9b", 2'983'536'640},
      // FoT leaves the input embedding out.
      {"hgrn2-756m", 756'820'992 + 50257 * 1536},
      {"transformer-756m", 756'747'264 + 50257 * 1536},
      {"fox-757m", 757'189'920 + 50257 * 1536},
      {"transformer-pro-757m", 757'675'008 + 50257 * 1536},
      {"fox-pro-758m", 758'117'664 + 50257 * 1536},
      {"transformer-360m", 359'794'688 + 50257 * 1024},
      {"fox-360m", 359'991'488 + 50257 * 1024},
      {"transformer-pro-360m", 366'900'224 + 50257 * 1024},
      {"fox-pro-360m", 366'706'880 + 50257 * 1024},
      {"transformer-125m", 123'551'232 + 50257 * 768},
      {"fox-125m", 123'606'600 + 50257 * 768},
      {"transformer-pro-125m", 123'783'168 + 50257 * 768},
      {"fox-pro-125m", 123'729'480 + 50257 * 768},
      {"transformer-386m", 385'504'256},
      {"demo", 2'698'752}};
  const std::map<std::string, int64_t> images = {{"hgrn-vit-tiny", 6'107'560},
                                                 {"hgrn-vit-small", 23'715'688}};
  const auto all = presets();
  EXPECT_EQ(all.size(), language.size() + images.size());
  const nn::Placement meta{torch::kMeta, std::nullopt};  // a billion parameters in no memory
  for (const auto& [name, parameters] : language) {
    EXPECT_EQ(count(*CausalLM(all.at(name), meta)), parameters) << name;
  }
  for (const auto& [name, parameters] : images) {
    EXPECT_EQ(count(*ImageClassifier(all.at(name), meta)), parameters) << name;
  }
}

TEST(Config, SurvivesItsJson) {
  for (const auto& [name, config] : presets()) {
    EXPECT_EQ(LMConfig::from_json(config.to_json()), config) << name;
  }
  EXPECT_NE(message_of([] { LMConfig::from_json("{"); }).find("not valid JSON"), std::string::npos);
  EXPECT_NE(message_of([] {
              LMConfig::from_json(R"({"mixer": "hgrn", "width": 3})");
            }).find("unknown key 'width'"),
            std::string::npos);
  EXPECT_NE(message_of([] {
              LMConfig{.mixer = "lstm"}.validate();
            }).find("mixer: 'lstm' is unknown; available: hgrn, hgrn2"),
            std::string::npos);
}

TEST(Config, LayersKnowTheirDepth) {
  LMConfig config = small();
  config.mixer = "rwkv4";
  config.layers = 3;
  config.layer_options = {{}, {{"depth", 0.75}}};
  const auto depth = [&](int64_t k) {
    return std::get<double>(config.of_layer(k).mixer_options.at(0).second);
  };
  EXPECT_EQ(depth(0), 0.0);
  EXPECT_EQ(depth(1), 0.75);
  EXPECT_EQ(depth(2), 1.0);
  EXPECT_TRUE(config.mixer_options.empty());
  config.mixer = std::vector<std::string>{"hgrn", "lru", "rwkv4"};
  config.layer_options = {};
  EXPECT_TRUE(config.of_layer(0).mixer_options.empty());
  EXPECT_EQ(depth(2), 1.0);
}

TEST(Config, LayersMayDiffer) {
  LMConfig config = small();
  config.mixer = std::vector<std::string>{"gated-linear-rnn", "hgrn"};
  config.layer_options = {{{"gate_init", "chrono:9"}}, {{"complex", false}}};
  EXPECT_EQ(LMConfig::from_json(config.to_json()), config);
  EXPECT_EQ(std::get<std::string>(config.of_layer(1).mixer), "hgrn");
  CausalLM model(config);
  EXPECT_FALSE(model->block(0).mixer().takes_gamma());
  EXPECT_FALSE(model->gammas()[0].has_value());
  EXPECT_EQ(model->gammas()[1]->size(0), 8);
  const Tensor ids = at::arange(10, at::kLong).unsqueeze(0);
  EXPECT_EQ(model->generate(ids, GenerateOptions(3)).size(1), 13);
  config.layers = 3;
  EXPECT_NE(message_of([&] { config.validate(); }).find("one for each of the 3 layers; got 2"),
            std::string::npos);
  config = small();
  config.layer_options.resize(3);
  EXPECT_NE(message_of([&] { config.validate(); }).find("expected a list of at most 2"),
            std::string::npos);
}

TEST(Config, LayersOfDifferentKindsShareTheirBounds) {
  LMConfig config = small();
  config.mixer = std::vector<std::string>{"gla", "transformer", "fox", "lru"};
  config.layers = 4;
  config.layer_options = {
      {{"num_heads", int64_t{2}}, {"gate", "scalar"}, {"lower_bound", true}},
      {{"num_heads", int64_t{2}}},
      {{"num_heads", int64_t{2}}, {"lower_bound", true}},
      {{"state", int64_t{2}}, {"gate", "data"}, {"lower_bound", true}},
  };
  EXPECT_EQ(LMConfig::from_json(config.to_json()), config);
  torch::manual_seed(1);
  CausalLM model(config, kWide);
  EXPECT_EQ(model->lower_bounds->logits.sizes(), at::IntArrayRef({4, 2}));
  EXPECT_FALSE(model->gammas()[1].has_value());
  EXPECT_EQ(model->gammas()[3]->size(0), 2);
  expect_generation_is_forward(model);
  model->forward(at::randint(0, 11, {2, 5}, at::kLong), "next").loss.backward();
  EXPECT_GT(model->lower_bounds->logits.grad().abs().sum().item<double>(), 0.0);
  config.layer_options[3][0].second = int64_t{3};
  EXPECT_NE(message_of([&] { CausalLM bad(config); }).find("one width; got widths 2, 3"),
            std::string::npos);
}

TEST(Config, FieldsChangeOneByOne) {
  const LMConfig chained =
      LMConfig().with_mixer("hgrn").with_vocab_size(11).with_dim(8).with_layers(2).with_glu_hidden(
          12);
  EXPECT_EQ(chained, small());
  const LMConfig base = small();
  const LMConfig other = base.with_mixer_options({{"complex", false}}).with_dropout(0.5);
  EXPECT_EQ(base, small());
  EXPECT_EQ(other.dropout, 0.5);
  EXPECT_EQ(other.mixer_options.size(), 1u);
  EXPECT_EQ(presets().at("demo").with_layers(1).layers, 1);
}

TEST(CausalLm, LearnsASequence) {
  torch::manual_seed(0);
  CausalLM model(small());
  const Tensor ids = at::arange(10, at::kLong).unsqueeze(0);
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 60; ++step) {
    model->zero_grad();
    const Output out = model->forward(ids, "next");
    out.loss.backward();
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : model->parameters()) parameter.sub_(0.3 * parameter.grad());
    last = out.loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.5 * first);
}

TEST(CausalLm, GeneratesWhatItsForwardSays) {
  torch::manual_seed(1);
  CausalLM model(small(), kWide);
  expect_generation_is_forward(model);
  const Tensor prompt = at::randint(0, 11, {2, 4}, at::kLong);
  EXPECT_TRUE(model->is_training());
  const auto sampled = GenerateOptions(6).seed(3).top_k(4);
  const Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_TRUE(at::equal(model->generate(prompt, sampled), model->generate(prompt, sampled)));
  EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
}

TEST(CausalLm, GenerationLeavesEveryModulesMode) {
  torch::manual_seed(1);
  CausalLM model(small(), kWide);
  model->children().front()->eval();
  std::vector<bool> before, after;
  for (const auto& module : model->modules()) before.push_back(module->is_training());
  model->generate(at::randint(0, 11, {2, 4}, at::kLong), GenerateOptions(2));
  for (const auto& module : model->modules()) after.push_back(module->is_training());
  EXPECT_EQ(before, after);
  EXPECT_NE(std::count(before.begin(), before.end(), true), 0);
  EXPECT_NE(std::count(before.begin(), before.end(), false), 0);
}

TEST(CausalLm, PaddingTakesNoPart) {
  torch::manual_seed(2);
  CausalLM model(small(), kWide);
  const Tensor ids = at::randint(0, 11, {2, 5}, at::kLong);
  const Tensor lengths = at::tensor({3, 5}, at::kLong);
  const auto greedy = GenerateOptions(4).temperature(0.0);
  const Tensor both = model->generate(ids, GenerateOptions(greedy).lengths(lengths));
  const Tensor alone = model->generate(ids.narrow(0, 0, 1).narrow(1, 0, 3), greedy);
  EXPECT_TRUE(at::equal(both.narrow(0, 0, 1).narrow(1, 0, 7), alone));
}

TEST(CausalLm, ClonesAreTheirOwn) {
  torch::manual_seed(3);
  CausalLM model(small(), kWide);
  const Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  CausalLM copy(std::dynamic_pointer_cast<CausalLMImpl>(model->clone()));
  EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
  const Tensor ids = at::randint(0, 11, {2, 5}, at::kLong);
  const Tensor wanted = model->forward(ids).logits.detach().clone();
  EXPECT_TRUE(at::equal(copy->forward(ids).logits, wanted));
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : model->parameters()) parameter.zero_();
  }
  EXPECT_TRUE(at::equal(copy->forward(ids).logits, wanted));
}

TEST(CausalLm, RefusesWhatCannotWork) {
  const auto build = [](LMConfig config) { return message_of([&] { CausalLM model(config); }); };
  LMConfig both = small(), bound = small(), images = small();
  both.mixer_options = {{"bidirectional", true}};
  bound.mixer_options = {{"forget_gate", "bound"}};
  bound.lower_bound = "none";
  images.vocab_size = std::nullopt;
  EXPECT_NE(build(both).find("must not see later tokens"), std::string::npos);
  EXPECT_NE(build(bound).find("LMConfig: lower_bound"), std::string::npos);
  EXPECT_NE(build(images).find("CausalLM: vocab_size"), std::string::npos);
  CausalLM model(small());
  EXPECT_NE(message_of([&] { model->forward(at::zeros({2, 3})); }).find("expected int32 or int64"),
            std::string::npos);
}

TEST(CausalLm, AFullCacheIsRefusedBeforeAnyStateMoves) {
  LMConfig config = small().with_mixer(std::vector<std::string>{"hgrn", "transformer"});
  CausalLM model(config.with_layer_options({{}, {{"num_heads", int64_t{2}}}}));
  const torch::NoGradGuard no_grad;
  const ModelState state = model->init_state(2, 1);
  const Tensor ids = at::zeros({2}, at::kLong);
  model->step(ids, state);
  const Tensor before = state[0][0].clone();
  EXPECT_NE(message_of([&] { model->step(ids, state); }).find("expected room for 2 tokens"),
            std::string::npos);
  EXPECT_TRUE(at::equal(state[0][0], before));
}

TEST(CausalLm, NoGpuIsOneLine) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is one";
  const nn::Placement there{torch::Device(torch::kCUDA), std::nullopt};
  EXPECT_EQ(message_of([&] { CausalLM model(small(), there); }),
            "device: expected cpu, since torch sees no CUDA device; got cuda");
}

using Files = Folder;

TEST_F(Files, SaveAndLoad) {
  torch::manual_seed(4);
  CausalLM model(small());
  model->to(torch::kBFloat16);
  model->save(path_ + "/deep/er");
  CausalLM loaded = CausalLM::load(path_ + "/deep/er");
  EXPECT_FALSE(loaded->is_training());
  EXPECT_EQ(loaded->config, model->config);
  model->eval();
  const Tensor ids = at::randint(0, 11, {2, 5}, at::kLong);
  EXPECT_TRUE(at::equal(loaded->forward(ids).logits, model->forward(ids).logits));
  EXPECT_EQ(loaded->lower_bounds->logits.scalar_type(), torch::kFloat);
}

TEST_F(Files, BrokenOnesAreRefusedInOneLine) {
  CausalLM(small())->save(path_);
  const std::string weights = path_ + "/model.safetensors";
  struct stat info = {};
  ASSERT_EQ(::stat(weights.c_str(), &info), 0);
  for (const off_t kept : {info.st_size - 1, info.st_size / 2, off_t{20}, off_t{3}, off_t{0}}) {
    ASSERT_EQ(::truncate(weights.c_str(), kept), 0);
    const std::string message = message_of([&] { CausalLM::load(path_); });
    EXPECT_NE(message.find("truncated"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  ::remove(weights.c_str());
  EXPECT_NE(message_of([&] { CausalLM::load(path_); }).find("no such file"), std::string::npos);
  EXPECT_NE(message_of([&] { CausalLM::load(path_ + "/none"); }).find("no such file"),
            std::string::npos);
}

TEST_F(Files, UnwritableFoldersAreRefused) {
  std::ofstream(path_ + "/file") << "text";
  EXPECT_NE(message_of([&] {
              CausalLM(small())->save(path_ + "/file/model");
            }).find("cannot make the folder"),
            std::string::npos);
}

TEST_F(Files, ARunsFolderIsNoPlaceForAModel) {
  std::ofstream(path_ + "/config.json") << R"({"train": {}, "model": {}})";
  EXPECT_EQ(message_of([&] { CausalLM(small())->save(path_); }),
            "CausalLM.save: " + path_ +
                ": expected a folder for a model; got a run, whose config.json would be lost: its "
                "model has its place in " +
                path_ + "/model, where tidegate.training.export_trained() writes it");
  CausalLM(small())->save(path_ + "/model");
}

// How many entries the folder has, besides itself and the one above.
int64_t entries_of(const std::string& folder) {
  int64_t entries = 0;
  DIR* stream = ::opendir(folder.c_str());
  if (stream == nullptr) return -1;
  while (const dirent* entry = ::readdir(stream)) entries += entry->d_name[0] != '.';
  ::closedir(stream);
  return entries;
}

TEST_F(Files, ThreadsThatSaveToOnePathLeaveAWholeFile) {
  const std::string path = path_ + "/a.safetensors";
  constexpr int64_t kThreads = 4, kSaves = 8;
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int64_t k = 0; k < kThreads; ++k) {
    threads.emplace_back([&, k] {
      for (int64_t n = 0; n < kSaves; ++n) {
        // Lengths differ, so that a file of two writers does not fit its header.
        const TensorMap tensors{{"x", at::full({20'000 * (k + 1)}, static_cast<float>(k))}};
        failures += message_of([&] { save_safetensors(tensors, path); }) != "no error";
        failures +=
            message_of([&] {
              const Tensor x = load_safetensors(path).at("x");
              const auto writer = x[0].item<int64_t>();
              TORCH_CHECK(x.numel() == 20'000 * (writer + 1) && x.eq(writer).all().item<bool>());
            }) != "no error";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(entries_of(path_), 1);
}

TEST_F(Files, SavingFollowsNoPlantedLink) {
  const std::string path = path_ + "/a.safetensors", victim = path_ + "/victim";
  std::ofstream(victim) << "precious";
  const std::string planted = path + ".tmp." + std::to_string(::getpid());
  ASSERT_EQ(::symlink(victim.c_str(), planted.c_str()), 0);
  constexpr int kNumbered = 500;  // the names that this process is likely to come to next
  for (int k = 0; k < kNumbered; ++k) {
    ASSERT_EQ(::symlink(victim.c_str(), (planted + '.' + std::to_string(k)).c_str()), 0);
  }
  save_safetensors({{"x", at::ones({3})}}, path);
  std::string text;
  std::ifstream(victim) >> text;
  EXPECT_EQ(text, "precious");
  struct stat info = {};
  ASSERT_EQ(::lstat(path.c_str(), &info), 0);
  EXPECT_TRUE(S_ISREG(info.st_mode));
  EXPECT_EQ(load_safetensors(path).at("x").numel(), 3);
  EXPECT_EQ(entries_of(path_), kNumbered + 3);
}

TEST(Classifiers, LeavePaddingOutOfThePooling) {
  torch::manual_seed(5);
  LMConfig config = small();
  config.num_classes = 3;
  config.mixer_options = {{"bidirectional", true}};
  SequenceClassifier model(config, kWide);
  const Tensor ids = at::randint(0, 11, {2, 6}, at::kLong);
  const Tensor labels = at::tensor({0, 2}, at::kLong);
  const Output padded = model->forward(ids, labels, at::tensor({4, 6}, at::kLong));
  const Tensor alone = model->forward(ids.narrow(0, 0, 1).narrow(1, 0, 4)).logits;
  EXPECT_TRUE(at::allclose(padded.logits.narrow(0, 0, 1), alone, 1e-9, 1e-11));
  padded.loss.backward();
  EXPECT_GT(model->head->weight.grad().abs().sum().item<double>(), 0.0);
}

TEST(Classifiers, PoolManyTokensInHalfPrecision) {
  torch::manual_seed(6);
  LMConfig config = small();
  config.num_classes = 3;
  SequenceClassifier model(config);
  model->to(at::kHalf);
  const torch::NoGradGuard no_grad;
  const Tensor ids = at::full({1, 60000}, 2, at::kLong);
  const Tensor whole = model->forward(ids).logits;
  const Tensor packed = model->forward(ids, std::nullopt, at::tensor({60000}, at::kLong)).logits;
  EXPECT_TRUE(at::isfinite(whole).all().item<bool>());
  EXPECT_TRUE(at::allclose(whole, packed, 1e-2, 1e-2));
}

TEST(Classifiers, TakeImagesOfAnySize) {
  LMConfig config = small();
  config.vocab_size = std::nullopt;
  config.num_classes = 3;
  config.patch_size = 2;
  config.mixer_options = {{"bidirectional", true}};
  ImageClassifier model(config);
  for (const int64_t width : {2, 6}) {
    const Output out = model->forward(at::randn({2, 3, 4, width}), at::tensor({0, 1}, at::kLong));
    EXPECT_EQ(out.logits.sizes(), (std::vector<int64_t>{2, 3}));
    out.loss.backward();
  }
  EXPECT_NE(message_of([&] {
              model->forward(at::randn({2, 3, 4, 5}));
            }).find("multiples of the patch size 2"),
            std::string::npos);
}

}  // namespace
}  // namespace tidegate::models
