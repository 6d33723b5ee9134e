// forgetting_attention: schema, checks, dispatch, autograd.

#include "tidegate/ops/forgetting_attention.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <tuple>

#include "kernels/attention/forgetting_attention.h"
#include "src/ops/autocast.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/registration.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/attention/forgetting_attention_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using kernels::attention::ForgettingAttentionBackwardParams;
using kernels::attention::ForgettingAttentionParams;
using kernels::attention::ForgettingAttentionStepParams;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kName = "forgetting_attention";
constexpr const char* kBackwardName = "forgetting_attention_backward";
constexpr const char* kStepName = "forgetting_attention_step";

constexpr KernelSet<ForgettingAttentionParams> kForward = {
    &kernels::attention::forgetting_attention_unsupported,
    &kernels::attention::forgetting_attention_plan_cpu,
    &kernels::attention::forgetting_attention_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_forward)};

constexpr KernelSet<ForgettingAttentionBackwardParams, ForgettingAttentionParams> kBackward = {
    &kernels::attention::forgetting_attention_unsupported,
    &kernels::attention::forgetting_attention_backward_plan_cpu,
    &kernels::attention::forgetting_attention_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_backward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_backward)};

constexpr KernelSet<ForgettingAttentionStepParams> kStep = {
    &kernels::attention::forgetting_attention_step_unsupported,
    &kernels::attention::forgetting_attention_step_plan_cpu,
    &kernels::attention::forgetting_attention_step_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_step_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_step)};

/// What forward and backward are called with.
struct Arguments {
  const char* op;
  const at::Tensor &q, &k, &v, &log_f;
  std::optional<double> scale;
  std::optional<int64_t> window;
  OptionalTensor cu_seqlens, cu_seqlens_k;
  std::optional<double> prune;
};

// ---- checks ----

bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }

void check_options(const char* op, std::optional<double> scale, std::optional<int64_t> window) {
  TORCH_CHECK(!scale || (*scale > 0 && std::isfinite(*scale)), op,
              ": scale must be above 0 and finite, got ", scale.value_or(0));
  TORCH_CHECK(!window || *window >= 1, op, ": window must be at least 1, got ", window.value_or(0));
}

void check_head_counts(const char* op, const char* name, const c10::SymInt& heads,
                       const c10::SymInt& key_heads) {
  TORCH_CHECK(holds(key_heads.sym_ge(1)) && holds((heads % key_heads).sym_eq(0)), op,
              ": q's heads must be a multiple of ", name, "'s, got Hq = ", heads,
              " and Hkv = ", key_heads);
}

/// Keys, values and gates of Tk tokens; `names`: k, v, log_f as this op calls them.
void check_keys(const Reference& q, const char* const (&names)[3], const at::Tensor& k,
                const at::Tensor& v, const at::Tensor& gates, const char* key_shape,
                const char* gate_shape) {
  check_same_type(q, names[0], k);
  check_rank({q.op, names[0], k}, 4, key_shape);
  const c10::SymInt heads = q.tensor.sym_size(-2), time = k.sym_size(1);
  check_shape(q.op, names[0], k, key_shape,
              {q.tensor.sym_size(0), time, k.sym_size(2), q.tensor.sym_size(-1)},
              ", batch and head dimension like q");
  check_head_counts(q.op, names[0], heads, k.sym_size(2));
  check_like({q.op, names[0], k}, names[1], v);
  check_device(q, names[2], gates);
  check_shape(q.op, names[2], gates, gate_shape, {q.tensor.sym_size(0), time, heads},
              ", one gate a token and query head");
}

