// Every mixer beside the Transformer, in one command: see kUsage. Also an example of training and
// decoding in C++: work.cpp.

#include <ATen/Parallel.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <cstdio>
#include <ctime>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/cpu_name.h"
#include "benchmarks/models/flags.h"
#include "benchmarks/models/gpu_name.h"
#include "benchmarks/models/measure.h"
#include "benchmarks/models/report.h"

namespace tidegate::benchmarks {
namespace {

using Json = nlohmann::ordered_json;

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &parts);
  return text;
}

Json head_of(const Flags& flags) {
  const Setup& setup = flags.setup;
  return {{"kind", "models"},
          {"date", today()},
          {"commit", flags.commit},
          {"machine",
           {{"device", setup.device.is_cuda() ? "cuda" : "cpu"},
            {"name", setup.device.is_cuda() ? gpu_name()() : testing::cpu_name()},
            {"threads", at::get_num_threads()},
            {"torch", TORCH_VERSION}}},
          {"size", flags.size.name},
          {"precision", setup.is_bf16 ? "bf16" : "fp32"},
          {"recompute", setup.recompute},
          {"residual", setup.has_narrow_residual ? "bf16" : "auto"},
          {"optimizer", "AdamW, fused"},
          {"tokens", setup.tokens},
          {"decode_tokens", setup.decode_tokens}};
}

// Runs `work`; what it throws becomes the row's, and the memory it held is free for the next.
void attempt(Row& row, const char* what, const Setup& setup, const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    row.errors.push_back(std::string(what) + ": " + message.substr(0, message.find('\n')));
    release_memory(setup.device);
  }
}

class Run {
 public:
  explicit Run(Flags flags)
      : flags_(std::move(flags)),
        head_(head_of(flags_)),
        speeds_(measure_speeds(flags_.setup.device, flags_.setup.is_bf16)) {
    head_["product_operations_per_s"] = speeds_.operations;
    head_["copy_bytes_per_s"] = speeds_.bytes;
  }

  int all() {
    std::cout << head_["machine"]["name"].get<std::string>() << ", " << flags_.size.name << ", "
              << head_["precision"].get<std::string>() << ", " << flags_.setup.tokens
              << " tokens a step\n"
              << table_head() << std::endl;
    for (const std::string& mixer : flags_.mixers) measure(mixer);
    for (const Row& row : rows_) {
      if (!row.errors.empty()) return 1;
    }
    return 0;
  }

 private:
  void measure(const std::string& mixer) {
    const Setup& setup = flags_.setup;
    const models::LMConfig config = config_of(flags_.size, mixer);
    const int64_t parameters = parameter_count(config);
    const size_t first = rows_.size();
    for (const int64_t context : flags_.contexts) {
      Row& row = rows_.emplace_back();
      row.mixer = mixer;
      row.context = context;
      row.batch = setup.batch(context);
      row.layers = config.layers;
      row.glu_hidden = *config.glu_hidden;
      row.parameters = parameters;
    }
    models::CausalLM model(nullptr);
    attempt(rows_[first], "model", setup, [&] { model = make_model(config, setup); });
    if (!model.is_empty()) {
      for (size_t i = first; i < rows_.size(); ++i) train(model, rows_[i]);
      // As it is served: no gradients, and on a GPU weights in bf16.
      if (setup.is_bf16) model->to(torch::kBFloat16);
      for (size_t i = first; i < rows_.size(); ++i) decode(model, rows_[i]);
    }
    print(mixer);
  }

  void print(const std::string& mixer) const {
    const Json record = with_rows(head_, rows_);
    for (const Json& row : record["rows"]) {
      if (row["mixer"] == mixer) std::cout << table_line(row) << std::endl;
    }
    for (const Json& row : record["rows"]) {
      if (row["mixer"] == mixer && row.contains("train")) {
        std::cout << split_line(row) << std::endl;
      }
    }
    for (const Json& pair : record["pairs"]) {
      if (pair["mixers"][0] == mixer || pair["mixers"][1] == mixer) {
        std::cout << pair_line(pair) << std::endl;
      }
    }
  }

  void train(models::CausalLM& model, Row& row) {
    const Setup& setup = flags_.setup;
    attempt(row, "training", setup,
            [&] { row.train = measure_training(model, setup, row.context, speeds_); });
    for (torch::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
    const bool is_attention = row.mixer.rfind("fox", 0) == 0 || row.mixer.rfind(kBaseline, 0) == 0;
    if (is_attention) {
      attempt(row, "attention", setup,
              [&] { row.attention = measure_attention(model->config, setup, row.context); });
    }
    save();
  }

  void decode(models::CausalLM& model, Row& row) {
    const Setup& setup = flags_.setup;
    if (setup.decode_tokens == 0) return;
    attempt(row, "decoding", setup,
            [&] { row.decode = measure_decoding(model, setup, row.context); });
    save();
  }

  void save() const {
    if (!flags_.json.empty()) write_json(flags_.json, with_rows(head_, rows_));
  }

  Flags flags_;
  Json head_;
  Speeds speeds_;
  std::vector<Row> rows_;
};

}  // namespace
}  // namespace tidegate::benchmarks

int main(int argc, char** argv) {
  using namespace tidegate::benchmarks;  // NOLINT: this program's own
  try {
    Flags flags = parse_flags({argv + 1, argv + argc});
    if (flags.help) {
      std::cout << kUsage;
      return 0;
    }
    return Run(std::move(flags)).all();
  } catch (const c10::Error& error) {
    std::cerr << "bench_models: " << error.what_without_backtrace() << "\n";
    return 2;
  }
}
