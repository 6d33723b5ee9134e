#include "tidegate/nn/token_mixer.h"

#include <ATen/core/Tensor.h>

namespace tidegate::nn {
namespace {

// The tensor that a state of one tensor holds; undefined for an empty one.
at::Tensor only(const MixerState& state) { return state.empty() ? at::Tensor() : state.front(); }

}  // namespace

std::tuple<at::Tensor, MixerState> TensorStateMixer::mix(
    const at::Tensor& x, const MixerState& state, const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& cu_seqlens) {
  auto [y, next] = forward(x, only(state), gamma, cu_seqlens);
  return {y, next.defined() ? MixerState{next} : MixerState{}};
}

at::Tensor TensorStateMixer::mix_step(const at::Tensor& x, const MixerState& state,
                                      const std::optional<at::Tensor>& gamma) {
  return step(x, only(state), gamma);
}

MixerState TensorStateMixer::make_state(int64_t batch, std::optional<at::Device> device,
                                        std::optional<at::ScalarType> dtype,
                                        std::optional<int64_t> capacity) const {
  return {init_state(batch, device, dtype, capacity)};
}

}  // namespace tidegate::nn