/// Everything but values.
void check_arguments(const Arguments& a) {
  const Reference q{a.op, "q", a.q};
  check_data_dtype(q, ComplexData::kRefused);
  check_rank(q, 4, "[B, Tq, Hq, D]");
  check_keys(q, {"k", "v", "log_f"}, a.k, a.v, a.log_f, "[B, Tk, Hkv, D]", "[B, Tk, Hq]");
  check_gate(q, "log_f", a.log_f);
  check_options(a.op, a.scale, a.window);
  TORCH_CHECK(!a.prune || (*a.prune >= 0 && *a.prune < 1), a.op, ": prune must lie in [0, 1), got ",
              a.prune.value_or(0));
  const c10::SymInt sequences = check_cu_seqlens(q, a.cu_seqlens);
  const c10::SymInt queries = a.q.sym_size(1), keys = a.k.sym_size(1);
  if (!is_given(a.cu_seqlens_k)) {
    TORCH_CHECK(!is_given(a.cu_seqlens) || holds(queries.sym_eq(keys)), a.op,
                ": k must have as many tokens as q when cu_seqlens is given and cu_seqlens_k is "
                "not, got Tq = ",
                queries, " and Tk = ", keys);
  } else {
    TORCH_CHECK(is_given(a.cu_seqlens), a.op,
                ": cu_seqlens must be given when cu_seqlens_k is, got None");
    const at::Tensor &offsets = *a.cu_seqlens_k, &query_offsets = *a.cu_seqlens;
    check_same_type({a.op, "cu_seqlens", query_offsets}, "cu_seqlens_k", offsets);
    check_shape(a.op, "cu_seqlens_k", offsets, "[N + 1]", {sequences + 1}, " like cu_seqlens");
  }
  TORCH_CHECK(holds(queries.sym_le(keys)), a.op,
              ": q must not have more tokens than k (the last query is on the last key), got Tq = ",
              queries, " and Tk = ", keys);
}

void check_gradient_arguments(const at::Tensor& d_o, const OptionalTensor& dlse, const Arguments& a,
                              const at::Tensor& o, const at::Tensor& lse) {
  check_arguments(a);
  const Reference q{a.op, "q", a.q};
  check_like(q, "do", d_o);
  check_like(q, "o", o);
  const auto sizes = a.q.sym_sizes();
  check_state(q, "lse", lse, "[B, Hq, Tq]", {sizes[0], sizes[2], sizes[1]});
  check_state(q, "dlse", dlse, "[B, Hq, Tq]", {sizes[0], sizes[2], sizes[1]});
}

void check_step_arguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& gates, const at::Tensor& lengths,
                          std::optional<double> scale, std::optional<int64_t> window) {
  const Reference data{kStepName, "q", q};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 3, "[B, Hq, D]");
  check_keys(data, {"k_cache", "v_cache", "gate_cache"}, k, v, gates, "[B, Tmax, Hkv, D]",
             "[B, Tmax, Hq]");
  const at::ScalarType wide = state_dtype(q.scalar_type());
  TORCH_CHECK(gates.scalar_type() == wide, kStepName, ": gate_cache must be ",
              c10::getDtypeNames(wide).first, " (q is ", c10::getDtypeNames(q.scalar_type()).first,
              "), got ", c10::getDtypeNames(gates.scalar_type()).first);
  check_device(data, "lengths", lengths);
  TORCH_CHECK(lengths.scalar_type() == at::kInt, kStepName, ": lengths must be int32, got ",
              c10::getDtypeNames(lengths.scalar_type()).first);
  check_shape(kStepName, "lengths", lengths, "[B]", {q.sym_size(0)});
  check_options(kStepName, scale, window);
}

void check_head_dim(const char* op, int64_t head_dim) {
  TORCH_CHECK(head_dim >= 1 && head_dim <= kernels::attention::kMaxAttentionHeadDim, op,
              ": D must be from 1 to ", kernels::attention::kMaxAttentionHeadDim,
              ", got q with D = ", head_dim);
}

/// Offsets, and gates in debug mode.
void check_values(const Arguments& a) {
  check_log_decay_values({a.op, "q", a.q}, "log_f", a.log_f);
  check_cu_seqlens_values({a.op, "q", a.q}, a.cu_seqlens);
  check_key_offsets_values({a.op, "k", a.k}, a.cu_seqlens, a.cu_seqlens_k);
}

/// In debug mode: lengths are from 0 to Tmax, and no gate that is read is above 0.
void check_step_values(const at::Tensor& q, const at::Tensor& gates, const at::Tensor& lengths) {
  if (!debug_checks_enabled() || is_capturing(lengths.device()) || lengths.numel() == 0) {
    return;
  }
  const int64_t capacity = gates.size(1), low = lengths.min().item<int64_t>(),
                high = lengths.max().item<int64_t>();
  TORCH_CHECK(low >= 0 && high <= capacity, kStepName,
              ": lengths must lie in [0, Tmax = ", capacity, "], got values from ", low, " to ",
              high);
  const at::Tensor places = at::arange(capacity, lengths.options()).view({1, -1, 1});
  const at::Tensor unread = places.ge(lengths.view({-1, 1, 1}));
  check_log_decay_values({kStepName, "q", q}, "gate_cache", gates.masked_fill(unread, 0));
}

