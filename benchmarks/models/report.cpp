#include "benchmarks/models/report.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/models/sizes.h"

namespace tidegate::benchmarks {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMilli = 1e3;

// The mean of one of the numbers of a result.
template <typename Result>
double mean_of(const std::vector<Result>& rounds, double Result::* number) {
  double sum = 0;
  for (const Result& round : rounds) sum += round.*number;
  return sum / static_cast<double>(rounds.size());
}

// How far apart the rounds are: the longest less the shortest, of their mean.
template <typename Result>
double spread_of(const std::vector<Result>& rounds, double Result::* number) {
  double least = rounds.front().*number, most = least;
  for (const Result& round : rounds) {
    least = std::min(least, round.*number);
    most = std::max(most, round.*number);
  }
  return (most - least) / mean_of(rounds, number);
}

Json train_json(const Row& row, const Row* baseline) {
  const TrainResult train = mean(row.train);
  const double tokens = static_cast<double>(row.batch * row.context);
  Json json = {{"tokens_per_s", tokens / train.step},
               {"step_ms", kMilli * train.step},
               {"step_spread", spread_of(row.train, &TrainResult::step)},
               {"forward_ms", kMilli * train.forward},
               {"backward_ms", kMilli * train.backward},
               {"optimizer_ms", kMilli * train.optimizer},
               {"steps", train.steps},
               {"first_loss", train.first_loss},
               {"last_loss", train.last_loss},
               {"peak_bytes", nullptr},
               {"speed_of_transformer", nullptr},
               {"memory_of_transformer", nullptr}};
  const StepSplit& split = train.split;
  json["split"] = {
      {"products_ms", kMilli * split.products}, {"attention_ms", kMilli * split.attention},
      {"ours_ms", kMilli * split.ours},         {"optimizer_ms", kMilli * split.optimizer},
      {"rest_ms", kMilli * split.rest},         {"idle_ms", kMilli * split.idle},
      {"floor_ms", kMilli * train.floor}};
  if (train.peak_bytes) json["peak_bytes"] = *train.peak_bytes;
  if (baseline == nullptr || baseline->train.empty()) return json;
  const TrainResult other = mean(baseline->train);
  json["speed_of_transformer"] = other.step / train.step;
  if (train.peak_bytes && other.peak_bytes) {
    json["memory_of_transformer"] =
        static_cast<double>(*train.peak_bytes) / static_cast<double>(*other.peak_bytes);
  }
  return json;
}

Json decode_json(const Row& row, const Row* baseline) {
  const DecodeResult decode = mean(row.decode);
  const double batch = static_cast<double>(row.batch);
  Json json = {{"tokens_per_s", batch / decode.token},
               {"token_ms", kMilli * decode.token},
               {"token_spread", spread_of(row.decode, &DecodeResult::token)},
               {"prefill_ms", kMilli * decode.prefill},
               {"prefill_tokens_per_s", batch * static_cast<double>(row.context) / decode.prefill},
               {"state_bytes", decode.state_bytes},
               {"error", decode.error},
               {"speed_of_transformer", nullptr},
               {"prefill_speed_of_transformer", nullptr}};
  if (baseline == nullptr || baseline->decode.empty()) return json;
  const DecodeResult other = mean(baseline->decode);
  json["speed_of_transformer"] = other.token / decode.token;
  json["prefill_speed_of_transformer"] = other.prefill / decode.prefill;
  return json;
}

double attention_of_step(const Row& row) {
  const AttentionResult attention = mean(row.attention);
  return static_cast<double>(row.layers) * (attention.forward + attention.backward);
}

Json row_json(const Row& row, const Row* baseline) {
  Json json = {{"mixer", row.mixer},
               {"context", row.context},
               {"batch", row.batch},
               {"layers", row.layers},
               {"glu_hidden", row.glu_hidden},
               {"parameters", row.parameters},
               {"parameters_of_transformer", nullptr}};
  if (baseline != nullptr) {
    json["parameters_of_transformer"] =
        static_cast<double>(row.parameters) / static_cast<double>(baseline->parameters);
  }
  if (!row.train.empty()) json["train"] = train_json(row, baseline);
  if (!row.decode.empty()) json["decode"] = decode_json(row, baseline);
  if (!row.attention.empty()) {
    const AttentionResult attention = mean(row.attention);
    json["attention"] = {{"op", attention.op},
                         {"heads", attention.heads},
                         {"head_dim", attention.head_dim},
                         {"forward_ms", kMilli * attention.forward},
                         {"backward_ms", kMilli * attention.backward},
                         {"all_layers_ms", kMilli * attention_of_step(row)}};
  }
  if (!row.errors.empty()) json["errors"] = row.errors;
  return json;
}

const Row* find_row(const std::vector<Row>& rows, const std::string& mixer, int64_t context) {
  for (const Row& row : rows) {
    if (row.mixer == mixer && row.context == context) return &row;
  }
  return nullptr;
}

// How much longer a step with forgetting attention takes than its Transformer's, and how much of
// that is not attention.
Json pair_json(const Row& gated, const Row& transformer) {
  const double step = mean(transformer.train).step;
  const double attention = attention_of_step(gated) - attention_of_step(transformer);
  const double all = mean(gated.train).step - step;
  return {{"mixers", {gated.mixer, transformer.mixer}},
          {"context", gated.context},
          {"step_ms", kMilli * all},
          {"attention_ms", kMilli * attention},
          {"rest_ms", kMilli * (all - attention)},
          {"rest_percent_of_step", 100 * (all - attention) / step}};
}

// "12.3", or "-" where there is no number.
std::string number(const Json& json, const char* key, double scale, const char* format) {
  if (!json.contains(key) || !json[key].is_number()) return "-";
  char text[64];
  std::snprintf(text, sizeof(text), format, scale * json[key].get<double>());
  return text;
}

std::string padded(const std::string& text, size_t width, bool left = false) {
  const std::string space(width > text.size() ? width - text.size() : 0, ' ');
  return left ? text + space : space + text;
}

struct Column {
  const char* name;
  size_t width;
};
constexpr Column kColumns[] = {
    {"mixer", 16},    {"context", 7},  {"batch", 5},    {"params", 7},    {"of T", 6},
    {"tok/s", 9},     {"of T", 5},     {"step ms", 8},  {"spread", 6},    {"fwd", 7},
    {"bwd", 7},       {"optim", 6},    {"peak GiB", 8}, {"of T", 5},      {"decode/s", 9},
    {"of T", 5},      {"token ms", 8}, {"spread", 6},   {"prefill/s", 9}, {"of T", 5},
    {"state MiB", 9},
};

std::string aligned(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    line += (i ? "  " : "") + padded(cells[i], kColumns[i].width, /*left=*/i == 0);
  }
  return line;
}

}  // namespace

