// Trains a byte-level language model on a text, saves it, loads it again and lets it write.
//
//   build/tidegate_train TEXT MODEL [--steps 300] [--mixer hgrn2] [--dim 128] [--layers 2]
//                        [--batch-size 8] [--context 256] [--lr 0.003] [--prompt "The "] [--cuda]
//
// MODEL is a folder, which Python loads as well: tidegate.models.CausalLM.load(MODEL).
#include <tidegate/tidegate.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Settings {
  std::string text, model;
  std::map<std::string, std::string> flags = {
      {"--steps", "300"},     {"--mixer", "hgrn2"}, {"--dim", "128"},  {"--layers", "2"},
      {"--batch-size", "8"},  {"--context", "256"}, {"--lr", "0.003"}, {"--prompt", "The "},
      {"--new-bytes", "200"}, {"--seed", "0"}};
  bool cuda = false;

  int64_t number(const char* flag) const { return std::stoll(flags.at(flag)); }
};

Settings parse(int count, char** words) {
  Settings settings;
  std::vector<std::string> names;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--cuda") {
      settings.cuda = true;
    } else if (word.starts_with("--")) {
      if (!settings.flags.contains(word) || ++i == count) {
        throw std::invalid_argument("unknown flag, or one without a value: " + word);
      }
      settings.flags[word] = words[i];
    } else {
      names.push_back(word);
    }
  }
  if (names.size() != 2) throw std::invalid_argument("expected a text and a folder for the model");
  settings.text = names[0];
  settings.model = names[1];
  return settings;
}

// The bytes of a file, as ids.
torch::Tensor read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::invalid_argument(path + ": cannot be read");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  return torch::tensor(
      at::ArrayRef<uint8_t>(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()),
      torch::kUInt8);
}

// `rows` pieces of `context` bytes, from anywhere in the text: int64 [rows, context].
torch::Tensor draw_batch(const torch::Tensor& text, int64_t rows, int64_t context) {
  const auto starts = torch::randint(text.size(0) - context + 1, {rows, 1}, torch::kLong);
  return text.index({starts + torch::arange(context)}).to(torch::kLong);
}

void train(tidegate::models::CausalLM& model, const torch::Tensor& text, const Settings& settings,
           torch::Device device) {
  const int64_t steps = settings.number("--steps"), context = settings.number("--context");
  const int64_t rows = settings.number("--batch-size");
  const double peak = std::stod(settings.flags.at("--lr"));
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(peak).weight_decay(0.01));
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = 1; step <= steps; ++step) {
    // A linear warm-up over a tenth of the steps, then linearly down to nothing.
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    const double rate = peak * std::min(done / 0.1, (1.0 - done) / 0.9 + 0.01);
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(rate);

    const auto ids = draw_batch(text, rows, context).to(device);
    const auto loss = model->forward(ids, "next").loss;
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    if (step % 10 == 0 || step == steps) {  // reading the loss waits for a GPU: not at every step
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      std::printf("\rstep %ld of %ld: %.3f nats a byte, %.0f bytes/s ", static_cast<long>(step),
                  static_cast<long>(steps), loss.item<double>(),
                  static_cast<double>(step * rows * context) / seconds.count());
      std::fflush(stdout);
    }
  }
  std::printf("\n");
}

std::string write(tidegate::models::CausalLM& model, const std::string& prompt, int64_t count,
                  torch::Device device) {
  std::vector<int64_t> ids(prompt.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<unsigned char>(prompt[i]);
  const auto options =
      tidegate::models::GenerateOptions(count).temperature(0.8).top_p(0.95).seed(1);
  const auto all = model->generate(torch::tensor(ids).unsqueeze(0).to(device), options).cpu();
  std::string text;
  for (int64_t i = 0; i < all.size(1); ++i) text += static_cast<char>(all[0][i].item<int64_t>());
  return text;
}

int run(const Settings& settings) {
  torch::manual_seed(settings.number("--seed"));
  const torch::Device device(settings.cuda ? torch::kCUDA : torch::kCPU);
  const auto text = read_bytes(settings.text);
  if (text.size(0) <= settings.number("--context")) {
    throw std::invalid_argument(settings.text + ": fewer bytes than --context");
  }
  tidegate::models::LMConfig config;
  config.mixer = settings.flags.at("--mixer");
  config.vocab_size = 256;
  config.dim = settings.number("--dim");
  config.layers = settings.number("--layers");
  tidegate::models::CausalLM model(config, tidegate::nn::Placement{.device = device});
  train(model, text, settings, device);

  model->save(settings.model);
  auto loaded = tidegate::models::CausalLM::load(settings.model, device);
  std::printf(
      "%s\n",
      write(loaded, settings.flags.at("--prompt"), settings.number("--new-bytes"), device).c_str());
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(parse(count, words));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tidegate_train: %s\n", error.what());
    return 2;
  }
}