// ---- CPU and CUDA ----

double scale_of(std::optional<double> scale, int64_t head_dim) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
}

at::Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return is_given(tensor) ? tensor->contiguous() : at::Tensor();
}

/// log_f [B, T, H]: any strides, so no row has to be contiguous.
kernels::HeadSeries gate_series(const at::Tensor& gates) {
  return head_series(gates.unsqueeze(-1));
}

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor q, k, v, log_f, cu_seqlens, cu_seqlens_k;

  explicit KernelInputs(const Arguments& a)
      : q(in_rows(a.q)),
        k(in_rows(a.k)),
        v(in_rows(a.v)),
        log_f(a.log_f.scalar_type() == at::kFloat && a.q.scalar_type() == at::kDouble
                  ? a.log_f.to(at::kDouble)
                  : a.log_f),
        cu_seqlens(contiguous_or_none(a.cu_seqlens)),
        cu_seqlens_k(is_given(a.cu_seqlens_k) ? a.cu_seqlens_k->contiguous() : cu_seqlens) {}

  ForgettingAttentionParams params(const Arguments& a) const {
    check_head_dim(a.op, q.size(3));
    ForgettingAttentionParams params;
    params.layout = sequence_layout(q, cu_seqlens, /*reverse=*/false);
    params.key_layout = sequence_layout(k, cu_seqlens_k, /*reverse=*/false);
    params.heads = q.size(2);
    params.key_heads = k.size(2);
    params.head_dim = q.size(3);
    params.channels = params.heads * params.head_dim;
    params.scale = scale_of(a.scale, params.head_dim);
    params.window = a.window.value_or(0);
    params.prune = a.prune.value_or(0);
    params.q = head_series(q);
    params.k = head_series(k);
    params.v = head_series(v);
    params.log_f = gate_series(log_f);
    return params;
  }
};

