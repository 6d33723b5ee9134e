#include "tidegate/nn/attention.h"
#include "tidegate/ops/forgetting_attention.h"

#include "kernels/attention/forgetting_attention.h"
#include "src/nn/attention_switches.h"
#include "src/nn/common.h"
#include "src/nn/states.h"
#include "src/ops/capture.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

// Packed tokens [1, total, H, D] as [count, size, H, D], zeros after each end, which causal queries
// before them do not see.
Tensor padded(const Tensor& x, const TokenLayout& layout, int64_t size) {
  const Tensor out = at::zeros({layout.count(), size, x.size(2), x.size(3)}, x.options());
  return out.index_put({layout.rows()[0], layout.steps()[0]}, x[0]);
}

Tensor packed(const Tensor& x, const TokenLayout& layout) {
  return x.index({layout.rows()[0], layout.steps()[0]}).unsqueeze(0);
}

int64_t longest(const TokenLayout& layout) {
  return layout.count() > 0 ? layout.lengths().max().item<int64_t>() : 0;
}

// A zero like `like`, made once: a step of decoding has no kernel for it, which would stand between
// two that are launched early.
Tensor lasting_zero(const Tensor& like) {
  static std::mutex lock;
  static auto* const zeros = new std::map<std::pair<std::string, at::ScalarType>, Tensor>();
  const at::ScalarType dtype = wide_dtype(like.scalar_type());
  const std::lock_guard<std::mutex> guard(lock);
  const auto key = std::pair(like.device().str(), dtype);
  if (const auto found = zeros->find(key); found != zeros->end()) return found->second;
  // The memory of a graph that is being captured is that graph's alone.
  if (ops::is_capturing(like.device())) return at::zeros({}, like.options().dtype(dtype));
  const c10::InferenceMode normal(false);
  // The copy waits, so that every stream finds it there.
  return zeros->emplace(key, at::zeros({}, dtype).to(like.device())).first->second;
}

}  // namespace

AttentionImpl::AttentionImpl(const AttentionOptions& given)
    : SoftmaxAttention(resolve_switches("Attention", given)), options(given) {
  reset();
}

void AttentionImpl::reset() {
  register_projections(*this);
  register_outputs(*this);
  if (!UndrawnGuard::is_active()) reset_parameters();
}

// With a window, attention is forgetting_attention with nothing forgotten: torch's would want a
// mask of T x T. The op's heads have at most so many channels.
bool AttentionImpl::has_window_op() const {
  static_assert(kMaxAttentionHeadDim == kernels::attention::kMaxAttentionHeadDim);
  return switches_.window && switches_.head_dim <= kMaxAttentionHeadDim;
}

// Log forget gates [B, T, H] of zero, which take no memory.
Tensor AttentionImpl::nothing_forgotten(const Tensor& v) const {
  return at::zeros({}, v.options()).expand({v.size(0), v.size(1), switches_.num_heads});
}

Tensor AttentionImpl::attend(const Operands& x, const TokenLayout& layout) const {
  if (has_window_op()) {
    Operands ungated = x;
    ungated.log_f = nothing_forgotten(x.v);
    return attend_by_op(ungated, layout, /*prune=*/std::nullopt);
  }
  if (!layout.is_packed()) return scores(x.q, x.k, x.v, {});
  // Packed sequences are laid out as rows of a batch; reads the lengths on the host.
  const int64_t size = longest(layout);
  return packed(
      scores(padded(x.q, layout, size), padded(x.k, layout, size), padded(x.v, layout, size), {}),
      layout);
}

Tensor AttentionImpl::attend_state(const Tensor& q, const AttentionState& state,
                                   const TokenLayout& layout) const {
  if (has_window_op()) {
    return attend_state_by_op(q, state, nothing_forgotten(state.v), layout,
                              /*prune=*/std::nullopt);
  }
  const Tensor past = (state.lengths - layout.lengths()).unsqueeze(1);
  if (!layout.is_packed()) return scores(q, state.k, state.v, past + layout.steps());
  const int64_t size = longest(layout);
  const Tensor positions = past + at::arange(size, integers(q));
  return packed(scores(padded(q, layout, size), state.k, state.v, positions), layout);
}

Tensor AttentionImpl::attend_step(const Tensor& q, const AttentionState& state) const {
  if (switches_.head_dim > kMaxAttentionHeadDim) {
    return scores(q, state.k, state.v, state.lengths.to(torch::kLong).unsqueeze(1) - 1);
  }
  // The op reads what a sequence holds; torch's attention would read all that there is room for,
  // and a mask.
  const Tensor nothing =
      lasting_zero(state.k).expand({state.k.size(0), state.k.size(1), switches_.num_heads});
  return forgetting_attention_step(q.select(1, 0).to(state.k.scalar_type()), state.k, state.v,
                                   nothing, state.lengths, /*scale=*/std::nullopt, switches_.window)
      .unsqueeze(1);
}

// Attention of q [N, P, H, D] over k, v [N, S, Hkv, D]. positions [N, P]: of the queries, where the
// keys are a state's; undefined: queries and keys are the same tokens.
Tensor AttentionImpl::scores(const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& positions) const {
  OptionalTensor mask;
  if (positions.defined() || switches_.window) {
    const Tensor here =
        positions.defined() ? positions : at::arange(q.size(1), integers(q)).unsqueeze(0);
    const Tensor back = here.unsqueeze(-1) - at::arange(k.size(1), integers(q));
    mask = (back >= 0).unsqueeze(1);
    if (switches_.window) mask = *mask & (back < *switches_.window).unsqueeze(1);
  }
  return at::scaled_dot_product_attention(
             q.to(v.scalar_type()).transpose(1, 2), k.to(v.scalar_type()).transpose(1, 2),
             v.transpose(1, 2), mask, /*dropout_p=*/0.0, /*is_causal=*/!mask,
             /*scale=*/std::nullopt, /*enable_gqa=*/switches_.num_heads != switches_.num_kv_heads)
      .transpose(1, 2);
}

void AttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::Attention(dim=" << options.dim() << ", num_heads=" << switches_.num_heads
         << ", preset=" << options.preset() << ")";
}

}  // namespace tidegate::nn
