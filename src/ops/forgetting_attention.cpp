// forgetting_attention: schema, checks, how tensors become the kernels' params. Its step, over a
// cache, is in forgetting_attention_step.cpp; what both share in attention.cpp.

#include "tidegate/ops/forgetting_attention.h"

#include <ATen/Context.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

#include "src/ops/attention.h"
#include "src/ops/autograd.h"
#include "src/ops/checks.h"
#include "src/ops/kernel_sets.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/views.h"
#include "src/ops/width_copies.h"

namespace tidegate::ops {
namespace {

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

  TensorTuple<2> kernel() const;
  TensorTuple<2> meta() const;
};

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

  TensorTuple<4> kernel() const;
  TensorTuple<4> meta() const;
};

// ---- checks ----

/// What forward and backward read; values are looked at apart.
template <class Op>
void check_attention(const Op& a) {
  constexpr const char* kOp = kOpName<Op>;
  const Reference q{kOp, "q", a.q};
  check_data_dtype(q, ComplexData::kRefused);
  check_rank(q, 4, "[B, Tq, Hq, D]");
  check_attention_keys(q, {"k", "v", "log_f"}, a.k, a.v, a.log_f, "[B, Tk, Hkv, D]", "[B, Tk, Hq]");
  check_gate(q, "log_f", a.log_f);
  check_attention_options(kOp, a.scale, a.window);
  check_prune(kOp, a.prune);
  const c10::SymInt sequences = check_cu_seqlens(q, a.cu_seqlens);
  const c10::SymInt queries = a.q.sym_size(1), keys = a.k.sym_size(1);
  if (!is_given(a.cu_seqlens_k)) {
    TORCH_CHECK(!is_given(a.cu_seqlens) || queries.sym_eq(keys).expect_true(__FILE__, __LINE__),
                kOp,
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
  TORCH_CHECK(queries.sym_le(keys).expect_true(__FILE__, __LINE__), kOp,
              ": q must not have more tokens than k (the last query is on the last key), got Tq = ",
              queries, " and Tk = ", keys);
}

/// Offsets, and gates in debug mode.
template <class Op>
void check_attention_values(const Op& a) {
  const Reference q{kOpName<Op>, "q", a.q};
  check_log_decay_values(q, "log_f", a.log_f);
  check_cu_seqlens_values(q, a.cu_seqlens);
  check_key_offsets_values({q.op, "k", a.k}, a.cu_seqlens, a.cu_seqlens_k);
}

// ---- sizes and rows that tensor cores do not take ----

/// The head dimension that tensor cores take in the place of `head_dim`: tensor_cores_take of
/// kernels/attention/cuda/ has the rule.
int64_t padded_head_dim(int64_t head_dim) {
  constexpr int64_t kStep = 8, kLeast = 16;
  return std::max(kLeast, (head_dim + kStep - 1) / kStep * kStep);
}

/// Whether tensor cores would take the call if its tensors were padded with zeros, and their rows
/// began aligned. The copies are little beside what the kernels that take any size would need. A
/// tensor of another rank is for the checks, which come next.
bool wants_padding(at::ArrayRef<at::Tensor> tensors) {
  const auto has_rank = [](const at::Tensor& t) { return t.defined() && t.dim() == 4; };
  if (!std::all_of(tensors.begin(), tensors.end(), has_rank)) return false;
  const at::Tensor& q = tensors[0];
  const at::ScalarType type = q.scalar_type();
  const int64_t head_dim = q.size(3);
  if (!q.is_cuda() || (type != at::kBFloat16 && type != at::kHalf) ||
      head_dim > kernels::attention::kMaxAttentionHeadDim) {
    return false;
  }
  return head_dim != padded_head_dim(head_dim) ||
         !std::all_of(tensors.begin(), tensors.end(), rows_begin_aligned);
}

/// Whether a forward pass of what wants padding takes q, k and v as they are, without it.
bool is_single_tile(const at::Tensor& q, const at::Tensor& k) {
  using namespace kernels::attention;
  return q.size(3) <= kSingleTileHeadDim && q.size(1) <= kSingleTileTime &&
         k.size(1) <= kSingleTileTime;
}

// ---- forward ----

/// In which dtype the kernels take log_f, and write its gradient: its own, but float64 beside
/// float64 data.
template <class Op>
at::ScalarType log_f_dtype(const Op& a) {
  return a.q.scalar_type() == at::kDouble ? at::kDouble : a.log_f.scalar_type();
}

/// What both directions read.
template <class Op>
kernels::attention::ForgettingAttentionParams attention_params(const Op& a, KernelInputs* read) {
  check_attention_head_dim(kOpName<Op>, a.q.size(3));
  kernels::attention::ForgettingAttentionParams params;
  params.layout = read->layout(a.q, a.cu_seqlens, /*reverse=*/false);
  params.key_layout = read->layout(a.k, is_given(a.cu_seqlens_k) ? a.cu_seqlens_k : a.cu_seqlens,
                                   /*reverse=*/false);
  params.heads = a.q.size(2);
  params.key_heads = a.k.size(2);
  params.head_dim = a.q.size(3);
  params.channels = params.heads * params.head_dim;
  params.scale = attention_scale(a.scale, params.head_dim);
  params.window = attention_window(a.window, a.k.size(1));
  params.prune = a.prune.value_or(0);
  params.q = read->head_rows(a.q);
  params.k = read->head_rows(a.k);
  params.v = read->head_rows(a.v);
  params.log_f = attention_gates(read->keep(a.log_f.to(log_f_dtype(a))));
  return params;
}

TensorTuple<2> ForgettingAttention::meta() const {
  check_attention(*this);
  return {new_like(q), new_state(q, {q.sym_size(0), q.sym_size(2), q.sym_size(1)})};
}

TensorTuple<2> ForgettingAttention::kernel() const {
  if (wants_padding({q, k, v}) && !is_single_tile(q, k)) {
    check_attention(*this);
    const int64_t head_dim = q.size(3), wide = padded_head_dim(head_dim);
    WidthCopies copies(kOpName<ForgettingAttention>);
    const at::Tensor queries = copies.widened(q, wide), keys = copies.widened(k, wide),
                     values = copies.widened(v, wide);
    copies.run();
    const auto [o, lse] =
        ForgettingAttention{
            queries, keys,       values,       log_f, attention_scale(scale, head_dim),
            window,  cu_seqlens, cu_seqlens_k, prune}
            .kernel();
    const at::Tensor narrow = copies.narrowed(o, head_dim);
    copies.run();
    return {narrow, lse};
  }
  auto results = meta();
  check_attention_values(*this);
  const auto& [o, lse] = results;
  KernelInputs read(q);
  kernels::attention::ForgettingAttentionParams params = attention_params(*this, &read);
  params.o = head_series(o);
  params.lse = lse.data_ptr();
  Launch(kOpName<ForgettingAttention>, &params, o).run();
  return results;
}

// ---- backward ----

TensorTuple<4> ForgettingAttentionBackward::meta() const {
  check_attention(*this);
  const Reference data{kOpName<ForgettingAttentionBackward>, "q", q};
  check_like(data, "do", d_o);
  check_like(data, "o", o);
  const auto sizes = q.sym_sizes();
  check_state(data, "lse", lse, "[B, Hq, Tq]", {sizes[0], sizes[2], sizes[1]});
  check_state(data, "dlse", dlse, "[B, Hq, Tq]", {sizes[0], sizes[2], sizes[1]});
  return {new_like(q), new_like(k), new_like(v), new_like(log_f)};
}

TensorTuple<4> ForgettingAttentionBackward::kernel() const {
  TensorTuple<4> gradients = meta();
  if (wants_padding({q, k, v, o, d_o})) {
    const int64_t head_dim = q.size(3), wide = padded_head_dim(head_dim);
    WidthCopies copies(kOpName<ForgettingAttentionBackward>);
    const at::Tensor queries = copies.widened(q, wide), keys = copies.widened(k, wide),
                     values = copies.widened(v, wide), outputs = copies.widened(o, wide),
                     loss = copies.widened(d_o, wide);
    copies.run();
    const auto [dq, dk, dv, dlog_f] =
        ForgettingAttentionBackward{loss,    dlse,       queries,
                                    keys,    values,     log_f,
                                    outputs, lse,        attention_scale(scale, head_dim),
                                    window,  cu_seqlens, cu_seqlens_k,
                                    prune}
            .kernel();
    TensorTuple<4> narrow = {copies.narrowed(dq, head_dim), copies.narrowed(dk, head_dim),
                             copies.narrowed(dv, head_dim), dlog_f};
    copies.run();
    return narrow;
  }
  check_attention_values(*this);
  auto& [dq, dk, dv, dlog_f] = gradients;
  if (log_f_dtype(*this) != log_f.scalar_type()) {
    dlog_f = new_like(log_f, log_f_dtype(*this));
  }
  KernelInputs read(q);
  kernels::attention::ForgettingAttentionBackwardParams params;
  params.forward = attention_params(*this, &read);
  params.forward.deterministic = at::globalContext().deterministicAlgorithms();
  params.forward.o = read.head_rows(o);
  params.forward.lse = read.state(lse);
  params.d_o = read.head_rows(d_o);
  params.dlse = read.state(dlse);
  params.dq = head_series(dq);
  params.dk = head_series(dk);
  params.dv = head_series(dv);
  params.dlog_f = attention_gates(dlog_f);
  Launch(kOpName<ForgettingAttentionBackward>, &params, dq).run();
  dlog_f = dlog_f.to(log_f.scalar_type());
  return gradients;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  register_op<ForgettingAttention>(m);
  register_backward<ForgettingAttentionBackward>(m);
  register_gradient<ForgettingAttention, ForgettingAttentionBackward>(m);
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

}  // namespace tidegate