std::tuple<at::Tensor, at::Tensor> run_forward(const Arguments& a) {
  check_arguments(a);
  check_values(a);
  at::Tensor o = at::empty(a.q.sizes(), a.q.options());
  at::Tensor lse = at::empty({a.q.size(0), a.q.size(2), a.q.size(1)},
                             a.q.options().dtype(state_dtype(a.q.scalar_type())));
  const KernelInputs inputs(a);
  ForgettingAttentionParams params = inputs.params(a);
  params.o = head_series(o);
  params.lse = lse.data_ptr();
  Launch<ForgettingAttentionParams>(a.op, kForward, &params, o).run();
  return {std::move(o), std::move(lse)};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients run_backward(const at::Tensor& d_o, const OptionalTensor& dlse, const Arguments& a,
                       const at::Tensor& o, const at::Tensor& lse) {
  check_gradient_arguments(d_o, dlse, a, o, lse);
  check_values(a);
  const at::ScalarType wide = state_dtype(a.q.scalar_type());
  const KernelInputs inputs(a);
  const at::Tensor do_read = in_rows(d_o), o_read = in_rows(o);
  const at::Tensor lse_read = contiguous_as(lse, wide), dlse_read = contiguous_as(dlse, wide);
  const auto like = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
  at::Tensor dq = like(a.q), dk = like(a.k), dv = like(a.v), dlog_f = like(inputs.log_f);

  ForgettingAttentionBackwardParams params;
  params.forward = inputs.params(a);
  params.forward.deterministic = at::globalContext().deterministicAlgorithms();
  params.forward.o = head_series(o_read);
  params.forward.lse = lse_read.data_ptr();
  params.d_o = head_series(do_read);
  params.dlse = data_or_null(dlse_read);
  params.dq = head_series(dq);
  params.dk = head_series(dk);
  params.dv = head_series(dv);
  params.dlog_f = gate_series(dlog_f);
  Launch<ForgettingAttentionBackwardParams, ForgettingAttentionParams>(a.op, kBackward, &params, dq)
      .run();
  return {std::move(dq), std::move(dk), std::move(dv), dlog_f.to(a.log_f.scalar_type())};
}

std::tuple<at::Tensor, at::Tensor> forward_kernel(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale, std::optional<int64_t> window, const OptionalTensor& cu_seqlens,
    const OptionalTensor& cu_seqlens_k, std::optional<double> prune) {
  return run_forward({kName, q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune});
}

Gradients backward_kernel(const at::Tensor& d_o, const OptionalTensor& dlse, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
                          const at::Tensor& o, const at::Tensor& lse, std::optional<double> scale,
                          std::optional<int64_t> window, const OptionalTensor& cu_seqlens,
                          const OptionalTensor& cu_seqlens_k, std::optional<double> prune) {
  const Arguments a{kBackwardName, q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune};
  return run_backward(d_o, dlse, a, o, lse);
}

at::Tensor step_kernel(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                       const at::Tensor& gate_cache, const at::Tensor& lengths,
                       std::optional<double> scale, std::optional<int64_t> window) {
  check_step_arguments(q, k_cache, v_cache, gate_cache, lengths, scale, window);
  check_step_values(q, gate_cache, lengths);
  check_head_dim(kStepName, q.size(2));
  at::Tensor o = at::empty(q.sizes(), q.options());
  const at::Tensor query = in_rows(q.unsqueeze(1)), k = in_rows(k_cache), v = in_rows(v_cache),
                   counts = lengths.contiguous();
  ForgettingAttentionStepParams params;
  params.layout = sequence_layout(query, at::Tensor(), /*reverse=*/false);
  params.heads = q.size(1);
  params.key_heads = k.size(2);
  params.head_dim = q.size(2);
  params.channels = params.heads * params.head_dim;
  params.capacity = k.size(1);
  params.scale = scale_of(scale, params.head_dim);
  params.window = window.value_or(0);
  params.q = head_series(query);
  params.k = head_series(k);
  params.v = head_series(v);
  params.log_f = gate_series(gate_cache);
  params.lengths = counts.const_data_ptr<int32_t>();
  params.o = head_series(o.unsqueeze(1));
  Launch<ForgettingAttentionStepParams>(kStepName, kStep, &params, o).run();
  return o;
}

// ---- Meta ----

std::tuple<at::Tensor, at::Tensor> forward_meta(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale, std::optional<int64_t> window, const OptionalTensor& cu_seqlens,
    const OptionalTensor& cu_seqlens_k, std::optional<double> prune) {
  check_arguments({kName, q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune});
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)},
                           q.options().dtype(state_dtype(q.scalar_type())))};
}

Gradients backward_meta(const at::Tensor& d_o, const OptionalTensor& dlse, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
                        const at::Tensor& o, const at::Tensor& lse, std::optional<double> scale,
                        std::optional<int64_t> window, const OptionalTensor& cu_seqlens,
                        const OptionalTensor& cu_seqlens_k, std::optional<double> prune) {
  const Arguments a{kBackwardName, q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune};
  check_gradient_arguments(d_o, dlse, a, o, lse);
  const auto like = [](const at::Tensor& t) {
    return at::empty_symint(t.sym_sizes(), t.options());
  };
  return {like(q), like(k), like(v), like(log_f)};
}

at::Tensor step_meta(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const at::Tensor& gate_cache, const at::Tensor& lengths,
                     std::optional<double> scale, std::optional<int64_t> window) {
  check_step_arguments(q, k_cache, v_cache, gate_cache, lengths, scale, window);
  return at::empty_symint(q.sym_sizes(), q.options());
}

// ---- Autograd, Autocast ----

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& log_f,
                               std::optional<double> scale, std::optional<int64_t> window,
                               const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                               std::optional<double> prune) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window"] = window;
    ctx->saved_data["prune"] = prune;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, lse] = call_op<&forward_kernel>("tidegate::forgetting_attention", q, k, v, log_f,
                                             scale, window, cu_seqlens, cu_seqlens_k, prune);
    const at::Tensor none;
    ctx->save_for_backward(
        {q, k, v, log_f, o, lse, cu_seqlens.value_or(none), cu_seqlens_k.value_or(none)});
    return {o, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &log_f = saved[3], &o = saved[4],
                     &lse = saved[5];
    const at::Tensor d_o = gradients[0].defined() ? gradients[0] : at::zeros_like(o);
    auto [dq, dk, dv, dlog_f] = call_op<&backward_kernel>(
        "tidegate::forgetting_attention_backward", d_o, optional(gradients[1]), q, k, v, log_f, o,
        lse, ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["window"].toOptional<int64_t>(), optional(saved[6]), optional(saved[7]),
        ctx->saved_data["prune"].toOptional<double>());
    const at::Tensor none;
    return {dq, dk, dv, dlog_f, none, none, none, none, none};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale, std::optional<int64_t> window, const OptionalTensor& cu_seqlens,
    const OptionalTensor& cu_seqlens_k, std::optional<double> prune) {
  check_given(kName, {{"q", q}, {"k", k}, {"v", v}, {"log_f", log_f}});
  check_differentiable(kName, {q, k, v, log_f});
  const variable_list results =
      AttentionFunction::apply(q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune);
  return {results[0], results[1]};
}

