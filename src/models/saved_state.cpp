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
