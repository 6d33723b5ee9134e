#include "src/models/mixers.h"

#include "tidegate/nn/attention.h"
#include "tidegate/nn/forgetting_attention.h"
#include "tidegate/nn/gated_linear_attention.h"
#include "tidegate/nn/gated_linear_rnn.h"
#include "tidegate/nn/gated_rnn.h"
#include "tidegate/nn/hgru.h"
#include "tidegate/nn/hgru2.h"
#include "tidegate/nn/lru.h"
#include "tidegate/nn/rwkv4.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "src/models/json.h"
#include "tidegate/choices.h"

namespace tidegate::models {
namespace {

std::string shown_option(const OptionValue& value) {
  return std::visit(
      [](const auto& held) -> std::string {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>, std::monostate>)
          return "None";
        else
          return shown(held);
      },
      value);
}

[[noreturn]] void wrong_value(const std::string& name, const std::string& expected,
                              const OptionValue& value) {
  TORCH_CHECK_VALUE(false, "LMConfig: mixer_options: ", name, ": expected ", expected, "; got ",
                    shown_option(value));
}

// The value as T, or an error that names the option.
template <typename T>
T value_as(const std::string& name, const OptionValue& value) {
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
  }
  const T* found = std::get_if<T>(&value);
  if (found == nullptr) {
    wrong_value(name,
                std::is_same_v<T, bool>      ? "True or False"
                : std::is_same_v<T, int64_t> ? "an integer"
                : std::is_same_v<T, double>  ? "a number"
                                             : "a string",
                value);
  }
  if constexpr (std::is_same_v<T, double>) {
    if (!std::isfinite(*found)) wrong_value(name, "a finite number", value);
  }
  if constexpr (std::is_same_v<T, int64_t>) {
    if (*found > kMaxOption) wrong_value(name, "at most " + std::to_string(kMaxOption), value);
  }
  return *found;
}

template <typename T>
void assign(T& field, const std::string& name, const OptionValue& value) {
  field = value_as<T>(name, value);
}

template <typename T>
void assign(std::optional<T>& field, const std::string& name, const OptionValue& value) {
  field = std::holds_alternative<std::monostate>(value)
              ? std::nullopt
              : std::optional<T>(value_as<T>(name, value));
}

// The options of each mixer that a configuration can set, in the order in which errors list them.
template <typename Visit>
void visit_options(nn::HGRUOptions& options, const Visit& visit) {
  visit("complex", options.complex());
  visit("theta", options.theta());
  visit("input_gate", options.input_gate());
  visit("forget_gate", options.forget_gate());
  visit("output_gate", options.output_gate());
  visit("expand", options.expand());
  visit("expansion", options.expansion());
  visit("rank", options.rank());
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("bidirectional", options.bidirectional());
  visit("preset", options.preset());
  visit("bias", options.bias());
  visit("norm", options.norm());
  visit("norm_eps", options.norm_eps());
}

template <typename Visit>
void visit_options(nn::HGRU2Options& options, const Visit& visit) {
  visit("num_heads", options.num_heads());
  visit("expand_ratio", options.expand_ratio());
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("bidirectional", options.bidirectional());
  visit("preset", options.preset());
  visit("q_activation", options.q_activation());
  visit("v_activation", options.v_activation());
  visit("bias", options.bias());
  visit("norm", options.norm());
  visit("norm_eps", options.norm_eps());
}

template <typename Visit>
void visit_options(nn::GatedLinearAttentionOptions& options, const Visit& visit) {
  visit("num_heads", options.num_heads());
  visit("gate", options.gate());
  visit("normalize", options.normalize());
  visit("feature_map", options.feature_map());
  visit("key_dim", options.key_dim());
  visit("value_dim", options.value_dim());
  visit("gate_rank", options.gate_rank());
  visit("gate_temperature", options.gate_temperature());
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("lower_bound", options.lower_bound());
  visit("output_gate", options.output_gate());
  visit("norm", options.norm());
  visit("norm_eps", options.norm_eps());
}

template <typename Visit>
void visit_options(nn::LRUOptions& options, const Visit& visit) {
  visit("state", options.state());
  visit("skip", options.skip());
  visit("r_min", options.r_min());
  visit("r_max", options.r_max());
  visit("max_phase", options.max_phase());
  visit("gate", options.gate());
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("lower_bound", options.lower_bound());
}

template <typename Visit>
void visit_options(nn::SLRUOptions& options, const Visit& visit) {
  visit("state", options.state());
  visit("skip", options.skip());
  visit("r_min", options.r_min());
  visit("r_max", options.r_max());
}

// What both kinds of attention switch.
template <typename Options, typename Visit>
void visit_switches(Options& options, const Visit& visit) {
  visit("qk_norm", options.qk_norm());
  visit("qk_norm_shared", options.qk_norm_shared());
  visit("output_gate", options.output_gate());
  visit("output_activation", options.output_activation());
  visit("output_norm", options.output_norm());
  visit("kv_shift", options.kv_shift());
  visit("rope", options.rope());
  visit("window", options.window());
}

template <typename Visit>
void visit_options(nn::AttentionOptions& options, const Visit& visit) {
  visit("num_heads", options.num_heads());
  visit("preset", options.preset());
  visit("num_kv_heads", options.num_kv_heads());
  visit_switches(options, visit);
  visit("norm_eps", options.norm_eps());
  visit("qk_norm_eps", options.qk_norm_eps());
}

template <typename Visit>
void visit_options(nn::ForgettingAttentionOptions& options, const Visit& visit) {
  visit("num_heads", options.num_heads());
  visit("preset", options.preset());
  visit("num_kv_heads", options.num_kv_heads());
  visit("gate", options.gate());
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("lower_bound", options.lower_bound());
  visit_switches(options, visit);
  visit("prune", options.prune());
  visit("drop_pruned", options.drop_pruned());
  visit("norm_eps", options.norm_eps());
  visit("qk_norm_eps", options.qk_norm_eps());
}

