// What the modules' sources share: option checks and seeded initialisation.
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include "tidegate/nn/module.h"
#include "tidegate/nn/stacked_linear.h"

#include <initializer_list>
#include <optional>
#include <string>

#include "src/nn/shape_text.h"
#include "tidegate/choices.h"

namespace tidegate::nn {

/// Throws c10::ValueError naming module, option, the allowed values and the one given.
void check_choice(const char* owner, const char* option, const std::string& value,
                  std::initializer_list<const char*> allowed);

/// Throws c10::ValueError unless `value` is at least one.
void check_positive(const char* owner, const char* option, int64_t value);

/// Throws c10::ValueError for an epsilon that no norm can add.
void check_eps(const char* owner, const char* option, double eps);

/// Throws c10::ValueError unless x is `[B, T, dim]`, or `[B, dim]` for one token, and, without
/// autocast, which casts all but fp64, of the dtype of `weight`.
void check_mixer_input(const char* owner, const torch::Tensor& x, int64_t dim,
                       const torch::Tensor& weight, bool time = true);

/// Throws c10::Error, beginning with `owner`, where gradients are recorded and one of `tensors` or
/// of the module's parameters requires one: a step would lose it.
void refuse_gradients(const std::string& owner, const torch::nn::Module& module,
                      at::TensorList tensors);

/// Throws c10::ValueError where a lower bound is given to a mixer that takes none.
void refuse_gamma(const char* owner, const std::optional<torch::Tensor>& gamma, const char* why);

/// Throws c10::ValueError unless gamma, where it is given, is `[size]`, called `axis`, and float32
/// or of the dtype of `weight`; under autocast, which casts all but fp64, of any 16-bit type.
void check_lower_bound(const char* owner, const std::optional<torch::Tensor>& gamma,
                       const char* axis, int64_t size, const torch::Tensor& weight);

/// Throws c10::ValueError unless gamma fits a mixer that takes one by its option `lower_bound`:
/// with it as check_lower_bound() does, without it where one is given.
void check_optional_gamma(const char* owner, const std::optional<torch::Tensor>& gamma,
                          bool lower_bound, const char* axis, int64_t size,
                          const torch::Tensor& weight);

/// Whether autocast is on for the device of x.
bool is_autocast(const torch::Tensor& x);

/// An undefined tensor stands for "none" in LibTorch as much as an empty optional does.
std::optional<torch::Tensor> normalized(const std::optional<torch::Tensor>& tensor);
std::optional<torch::Tensor> optional(const torch::Tensor& tensor);

/// Options of int64 tensors on the device of `like`.
inline at::TensorOptions integers(const torch::Tensor& like) {
  return like.options().dtype(torch::kLong);
}

/// A parameter's storage, uninitialised.
torch::Tensor make_empty(torch::IntArrayRef shape, const Placement& placement);

/// An uninitialised parameter in the dtype of phases and bounds: fp64 in an fp64 module, else fp32.
torch::Tensor make_empty_wide(torch::IntArrayRef shape, const Placement& placement);

/// Modules whose weights are uninitialised and for which nothing was drawn: their owner's
/// reset_parameters() draws each number exactly once, in the documented order. rows: out_features,
/// or those of each matrix that the weight stacks (StackedLinearImpl).
torch::nn::Linear make_linear(int64_t in_features, at::IntArrayRef rows, bool bias,
                              const Placement& placement);
torch::nn::Embedding make_embedding(int64_t entries, int64_t dim, const Placement& placement);

/// Weight, then bias, uniform on +-1/sqrt(in_features), torch.nn.Linear's own distribution.
void reset_linear(const torch::nn::Linear& linear);

/// x W^T + b by one fused op, as Python's Linear computes it. torch::nn::Linear's own forward()
/// multiplies first and adds then: two roundings in bf16, and a pass over memory more.
torch::Tensor apply_linear(const torch::nn::Linear& linear, const torch::Tensor& x);

/// x in fp32, or as it is when it is fp64.
torch::Tensor widen(const torch::Tensor& x);

/// The smallest normal number of fp64, or of fp32.
double smallest_normal(torch::ScalarType type);

/// gamma + (1 - gamma) * exp(log_decay), for log_decay <= 0, with its digits next to one.
torch::Tensor bounded_decay(const torch::Tensor& log_decay,
                            const std::optional<torch::Tensor>& gamma);

/// log(gamma + (1 - gamma) * exp(log_gate)), for log_gate <= 0, with its digits next to zero, where
/// they are what is lost a step, and with finite gradients.
torch::Tensor bounded_log_gate(const torch::Tensor& log_gate,
                               const std::optional<torch::Tensor>& gamma);

}  // namespace tidegate::nn
