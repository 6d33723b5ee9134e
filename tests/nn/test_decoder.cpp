// The decoding engine from C++: Decoder beside generate(), its slots and its errors.

#include "tidegate/models/decoder.h"

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "src/models/decoder_rows.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

CausalLM made(const char* mixer) {
  torch::manual_seed(3);
  LMConfig config;
  config.mixer = std::string(mixer);
  config.vocab_size = 23;
  config.dim = 16;
  config.layers = 2;
  CausalLM model(config, nn::Placement{torch::kCPU, torch::kDouble});
  const torch::NoGradGuard no_grad;
  for (Tensor& p : model->parameters()) p.add_(at::randn_like(p));
  return model;
}

std::map<int64_t, std::vector<int64_t>> decoded(Decoder& decoder, int64_t steps) {
  std::map<int64_t, std::vector<int64_t>> tokens;
  while (decoder.active() > 0) {
    for (const DecodedToken& one : decoder.steps(steps)) tokens[one.slot].push_back(one.token);
  }
  return tokens;
}

TEST(Decoder, GivesWhatGenerateGives) {
  for (const char* mixer : {"hgrn", "hgrn2", "rwkv4", "fox-pro", "transformer"}) {
    CausalLM model = made(mixer);
    const Tensor ids = at::randint(0, 23, {3, 5}, at::kLong);
    const Tensor wanted =
        model->generate(ids, GenerateOptions(20).seed(4).top_k(9).repetition_penalty(1.3));
    Decoder decoder(model, DecoderOptions(3).capacity(4).prompt_chunk(3));
    std::vector<Tensor> prompts;
    std::vector<SequenceOptions> options;
    for (int64_t b = 0; b < 3; ++b) {
      prompts.push_back(ids[b]);
      options.push_back(
          SequenceOptions().max_new_tokens(20).seed(4).stream(b).top_k(9).repetition_penalty(1.3));
    }
    const auto slots = decoder.add(prompts, options);
    auto tokens = decoded(decoder, 7);
    for (int64_t b = 0; b < 3; ++b) {
      const Tensor found = at::tensor(tokens[slots[static_cast<size_t>(b)]], at::kLong);
      EXPECT_TRUE(at::equal(found, wanted[b].narrow(0, 5, 20))) << mixer << " row " << b;
    }
  }
}

TEST(Decoder, SavedStatesAreAsGoodAsReading) {
  CausalLM model = made("fox-pro");
  const Tensor ids = at::randint(0, 23, {9}, at::kLong);
  const auto options = SequenceOptions().temperature(0.0).max_new_tokens(10);
  Decoder decoder(model, DecoderOptions(2));
  const int64_t whole = decoder.add(ids, options);
  const int64_t prefix = decoder.add(ids.narrow(0, 0, 6), options);
  const TensorMap saved = decoder.save_prefix(prefix);
  decoder.remove(prefix);
  const int64_t other = decoder.load_prefix(saved, ids.narrow(0, 6, 3), options);
  auto tokens = decoded(decoder, 3);
  EXPECT_EQ(tokens[whole], tokens[other]);
}

TEST(Decoder, StepsBySlotAndPrefixesInFiles) {
  CausalLM model = made("hgrn2");
  const Tensor ids = at::randint(0, 23, {6}, at::kLong);
  const auto options = SequenceOptions().temperature(0.0).max_new_tokens(8);
  const std::string path = testing::TempDir() + "tidegate_prefix.safetensors";
  Decoder decoder(model, DecoderOptions(2));
  EXPECT_EQ(decoder.max_batch(), 2);
  const int64_t first = decoder.add(ids, options);
  decoder.save_prefix(first, path);
  const int64_t second = decoder.load_prefix(path, at::zeros({0}, at::kLong), options);
  std::remove(path.c_str());
  for (int64_t step = 0; step < 8; ++step) {
    const std::map<int64_t, DecodedToken> tokens = decoder.step();
    ASSERT_EQ(tokens.size(), 2U);
    EXPECT_EQ(tokens.at(first).token, tokens.at(second).token);
    EXPECT_EQ(tokens.at(second).slot, second);
    EXPECT_EQ(tokens.at(first).is_last, step == 7);
  }
  EXPECT_TRUE(decoder.step().empty());
}

