#include "src/models/recompute.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include "src/nn/common.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

namespace tidegate::models {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Autocast on a device, as it was when this was made.
struct AutocastState {
  c10::DeviceType device;
  bool enabled;
  at::ScalarType dtype;

  explicit AutocastState(c10::DeviceType device)
      : device(device),
        enabled(at::autocast::is_autocast_enabled(device)),
        dtype(at::autocast::get_autocast_dtype(device)) {}

  void set() const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }
};

/// Autocast as `state` says, without its cache, while one lives: what is cached of a weight while
/// no gradients are recorded would cut that weight's gradient off elsewhere in the region.
class WithAutocast {
 public:
  explicit WithAutocast(const AutocastState& state)
      : before_(state.device), caches_(at::autocast::is_autocast_cache_enabled()) {
    state.set();
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WithAutocast() {
    before_.set();
    at::autocast::set_autocast_cache_enabled(caches_);
  }
  WithAutocast(const WithAutocast&) = delete;
  WithAutocast& operator=(const WithAutocast&) = delete;

 private:
  AutocastState before_;
  bool caches_;
};

bool draws(const BlockImpl& block) {
  const auto is_noise = [](const auto& option) {
    return option.first == "gumbel_gate" && !std::holds_alternative<std::monostate>(option.second);
  };
  const auto& options = block.config.mixer_options;
  return block.is_training() &&
         (block.config.dropout > 0 || std::any_of(options.begin(), options.end(), is_noise));
}

/// The states of the generators of the CPU and of a device.
struct GeneratorStates {
  std::vector<std::pair<at::Generator, Tensor>> states;

  explicit GeneratorStates(at::Device device) {
    add(at::kCPU);
    if (!device.is_cpu()) add(device);
  }
  void add(at::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states.emplace_back(generator, generator.get_state());
  }
  void set() {
    for (auto& [generator, state] : states) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }
};

/// What the backward pass needs besides tensors.
struct Call : torch::CustomClassHolder {
  BlockImpl& block;
  std::shared_ptr<torch::nn::Module> alive;  // the block
  AutocastState autocast;
  std::optional<GeneratorStates> generators;

  Call(BlockImpl& block, at::Device device)
      : block(block), alive(block.shared_from_this()), autocast(device.type()) {
    if (draws(block)) generators.emplace(device);
  }

  /// y and the mixer's state, under autocast as it was.
  variable_list run(const Tensor& x, const Tensor& gamma, const Tensor& cu_seqlens) const {
    const WithAutocast with_autocast(autocast);
    const auto given = [](const Tensor& t) {
      return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
    };
    auto [y, state] = block.forward(x, {}, given(gamma), given(cu_seqlens));
    variable_list results{std::move(y)};
    results.insert(results.end(), state.begin(), state.end());
    return results;
  }
};

/// inputs: x, then the block's parameters, which the node has as inputs so that autograd sends
/// their gradients where it sends all others.
class RecomputedBlock : public torch::autograd::Function<RecomputedBlock> {
 public:
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const std::optional<Tensor>& gamma,
                               const std::optional<Tensor>& cu_seqlens,
                               const c10::intrusive_ptr<Call>& call) {
    ctx->set_materialize_grads(false);
    const Tensor none;
    ctx->save_for_backward({inputs[0], gamma.value_or(none), cu_seqlens.value_or(none)});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return call->run(inputs[0], gamma.value_or(none), cu_seqlens.value_or(none));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const auto detached = [](const Tensor& t) {
      return t.defined() ? t.detach().requires_grad_(t.requires_grad()) : t;
    };
    const Tensor x = detached(saved[0]), gamma = detached(saved[1]);
    variable_list inputs{x};
    for (const Tensor& p : call->block.parameters()) inputs.push_back(p);
    inputs.push_back(gamma);
    variable_list asked = inputs;
    std::erase_if(asked, [](const Tensor& t) { return !t.defined() || !t.requires_grad(); });

    variable_list results, outer;
    {
      std::optional<GeneratorStates> now;
      if (call->generators) {
        now.emplace(x.device());
        call->generators->set();
      }
      const at::AutoGradMode with_grad(true);
      variable_list made = call->run(x, gamma, saved[2]);
      if (now) now->set();
      for (size_t i = 0; i < made.size(); ++i) {
        if (gradients[i].defined() && made[i].requires_grad()) {
          results.push_back(made[i]);
          outer.push_back(gradients[i]);
        }
      }
    }
    variable_list found(inputs.size() + 2);  // none of cu_seqlens and call
    if (results.empty()) return found;
    const variable_list some = torch::autograd::grad(results, asked, outer, /*retain_graph=*/false,
                                                     /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined() && inputs[i].requires_grad()) found[i] = some[next++];
    }
    return found;
  }
};

}  // namespace

std::tuple<Tensor, nn::MixerState> forward_recomputed(BlockImpl& block, const Tensor& x,
                                                      const std::optional<Tensor>& gamma,
                                                      const std::optional<Tensor>& cu_seqlens) {
  std::vector<Tensor> inputs{x};
  for (const Tensor& p : block.parameters()) inputs.push_back(p);
  variable_list results = RecomputedBlock::apply(at::TensorList(inputs), nn::normalized(gamma),
                                                 nn::normalized(cu_seqlens),
                                                 c10::make_intrusive<Call>(block, x.device()));
  nn::MixerState state(results.begin() + 1, results.end());
  return {results.front(), state};
}

}  // namespace tidegate::models
