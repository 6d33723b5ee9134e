#include "tidegate/models/config.h"
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "src/models/file_io.h"
#include "tidegate/choices.h"

namespace tidegate::models {

void check_mixer_options(const std::string& mixer, const MixerOptions& options);
bool takes_depth(const std::string& mixer);

namespace {

using Json = nlohmann::ordered_json;

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
  TORCH_CHECK_VALUE(false, "LMConfig: ", field, ": expected ", expected, "; got ", given.dump());
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
  if (!json.is_boolean()) bad(field, "true or false", json);
  value = json.get<bool>();
}

void from_value(const std::string& field, const Json& json, int64_t& value) {
  if (!json.is_number_integer()) bad(field, "an integer", json);
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
  if (!json.is_object()) bad(field, "an object", json);
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
      bad(field + "." + name, "a number, a string, true, false or null", item);
    }
    options.emplace_back(name, std::move(value));
  }
}

void from_value(const std::string& field, const Json& json, std::vector<MixerOptions>& layers) {
  if (!json.is_array()) bad(field, "a list of objects", json);
  layers.clear();
  for (const Json& item : json) from_value(field, item, layers.emplace_back());
}

void check_positive(const char* field, std::optional<int64_t> value) {
  TORCH_CHECK_VALUE(value.value_or(1) >= 1, "LMConfig: ", field,
                    ": expected a positive integer; got ", *value);
}

void check_choice(const char* field, const std::string& value,
                  std::initializer_list<const char*> allowed) {
  std::string names;
  for (const char* name : allowed) {
    if (value == name) return;
    names += (names.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  TORCH_CHECK_VALUE(false, "LMConfig: ", field, ": expected one of ", names, "; got '", value, "'");
}

}  // namespace

void LMConfig::validate() const {
  check_positive("dim", dim);
  check_positive("layers", layers);
  check_positive("image_channels", image_channels);
  check_positive("vocab_size", vocab_size);
  check_positive("glu_hidden", glu_hidden);
  check_positive("num_classes", num_classes);
  check_positive("patch_size", patch_size);
  check_choice("glu_activation", glu_activation, kGluActivations);
  check_choice("norm", norm, kNorms);
  if (final_norm) check_choice("final_norm", *final_norm, kNorms);
  check_choice("lower_bound", lower_bound, kLowerBoundModes);
  TORCH_CHECK_VALUE(dropout >= 0.0 && dropout < 1.0, "LMConfig: dropout: expected 0 <= p < 1; got ",
                    dropout);
  TORCH_CHECK_VALUE(norm_eps > 0.0, "LMConfig: norm_eps: expected a positive number; got ",
                    norm_eps);
  TORCH_CHECK_VALUE(init_std.value_or(1.0) > 0.0,
                    "LMConfig: init_std: expected a positive number; got ", *init_std);
  const auto* names = std::get_if<std::vector<std::string>>(&mixer);
  TORCH_CHECK_VALUE(!names || static_cast<int64_t>(names->size()) == layers,
                    "LMConfig: mixer: expected a name, or a list of one for each of the ", layers,
                    " layers; got ", names ? names->size() : 1, " names");
  TORCH_CHECK_VALUE(static_cast<int64_t>(layer_options.size()) <= layers,
                    "LMConfig: layer_options: expected a list of at most ", layers,
                    " dictionaries, one a layer; got ", layer_options.size());
  for (int64_t k = 0; k < layers; ++k) {
    const LMConfig layer = of_layer(k);
    check_mixer_options(std::get<std::string>(layer.mixer), layer.mixer_options);
  }
}

LMConfig LMConfig::of_layer(int64_t layer) const {
  LMConfig config = *this;
  if (const auto* names = std::get_if<std::vector<std::string>>(&mixer)) {
    config.mixer = names->at(layer);
  }
  config.layer_options.clear();
  auto& options = config.mixer_options;
  const auto find = [&](const std::string& wanted) {
    return std::find_if(options.begin(), options.end(),
                        [&](const auto& option) { return option.first == wanted; });
  };
  if (layer < static_cast<int64_t>(layer_options.size())) {
    for (const auto& [name, value] : layer_options[layer]) {
      const auto found = find(name);
      if (found == options.end()) {
        options.emplace_back(name, value);
      } else {
        found->second = value;
      }
    }
  }
  if (takes_depth(std::get<std::string>(config.mixer)) && find("depth") == options.end()) {
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
    object = Json::parse(text);
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, "LMConfig: not valid JSON: ", printable(error.what()));
  }
  if (!object.is_object()) bad("JSON", "an object", object);
  LMConfig config;
  std::vector<std::string> known;
  visit_fields(config, [&](const char* name, auto& value) {
    known.emplace_back(name);
    if (object.contains(name)) from_value(name, object[name], value);
  });
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const auto& name : known) names += (names.empty() ? "" : ", ") + name;
    TORCH_CHECK_VALUE(false, "LMConfig: unknown key '", key, "'; known: ", names);
  }
  config.validate();
  return config;
}

}  // namespace tidegate::models