TrainResult mean(const std::vector<TrainResult>& rounds) {
  TrainResult result = rounds.back();
  for (const auto number : {&TrainResult::step, &TrainResult::forward, &TrainResult::backward,
                            &TrainResult::optimizer}) {
    result.*number = mean_of(rounds, number);
  }
  for (const TrainResult& round : rounds) {
    if (round.peak_bytes) {
      result.peak_bytes = std::max(result.peak_bytes.value_or(0), *round.peak_bytes);
    }
  }
  return result;
}

DecodeResult mean(const std::vector<DecodeResult>& rounds) {
  DecodeResult result = rounds.back();
  result.prefill = mean_of(rounds, &DecodeResult::prefill);
  result.token = mean_of(rounds, &DecodeResult::token);
  return result;
}

AttentionResult mean(const std::vector<AttentionResult>& rounds) {
  AttentionResult result = rounds.back();
  result.forward = mean_of(rounds, &AttentionResult::forward);
  result.backward = mean_of(rounds, &AttentionResult::backward);
  return result;
}

Json with_rows(Json record, const std::vector<Row>& rows) {
  record["rows"] = Json::array();
  record["pairs"] = Json::array();
  for (const Row& row : rows) {
    const bool is_begun = !(row.train.empty() && row.decode.empty() && row.errors.empty());
    if (is_begun) record["rows"].push_back(row_json(row, find_row(rows, kBaseline, row.context)));
  }
  const auto is_whole = [](const Row* row) {
    return row && !row->train.empty() && !row->attention.empty();
  };
  for (const char* suffix : {"", "-pro"}) {
    for (const Row& row : rows) {
      if (row.mixer != std::string("fox") + suffix) continue;
      const Row* transformer = find_row(rows, std::string(kBaseline) + suffix, row.context);
      if (is_whole(&row) && is_whole(transformer)) {
        record["pairs"].push_back(pair_json(row, *transformer));
      }
    }
  }
  return record;
}

