// forgetting_attention: schema, checks, how tensors become the kernels' params.

#include "tidegate/ops/forgetting_attention.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <tuple>

#include "kernels/attention/forgetting_attention.h"
#include "src/ops/autograd.h"
#include "src/ops/capture.h"
#include "src/ops/checks.h"
#include "src/ops/launch.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/attention/forgetting_attention_cuda.h"
#endif

namespace tidegate::ops {
namespace {

namespace attention = kernels::attention;
using Params = attention::ForgettingAttentionParams;
using BackwardParams = attention::ForgettingAttentionBackwardParams;
using StepParams = attention::ForgettingAttentionStepParams;

constexpr KernelSet<Params> kForward = {
    &attention::forgetting_attention_unsupported, &attention::forgetting_attention_plan_cpu,
    &attention::forgetting_attention_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&attention::forgetting_attention_forward_plan),
    TIDEGATE_CUDA_KERNEL(&attention::forgetting_attention_forward)};

constexpr KernelSet<BackwardParams, Params> kBackward = {
    &attention::forgetting_attention_unsupported,
    &attention::forgetting_attention_backward_plan_cpu,
    &attention::forgetting_attention_backward_cpu,
    TIDEGATE_CUDA_KERNEL(&attention::forgetting_attention_backward_plan),
    TIDEGATE_CUDA_KERNEL(&attention::forgetting_attention_backward)};

constexpr KernelSet<StepParams> kStep = {
    &attention::forgetting_attention_step_unsupported,
    &attention::forgetting_attention_step_plan_cpu, &attention::forgetting_attention_step_cpu,
    TIDEGATE_CUDA_KERNEL(&attention::forgetting_attention_step_plan),
    TIDEGATE_CUDA_KERNEL(&attention::forgetting_attention_step)};

// ---- schemas ----

struct ForgettingAttention {
  static constexpr std::string_view kSchema =
      "forgetting_attention(Tensor q, Tensor k, Tensor v, Tensor log_f, float? scale=None, "
      "int? window=None, Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, "
      "float? prune=None) -> (Tensor, Tensor)";
  static constexpr std::string_view kResults[] = {"o", "lse"};
  static constexpr std::string_view kData = "q";
  /// q, k and v go to autocast's type; sums of log_f need its digits, so it keeps fp32.
  static constexpr CastRule kCasts[] = {
      {"q", Cast::kLower}, {"k", Cast::kLower}, {"v", Cast::kLower}, {"log_f", Cast::kUnlessFloat}};

  const at::Tensor &q, &k, &v, &log_f;
  std::optional<double> scale;
  std::optional<int64_t> window;
  const OptionalTensor &cu_seqlens, &cu_seqlens_k;
  std::optional<double> prune;

  std::tuple<at::Tensor, at::Tensor> kernel() const;
  std::tuple<at::Tensor, at::Tensor> meta() const;
};

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The gradients of q, k, v and log_f.
struct ForgettingAttentionBackward {
  static constexpr std::string_view kSchema =
      "forgetting_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
      "Tensor log_f, Tensor o, Tensor lse, float? scale, int? window, Tensor? cu_seqlens, "
      "Tensor? cu_seqlens_k, float? prune) -> (Tensor, Tensor, Tensor, Tensor)";
  static constexpr std::string_view kGradientLike = "o";

  const at::Tensor& d_o;
  const OptionalTensor& dlse;
  const at::Tensor &q, &k, &v, &log_f, &o, &lse;
  std::optional<double> scale;
  std::optional<int64_t> window;
  const OptionalTensor &cu_seqlens, &cu_seqlens_k;
  std::optional<double> prune;

  Gradients kernel() const;
  Gradients meta() const;
};

struct ForgettingAttentionStep {
  static constexpr std::string_view kSchema =
      "forgetting_attention_step(Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "gate_cache, Tensor lengths, float? scale=None, int? window=None) -> Tensor";
  static constexpr std::string_view kData = "q";
  /// A cache keeps its type, and decides: casting it would be reading and writing all of it.
  static constexpr CastRule kCasts[] = {{"q", Cast::kToTypeOf, "k_cache"}};

  const at::Tensor &q, &k_cache, &v_cache, &gate_cache, &lengths;
  std::optional<double> scale;
  std::optional<int64_t> window;

