#include "tidegate/nn/gated_linear_rnn.h"
#include "tidegate/ops/hgru.h"

#include "src/nn/common.h"
#include "src/nn/gate_init.h"

namespace tidegate::nn {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

GatedLinearRNNImpl::GatedLinearRNNImpl(const GatedLinearRNNOptions& given) : options(given) {
  check_positive("GatedLinearRNN", "dim", options.dim());
  parse_gate_init("GatedLinearRNN", options.gate_init(), options.dim());
  check_gumbel_gate("GatedLinearRNN", options.gumbel_gate());
  reset();
}

void GatedLinearRNNImpl::reset() {
  in_proj = register_module("in_proj", make_linear(options.dim(), {options.dim(), options.dim()},
                                                   true, options.placement()));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void GatedLinearRNNImpl::reset_parameters() {
  reset_linear(in_proj);
  reset_chosen_biases();
}

void GatedLinearRNNImpl::reset_chosen_biases() {
  const Tensor gate = in_proj->bias.detach().narrow(0, 0, options.dim());
  parse_gate_init("GatedLinearRNN", options.gate_init(), options.dim()).draw(gate, options.dim());
}

std::tuple<Tensor, Tensor> GatedLinearRNNImpl::forward_checked(const Tensor& x,
                                                               const OptionalTensor& state,
                                                               const OptionalTensor& gamma,
                                                               const OptionalTensor& cu_seqlens) {
  const auto parts = apply_linear(in_proj, x).chunk(2, -1);
  const bool is_noisy = options.gumbel_gate() && is_training();
  const Tensor z = is_noisy ? gumbel_gate(parts[0], *options.gumbel_gate()) : parts[0];
  return hgru(parts[1], z, gamma, std::nullopt, state, "none", false, cu_seqlens);
}

Tensor GatedLinearRNNImpl::step_checked(const Tensor& x, const Tensor& state,
                                        const OptionalTensor& gamma) {
  const auto parts = apply_linear(in_proj, x).chunk(2, -1);
  return hgru_step(parts[1], parts[0], gamma, std::nullopt, state, "none");
}

void GatedLinearRNNImpl::check_gamma(const OptionalTensor& gamma) const {
  check_optional_gamma("GatedLinearRNN", gamma, options.lower_bound(), "dim", options.dim(),
                       in_proj->weight);
}

void GatedLinearRNNImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::GatedLinearRNN(dim=" << options.dim()
         << ", gate_init=" << options.gate_init() << ", lower_bound=" << options.lower_bound()
         << ")";
}

}  // namespace tidegate::nn
