#include "src/ops/gla.h"

#include <string>
#include <utility>

#include "src/ops/gla_padding.h"
#include "src/ops/kernel_sets.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/gla/token_step_cuda.h"
#endif

namespace tidegate::ops {
namespace {

// ---- checks ----

/// The names of dimensions that both layouts have, for messages.
struct GlaShapeNames {
  const char *key, *value, *gate, *state;
};
constexpr GlaShapeNames kGlaSequenceShapes = {"[B, T, H, K]", "[B, T, H, V]",
                                              "[B, T, H, K] (or [B, T, H, 1], one gate a head)",
                                              "[N, H, K, V]"};
constexpr GlaShapeNames kGlaStepShapes = {
    "[B, H, K]", "[B, H, V]", "[B, H, K] (or [B, H, 1], one gate a head)", "[B, H, K, V]"};

/// Whether `gate` has the last dimension of one gate a head.
bool is_gate_per_head(const at::Tensor& gate, const at::Tensor& q) {
  return gate.dim() == q.dim() && gate.sym_size(-1).sym_eq(1).guard_bool(__FILE__, __LINE__) &&
         !q.sym_size(-1).sym_eq(1).guard_bool(__FILE__, __LINE__);
}

/// `tensor` has q's shape but for the last dimension, which is `width`.
void check_beside_q(const Reference& q, const char* name, const at::Tensor& tensor,
                    const char* shape_name, const c10::SymInt& width) {
  const auto sizes = q.tensor.sym_sizes();
  if (q.tensor.dim() == 4) {
    check_shape(q.op, name, tensor, shape_name, {sizes[0], sizes[1], sizes[2], width}, " like q");
  } else {
    check_shape(q.op, name, tensor, shape_name, {sizes[0], sizes[1], width}, " like q");
  }
}

/// Everything but states and offsets, with or without a time axis.
void check_gla_inputs(const GlaArguments& arguments, const GlaShapeNames& names, int64_t rank) {
  const Reference q{arguments.op, "q", arguments.q};
  const bool logit = arguments.gate_kind == kernels::gla::GateKind::kLogit;
  check_data_dtype(q, ComplexData::kRefused);
  check_rank(q, rank, names.key);
  if (!logit) {
    check_like(q, "k", *arguments.k);
  }
  const at::Tensor& v = arguments.v;
  check_same_type(q, "v", v);
  check_beside_q(q, "v", v, names.value,
                 v.dim() == rank ? v.sym_size(-1) : arguments.q.sym_size(-1));
  const at::Tensor& gate = arguments.gate;
  const char* gate_name = logit ? "f" : "log_f";
  check_gate(q, gate_name, gate);
  const bool per_head = !logit && is_gate_per_head(gate, arguments.q);
  check_beside_q(q, gate_name, gate, logit ? names.key : names.gate,
                 per_head ? c10::SymInt(1) : arguments.q.sym_size(-1));
  if (is_given(arguments.gamma)) {
    check_gate(q, "gamma", *arguments.gamma);
    check_shape(q.op, "gamma", *arguments.gamma, "[H, K]",
                {arguments.q.sym_size(-2), arguments.q.sym_size(-1)});
  }
  check_scale(arguments.op, arguments.scale);
}

/// All inputs of the forward pass; returns N.
c10::SymInt check_gla_arguments(const GlaArguments& arguments) {
  check_gla_inputs(arguments, kGlaSequenceShapes, 4);
  const Reference q{arguments.op, "q", arguments.q};
  c10::SymInt sequences = check_cu_seqlens(q, arguments.cu_seqlens);
  const auto sizes = arguments.q.sym_sizes();
  check_state(q, "h0", arguments.h0, kGlaSequenceShapes.state,
              {sequences, sizes[2], sizes[3], arguments.v.sym_size(3)});
  return sequences;
}

c10::SymInt check_gla_backward(const at::Tensor& d_o, const OptionalTensor& dh_final,
                               const GlaArguments& arguments) {
  c10::SymInt sequences = check_gla_arguments(arguments);
  const Reference v{arguments.op, "v", arguments.v};
  check_like(v, "do", d_o);
  const auto sizes = arguments.q.sym_sizes();
  check_state(v, "dh_final", dh_final, kGlaSequenceShapes.state,
              {sequences, sizes[2], sizes[3], arguments.v.sym_size(3)});
  return sequences;
}

void check_gla_step(const GlaArguments& arguments, const at::Tensor& state) {
  check_gla_inputs(arguments, kGlaStepShapes, 3);
  check_given(arguments.op, "state", state);
  const auto sizes = arguments.q.sym_sizes();
  check_state({arguments.op, "q", arguments.q}, "state", state, kGlaStepShapes.state,
              {sizes[0], sizes[1], sizes[2], arguments.v.sym_size(2)});
}

void check_gla_values(const GlaArguments& arguments) {
  const Reference q{arguments.op, "q", arguments.q};
  check_cu_seqlens_values(q, arguments.cu_seqlens);
  check_bound_values(q, "gamma", arguments.gamma);
  if (arguments.gate_kind == kernels::gla::GateKind::kLogDecay) {
    check_log_decay_values(q, "log_f", arguments.gate);
  }
}

/// `gla_unsupported` knows the sizes too, but not the names that the user gave them.
void check_gla_head_dims(const char* op, int64_t key_dim, int64_t value_dim) {
  const auto fits = [](int64_t dim) { return dim >= 1 && dim <= kernels::gla::kMaxHeadDim; };
  TORCH_CHECK(fits(key_dim) && fits(value_dim), op, ": K and V must be from 1 to ",
              kernels::gla::kMaxHeadDim, ", got q with K = ", key_dim,
              " and v with V = ", value_dim);
}

/// o and h_final without values.
std::tuple<at::Tensor, at::Tensor> new_results(const GlaArguments& arguments,
                                               const c10::SymInt& sequences) {
  const at::Tensor &q = arguments.q, &v = arguments.v;
  return {new_like(v), new_state(q, {sequences, q.sym_size(2), q.sym_size(3), v.sym_size(3)})};
}

// ---- CPU and CUDA ----

/// What both directions read.
kernels::gla::GlaParams gla_params(const GlaArguments& a, KernelInputs* read) {
  kernels::gla::GlaParams params;
  params.layout = read->layout(a.q, a.cu_seqlens, a.reverse);
  params.heads = a.q.size(2);
  params.key_dim = a.q.size(3);
  params.value_dim = a.v.size(3);
  params.channels = params.heads * params.key_dim;
  params.scale = a.scale;
  params.gate_kind = a.gate_kind;
  params.gate_per_head = a.gate.size(3) != params.key_dim;
  params.q_activation = a.q_activation;
  params.v_activation = a.v_activation;
  params.q = read->head_rows(a.q);
  if (is_given(a.k)) {
    params.k = read->head_rows(*a.k);
  }
  params.v = read->head_rows(a.v);
  params.gate = read->head_gate(a.gate);
  params.gamma = read->state(a.gamma);
  params.h0 = read->state(a.h0);
  check_gla_head_dims(a.op, params.key_dim, params.value_dim);
  return params;
}

thread_local int settled_states_guards = 0;
thread_local DeferredStates* deferred_states = nullptr;

#ifdef TIDEGATE_WITH_CUDA

/// One token of states that are settled: by DeferredStates, where there is one, and they are many.
void run_settled_step(const GlaArguments& arguments, kernels::gla::GlaParams params,
                      cudaStream_t stream) {
  namespace gla = kernels::gla;
  static_assert(DeferredStates::kSteps - 1 <= gla::PendingTokens::kMost);
  gla::TokenStepOptions options;
  options.h0_is_settled = true;
  bool defers = false;
  // What is kept is the caller's rows themselves.
  if (deferred_states != nullptr && params.gate.data == arguments.gate.const_data_ptr() &&
      params.v.data == arguments.v.const_data_ptr()) {
    check_launch(arguments.op, "plan", gla::token_step_defers(params, &defers));
  }
  if (defers) {
    auto& tokens = deferred_states->tokens_of(params.h0);
    for (const DeferredStates::Token& token : tokens) {
      options.pending.gate[options.pending.count] = token.gate;
      options.pending.v[options.pending.count++] = token.v;
    }
    if (deferred_states->is_last()) {
      tokens.clear();
    } else {
      tokens.push_back({arguments.gate, arguments.v, params.gate, params.v});
      params.h_final = nullptr;
    }
  }
  check_launch(arguments.op, "launch", gla::token_step(params, options, stream));
}

#endif

/// `h_final` may be the arguments' h0 when T = 1.
void run_gla(const GlaArguments& arguments, const at::Tensor& o, const at::Tensor& h_final) {
  KernelInputs read(arguments.q);
  kernels::gla::GlaParams params = gla_params(arguments, &read);
  params.o = head_series(o);
  params.h_final = h_final.data_ptr();
  Launch launch(arguments.op, &params, o);
#ifdef TIDEGATE_WITH_CUDA
  namespace gla = kernels::gla;
  if (arguments.h0_is_settled && o.is_cuda() && o.numel() > 0 &&
      launch.plan().path == gla::GlaPath::kPlain && gla::token_step_takes(params)) {
    run_settled_step(arguments, params, current_stream(o.device()));
    return;
  }
#endif
  launch.run();
}

}  // namespace

SettledStatesGuard::SettledStatesGuard() { ++settled_states_guards; }
SettledStatesGuard::~SettledStatesGuard() { --settled_states_guards; }
bool SettledStatesGuard::is_active() { return settled_states_guards > 0; }

DeferredStates::DeferredStates(int64_t steps)
    : steps_(steps), outer_(std::exchange(deferred_states, this)) {}
DeferredStates::~DeferredStates() { deferred_states = outer_; }

std::vector<DeferredStates::Token>& DeferredStates::tokens_of(const void* state) {
  is_wanted_ = true;
  return tokens_[state];
}

kernels::gla::InputActivation parse_input_activation(const char* op, const char* name,
                                                     std::string_view value) {
  if (value == "silu") {
    return kernels::gla::InputActivation::kSilu;
  }
  if (value == "sigmoid") {
    return kernels::gla::InputActivation::kSigmoid;
  }
  TORCH_CHECK(value == "none", op, ": ", name, " must be \"none\", \"silu\" or \"sigmoid\", got \"",
              value, "\"");
  return kernels::gla::InputActivation::kNone;
}

// ---- forward ----

std::tuple<at::Tensor, at::Tensor> gla_forward_meta(const GlaArguments& arguments) {
  return new_results(arguments, check_gla_arguments(arguments));
}

std::tuple<at::Tensor, at::Tensor> gla_forward_kernel(const GlaArguments& arguments) {
  const c10::SymInt sequences = check_gla_arguments(arguments);
  check_gla_values(arguments);
  if (forward_wants_padding(arguments)) {
    const PaddedGla padded(arguments);
    const GlaArguments wide = padded.arguments();
    const auto [o, h_final] = new_results(wide, sequences);
    run_gla(wide, o, h_final);
    return padded.narrow_results(o, h_final);
  }
  const auto results = new_results(arguments, sequences);
  run_gla(arguments, std::get<0>(results), std::get<1>(results));
  return results;
}

// ---- backward ----

GlaGradients gla_backward_meta(const at::Tensor& d_o, const OptionalTensor& dh_final,
                               const GlaArguments& arguments) {
  const c10::SymInt sequences = check_gla_backward(d_o, dh_final, arguments);
  const at::Tensor &q = arguments.q, &v = arguments.v;
  return {new_like(q),
          new_gradient(arguments.k, q),
          new_like(v),
          new_like(arguments.gate),
          new_gradient(arguments.gamma, q),
          new_state_gradient(arguments.h0, q,
                             {sequences, q.sym_size(2), q.sym_size(3), v.sym_size(3)})};
}

GlaGradients gla_backward_kernel(const at::Tensor& d_o, const OptionalTensor& dh_final,
                                 const GlaArguments& arguments, const GlaGradients& into) {
  const c10::SymInt sequences = check_gla_backward(d_o, dh_final, arguments);
  check_gla_values(arguments);
  if (backward_wants_padding(arguments, d_o, dh_final)) {
    const PaddedGla padded(arguments, d_o, dh_final);
    return padded.narrow(gla_backward_kernel(*padded.d_o(), padded.dh_final(), padded.arguments()),
                         into);
  }
  const at::Tensor &q = arguments.q, &v = arguments.v;
  const at::ScalarType wide = state_dtype(q.scalar_type());

  GlaGradients grads = into;
  if (!grads.dq.defined()) {
    grads.dq = new_like(q);
    grads.dv = new_like(v);
    grads.dgate = new_like(arguments.gate, gate_dtype(arguments.gate, q.scalar_type()));
  }
  grads.dk = new_gradient(arguments.k, q);
  grads.dh0 = new_state(q, {sequences, q.sym_size(2), q.sym_size(3), v.sym_size(3)});

  KernelInputs read(q);
  kernels::gla::GlaBackwardParams params;
  params.forward = gla_params(arguments, &read);
  params.d_o = read.head_rows(d_o);
  params.dh_final = read.state(dh_final);
  params.dq = head_series(grads.dq);
  params.dk = is_given(arguments.k) ? head_series(grads.dk) : kernels::HeadSeries{};
  params.dv = head_series(grads.dv);
  params.dgate = head_series(grads.dgate);
  params.dh0 = grads.dh0.data_ptr();
  Launch launch(arguments.op, &params, grads.dq);
  const at::Tensor dgamma = launch.partial_sums(wide, is_given(arguments.gamma));
  params.dgamma_partial = data_or_null(dgamma);
  launch.run();

  const at::Tensor sum = sum_rows(arguments.op, {dgamma})[0];
  grads.dgamma = parameter_gradient(arguments.gamma,
                                    sum.defined() ? sum.view(arguments.gamma->sizes()) : sum, q);
  if (!into.dgate.defined()) {
    grads.dgate = in_type_of(arguments.gate, grads.dgate);
  }
  grads.dh0 = in_type_of(arguments.h0, grads.dh0);
  return grads;
}

// ---- step ----

at::Tensor gla_step_meta(const GlaArguments& arguments, const at::Tensor& state) {
  check_gla_step(arguments, state);
  return new_like(arguments.v);
}

at::Tensor gla_step_kernel(const GlaArguments& arguments, at::Tensor& state) {
  at::Tensor o = gla_step_meta(arguments, state);
  check_gla_values(arguments);
  const at::Tensor q = arguments.q.unsqueeze(1), v = arguments.v.unsqueeze(1),
                   gate = arguments.gate.unsqueeze(1);
  GlaArguments token{arguments.op, arguments.gate_kind, q, std::nullopt, v, gate};
  if (is_given(arguments.k)) {
    token.k = arguments.k->unsqueeze(1);
  }
  token.gamma = arguments.gamma;
  token.h0 = contiguous_as(state, state_dtype(q.scalar_type()));
  token.h0_is_settled = SettledStatesGuard::is_active() && token.h0->is_same(state);
  token.scale = arguments.scale;
  token.q_activation = arguments.q_activation;
  token.v_activation = arguments.v_activation;
  run_gla(token, o.unsqueeze(1), *token.h0);
  write_back(arguments.op, *token.h0, state);
  return o;
}

}  // namespace tidegate::ops
