#include "tidegate/nn/gated_linear_attention.h"
#include "tidegate/ops/gated_linear_attention.h"
#include "tidegate/ops/linear_scan.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/gla/gla.h"
#include "src/nn/common.h"
#include "src/nn/gate_init.h"
#include "src/nn/states.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

constexpr const char* kName = "GatedLinearAttention";

// Modules refuse what the op would, before they make parameters for it.
static_assert(kMaxHeadDim == kernels::gla::kMaxHeadDim);

void check_width(const char* name, int64_t width, int64_t heads) {
  check_positive(kName, name, width);
  TORCH_CHECK_VALUE(width % heads == 0, kName, ": ", name,
                    ": expected a multiple of num_heads=", heads, "; got ", width);
  TORCH_CHECK_VALUE(width / heads <= kMaxHeadDim, kName, ": ", name, ": expected at most ",
                    kMaxHeadDim, " channels a head; got ", width / heads);
}

void check_feature_map(const GatedLinearAttentionOptions& options) {
  const std::string map = options.feature_map().value_or("relu");
  TORCH_CHECK_VALUE(map == "elu+1" || map == "relu" || map == "exp", kName,
                    ": feature_map: expected one of None, 'elu+1', 'relu', 'exp'; got '", map, "'");
}

// What was left open, filled in.
GatedLinearAttentionOptions resolve(GatedLinearAttentionOptions options) {
  options.key_dim(options.key_dim().value_or(std::max<int64_t>(options.dim() / 2, 1)));
  options.value_dim(options.value_dim().value_or(options.dim()));
  check_positive(kName, "dim", options.dim());
  check_positive(kName, "num_heads", options.num_heads());
  check_width("key_dim", *options.key_dim(), options.num_heads());
  check_width("value_dim", *options.value_dim(), options.num_heads());
  check_positive(kName, "gate_rank", options.gate_rank());
  check_choice(kName, "gate", options.gate(), {"vector", "scalar"});
  check_feature_map(options);
  check_choice(kName, "norm", options.norm(), kNormsOrNone);
  check_eps(kName, "norm_eps", options.norm_eps());
  options.gate_temperature(
      options.gate_temperature().value_or(options.gate() == "vector" ? 16.0 : 1.0));
  TORCH_CHECK_VALUE(*options.gate_temperature() > 0 && std::isfinite(*options.gate_temperature()),
                    kName, ": gate_temperature: expected a positive number; got ",
                    *options.gate_temperature());
  check_gate_options(kName, /*has_data=*/true, "", options.gate_init(), options.gumbel_gate(),
                     options.gate() == "vector" ? *options.key_dim() : options.num_heads());
  TORCH_CHECK_VALUE(!options.normalize() || options.feature_map(), kName,
                    ": feature_map: expected 'elu+1', 'relu' or 'exp' with normalize=True, whose "
                    "divisor must not be negative; got None");
  if (options.normalize() && options.norm() != "none") {
    TORCH_WARN(
        kName, ": normalize=True changes nothing before norm='", options.norm(),
        "', which divides each head by its own size; norm='none' gives the normalised output");
  }
  return options;
}

// None of the maps is negative.
Tensor mapped(const std::optional<std::string>& map, const Tensor& x) {
  // exp where x < 0: elu(x) + 1 would round there.
  if (map == "elu+1") return at::where(x > 0, x + 1, x.clamp_max(0).exp());
  if (map == "relu") return at::relu(x);
  return map ? x.exp() : x;
}

// What errors call a state, in Python's words; with its count where a pair is expected.
std::string given_kind(const MixerState& state, bool has_count) {
  if (state.empty()) return "None";
  if (state.size() == 1) return "a tensor";
  return has_count ? "a tuple of " + std::to_string(state.size()) : "a tuple";
}

}  // namespace

GatedLinearAttentionImpl::GatedLinearAttentionImpl(const GatedLinearAttentionOptions& given)
    : options(resolve(given)) {
  reset();
}