  at::Tensor kernel() const;
  at::Tensor meta() const;
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

/// What forward and backward read; values are looked at apart.
template <class Op>
void check_inputs(const Op& a) {
  constexpr const char* kOp = kOpName<Op>;
  const Reference q{kOp, "q", a.q};
  check_data_dtype(q, ComplexData::kRefused);
  check_rank(q, 4, "[B, Tq, Hq, D]");
  check_keys(q, {"k", "v", "log_f"}, a.k, a.v, a.log_f, "[B, Tk, Hkv, D]", "[B, Tk, Hq]");
  check_gate(q, "log_f", a.log_f);
  check_options(kOp, a.scale, a.window);
  TORCH_CHECK(!a.prune || (*a.prune >= 0 && *a.prune < 1), kOp, ": prune must lie in [0, 1), got ",
              a.prune.value_or(0));
  const c10::SymInt sequences = check_cu_seqlens(q, a.cu_seqlens);
  const c10::SymInt queries = a.q.sym_size(1), keys = a.k.sym_size(1);
  if (!is_given(a.cu_seqlens_k)) {
    TORCH_CHECK(!is_given(a.cu_seqlens) || holds(queries.sym_eq(keys)), kOp,
                ": k must have as many tokens as q when cu_seqlens is given and cu_seqlens_k is "
                "not, got Tq = ",
                queries, " and Tk = ", keys);
  } else {
    TORCH_CHECK(is_given(a.cu_seqlens), kOp,
                ": cu_seqlens must be given when cu_seqlens_k is, got None");
    const at::Tensor &offsets = *a.cu_seqlens_k, &query_offsets = *a.cu_seqlens;
    check_same_type({kOp, "cu_seqlens", query_offsets}, "cu_seqlens_k", offsets);
    check_shape(kOp, "cu_seqlens_k", offsets, "[N + 1]", {sequences + 1}, " like cu_seqlens");
  }
  TORCH_CHECK(holds(queries.sym_le(keys)), kOp,
              ": q must not have more tokens than k (the last query is on the last key), got Tq = ",
              queries, " and Tk = ", keys);
}

void check_head_dim(const char* op, int64_t head_dim) {
  TORCH_CHECK(head_dim >= 1 && head_dim <= kernels::attention::kMaxAttentionHeadDim, op,
              ": D must be from 1 to ", kernels::attention::kMaxAttentionHeadDim,
              ", got q with D = ", head_dim);
}

/// Offsets, and gates in debug mode.
template <class Op>
void check_values(const Op& a) {
  const Reference q{kOpName<Op>, "q", a.q};
  check_log_decay_values(q, "log_f", a.log_f);
  check_cu_seqlens_values(q, a.cu_seqlens);
  check_key_offsets_values({q.op, "k", a.k}, a.cu_seqlens, a.cu_seqlens_k);
}

// ---- forward ----

double scale_of(std::optional<double> scale, int64_t head_dim) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
}

/// log_f [B, T, H]: any strides, so no row has to be contiguous.
kernels::HeadSeries gate_series(const at::Tensor& gates) {
  return head_series(gates.unsqueeze(-1));
}

/// The tensors that both directions read, in the form that the kernels take.
struct KernelInputs {
  at::Tensor q, k, v, log_f, cu_seqlens, cu_seqlens_k;

  template <class Op>
  explicit KernelInputs(const Op& a)
      : q(in_rows(a.q)),
        k(in_rows(a.k)),
        v(in_rows(a.v)),
        log_f(a.log_f.scalar_type() == at::kFloat && a.q.scalar_type() == at::kDouble
                  ? a.log_f.to(at::kDouble)
                  : a.log_f),
        cu_seqlens(contiguous_or_none(a.cu_seqlens)),
        cu_seqlens_k(is_given(a.cu_seqlens_k) ? a.cu_seqlens_k->contiguous() : cu_seqlens) {}

