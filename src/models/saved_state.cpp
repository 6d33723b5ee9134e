#include "src/models/saved_state.h"

#include <ATen/ATen.h>

#include <string>

#include "src/models/row_states.h"
#include "src/nn/shape_text.h"
#include "src/ops/checks.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

std::string place_name(size_t layer, size_t place) {
  return "layers." + std::to_string(layer) + "." + std::to_string(place);
}

const Tensor& saved_tensor(const char* owner, const TensorMap& saved, const std::string& name) {
  const auto found = saved.find(name);
  TORCH_CHECK_VALUE(found != saved.end(), owner, ": saved: expected a tensor '", name,
                    "', as save() makes of this model; got none");
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

}  // namespace

TensorMap pack_state(const SavedState& saved) {
  TensorMap out;
  for (size_t k = 0; k < saved.state.size(); ++k) {
    for (size_t i = 0; i < saved.state[k].size(); ++i) {
      out.emplace(place_name(k, i), saved.state[k][i].to(at::kCPU).contiguous());
    }
  }
  out.emplace("logits", saved.logits.to(at::kCPU).contiguous());
  out.emplace("tokens", at::tensor(saved.tokens, at::kLong));
  return out;
}

SavedState unpack_state(const char* owner, const TensorMap& saved, const CausalLMImpl& model,
                        at::Device device) {
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
  const Tensor& logits = saved_tensor(owner, saved, "logits");
  check_saved(owner, "logits", logits,
              at::empty({1, *model.config.vocab_size}, logits.options().device(at::kMeta)));
  out.logits = logits.to(device);
  const Tensor tokens = saved_tensor(owner, saved, "tokens").to(at::kLong).contiguous();
  out.tokens.assign(tokens.const_data_ptr<int64_t>(),
                    tokens.const_data_ptr<int64_t>() + tokens.numel());
  return out;
}

}  // namespace tidegate::models
