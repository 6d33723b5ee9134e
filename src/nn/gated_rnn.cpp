#include "tidegate/nn/gated_rnn.h"
#include "tidegate/ops/gated_rnn.h"

#include "src/nn/common.h"
#include "src/nn/gate_init.h"

namespace tidegate::nn {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

GatedRNNImpl::GatedRNNImpl(const GatedRNNOptions& given) : options(given) {
  check_positive("GatedRNN", "dim", options.dim());
  parse_gate_init("GatedRNN", options.gate_init(), options.dim());
  check_gumbel_gate("GatedRNN", options.gumbel_gate());
  reset();
}

void GatedRNNImpl::reset() {
  const int64_t dim = options.dim();
  in_proj = register_module("in_proj", make_linear(dim, {dim, dim}, true, options.placement()));
  state_proj = register_module("state_proj", make_linear(dim, dim, false, options.placement()));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void GatedRNNImpl::reset_parameters() {
  reset_linear(in_proj);
  reset_chosen_biases();
  reset_linear(state_proj);
}

void GatedRNNImpl::reset_chosen_biases() {
  const Tensor gate = in_proj->bias.detach().narrow(0, 0, options.dim());
  parse_gate_init("GatedRNN", options.gate_init(), options.dim()).draw(gate, options.dim());
}

std::tuple<Tensor, Tensor> GatedRNNImpl::forward_checked(const Tensor& x,
                                                         const OptionalTensor& state,
                                                         const OptionalTensor& gamma,
                                                         const OptionalTensor& cu_seqlens) {
  const auto parts = apply_linear(in_proj, x).chunk(2, -1);
  Tensor z = parts[0], w_zh = state_proj->weight;
  if (options.gumbel_gate() && is_training()) {
    z = gumbel_gate(z, *options.gumbel_gate());
    w_zh = w_zh / *options.gumbel_gate();
  }
  return gated_rnn(z, parts[1], w_zh, state, cu_seqlens, gamma);
}

Tensor GatedRNNImpl::step_checked(const Tensor& x, const Tensor& state,
                                  const OptionalTensor& gamma) {
  const auto parts = apply_linear(in_proj, x).chunk(2, -1);
  return gated_rnn_step(parts[0], parts[1], state_proj->weight, state, gamma);
}

void GatedRNNImpl::check_gamma(const OptionalTensor& gamma) const {
  check_optional_gamma("GatedRNN", gamma, options.lower_bound(), "dim", options.dim(),
                       in_proj->weight);
}

void GatedRNNImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::GatedRNN(dim=" << options.dim() << ", gate_init=" << options.gate_init()
         << ", lower_bound=" << options.lower_bound() << ")";
}

}  // namespace tidegate::nn
