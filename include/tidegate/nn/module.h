// What the modules share: where their parameters live, and parameters that stay fp32.
#pragma once

#include <torch/nn/cloneable.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tidegate::nn {

/// Device and dtype in which a module creates its parameters; unset: the CPU, torch's default
/// dtype. On the meta device nothing is allocated and nothing is drawn.
struct Placement {
  std::optional<torch::Device> device = std::nullopt;
  std::optional<torch::ScalarType> dtype = std::nullopt;
};

// clang-format off
/// Placement arguments of an options class, and `placement()` to hand both on to children.
#define TIDEGATE_PLACEMENT_ARGS                                        \
  TORCH_ARG(std::optional<torch::Device>, device) = std::nullopt;      \
  TORCH_ARG(std::optional<torch::ScalarType>, dtype) = std::nullopt;   \
                                                                       \
 public:                                                               \
  ::tidegate::nn::Placement placement() const { return {device_, dtype_}; }
// clang-format on

/// While one lives on this thread, modules of this library leave the parameters that they construct
/// uninitialised, and draw nothing. A model builds its children under one and then draws each
/// number exactly once, in its own order, so that C++ and Python agree bit for bit; loading a file
/// and cloning draw nothing.
class UndrawnGuard {
 public:
  UndrawnGuard();
  ~UndrawnGuard();
  UndrawnGuard(const UndrawnGuard&) = delete;
  UndrawnGuard& operator=(const UndrawnGuard&) = delete;

  static bool is_active();
};

/// torch::nn::Cloneable, whose clone() leaves torch's random generators as they were.
template <typename Derived>
class Module : public torch::nn::Cloneable<Derived> {
 public:
  using torch::nn::Cloneable<Derived>::Cloneable;

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const UndrawnGuard undrawn;
    return torch::nn::Cloneable<Derived>::clone(device);
  }
};

/// A module whose own parameters and buffers in `float32_tensors()` never become bf16 or fp16:
/// `module->to(torch::kBFloat16)` makes them fp32 (devices and fp64 are followed). A phase or a
/// lower bound next to one rounded to eight bits is another model.
template <typename Derived>
class KeepsFloat32 : public Module<Derived> {
 public:
  using Module<Derived>::Module;

  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    keep([&] { torch::nn::Module::to(device, dtype, non_blocking); });
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    keep([&] { torch::nn::Module::to(dtype, non_blocking); });
  }
  void to(torch::Device device, bool non_blocking = false) override {
    torch::nn::Module::to(device, non_blocking);
  }

 protected:
  virtual std::vector<torch::Tensor> float32_tensors() const = 0;

 private:
  static bool is_half(torch::ScalarType type) {
    return type == torch::kBFloat16 || type == torch::kHalf;
  }

  template <typename Cast>
  void keep(const Cast& cast) {
    std::vector<std::pair<torch::Tensor, torch::Tensor>> kept;  // the parameter, its wide values
    for (const torch::Tensor& tensor : float32_tensors()) {
      if (tensor.defined()) kept.emplace_back(tensor, tensor.detach());
    }
    cast();
    for (auto& [tensor, wide] : kept) {
      if (is_half(tensor.scalar_type()) && !is_half(wide.scalar_type())) {
        tensor.set_data(wide.to(tensor.device(), torch::kFloat));
      }
    }
  }
};

}  // namespace tidegate::nn
