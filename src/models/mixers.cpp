#include "src/models/mixers.h"

#include "tidegate/nn/hgru.h"

#include <algorithm>
#include <sstream>
#include <type_traits>

namespace tidegate::models {
namespace {

constexpr const char* kMixers[] = {"hgrn"};

// Names of the public surface; those without a class are not available in this version.
constexpr const char* kKnownMixers[] = {
    "hgrn",      "hgrn2", "gla",     "lru",         "slru",           "rwkv4", "gated-linear-rnn",
    "gated-rnn", "fox",   "fox-pro", "transformer", "transformer-pro"};

constexpr const char* kHgruOptions[] = {"complex",     "theta",  "input_gate", "forget_gate",
                                        "output_gate", "expand", "expansion",  "bidirectional",
                                        "preset",      "bias",   "norm",       "norm_eps"};

template <size_t N>
bool contains(const char* const (&names)[N], const std::string& name) {
  return std::any_of(names, names + N, [&](const char* known) { return name == known; });
}

template <size_t N>
std::string joined(const char* const (&names)[N]) {
  std::string text;
  for (const char* name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

[[noreturn]] void wrong_type(const std::string& name, const char* expected) {
  TORCH_CHECK_VALUE(false, "LMConfig: mixer_options: ", name, ": expected ", expected);
}

// The value as T, or an error that names the option.
template <typename T>
T value_as(const std::string& name, const OptionValue& value) {
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
  }
  if (const T* found = std::get_if<T>(&value)) return *found;
  wrong_type(name, std::is_same_v<T, bool>      ? "true or false"
                   : std::is_same_v<T, int64_t> ? "an integer"
                   : std::is_same_v<T, double>  ? "a number"
                                                : "a string");
}

template <typename T>
std::optional<T> optional_as(const std::string& name, const OptionValue& value) {
  if (std::holds_alternative<std::monostate>(value)) return std::nullopt;
  return value_as<T>(name, value);
}

void set_option(nn::HGRUOptions& options, const std::string& name, const OptionValue& value) {
  if (name == "complex") options.complex(optional_as<bool>(name, value));
  if (name == "theta") options.theta(optional_as<std::string>(name, value));
  if (name == "input_gate") options.input_gate(value_as<std::string>(name, value));
  if (name == "forget_gate") options.forget_gate(value_as<std::string>(name, value));
  if (name == "output_gate") options.output_gate(value_as<bool>(name, value));
  if (name == "expand") options.expand(value_as<int64_t>(name, value));
  if (name == "expansion") options.expansion(optional_as<std::string>(name, value));
  if (name == "bidirectional") options.bidirectional(value_as<bool>(name, value));
  if (name == "preset") options.preset(value_as<std::string>(name, value));
  if (name == "bias") options.bias(optional_as<bool>(name, value));
  if (name == "norm") options.norm(optional_as<std::string>(name, value));
  if (name == "norm_eps") options.norm_eps(value_as<double>(name, value));
}

}  // namespace

std::vector<std::string> mixers() { return {std::begin(kMixers), std::end(kMixers)}; }

void check_mixer_options(const std::string& mixer, const MixerOptions& options) {
  const char* what =
      contains(kKnownMixers, mixer) ? "is not available in this version" : "is unknown";
  TORCH_CHECK_VALUE(contains(kMixers, mixer), "LMConfig: mixer: '", mixer, "' ", what,
                    "; available: ", joined(kMixers));
  for (const auto& [name, value] : options) {
    TORCH_CHECK_VALUE(contains(kHgruOptions, name), "LMConfig: mixer_options: mixer '", mixer,
                      "' has no option '", name, "'; it has ", joined(kHgruOptions));
  }
}

std::shared_ptr<torch::nn::Module> make_mixer(const LMConfig& config,
                                              const nn::Placement& placement) {
  check_mixer_options(config.mixer, config.mixer_options);
  nn::HGRUOptions options(config.dim);
  options.norm_eps(config.norm_eps).device(placement.device).dtype(placement.dtype);
  for (const auto& [name, value] : config.mixer_options) set_option(options, name, value);
  return std::make_shared<nn::HGRUImpl>(options);
}

}  // namespace tidegate::models
