#include "tidegate/nn/forgetting_attention.h"
#include "tidegate/ops/forgetting_attention.h"
#include "tidegate/ops/init.h"

#include <cmath>
#include <limits>

#include "src/nn/attention_switches.h"
#include "src/nn/common.h"
#include "src/nn/gate_init.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

constexpr const char* kOwner = "ForgettingAttention";
// A pruned cache drops a token where its weight in any query to come is below prune / 2^32: all
// that are dropped then weigh less than prune together, for as long as there are fewer than 2^32.
const double kLogMostTokens = 32 * std::log(2.0);

constexpr const char* kOwnInits = "'zero', 'long:T_min:T_max' with numbers above 0, ";

// T_min and T_max of "long:T_min:T_max"; unset for the others.
std::optional<std::pair<double, double>> parse_init(const std::string& text, int64_t heads) {
  if (text == "zero") return std::nullopt;
  const std::vector<std::string_view> parts = split_at_colons(text);
  if (parts.size() == 3 && parts[0] == "long" && is_plain_number(parts[1]) &&
      is_plain_number(parts[2])) {
    const std::pair spans(std::stod(std::string(parts[1])), std::stod(std::string(parts[2])));
    if (spans.first > 0 && spans.second > 0) return spans;
  }
  parse_gate_init(kOwner, text, heads, kOwnInits);
  return std::nullopt;
}

// At least as long as any row that a norm makes of `width` channels: max|w| sqrt(width) by its
// weights w, of all heads; a hundredth more covers that rows are rounded, to bf16 at worst.
Tensor longest_row(const Norm& norm, int64_t width) {
  const Tensor weight = norm->weight.detach();
  const auto wide = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::linalg_vector_norm(weight, std::numeric_limits<double>::infinity(), at::nullopt,
                                /*keepdim=*/false, wide) *
         (1.01 * std::sqrt(static_cast<double>(width)));
}

}  // namespace

ForgettingAttentionImpl::ForgettingAttentionImpl(const ForgettingAttentionOptions& given)
    : SoftmaxAttention(resolve_switches(kOwner, given)), options(given) {
  check_choice(kOwner, "gate", options.gate(), {"data", "independent", "fixed", "none"});
  long_ = parse_init(options.gate_init(), switches_.num_heads);
  TORCH_CHECK_VALUE(options.gate_init() == "zero" || options.gate() != "none", kOwner,
                    ": gate_init: expected 'zero' with gate='none'; got '", options.gate_init(),
                    "'");
  check_gate_options(kOwner, options.gate() == "data", "gate='data'", std::nullopt,
                     options.gumbel_gate(), switches_.num_heads);
  TORCH_CHECK_VALUE(!options.lower_bound() || options.gate() != "none", kOwner,
                    ": lower_bound: expected False with gate='none', which leaves nothing to "
                    "bound; got True");
  const double prune = options.prune().value_or(0.5);
  TORCH_CHECK_VALUE(prune > 0 && prune < 1, kOwner,
                    ": prune: expected a number between 0 and 1; got ", prune);
  TORCH_CHECK_VALUE(!options.drop_pruned() || (options.prune() && switches_.qk_norm), kOwner,
                    ": drop_pruned: expected False without prune and qk_norm, which bound what a "
                    "dropped token weighs; got True");
  reset();
}

