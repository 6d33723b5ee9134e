#include "tidegate/nn/token_mixer.h"
#include "tidegate/nn/norm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "src/nn/common.h"
#include "src/nn/shape_text.h"
#include "src/nn/states.h"
#include "src/ops/checks.h"

namespace tidegate::nn {
namespace {

// The tensor that a state of one tensor holds; undefined for an empty one.
at::Tensor only(const MixerState& state) { return state.empty() ? at::Tensor() : state.front(); }

std::vector<int64_t> with_batch(int64_t batch, std::vector<int64_t> shape) {
  shape.insert(shape.begin(), batch);
  return shape;
}

}  // namespace

at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor empty_state(at::IntArrayRef shape, const at::Tensor& weight,
                       std::optional<at::Device> device, std::optional<at::ScalarType> dtype) {
  return at::zeros(shape, at::TensorOptions(wide_dtype(dtype.value_or(weight.scalar_type())))
                              .device(device.value_or(weight.device())));
}

void check_sizes(const char* owner, int64_t batch, std::optional<int64_t> capacity) {
  const auto check = [&](const char* name, int64_t size) {
    TORCH_CHECK_VALUE(size >= 0, owner, ".init_state: ", name,
                      ": expected an integer of 0 or more; got ", size);
  };
  check("batch", batch);
  if (capacity) check("capacity", *capacity);
}

int64_t sequence_count(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens) {
  const bool is_packed = cu_seqlens && cu_seqlens->defined();
  return is_packed ? std::max<int64_t>(cu_seqlens->numel() - 1, 0) : x.size(0);
}

void check_state_tensor(const char* owner, const char* part, const at::Tensor& state,
                        at::IntArrayRef shape, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(state.defined(), owner, ": state", part, ": expected ", shape, "; got None");
  TORCH_CHECK_VALUE(state.sizes() == shape, owner, ": state", part, ": expected ", shape, "; got ",
                    shape_text(state));
  TORCH_CHECK_VALUE(state.scalar_type() == dtype, owner, ": state", part, ": expected ",
                    ops::dtype_name(dtype), "; got ", ops::dtype_name(state.scalar_type()));
}

void check_own_memory(const std::string& name, const at::Tensor& state) {
  for (int64_t i = 0; i < state.dim(); ++i) {
    TORCH_CHECK_VALUE(state.stride(i) != 0 || state.size(i) <= 1, name,
                      ": expected memory of its own; got an expanded tensor: clone() it");
  }
}

std::tuple<at::Tensor, at::Tensor> TensorStateMixer::forward(
    const at::Tensor& x, const std::optional<at::Tensor>& given_state,
    const std::optional<at::Tensor>& given_gamma, const std::optional<at::Tensor>& given_bounds) {
  const auto state = normalized(given_state);
  const auto gamma = normalized(given_gamma);
  const auto cu_seqlens = normalized(given_bounds);
  check_mixer_input(owner(), x, dim(), own_weight());
  check_gamma(gamma);
  if (state) {
    refuse_bidirectional("a state");
    check_state(*state, x, cu_seqlens);
  }
  return forward_checked(x, state, gamma, cu_seqlens);
}

void TensorStateMixer::check_step(const at::Tensor& x, const at::Tensor& state,
                                  const std::optional<at::Tensor>& gamma) const {
  refuse_bidirectional("step()");
  const std::string name = std::string(owner()) + ".step";
  check_mixer_input(name.c_str(), x, dim(), own_weight(), /*time=*/false);
  check_gamma(gamma);
  check_state(state, x);
  check_own_memory(name + ": state", state);
  refuse_gradients(name, dynamic_cast<const torch::nn::Module&>(*this), {x, state});
}

at::Tensor TensorStateMixer::step(const at::Tensor& x, const at::Tensor& state,
                                  const std::optional<at::Tensor>& given_gamma) {
  const auto gamma = normalized(given_gamma);
  check_step(x, state, gamma);
  return step_checked(x, state, gamma);
}

at::Tensor TensorStateMixer::mix_residual_step(NormImpl& norm, const at::Tensor& x,
                                               const MixerState& state,
                                               const std::optional<at::Tensor>& given_gamma) {
  const auto gamma = normalized(given_gamma);
  check_step(x, only(state), gamma);
  return residual_step_checked(norm, x, only(state), gamma);
}

at::Tensor TensorStateMixer::residual_step_checked(NormImpl& norm, const at::Tensor& x,
                                                   const at::Tensor& state,
                                                   const std::optional<at::Tensor>& gamma) {
  return x + step_checked(norm.forward(x), state, gamma);
}

at::Tensor TokenMixer::mix_residual_step(NormImpl& norm, const at::Tensor& x,
                                         const MixerState& state,
                                         const std::optional<at::Tensor>& gamma) {
  return x + mix_step(norm.forward(x), state, gamma);
}

at::Tensor TensorStateMixer::init_state(int64_t batch, std::optional<at::Device> device,
                                        std::optional<at::ScalarType> dtype,
                                        std::optional<int64_t> capacity) const {
  refuse_bidirectional("init_state()");
  check_sizes(owner(), batch, capacity);
  return empty_state(with_batch(batch, state_shape()), own_weight(), device, dtype);
}

void TensorStateMixer::check_state(const at::Tensor& state, const at::Tensor& x,
                                   const std::optional<at::Tensor>& cu_seqlens) const {
  check_state_tensor(owner(), "", state, with_batch(sequence_count(x, cu_seqlens), state_shape()),
                     wide_dtype(own_weight().scalar_type()));
}

void TensorStateMixer::refuse_bidirectional(const char* what) const {
  TORCH_CHECK_VALUE(!is_bidirectional(), owner(), ": ", what, ": a bidirectional ", owner(),
                    " reads the whole sequence and has no state; expected bidirectional=False");
}

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
