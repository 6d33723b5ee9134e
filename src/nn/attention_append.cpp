#include "src/nn/attention_append.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/attention/append.h"
#include "src/nn/common.h"
#include "src/ops/launch.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/attention/append_cuda.h"
#endif

namespace tidegate::nn {

using torch::Tensor;

#ifdef TIDEGATE_WITH_CUDA

namespace {

constexpr int64_t kMostHeadDim = 256;

// Undefined tensors are none.
bool are_of(at::ScalarType dtype, std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    if (t.defined() && (t.scalar_type() != dtype || !ops::has_unit_rows(t))) return false;
  }
  return true;
}

template <typename T>
const T* data_of(const Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.const_data_ptr()) : nullptr;
}

Tensor weight_of(const NormImpl* norm) { return norm == nullptr ? Tensor() : norm->weight; }

}  // namespace

bool can_append_token(const Tensor& x, const AttentionState& state) {
  const auto dtype = state.k.scalar_type();
  return x.is_cuda() && x.scalar_type() == dtype && dtype != at::kDouble && x.size(0) > 0 &&
         state.k.size(3) <= kMostHeadDim && !at::autocast::is_autocast_enabled(at::kCUDA) &&
         are_of(dtype, {state.k, state.v}) && state.last_k.is_contiguous() &&
         state.last_v.is_contiguous() && state.lengths.is_contiguous() &&
         state.seen.is_contiguous();
}

Tensor append_token(const AppendedToken& token, const AttentionState& state, int64_t heads) {
  const auto dtype = state.k.scalar_type();
  const TokenGate& gate = token.gate;
  const Tensor q_weight = weight_of(token.q_norm), k_weight = weight_of(token.k_norm);
  if (!are_of(dtype, {token.projected, token.mixes, q_weight, k_weight, gate.logits}) ||
      !are_of(at::kFloat, {gate.bias, gate.gamma, state.gates})) {
    return {};
  }
  kernels::attention::AttentionAppendParams p;
  p.batch = state.k.size(0);
  p.heads = heads;
  p.key_heads = state.k.size(2);
  p.head_dim = state.k.size(3);
  p.capacity = state.capacity();
  p.dtype = ops::kernel_dtype(dtype);
  p.projected = token.projected.const_data_ptr();
  p.stride_projected = token.projected.stride(0);
  if (token.mixes.defined()) {
    p.mixes = token.mixes.const_data_ptr();
    p.stride_mixes = token.mixes.stride(0);
    p.last_k = state.last_k.data_ptr();
    p.last_v = state.last_v.data_ptr();
  }
  p.q_weight = data_of<void>(q_weight);
  p.k_weight = data_of<void>(k_weight);
  if (token.q_norm != nullptr) {
    p.weights_a_head = token.q_norm->options.heads() > 1 || token.k_norm->options.heads() > 1;
    p.eps = token.q_norm->options.eps();
  }
  p.theta = token.theta;
  p.gate_heads = state.gates.size(2);
  if (gate.logits.defined()) {
    p.gate_logits = gate.logits.const_data_ptr();
    p.stride_gate_logits = gate.logits.stride(0);
  }
  p.gate_bias = data_of<float>(gate.bias);
  p.gamma = data_of<float>(gate.gamma);
  const Tensor q = at::empty({p.batch, heads, p.head_dim}, token.projected.options());
  p.q = q.data_ptr();
  p.k = ops::head_series(state.k);
  p.v = ops::head_series(state.v);
  p.log_f = ops::head_series(state.gates.unsqueeze(-1));
  p.lengths = state.lengths.data_ptr<int32_t>();
  p.seen = state.seen.data_ptr<int64_t>();
  const c10::DeviceGuard guard(q.device());
  ops::check_launch("attention step", "launch",
                    kernels::attention::attention_append_cuda(p, ops::current_stream(q.device())));
  return q;
}

#else

bool can_append_token(const Tensor&, const AttentionState&) { return false; }
Tensor append_token(const AppendedToken&, const AttentionState&, int64_t) { return {}; }

#endif

}  // namespace tidegate::nn