void ForgettingAttentionImpl::reset() {
  register_projections(*this);
  if (options.gate() == "data") {
    gate_proj = register_module(
        "gate_proj", make_linear(switches_.dim, switches_.num_heads, false, options.placement()));
  }
  if (options.gate() != "none") {
    const Tensor bias = make_empty_wide({switches_.num_heads}, options.placement());
    gate_bias = options.gate() == "fixed" ? register_buffer("gate_bias", bias)
                                          : register_parameter("gate_bias", bias);
  }
  register_outputs(*this);
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void ForgettingAttentionImpl::reset_gate() {
  if (gate_proj) reset_linear(gate_proj);
  if (!gate_bias.defined()) return;
  if (long_) {
    init_long_(gate_bias, long_->first, long_->second);
  } else if (options.gate_init() == "zero") {
    init_constant_(gate_bias, 0.0);
  } else {
    parse_gate_init(kOwner, options.gate_init(), switches_.num_heads, kOwnInits)
        .draw(gate_bias, switches_.dim);
  }
}

Tensor ForgettingAttentionImpl::gate_logits(const Tensor& x) const {
  return widen(apply_linear(gate_proj, x)) + gate_bias;
}

void ForgettingAttentionImpl::check_gamma(const OptionalTensor& gamma) const {
  check_optional_gamma(kOwner, gamma, options.lower_bound(), "num_heads", switches_.num_heads,
                       in_proj->weight);
}

Tensor ForgettingAttentionImpl::training_log_gate(const Tensor& x,
                                                  const OptionalTensor& gamma) const {
  if (!options.gumbel_gate() || !is_training()) return log_gate(x, gamma);
  const Tensor logits = gumbel_gate(gate_logits(x), *options.gumbel_gate());
  return bounded_log_gate(at::log_sigmoid(logits), gamma);
}

Tensor ForgettingAttentionImpl::log_gate(const Tensor& x, const OptionalTensor& gamma) const {
  check_gamma(gamma);
  const std::vector<int64_t> shape = {x.size(0), x.size(1), switches_.num_heads};
  if (!gate_bias.defined()) {
    const bool is_double = x.scalar_type() == torch::kDouble;
    return at::zeros({1}, x.options().dtype(is_double ? torch::kDouble : torch::kFloat))
        .expand(shape);
  }
  if (!gate_proj) return bounded_log_gate(at::log_sigmoid(gate_bias), gamma).expand(shape);
  return bounded_log_gate(at::log_sigmoid(gate_logits(x)), gamma);
}

TokenGate ForgettingAttentionImpl::token_gate(const StepProjection& project,
                                              const OptionalTensor& gamma) const {
  TokenGate gate;
  if (!gate_bias.defined()) return gate;
  gate.bias = gate_bias;
  if (gate_proj) gate.logits = project(gate_proj);
  if (normalized(gamma)) gate.gamma = *gamma;
  return gate;
}

Tensor ForgettingAttentionImpl::attend(const Operands& x, const TokenLayout& layout) const {
  return attend_by_op(x, layout, options.prune());
}

Tensor ForgettingAttentionImpl::attend_state(const Tensor& q, const AttentionState& state,
                                             const TokenLayout& layout) const {
  return attend_state_by_op(q, state, state.gates, layout, options.prune());
}

Tensor ForgettingAttentionImpl::attend_step(const Tensor& q, const AttentionState& state) const {
  // Without a norm nothing is known of keys that are not read, so all of them are; and where a
  // cache is small on a GPU: there it takes less time to read all of it than to find out what to.
  std::optional<double> prune;
  OptionalTensor key_norms;
  const bool is_worth_it =
      !state.k.is_cuda() || static_cast<int64_t>(state.k.nbytes()) >= kLeastPrunedBytes;
  if (options.prune() && k_norm && is_worth_it) {
    prune = options.prune();
    key_norms = longest_row(k_norm, switches_.head_dim)
                    .to(state.gates.scalar_type())
                    .expand({state.k.size(0), state.k.size(2)});
  }
  return forgetting_attention_step(q.select(1, 0).to(state.k.scalar_type()), state.k, state.v,
                                   state.gates, state.lengths, /*scale=*/std::nullopt,
                                   switches_.window, prune, key_norms)
      .unsqueeze(1);
}

Tensor ForgettingAttentionImpl::unreachable(const AttentionState& state) const {
  const Tensor behind = SoftmaxAttention::unreachable(state);
  if (!options.drop_pruned()) return behind;
  const int64_t width = switches_.head_dim;  // |q.k| / sqrt(D) is at most this
  const Tensor bound = longest_row(q_norm, width) * longest_row(k_norm, width) *
                       (1 / std::sqrt(static_cast<double>(width)));
  const Tensor held =
      (at::arange(state.capacity(), state.lengths.options()) < state.lengths.unsqueeze(1))
          .unsqueeze(-1);
  const Tensor log_f = state.gates.masked_fill(held.logical_not(), 0.0);
  const Tensor fades = log_f.flip(1).cumsum(1).flip(1) - log_f;  // from the token to the last
  const double limit = std::log(*options.prune()) - kLogMostTokens;
  const Tensor gone = ((fades + 2 * bound < limit) & held).all(-1).sum(1);
  return behind.defined() ? at::maximum(gone, behind) : gone;
}

void ForgettingAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::ForgettingAttention(dim=" << options.dim()
         << ", num_heads=" << switches_.num_heads << ", preset=" << options.preset()
         << ", gate=" << options.gate() << ", lower_bound=" << options.lower_bound() << ")";
}

}  // namespace tidegate::nn