void GatedLinearAttentionImpl::reset() {
  const Placement placement = options.placement();
  const int64_t dim = options.dim(), keys = *options.key_dim(), values = *options.value_dim();
  std::vector<int64_t> rows{keys, keys, values};
  if (options.output_gate()) rows.push_back(values);
  if (is_vector()) rows.push_back(options.gate_rank());
  in_proj = register_module("in_proj", make_linear(dim, rows, false, placement));
  gate_proj = register_module(
      "gate_proj", make_linear(is_vector() ? options.gate_rank() : dim,
                               is_vector() ? keys : options.num_heads(), true, placement));
  norm = register_module("norm", Norm(NormOptions(head_values())
                                          .kind(options.norm())
                                          .eps(options.norm_eps())
                                          .device(placement.device)
                                          .dtype(placement.dtype)));
  out_proj = register_module("out_proj", make_linear(values, dim, false, placement));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void GatedLinearAttentionImpl::reset_parameters() {
  reset_linear(in_proj);
  reset_linear(gate_proj);
  reset_chosen_biases();
  norm->reset_parameters();
  reset_linear(out_proj);
}

void GatedLinearAttentionImpl::reset_chosen_biases() {
  if (!options.gate_init()) return;
  const Tensor& bias = gate_proj->bias;
  parse_gate_init(kName, *options.gate_init(), bias.numel())
      .draw(bias, gate_proj->options.in_features());
}

double GatedLinearAttentionImpl::scale() const {
  return options.normalize() ? 1.0 : 1.0 / std::sqrt(static_cast<double>(head_keys()));
}

MixerState GatedLinearAttentionImpl::init_state(int64_t batch, std::optional<torch::Device> device,
                                                std::optional<torch::ScalarType> dtype,
                                                std::optional<int64_t> capacity) const {
  check_sizes(kName, batch, capacity);
  const int64_t h = options.num_heads();
  const auto zeros = [&](std::vector<int64_t> shape) {
    return empty_state(shape, out_proj->weight, device, dtype);
  };
  MixerState state{zeros({batch, h, head_keys(), head_values()})};
  if (options.normalize()) state.push_back(zeros({batch, h, head_keys()}));
  return state;
}

std::tuple<Tensor, MixerState> GatedLinearAttentionImpl::forward(
    const Tensor& x, const MixerState& state, const OptionalTensor& gamma,
    const OptionalTensor& given_bounds) {
  const OptionalTensor cu_seqlens = normalized(given_bounds);
  check_mixer_input(kName, x, options.dim(), out_proj->weight);
  check_gamma(gamma);
  if (!state.empty()) check_state(state, x, cu_seqlens);
  const Operands in = project(x, gamma, is_training() ? options.gumbel_gate() : std::nullopt);
  const OptionalTensor s0 = state.empty() ? std::nullopt : OptionalTensor(state[0]);
  const auto [o, s] = gated_linear_attention(in.q, in.k, in.v, in.log_f, s0, scale(),
                                             /*reverse=*/false, cu_seqlens);
  if (!options.normalize()) return {output(o, in.g), MixerState{s}};
  const OptionalTensor z0 = state.empty() ? std::nullopt : OptionalTensor(state[1].flatten(1));
  const auto [keys, decay] = key_scan(in);
  const auto [sums, z] = linear_scan(keys, decay, z0, /*reverse=*/false, cu_seqlens);
  return {output(normalized_by(o, in.q, sums), in.g),
          MixerState{s, z.unflatten(-1, {options.num_heads(), head_keys()})}};
}

Tensor GatedLinearAttentionImpl::step(const Tensor& x, const MixerState& state,
                                      const OptionalTensor& gamma) {
  check_mixer_input("GatedLinearAttention.step", x, options.dim(), out_proj->weight,
                    /*time=*/false);
  check_gamma(gamma);
  check_state(state, x, std::nullopt);
  for (const Tensor& part : state) check_own_memory("GatedLinearAttention.step: state", part);
  refuse_gradients("GatedLinearAttention.step", *this, {x, state[0]});
  const Operands in = project(x, gamma);
  Tensor o = gated_linear_attention_step(in.q, in.k, in.v, in.log_f, state[0], scale());
  if (options.normalize()) {
    const auto [keys, decay] = key_scan(in);
    const Tensor flat = state[1].flatten(1);
    const Tensor sums = linear_scan_step(keys, decay, flat);
    if (!state[1].is_contiguous()) state[1].copy_(flat.view_as(state[1]));  // flat may be a copy
    o = normalized_by(o, in.q, sums);
  }
  return output(o, in.g);
}

void GatedLinearAttentionImpl::check_gamma(const OptionalTensor& gamma) const {
  check_optional_gamma(kName, gamma, options.lower_bound(), is_vector() ? "key_dim" : "num_heads",
                       gamma_size(), out_proj->weight);
}

void GatedLinearAttentionImpl::check_state(const MixerState& state, const Tensor& x,
                                           const OptionalTensor& cu_seqlens) const {
  const int64_t h = options.num_heads(), k = head_keys(), v = head_values();
  const bool is_pair = options.normalize();
  TORCH_CHECK_VALUE(state.size() == (is_pair ? 2 : 1), kName, ": state: expected ",
                    is_pair ? "a pair (s, z)" : "a tensor",
                    " with normalize=", is_pair ? "True" : "False", "; got ",
                    given_kind(state, is_pair));
  const int64_t n = sequence_count(x, cu_seqlens);
  const auto dtype = wide_dtype(out_proj->weight.scalar_type());
  check_state_tensor(kName, "", state[0], {n, h, k, v}, dtype);
  if (is_pair) check_state_tensor(kName, ": z", state[1], {n, h, k}, dtype);
}

// All projections of x by one matrix product, the gate's second one, and views of them.
GatedLinearAttentionImpl::Operands GatedLinearAttentionImpl::project(
    const Tensor& x, const OptionalTensor& gamma, std::optional<double> gumbel) const {
  const Tensor all = apply_linear(in_proj, x);
  const int64_t keys = *options.key_dim(), values = *options.value_dim();
  const std::vector<int64_t> heads = {options.num_heads(), -1};
  int64_t next = 0;
  const auto take = [&](int64_t rows) {
    next += rows;
    return all.narrow(-1, next - rows, rows);
  };
  Operands in;
  in.q = mapped(options.feature_map(), take(keys).unflatten(-1, heads));
  in.k = mapped(options.feature_map(), take(keys).unflatten(-1, heads));
  in.v = take(values).unflatten(-1, heads);
  if (options.output_gate()) in.g = take(values);
  Tensor logits = widen(apply_linear(gate_proj, is_vector() ? take(options.gate_rank()) : x));
  if (gumbel) logits = gumbel_gate(logits, *gumbel);
  const Tensor log_f = at::log_sigmoid(logits).unflatten(-1, heads) / *options.gate_temperature();
  const OptionalTensor bound = normalized(gamma);
  in.log_f =
      bounded_log_gate(log_f, bound ? OptionalTensor(bound->unflatten(-1, heads)) : std::nullopt);
  return in;
}

// What enters z [..., H*K], and its decay.
std::tuple<Tensor, Tensor> GatedLinearAttentionImpl::key_scan(const Operands& in) const {
  return {widen(in.k).flatten(-2), in.log_f.exp().expand(in.k.sizes()).flatten(-2)};
}

// o / (z . q), for z = sums [..., H*K]; zero where all weights are.
Tensor GatedLinearAttentionImpl::normalized_by(const Tensor& o, const Tensor& q,
                                               const Tensor& sums) const {
  const Tensor z = sums.unflatten(-1, {options.num_heads(), head_keys()});
  const Tensor divisor = (widen(q) * z).sum(-1, /*keepdim=*/true);
  const double tiny = smallest_normal(divisor.scalar_type());
  // Where no weight is left, o is zero already: dividing by one keeps its gradient finite.
  return (widen(o) / divisor.masked_fill(divisor < tiny, 1.0)).to(o.scalar_type());
}

// Norm, gate and output projection of o [..., H, V].
Tensor GatedLinearAttentionImpl::output(const Tensor& o, const Tensor& g) {
  const Tensor gate = g.defined() ? g.unflatten(-1, {o.size(-2), o.size(-1)}) : g;
  return apply_linear(out_proj, norm->forward_gated(o, gate, "silu").flatten(-2));
}

void GatedLinearAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::GatedLinearAttention(dim=" << options.dim()
         << ", num_heads=" << options.num_heads() << ", gate=" << options.gate()
         << ", normalize=" << options.normalize()
         << ", feature_map=" << options.feature_map().value_or("none")
         << ", key_dim=" << *options.key_dim() << ", value_dim=" << *options.value_dim()
         << ", lower_bound=" << options.lower_bound() << ")";
}

}  // namespace tidegate::nn
