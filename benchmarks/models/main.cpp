// Every mixer beside the Transformer, in one command: see kUsage. Also an example of training and
// decoding in C++: work.cpp.

#include <ATen/Parallel.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cmath>
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
          {"dim", flags.size.dim},
          {"vocab_size", flags.size.vocab_size},
          {"precision", setup.is_bf16 ? "bf16" : "fp32"},
          {"recompute", setup.recompute},
          {"residual", setup.has_narrow_residual ? "bf16" : "auto"},
          {"optimizer", "AdamW, fused"},
          {"tokens", setup.tokens},
          {"decode_tokens", setup.decode_tokens},
          {"rounds", flags.rounds}};
}

// Runs `work`; what it throws becomes the row's, and the memory it held is free for the next.
void attempt(Row& row, const char* what, const Setup& setup, const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& thrown) {
    const std::string message = thrown.what_without_backtrace();
    const std::string error = std::string(what) + ": " + message.substr(0, message.find('\n'));
    const auto& known = row.errors;  // of the rounds before
    if (std::find(known.begin(), known.end(), error) == known.end()) row.errors.push_back(error);
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
    std::cout << head_["machine"]["name"].get<std::string>() << ", " << flags_.size.name << " ("
              << flags_.size.layers << " layers of " << flags_.size.dim << "), "
              << head_["precision"].get<std::string>() << ", " << flags_.setup.tokens
              << " tokens a step, " << flags_.rounds << " rounds\n"
              << table_head() << std::endl;
    for (const std::string& mixer : flags_.mixers) add_rows(mixer);
    warm_up();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t round = 0; round < flags_.rounds; ++round) {
      std::vector<std::string> turns = flags_.mixers;
      if (round % 2 == 1) std::reverse(turns.begin(), turns.end());
      for (const std::string& mixer : turns) {
        measure(mixer);
        say_what_is_left(begin);
      }
    }
    if (flags_.rounds > 1) {
      std::cout << "mean of " << flags_.rounds << " rounds\n" << table_head() << std::endl;
      for (const std::string& mixer : flags_.mixers) print(mixer);
    }
    for (const std::string& mixer : flags_.mixers) print_pairs(mixer);
    for (const Row& row : rows_) {
      if (!row.errors.empty()) return 1;
    }
    return 0;
  }

 private:
  void add_rows(const std::string& mixer) {
    const models::LMConfig config = config_of(flags_.size, mixer);
    const int64_t parameters = parameter_count(config);
    for (const int64_t context : flags_.contexts) {
      Row& row = rows_.emplace_back();
      row.mixer = mixer;
      row.context = context;
      row.batch = flags_.setup.batch(context);
      row.layers = config.layers;
      row.glu_hidden = *config.glu_hidden;
      row.parameters = parameters;
    }
  }

  std::vector<Row*> rows_of(const std::string& mixer) {
    std::vector<Row*> found;
    for (Row& row : rows_) {
      if (row.mixer == mixer) found.push_back(&row);
    }
    return found;
  }

  // A step that nobody counts: threads start, pages are touched, clocks rise. Whoever is first
  // would pay for that; if it fails, its row says so.
  void warm_up() {
    try {
      Setup setup = flags_.setup;
      setup.steps = 1;
      models::CausalLM model = make_model(config_of(flags_.size, flags_.mixers.front()), setup);
      measure_training(model, setup, flags_.contexts.front(), speeds_);
    } catch (const c10::Error&) {
      release_memory(flags_.setup.device);
    }
  }

  // After the first turn, when it is known what one takes.
  void say_what_is_left(std::chrono::steady_clock::time_point begin) {
    const auto all = static_cast<double>(flags_.rounds * flags_.mixers.size()) - 1;
    if (++turns_ != 1 || all == 0) return;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    std::cerr << "bench_models: about " << std::llround(std::ceil(all * passed.count() / 60))
              << " minutes to go" << std::endl;
  }

  void measure(const std::string& mixer) {
    const Setup& setup = flags_.setup;
    const std::vector<Row*> rows = rows_of(mixer);
    models::CausalLM model(nullptr);
    attempt(*rows.front(), "model", setup,
            [&] { model = make_model(config_of(flags_.size, mixer), setup); });
    if (model.is_empty()) return print(mixer);
    const bool prints_now = turns_ == 0;  // the first rows as soon as there is something to see
    for (Row* row : rows) {
      train(model, *row);
      if (prints_now && setup.decode_tokens > 0) std::cout << line_of(*row) << std::endl;
    }
    // The model decodes as it is served: no gradients, and on a GPU weights in bf16.
    if (setup.is_bf16) model->to(torch::kBFloat16);
    for (Row* row : rows) decode(model, *row);
    if (static_cast<size_t>(turns_) < flags_.mixers.size()) print(mixer);
  }

  std::string line_of(const Row& wanted) const {
    const Json record = with_rows(head_, rows_);
    for (const Json& row : record["rows"]) {
      if (row["mixer"] == wanted.mixer && row["context"] == wanted.context) return table_line(row);
    }
    return "";
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
  }

  void print_pairs(const std::string& mixer) const {
    const Json record = with_rows(head_, rows_);
    for (const Json& pair : record["pairs"]) {
      if (pair["mixers"][0] == mixer) std::cout << pair_line(pair) << std::endl;
    }
  }

  void train(models::CausalLM& model, Row& row) {
    const Setup& setup = flags_.setup;
    attempt(row, "training", setup,
            [&] { row.train.push_back(measure_training(model, setup, row.context, speeds_)); });
    for (torch::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
    const bool is_attention = row.mixer.rfind("fox", 0) == 0 || row.mixer.rfind(kBaseline, 0) == 0;
    if (is_attention) {
      attempt(row, "attention", setup, [&] {
        row.attention.push_back(measure_attention(model->config, setup, row.context));
      });
    }
    save();
  }

  void decode(models::CausalLM& model, Row& row) {
    const Setup& setup = flags_.setup;
    if (setup.decode_tokens == 0) return;
    attempt(row, "decoding", setup,
            [&] { row.decode.push_back(measure_decoding(model, setup, row.context)); });
    save();
  }

  void save() const {
    if (!flags_.json.empty()) write_json(flags_.json, with_rows(head_, rows_));
  }

  Flags flags_;
  Json head_;
  Speeds speeds_;
  std::vector<Row> rows_;
  int64_t turns_ = 0;  // that are done
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
    if (flags.list) {
      for (const std::string& mixer : ordered_mixers()) std::cout << "models/" << mixer << "\n";
      for (const Size& size : sizes()) std::cout << "size " << size.name << "\n";
      return 0;
    }
    return Run(std::move(flags)).all();
  } catch (const c10::Error& error) {
    std::cerr << "bench_models: " << error.what_without_backtrace() << "\n";
    return 2;
  }
}