  template <class Op>
  Params params(const Op& a) const {
    check_head_dim(kOpName<Op>, q.size(3));
    Params params;
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

std::tuple<at::Tensor, at::Tensor> ForgettingAttention::meta() const {
  check_inputs(*this);
  return {new_like(q), new_state(q, {q.sym_size(0), q.sym_size(2), q.sym_size(1)})};
}

std::tuple<at::Tensor, at::Tensor> ForgettingAttention::kernel() const {
  auto results = meta();
  check_values(*this);
  const auto& [o, lse] = results;
  const KernelInputs inputs(*this);
  Params params = inputs.params(*this);
  params.o = head_series(o);
  params.lse = lse.data_ptr();
  Launch<Params>(kOpName<ForgettingAttention>, kForward, &params, o).run();
  return results;
}

// ---- backward ----

Gradients ForgettingAttentionBackward::meta() const {
  check_inputs(*this);
  const Reference data{kOpName<ForgettingAttentionBackward>, "q", q};
  check_like(data, "do", d_o);
  check_like(data, "o", o);
  const auto sizes = q.sym_sizes();
  check_state(data, "lse", lse, "[B, Hq, Tq]", {sizes[0], sizes[2], sizes[1]});
  check_state(data, "dlse", dlse, "[B, Hq, Tq]", {sizes[0], sizes[2], sizes[1]});
  return {new_like(q), new_like(k), new_like(v), new_like(log_f)};
}

Gradients ForgettingAttentionBackward::kernel() const {
  Gradients gradients = meta();
  check_values(*this);
  const at::ScalarType wide = state_dtype(q.scalar_type());
  const KernelInputs inputs(*this);
  const at::Tensor do_read = in_rows(d_o), o_read = in_rows(o);
  const at::Tensor lse_read = contiguous_as(lse, wide), dlse_read = contiguous_as(dlse, wide);
  auto& [dq, dk, dv, dlog_f] = gradients;
  if (inputs.log_f.scalar_type() != log_f.scalar_type()) {
    dlog_f = new_like(inputs.log_f);
  }

  BackwardParams params;
  params.forward = inputs.params(*this);
  params.forward.deterministic = at::globalContext().deterministicAlgorithms();
  params.forward.o = head_series(o_read);
  params.forward.lse = lse_read.data_ptr();
  params.d_o = head_series(do_read);
  params.dlse = data_or_null(dlse_read);
  params.dq = head_series(dq);
  params.dk = head_series(dk);
  params.dv = head_series(dv);
  params.dlog_f = gate_series(dlog_f);
  Launch<BackwardParams, Params>(kOpName<ForgettingAttentionBackward>, kBackward, &params, dq)
      .run();
  dlog_f = dlog_f.to(log_f.scalar_type());
  return gradients;
}

// ---- step ----

at::Tensor ForgettingAttentionStep::meta() const {
  constexpr const char* kOp = kOpName<ForgettingAttentionStep>;
  const Reference data{kOp, "q", q};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 3, "[B, Hq, D]");
  check_keys(data, {"k_cache", "v_cache", "gate_cache"}, k_cache, v_cache, gate_cache,
             "[B, Tmax, Hkv, D]", "[B, Tmax, Hq]");
  const at::ScalarType wide = state_dtype(q.scalar_type());
  TORCH_CHECK(gate_cache.scalar_type() == wide, kOp, ": gate_cache must be ",
              c10::getDtypeNames(wide).first, " (q is ", c10::getDtypeNames(q.scalar_type()).first,
              "), got ", c10::getDtypeNames(gate_cache.scalar_type()).first);
  check_device(data, "lengths", lengths);
  TORCH_CHECK(lengths.scalar_type() == at::kInt, kOp, ": lengths must be int32, got ",
              c10::getDtypeNames(lengths.scalar_type()).first);
  check_shape(kOp, "lengths", lengths, "[B]", {q.sym_size(0)});
  check_options(kOp, scale, window);
  return new_like(q);
}

/// In debug mode: lengths are from 0 to Tmax, and no gate that is read is above 0.
void check_step_values(const at::Tensor& q, const at::Tensor& gates, const at::Tensor& lengths) {
  if (!debug_checks_enabled() || is_capturing(lengths.device()) || lengths.numel() == 0) {
    return;
  }
  const int64_t capacity = gates.size(1), low = lengths.min().item<int64_t>(),
                high = lengths.max().item<int64_t>();
  TORCH_CHECK(low >= 0 && high <= capacity, kOpName<ForgettingAttentionStep>,
              ": lengths must lie in [0, Tmax = ", capacity, "], got values from ", low, " to ",
              high);
  const at::Tensor places = at::arange(capacity, lengths.options()).view({1, -1, 1});
  const at::Tensor unread = places.ge(lengths.view({-1, 1, 1}));
  check_log_decay_values({kOpName<ForgettingAttentionStep>, "q", q}, "gate_cache",
                         gates.masked_fill(unread, 0));
}

at::Tensor ForgettingAttentionStep::kernel() const {
  constexpr const char* kOp = kOpName<ForgettingAttentionStep>;
  at::Tensor o = meta();
  check_step_values(q, gate_cache, lengths);
  check_head_dim(kOp, q.size(2));
  const at::Tensor query = in_rows(q.unsqueeze(1)), k = in_rows(k_cache), v = in_rows(v_cache),
                   counts = lengths.contiguous();
  StepParams params;
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
  Launch<StepParams>(kOp, kStep, &params, o).run();
  return o;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<ForgettingAttention>(m);
  register_backward<ForgettingAttentionBackward>(m);
  register_gradient<ForgettingAttention, ForgettingAttentionBackward>(m);
  register_step<ForgettingAttentionStep>(m);
}

}  // namespace tidegate::ops

namespace tidegate {

std::tuple<at::Tensor, at::Tensor> forgetting_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale, std::optional<int64_t> window,
    const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& cu_seqlens_k,
    std::optional<double> prune) {
  return ops::call_public<ops::ForgettingAttention>(q, k, v, log_f, scale, window, cu_seqlens,
                                                    cu_seqlens_k, prune);
}

at::Tensor forgetting_attention_step(const at::Tensor& q, const at::Tensor& k_cache,
                                     const at::Tensor& v_cache, const at::Tensor& gate_cache,
                                     const at::Tensor& lengths, std::optional<double> scale,
                                     std::optional<int64_t> window) {
  return ops::call_public<ops::ForgettingAttentionStep>(q, k_cache, v_cache, gate_cache, lengths,
                                                        scale, window);
}

}  // namespace tidegate