/// q, k and v go to autocast's type; sums of log_f need its digits, so it keeps fp32.
std::tuple<at::Tensor, at::Tensor> forward_autocast(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale, std::optional<int64_t> window, const OptionalTensor& cu_seqlens,
    const OptionalTensor& cu_seqlens_k, std::optional<double> prune) {
  const AutocastGuard autocast(q.device());
  return call_op<&forward_kernel>(
      "tidegate::forgetting_attention", autocast.cast(q), autocast.cast(k), autocast.cast(v),
      autocast.cast_unless_float(log_f), scale, window, cu_seqlens, cu_seqlens_k, prune);
}

at::Tensor step_autocast(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                         const at::Tensor& gate_cache, const at::Tensor& lengths,
                         std::optional<double> scale, std::optional<int64_t> window) {
  const AutocastGuard autocast(q.device());
  // A cache keeps its type, and decides: casting it would be reading and writing all of it.
  const at::Tensor query =
      at::isFloatingType(k_cache.scalar_type()) ? q.to(k_cache.scalar_type()) : q;
  return call_op<&step_kernel>("tidegate::forgetting_attention_step", query, k_cache, v_cache,
                               gate_cache, lengths, scale, window);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_op(m,
            "forgetting_attention(Tensor q, Tensor k, Tensor v, Tensor log_f, float? scale=None, "
            "int? window=None, Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, "
            "float? prune=None) -> (Tensor, Tensor)");
  register_kernels<&forward_kernel, &forward_meta>(m, kName);
  register_autograd<&forward_autograd>(m, kName);
  register_autocast<&forward_autocast>(m, kName);

  define_op(m,
            "forgetting_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
            "Tensor log_f, Tensor o, Tensor lse, float? scale, int? window, Tensor? cu_seqlens, "
            "Tensor? cu_seqlens_k, float? prune) -> (Tensor, Tensor, Tensor, Tensor)");
  register_kernels<&backward_kernel, &backward_meta>(m, kBackwardName);
  register_no_double_backward(m, kBackwardName);

  define_op(m,
            "forgetting_attention_step(Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
            "gate_cache, Tensor lengths, float? scale=None, int? window=None) -> Tensor");
  register_kernels<&step_kernel, &step_meta>(m, kStepName);
  register_step(m, kStepName);
  register_autocast<&step_autocast>(m, kStepName);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> forgetting_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale, std::optional<int64_t> window,
    const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& cu_seqlens_k,
    std::optional<double> prune) {
  ops::check_given(ops::kName, {{"q", q}, {"k", k}, {"v", v}, {"log_f", log_f}});
  return ops::call_op<&ops::forward_kernel>(
      "tidegate::forgetting_attention", q, k, v, log_f, scale, window,
      ops::offsets_on(ops::kName, cu_seqlens, q.device()),
      ops::offsets_on(ops::kName, cu_seqlens_k, q.device()), prune);
}

at::Tensor forgetting_attention_step(const at::Tensor& q, const at::Tensor& k_cache,
                                     const at::Tensor& v_cache, const at::Tensor& gate_cache,
                                     const at::Tensor& lengths, std::optional<double> scale,
                                     std::optional<int64_t> window) {
  ops::check_given(ops::kStepName, {{"q", q},
                                    {"k_cache", k_cache},
                                    {"v_cache", v_cache},
                                    {"gate_cache", gate_cache},
                                    {"lengths", lengths}});
  return ops::call_op<&ops::step_kernel>("tidegate::forgetting_attention_step", q, k_cache, v_cache,
                                         gate_cache, lengths, scale, window);
}

}  // namespace tidegate