template <typename Visit>
void visit_options(nn::GatedLinearRNNOptions& options, const Visit& visit) {
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("lower_bound", options.lower_bound());
}

template <typename Visit>
void visit_options(nn::GatedRNNOptions& options, const Visit& visit) {
  visit("gate_init", options.gate_init());
  visit("gumbel_gate", options.gumbel_gate());
  visit("lower_bound", options.lower_bound());
}

template <typename Visit>
void visit_options(nn::RWKV4Options& options, const Visit& visit) {
  visit("time_shift", options.time_shift());
  visit("decay_init", options.decay_init());
  visit("depth", options.depth());
}

// A mixer that configurations can name.
struct Mixer {
  const char* name;
  std::vector<std::string> (*option_names)();
  // Throws where the option of this name, which the mixer has, cannot take the value.
  void (*check_option)(const std::string& name, const OptionValue& value);
  std::shared_ptr<torch::nn::Module> (*make)(const LMConfig& config, const nn::Placement& placement,
                                             const char* preset);
  // What the name says beyond its class; a configuration's options go before it.
  const char* preset;
};

template <typename Options>
std::vector<std::string> option_names() {
  std::vector<std::string> names;
  Options options(1);
  visit_options(options, [&](const char* name, auto&) { names.emplace_back(name); });
  return names;
}

// The option `wanted` of `options` becomes `value`.
template <typename Options>
void set_option(Options& options, const std::string& wanted, const OptionValue& value) {
  visit_options(options, [&](const char* name, auto& field) {
    if (wanted == name) assign(field, wanted, value);
  });
}

template <typename Options>
void check_option(const std::string& name, const OptionValue& value) {
  Options options(1);
  set_option(options, name, value);
}

template <typename Impl, typename Options>
std::shared_ptr<torch::nn::Module> make(const LMConfig& config, const nn::Placement& placement,
                                        const char* preset) {
  Options options(config.dim);
  if constexpr (requires { options.preset(preset); }) {
    if (preset != nullptr) options.preset(preset);
  }
  options.device(placement.device).dtype(placement.dtype);
  if constexpr (requires { options.norm_eps(config.norm_eps); }) {
    options.norm_eps(config.norm_eps);
  }
  for (const auto& [name, value] : config.mixer_options) set_option(options, name, value);
  return std::make_shared<Impl>(options);
}

template <typename Impl, typename Options>
constexpr Mixer describe(const char* name, const char* preset = nullptr) {
  return {name, &option_names<Options>, &check_option<Options>, &make<Impl, Options>, preset};
}

constexpr Mixer kMixers[] = {
    describe<nn::HGRUImpl, nn::HGRUOptions>("hgrn"),
    describe<nn::HGRU2Impl, nn::HGRU2Options>("hgrn2"),
    describe<nn::GatedLinearAttentionImpl, nn::GatedLinearAttentionOptions>("gla"),
    describe<nn::LRUImpl, nn::LRUOptions>("lru"),
    describe<nn::SLRUImpl, nn::SLRUOptions>("slru"),
    describe<nn::RWKV4Impl, nn::RWKV4Options>("rwkv4"),
    describe<nn::GatedLinearRNNImpl, nn::GatedLinearRNNOptions>("gated-linear-rnn"),
    describe<nn::GatedRNNImpl, nn::GatedRNNOptions>("gated-rnn"),
    describe<nn::ForgettingAttentionImpl, nn::ForgettingAttentionOptions>("fox"),
    describe<nn::ForgettingAttentionImpl, nn::ForgettingAttentionOptions>("fox-pro", "pro"),
    describe<nn::AttentionImpl, nn::AttentionOptions>("transformer"),
    describe<nn::AttentionImpl, nn::AttentionOptions>("transformer-pro", "pro"),
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const Mixer& find_mixer(const std::string& name) {
  for (const Mixer& mixer : kMixers) {
    if (name == mixer.name) return mixer;
  }
  TORCH_CHECK_VALUE(false, "LMConfig: mixer: ", shown(name),
                    " is unknown; available: ", joined(mixers()));
}

}  // namespace

std::vector<std::string> mixers() {
  std::vector<std::string> names;
  for (const Mixer& mixer : kMixers) names.emplace_back(mixer.name);
  return names;
}

void check_mixer_options(const std::string& mixer, const MixerOptions& options) {
  const Mixer& found = find_mixer(mixer);
  const std::vector<std::string> known = found.option_names();
  for (const auto& [name, value] : options) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(),
                      "LMConfig: mixer_options: mixer '", mixer, "' has no option ", shown(name),
                      "; it has ", joined(known));
    found.check_option(name, value);
  }
}

bool takes_depth(const std::string& mixer) {
  const std::vector<std::string> known = find_mixer(mixer).option_names();
  return std::find(known.begin(), known.end(), "depth") != known.end();
}

std::shared_ptr<torch::nn::Module> make_mixer(const LMConfig& config,
                                              const nn::Placement& placement) {
  const auto* name = std::get_if<std::string>(&config.mixer);
  TORCH_CHECK_VALUE(name && config.layer_options.empty(),
                    "Block: config: expected one layer's, as LMConfig.of_layer() gives it; got a "
                    "list of ",
                    config.layer_options.empty() ? "mixers" : "layer_options");
  check_mixer_options(*name, config.mixer_options);
  const Mixer& mixer = find_mixer(*name);
  return mixer.make(config, placement, mixer.preset);
}

}  // namespace tidegate::models