// The states of these models have the same shapes.
TEST(Decoder, RefusesThePrefixOfAnotherConfiguration) {
  const Tensor ids = at::randint(0, 23, {6}, at::kLong);
  CausalLM hgrn = made("hgrn"), lru = made("lru");
  Decoder writer(hgrn, DecoderOptions(1)), reader(lru, DecoderOptions(1));
  TensorMap saved = writer.save_prefix(writer.add(ids));
  const auto error_of = [&] {
    try {
      reader.load_prefix(saved, ids);
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("no error");
  };
  EXPECT_EQ(
      error_of(),
      "Decoder.load_prefix: saved: expected the prefix of a model with mixer = 'lru'; got one "
      "with 'hgrn'");
  EXPECT_EQ(reader.taken(), 0);
  saved["config"] = at::zeros({2, 3}, at::kByte);
  EXPECT_EQ(error_of(),
            "Decoder.load_prefix: saved: 'config': expected uint8 [bytes], a JSON text; got uint8 "
            "(2, 3)");
  saved["config"] = at::full({4}, '1', at::kByte);
  EXPECT_EQ(error_of(), "Decoder.load_prefix: saved: 'config': expected an object; got 1111");
}

// A token that a layer has no room for is dropped on the device, and its count says so.
TEST(DecoderRows, SaysThatACacheWasFull) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device; the CPU checks each index";
  const torch::NoGradGuard no_grad;
  CausalLM model = made("fox");
  model->to(torch::kCUDA, torch::kFloat);
  const auto [logits, state] =
      model->prefill(at::zeros({1, 4}, at::device(at::kCUDA).dtype(at::kLong)));
  RowsOptions options;
  options.capacity = 4;
  DecoderRows rows(*model, options);
  rows.begin(0, logits, state, /*lengths=*/{0}, {RowSettings()}, {});  // there are four
  rows.advance(1, 1, 1);
  EXPECT_THROW(rows.fetch(1, 1).wait(), c10::Error);
}

TEST(Decoder, RefusesWhatDoesNotFit) {
  CausalLM model = made("hgrn2");
  Decoder decoder(model, DecoderOptions(1));
  const Tensor ids = at::zeros({2}, at::kLong);
  EXPECT_THROW(decoder.add(at::zeros({0}, at::kLong)), c10::ValueError);
  EXPECT_THROW(decoder.add(ids, SequenceOptions().temperature(-1.0)), c10::ValueError);
  EXPECT_THROW(decoder.remove(0), c10::ValueError);
  const int64_t slot = decoder.add(ids);
  EXPECT_THROW(decoder.add(ids), c10::ValueError);
  decoder.remove(slot);
  EXPECT_THROW(decoder.remove(slot), c10::ValueError);
  EXPECT_THROW(decoder.steps(0), c10::ValueError);
  constexpr int64_t kMany = int64_t{1} << 62;
  EXPECT_THROW(Decoder(model, DecoderOptions(0)), c10::ValueError);
  EXPECT_THROW(Decoder(model, DecoderOptions(kMany)), c10::ValueError);
  EXPECT_THROW(Decoder(model, DecoderOptions(1).max_stop_ids(-1)), c10::ValueError);
  EXPECT_THROW(Decoder(model, DecoderOptions(1).max_stop_ids(kMany)), c10::ValueError);
  EXPECT_THROW(Decoder(made("fox"), DecoderOptions(1).capacity(kMany)), c10::ValueError);
  for (const int64_t eos : {int64_t{-1}, int64_t{23}, kMany}) {
    EXPECT_THROW(model->generate(ids.unsqueeze(0), GenerateOptions(2).eos(eos)), c10::ValueError);
  }
  EXPECT_THROW(model->generate(ids.unsqueeze(0), GenerateOptions(kMany)), c10::ValueError);
}

TEST(Decoder, EndsWhatHasEnded) {
  CausalLM model = made("hgrn2");
  Decoder decoder(model, DecoderOptions(2));
  const Tensor ids = at::zeros({2}, at::kLong);
  const int64_t slot = decoder.add(ids, SequenceOptions().max_new_tokens(1));
  const int64_t other = decoder.add(ids);
  decoder.steps(1);
  decoder.end(slot);
  EXPECT_EQ(decoder.active(), 1);
  decoder.end(other);
  decoder.end(other);
  EXPECT_EQ(decoder.active(), 0);
  EXPECT_EQ(decoder.taken(), 2);
  decoder.remove(slot);
  EXPECT_THROW(decoder.end(slot), c10::ValueError);
}

}  // namespace
}  // namespace tidegate::models
