#include "src/models/saved_state.h"

#include <ATen/ATen.h>

#include <cstring>
#include <set>
#include <string>

#include "src/models/json.h"
#include "src/models/row_states.h"
#include "src/nn/shape_text.h"
#include "src/ops/checks.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

constexpr const char* kConfig = "config";

/// What a state depends on of a model's configuration.
Json state_config(const LMConfig& config) {
  Json fields = parse_json(config.to_json());
  for (const char* of_training : {"dropout", "init_std"}) fields.erase(of_training);
  return fields;
}

/// A value as Python's repr() writes it.
std::string python_text(const Json& value) {
  if (!value.is_structured()) return shown(value);
  std::string text;
  for (const auto& [key, item] : value.items()) {
    if (!text.empty()) text += ", ";
    text += (value.is_object() ? shown(key) + ": " : "") + python_text(item);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

/// The configuration of the model that made `saved`; null where nothing says it.
Json saved_config(const char* owner, const TensorMap& saved) {
  const auto found = saved.find(kConfig);
  if (found == saved.end()) return nullptr;
  TORCH_CHECK_VALUE(found->second.scalar_type() == at::kByte && found->second.dim() == 1, owner,
                    ": saved: '", kConfig, "': expected uint8 [bytes], a JSON text; got ",
                    ops::dtype_name(found->second.scalar_type()), " ",
                    nn::shape_text(found->second));
  const Tensor bytes = found->second.to(at::kCPU).contiguous();
  Json config;
  try {
    config = parse_json({reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()),
                         static_cast<size_t>(bytes.numel())});
  } catch (const JsonError& error) {
    TORCH_CHECK_VALUE(false, owner, ": saved: '", kConfig, "': ", error.what());
  }
  TORCH_CHECK_VALUE(config.is_object(), owner, ": saved: '", kConfig, "': expected an object; got ",
                    shown(config));
  return config;
}

void refuse_other_model(const char* owner, const TensorMap& saved, const LMConfig& config) {
  const Json theirs = saved_config(owner, saved);
  if (theirs.is_null()) return;
  const Json ours = state_config(config);
  // A version that did not know a field wrote what is a model with its default.
  const Json defaults = state_config(LMConfig());
  std::set<std::string> names;
  for (const Json* fields : {&ours, &theirs}) {
    for (const auto& [name, value] : fields->items()) names.insert(name);
  }
  for (const std::string& name : names) {
    const Json wanted = ours.value(name, Json());
    const Json given = theirs.value(name, defaults.value(name, Json()));
    const bool same = nlohmann::json(wanted) == nlohmann::json(given);  // in any order of keys
    TORCH_CHECK_VALUE(same, owner, ": saved: expected the prefix of a model with ", name, " = ",
                      python_text(wanted), "; got one with ", python_text(given));
  }
}

std::string place_name(size_t layer, size_t place) {
  return "layers." + std::to_string(layer) + "." + std::to_string(place);
}

const Tensor& saved_tensor(const char* owner, const TensorMap& saved, const std::string& name) {
  const auto found = saved.find(name);
  TORCH_CHECK_VALUE(found != saved.end(), owner, ": saved: expected a tensor '", name,
                    "', as save_prefix() makes of this model; got none");
  return found->second;
}

void check_saved(const char* owner, const std::string& name, const Tensor& given,
                 const Tensor& wanted) {
  TORCH_CHECK_VALUE(given.sizes() == wanted.sizes() && given.scalar_type() == wanted.scalar_type(),
                    owner, ": saved: '", name, "': expected ",
                    ops::dtype_name(wanted.scalar_type()), " ", nn::shape_text(wanted),
                    " by the model; got ", ops::dtype_name(given.scalar_type()), " ",
                    nn::shape_text(given));
}

/// A layer that keeps tokens: how many it holds, as the file says, are there; and it has seen no
/// fewer, nor more than the sequence has.
void check_counts(const char* owner, size_t layer, const TensorMap& saved,
                  const nn::MixerState& state, int64_t tokens) {
  if (state.size() <= kRoomPlace) return;
  const int64_t there = state.front().size(1);
  const auto count = [&](size_t place) {
    return saved_tensor(owner, saved, place_name(layer, place)).to(at::kCPU).item<int64_t>();
  };
  const int64_t held = count(kLengthsPlace), seen = count(kSeenPlace);
  TORCH_CHECK_VALUE(held >= 0 && held <= there, owner, ": saved: '",
                    place_name(layer, kLengthsPlace), "': expected from 0 to ", there,
                    ", the tokens that '", place_name(layer, 0), "' holds; got ", held);
  TORCH_CHECK_VALUE(there <= tokens && held <= seen && seen <= tokens, owner, ": saved: '",
                    place_name(layer, kSeenPlace), "': expected from ", held, " to ", tokens,
                    ", the number of 'tokens'; got ", seen, " and ", there, " kept");
}

}  // namespace

TensorMap pack_state(const SavedState& saved, const LMConfig& config) {
  TensorMap out;
  for (size_t k = 0; k < saved.state.size(); ++k) {
    for (size_t i = 0; i < saved.state[k].size(); ++i) {
      out.emplace(place_name(k, i), saved.state[k][i].to(at::kCPU).contiguous());
    }
  }
  out.emplace("logits", saved.logits.to(at::kCPU).contiguous());
  out.emplace("tokens", at::tensor(saved.tokens, at::kLong));
  const std::string text = state_config(config).dump();
  const Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  out.emplace(kConfig, bytes);
  return out;
}

SavedState unpack_state(const char* owner, const TensorMap& saved, const CausalLMImpl& model,
                        at::Device device) {
  refuse_other_model(owner, saved, model.config);
  SavedState out;
  for (size_t k = 0; k < model.blocks->size(); ++k) {
    const Tensor& first = saved_tensor(owner, saved, place_name(k, 0));
    // How many tokens a layer keeps is the file's to say.
    const int64_t held = first.dim() > 1 ? first.size(1) : 0;
    const nn::MixerState wanted =
        model.block(k).mixer().make_state(1, at::Device(at::kMeta), std::nullopt, held);
    nn::MixerState& layer = out.state.emplace_back();
    for (size_t i = 0; i < wanted.size(); ++i) {
      const std::string name = place_name(k, i);
      const Tensor& given = saved_tensor(owner, saved, name);
      check_saved(owner, name, given, wanted[i]);
      layer.push_back(i == kRoomPlace ? given.clone() : given.to(device));
    }
  }
  const int64_t vocab = *model.config.vocab_size;
  const Tensor& logits = saved_tensor(owner, saved, "logits");
  TORCH_CHECK_VALUE(logits.is_floating_point(), owner,
                    ": saved: 'logits': expected floating-point numbers; got ",
                    ops::dtype_name(logits.scalar_type()));
  check_saved(owner, "logits", logits, at::empty({1, vocab}, logits.options().device(at::kMeta)));
  out.logits = logits.to(device);
  const Tensor tokens = saved_tensor(owner, saved, "tokens").to(at::kLong).contiguous();
  out.tokens.assign(tokens.const_data_ptr<int64_t>(),
                    tokens.const_data_ptr<int64_t>() + tokens.numel());
  for (const int64_t id : out.tokens) {
    TORCH_CHECK_VALUE(id >= 0 && id < vocab, owner,
                      ": saved: 'tokens': expected ids from 0 to below vocab_size=", vocab,
                      "; got ", id);
  }
  for (size_t k = 0; k < out.state.size(); ++k) {
    check_counts(owner, k, saved, out.state[k], static_cast<int64_t>(out.tokens.size()));
  }
  return out;
}

}  // namespace tidegate::models
