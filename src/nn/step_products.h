// The products of a step of decoding, each with what a layer does around it.
#pragma once

#include <torch/nn/modules/linear.h>
#include "tidegate/nn/norm.h"

#include <optional>
#include <string_view>
#include <vector>

namespace tidegate::nn {

/// What goes before and after a product.
struct StepProduct {
  NormImpl* norm = nullptr;  // of x; none: x itself
  torch::Tensor gate = {};   // of the norm, as Norm::forward_gated() takes it; may be undefined
  const char* gate_activation = "silu";
  bool gate_first = false;
  const char* glu = nullptr;  // the activation, where y = act(z[:half]) * z[half:] of the product z
  torch::Tensor residual = {};  // added to y, where it is defined
  torch::Tensor out = {};       // where y goes; undefined: new memory
  /// Weights without biases whose products' channels follow, at most two; without glu, residual and
  /// out.
  std::vector<torch::Tensor> more = {};
};

/// residual + glu(norm(x) weight^T + bias), x `[B, in]`: one launch where the kernel takes it
/// (kernels/product/product_cuda.h), the ops it is made of elsewhere, with the same roundings.
/// Without gradients.
torch::Tensor step_product(const torch::Tensor& x, const torch::Tensor& weight,
                           const std::optional<torch::Tensor>& bias, const StepProduct& around);
torch::Tensor step_product(const torch::Tensor& x, const torch::nn::Linear& linear,
                           const StepProduct& around);

/// What hgrn2_step is told beside its tensors.
struct Hgrn2Token {
  double scale;
  std::string_view q_activation, v_activation;
};

/// o `[B, H*K]` of hgrn2_step of the q, f and v that in_proj makes of norm(x): product and step by
/// one launch. Undefined where the kernel is not made for these (it is for a few rows).
torch::Tensor hgrn2_token(const torch::Tensor& x, const torch::nn::Linear& in_proj,
                          const StepProduct& around, const std::optional<torch::Tensor>& gamma,
                          const torch::Tensor& state, const Hgrn2Token& token);

/// What goes into a step of HGRN's recurrence, `[B, D or 2D]`, and what comes after.
struct HgruToken {
  const torch::Tensor& c;
  const torch::Tensor& f;
  const std::optional<torch::Tensor>& gamma;
  const std::optional<torch::Tensor>& theta;
  NormImpl& norm;
  torch::Tensor gate;  // may be undefined
  const char* gate_activation;
  bool gate_first;
};

/// The gated norm of hgru_step's h, whose state is updated in place, by one launch. Undefined, with
/// the state as it was, where the kernel is not made for these.
torch::Tensor hgru_token(const HgruToken& token, const torch::Tensor& state);

/// A layer of HGRN, for a step of its recurrence with the products around it.
struct HgruLayer {
  const torch::nn::Linear& in_proj;  // makes c, f and the gate, one behind the other
  const torch::nn::Linear& out_proj;
  NormImpl& before;  // of x
  const std::optional<torch::Tensor>& gamma;
  const std::optional<torch::Tensor>& theta;
  NormImpl& norm;  // of the step's h, then its gate
  const char* gate_activation;
  bool gate_first;
};

/// residual + out_proj of the gated norm of hgru_step's h, x the residual and what goes into
/// in_proj: two launches. Undefined, with the state as it was, where the kernels are not made for
/// these (they are for a batch in bf16).
torch::Tensor hgru_layer_token(const HgruLayer& layer, const torch::Tensor& x,
                               const torch::Tensor& state);

/// Whether a step of rows like x `[B, dim]` is made of step products: on CUDA in 16 bits, for as
/// many rows as the device's kernels take, while a FewRowsGuard lives. Elsewhere norms add the
/// residual, and libraries make the products. TIDEGATE_STEP_PRODUCTS=0 or 1 decides instead.
bool makes_step_products(const torch::Tensor& x);

}  // namespace tidegate::nn