std::string table_head() {
  std::vector<std::string> names;
  for (const Column& column : kColumns) names.emplace_back(column.name);
  return aligned(names);
}

std::string table_line(const Json& row) {
  const Json none = Json::object();
  const Json& train = row.contains("train") ? row["train"] : none;
  const Json& decode = row.contains("decode") ? row["decode"] : none;
  constexpr double kMebi = 1.0 / (1 << 20), kGibi = 1.0 / (1 << 30);
  std::string line = aligned({
      row["mixer"],
      number(row, "context", 1, "%.0f"),
      number(row, "batch", 1, "%.0f"),
      number(row, "parameters", 1e-6, "%.2fM"),
      number(row, "parameters_of_transformer", 100, "%.1f%%"),
      number(train, "tokens_per_s", 1, "%.0f"),
      number(train, "speed_of_transformer", 1, "%.2f"),
      number(train, "step_ms", 1, "%.1f"),
      number(train, "step_spread", 100, "%.0f%%"),
      number(train, "forward_ms", 1, "%.1f"),
      number(train, "backward_ms", 1, "%.1f"),
      number(train, "optimizer_ms", 1, "%.1f"),
      number(train, "peak_bytes", kGibi, "%.2f"),
      number(train, "memory_of_transformer", 1, "%.2f"),
      number(decode, "tokens_per_s", 1, "%.0f"),
      number(decode, "speed_of_transformer", 1, "%.2f"),
      number(decode, "token_ms", 1, "%.2f"),
      number(decode, "token_spread", 100, "%.0f%%"),
      number(decode, "prefill_tokens_per_s", 1, "%.0f"),
      number(decode, "prefill_speed_of_transformer", 1, "%.2f"),
      number(decode, "state_bytes", kMebi, "%.2f"),
  });
  if (row.contains("errors")) {
    for (const Json& error : row["errors"]) line += "\n  " + error.get<std::string>();
  }
  return line;
}

std::string split_line(const Json& row) {
  const Json& split = row["train"]["split"];
  std::string line = "  " + row["mixer"].get<std::string>() + ", context " +
                     std::to_string(row["context"].get<int64_t>()) + ":";
  for (const char* kind : {"products", "attention", "ours", "optimizer", "rest", "idle"}) {
    line += std::string(" ") + kind + " " +
            number(split, (std::string(kind) + "_ms").c_str(), 1, "%.1f");
  }
  return line + " ms; products and optimizer at full speed " +
         number(split, "floor_ms", 1, "%.1f ms");
}

std::string pair_line(const Json& pair) {
  const std::string gated = pair["mixers"][0], transformer = pair["mixers"][1];
  return gated + " - " + transformer + ", context " +
         std::to_string(pair["context"].get<int64_t>()) + ": step " +
         number(pair, "step_ms", 1, "%+.1f ms") + ", attention " +
         number(pair, "attention_ms", 1, "%+.1f ms") + ", the rest " +
         number(pair, "rest_ms", 1, "%+.1f ms") + " (" +
         number(pair, "rest_percent_of_step", 1, "%+.1f%% of the step") + ")";
}

void write_json(const std::string& path, const Json& record) {
  const std::string partial = path + ".part";
  {
    std::ofstream file(partial);
    file << record.dump(1) << "\n";
    file.flush();
    TORCH_CHECK(file.good(), path, ": cannot be written");
  }
  TORCH_CHECK(std::rename(partial.c_str(), path.c_str()) == 0, path, ": cannot be written");
}

}  // namespace tidegate::benchmarks
