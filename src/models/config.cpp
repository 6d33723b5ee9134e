#include "tidegate/models/config.h"
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <unordered_map>

#include "src/models/json.h"
#include "tidegate/choices.h"

namespace tidegate::models {

void check_mixer_options(const std::string& mixer, const MixerOptions& options);
bool takes_depth(const std::string& mixer);

namespace {

// One list of the fields serves both directions of the JSON form.
template <typename Config, typename Visit>
void visit_fields(Config& config, const Visit& visit) {
  visit("mixer", config.mixer);
  visit("vocab_size", config.vocab_size);
  visit("dim", config.dim);
  visit("layers", config.layers);
  visit("mixer_options", config.mixer_options);
  visit("layer_options", config.layer_options);
  visit("glu_hidden", config.glu_hidden);
  visit("glu_activation", config.glu_activation);
  visit("glu_bias", config.glu_bias);
  visit("norm", config.norm);
  visit("final_norm", config.final_norm);
  visit("norm_eps", config.norm_eps);
  visit("lower_bound", config.lower_bound);
  visit("dropout", config.dropout);
  visit("tied", config.tied);
  visit("scale_embedding", config.scale_embedding);
  visit("num_classes", config.num_classes);
  visit("patch_size", config.patch_size);
  visit("image_channels", config.image_channels);
  visit("init_std", config.init_std);
}

[[noreturn]] void bad(const std::string& field, const char* expected, const Json& given) {
  TORCH_CHECK_VALUE(false, "LMConfig: ", field, ": expected ", expected, "; got ", shown(given));
}

Json to_value(const std::string& value) { return value; }
Json to_value(bool value) { return value; }
Json to_value(int64_t value) { return value; }
Json to_value(double value) { return value; }
Json to_value(std::monostate) { return nullptr; }

template <typename T>
Json to_value(const std::optional<T>& value) {
  return value ? to_value(*value) : Json(nullptr);
}

Json to_value(const MixerOptions& options) {
  Json object = Json::object();
  for (const auto& [name, value] : options) {
    object[name] = std::visit([](const auto& held) { return to_value(held); }, value);
  }
  return object;
}

Json to_value(const MixerNames& names) {
  return std::visit([](const auto& held) { return Json(held); }, names);
}

Json to_value(const std::vector<MixerOptions>& layers) {
  Json list = Json::array();
  for (const MixerOptions& options : layers) list.push_back(to_value(options));
  return list;
}

void from_value(const std::string& field, const Json& json, std::string& value) {
  if (!json.is_string()) bad(field, "a string", json);
  value = json.get<std::string>();
}

void from_value(const std::string& field, const Json& json, MixerNames& value) {
  const bool is_list =
      json.is_array() &&
      std::all_of(json.begin(), json.end(), [](const Json& name) { return name.is_string(); });
  if (is_list) {
    value = json.get<std::vector<std::string>>();
  } else if (json.is_string()) {
    value = json.get<std::string>();
  } else {
    bad(field, "a name, or a list of names", json);
  }
}

void from_value(const std::string& field, const Json& json, bool& value) {
  if (!json.is_boolean()) bad(field, "True or False", json);
  value = json.get<bool>();
}

void from_value(const std::string& field, const Json& json, int64_t& value) {
  if (!json.is_number_integer()) bad(field, "a positive integer", json);
  value = json.get<int64_t>();
}

void from_value(const std::string& field, const Json& json, double& value) {
  if (!json.is_number()) bad(field, "a number", json);
  value = json.get<double>();
}

template <typename T>
void from_value(const std::string& field, const Json& json, std::optional<T>& value) {
  if (json.is_null()) {
    value.reset();
  } else {
    from_value(field, json, value.emplace());
  }
}

void from_value(const std::string& field, const Json& json, MixerOptions& options) {
  if (!json.is_object()) bad(field, "a dictionary", json);
  options.clear();
  for (const auto& [name, item] : json.items()) {
    OptionValue value;
    if (item.is_boolean()) {
      value = item.get<bool>();
    } else if (item.is_number_integer()) {
      value = item.get<int64_t>();
    } else if (item.is_number()) {
      value = item.get<double>();
    } else if (item.is_string()) {
      value = item.get<std::string>();
    } else if (!item.is_null()) {
      bad(field + ": " + shown(name), "a number, a string, True, False or None", item);
    }
    options.emplace_back(name, std::move(value));
  }
}

void from_value(const std::string& field, const Json& json, std::vector<MixerOptions>& layers) {
  if (!json.is_array()) bad(field, "a list of dictionaries", json);
  layers.clear();
  for (const Json& item : json) from_value(field, item, layers.emplace_back());
}

void check_size(const char* field, std::optional<int64_t> value, int64_t most) {
  TORCH_CHECK_VALUE(value.value_or(1) >= 1, "LMConfig: ", field,
                    ": expected a positive integer; got ", *value);
  TORCH_CHECK_VALUE(value.value_or(1) <= most, "LMConfig: ", field, ": expected at most ", most,
                    "; got ", *value);
}

// also: what goes before the names that are allowed.
void check_choice(const char* field, const std::string& value,
                  std::initializer_list<const char*> allowed, std::string also = "") {
  for (const char* name : allowed) {
    if (value == name) return;
    also += (also.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  TORCH_CHECK_VALUE(false, "LMConfig: ", field, ": expected one of ", also, "; got ", shown(value));
}

void check_above_zero(const char* field, std::optional<double> value) {
  TORCH_CHECK_VALUE(value.value_or(1.0) > 0.0 && std::isfinite(value.value_or(1.0)),
                    "LMConfig: ", field, ": expected a positive number; got ", shown(*value));
}

// `options` with those of `own` in their place, or behind them. Looked up by a table: a file may
// hold more names than any mixer has.
MixerOptions merged(MixerOptions options, const MixerOptions& own) {
  if (own.empty()) return options;
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < options.size(); ++i) places.emplace(options[i].first, i);
  for (const auto& [name, value] : own) {
    const auto [place, is_new] = places.emplace(name, options.size());
    if (is_new) {
      options.emplace_back(name, value);
    } else {
      options[place->second].second = value;
    }
  }
  return options;
}

}  // namespace

void LMConfig::validate() const {
  check_size("dim", dim, kMaxWidth);
  check_size("layers", layers, kMaxLayers);
  check_size("image_channels", image_channels, kMaxImageChannels);
  check_size("vocab_size", vocab_size, kMaxVocabSize);
  check_size("glu_hidden", glu_hidden, kMaxWidth);
  check_size("num_classes", num_classes, kMaxVocabSize);
  check_size("patch_size", patch_size, kMaxPatchSize);
  check_choice("glu_activation", glu_activation, kGluActivations);
  check_choice("norm", norm, kNorms);
  if (final_norm) check_choice("final_norm", *final_norm, kNorms, "None");
  check_choice("lower_bound", lower_bound, kLowerBoundModes);
  TORCH_CHECK_VALUE(dropout >= 0.0 && dropout < 1.0, "LMConfig: dropout: expected 0 <= p < 1; got ",
                    shown(dropout));
  check_above_zero("norm_eps", norm_eps);
  check_above_zero("init_std", init_std);
  const auto* names = std::get_if<std::vector<std::string>>(&mixer);
  TORCH_CHECK_VALUE(!names || static_cast<int64_t>(names->size()) == layers,
                    "LMConfig: mixer: expected a name, or a list of one for each of the ", layers,
                    " layers; got ", names ? names->size() : 1, " names");
  const auto listed = static_cast<int64_t>(layer_options.size());
  TORCH_CHECK_VALUE(listed <= layers, "LMConfig: layer_options: expected a list of at most ",
                    layers, " dictionaries, one a layer; got ", listed);
  // Layers beyond those that are listed are all alike.
  const int64_t different = names ? layers : std::min(layers, listed + 1);
  for (int64_t k = 0; k < different; ++k) {
    check_mixer_options(names ? (*names)[k] : std::get<std::string>(mixer),
                        merged(mixer_options, k < listed ? layer_options[k] : MixerOptions{}));
  }
}

LMConfig LMConfig::of_layer(int64_t layer) const {
  LMConfig config = *this;
  if (const auto* names = std::get_if<std::vector<std::string>>(&mixer)) {
    config.mixer = names->at(layer);
  }
  config.layer_options.clear();
  auto& options = config.mixer_options;
  if (layer < static_cast<int64_t>(layer_options.size())) {
    options = merged(std::move(options), layer_options[layer]);
  }
  const bool says_depth = std::any_of(options.begin(), options.end(),
                                      [](const auto& option) { return option.first == "depth"; });
  if (takes_depth(std::get<std::string>(config.mixer)) && !says_depth) {
    const auto last = static_cast<double>(std::max<int64_t>(layers - 1, 1));
    options.emplace_back("depth", static_cast<double>(layer) / last);
  }
  return config;
}

std::string LMConfig::to_json() const {
  Json object = Json::object();
  visit_fields(*this, [&](const char* name, const auto& value) { object[name] = to_value(value); });
  return object.dump(2) + "\n";
}

LMConfig LMConfig::from_json(const std::string& text) {
  Json object;
  try {
    object = parse_json(text);
  } catch (const JsonError& error) {
    TORCH_CHECK_VALUE(false, "LMConfig: ", error.what());
  }
  if (!object.is_object()) bad("JSON", "an object", object);
  LMConfig config;
  std::unordered_map<std::string, const Json*> given;
  for (const auto& [key, value] : object.items()) given.emplace(key, &value);
  std::vector<std::string> known;
  visit_fields(config, [&](const char* name, auto&) { known.emplace_back(name); });
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const auto& name : known) names += (names.empty() ? "" : ", ") + name;
    TORCH_CHECK_VALUE(false, "LMConfig: unknown key ", shown(key), "; known: ", names);
  }
  visit_fields(config, [&](const char* name, auto& value) {
    if (const auto found = given.find(name); found != given.end()) {
      from_value(name, *found->second, value);
    }
  });
  config.validate();
  return config;
}

}  // namespace tidegate::models
