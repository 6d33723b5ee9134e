#pragma once

// Chooses the code for the types that params have.

#include "kernels/attention/cpu/backward_tile.h"
#include "kernels/attention/cpu/forward_tile.h"
#include "kernels/attention/cpu/step_part.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {
namespace {

/// body(tags of the types of state, data and gate), with subnormal numbers taken as zeros.
template <class Body>
void with_attention_types(DType data, DType gate, Body body) {
  const SubnormalsAreZero guard;
  with_real_types(data, gate, body);
}
/// Calls body(state, element) where the gate's type does not matter.
template <class Body>
void with_data_types(DType data, Body body) {
  with_attention_types(data, data, [&](auto state, auto element, auto) { body(state, element); });
}
template <class Tag>
using TypeOf = typename Tag::Type;

void attention_gate_sums(const ForgettingAttentionParams& params, const AttentionWork& work,
                         const AttentionHead& head) {
  with_attention_types(params.q.dtype, params.log_f.dtype, [&](auto state, auto, auto gate) {
    sum_gates<TypeOf<decltype(state)>, TypeOf<decltype(gate)>>(params, work, head);
  });
}

void attention_key_norms(const ForgettingAttentionParams& params, const AttentionWork& work,
                         const AttentionHead& head) {
  with_data_types(params.q.dtype, [&](auto state, auto data) {
    norm_keys<TypeOf<decltype(state)>, TypeOf<decltype(data)>>(params, work, head);
  });
}

void attention_forward(const ForgettingAttentionParams& params, const AttentionWork& work,
                       const AttentionItem& item) {
  with_data_types(params.q.dtype, [&](auto state, auto data) {
    ForwardTile<TypeOf<decltype(state)>, TypeOf<decltype(data)>>::run(params, work, item);
  });
}

void attention_prepare(const ForgettingAttentionBackwardParams& grads, const AttentionWork& work,
                       const AttentionItem& item) {
  with_data_types(grads.forward.q.dtype, [&](auto state, auto data) {
    BackwardTile<TypeOf<decltype(state)>, TypeOf<decltype(data)>>::prepare(grads, work, item);
  });
}

void attention_backward_keys(const ForgettingAttentionBackwardParams& grads,
                             const AttentionWork& work, const AttentionItem& item,
                             bool with_queries) {
  with_data_types(grads.forward.q.dtype, [&](auto state, auto data) {
    BackwardTile<TypeOf<decltype(state)>, TypeOf<decltype(data)>>::keys(grads, work, item,
                                                                        with_queries);
  });
}

void attention_backward_queries(const ForgettingAttentionBackwardParams& grads,
                                const AttentionWork& work, const AttentionItem& item) {
  with_data_types(grads.forward.q.dtype, [&](auto state, auto data) {
    BackwardTile<TypeOf<decltype(state)>, TypeOf<decltype(data)>>::queries(grads, work, item);
  });
}

void attention_finish(const ForgettingAttentionBackwardParams& grads, const AttentionWork& work,
                      const AttentionHead& head) {
  const ForgettingAttentionParams& params = grads.forward;
  with_attention_types(params.q.dtype, params.log_f.dtype, [&](auto state, auto data, auto gate) {
    using R = TypeOf<decltype(state)>;
    scan_gate_gradient<R, TypeOf<decltype(gate)>>(grads, work, head);
    BackwardTile<R, TypeOf<decltype(data)>>::write_dq(grads, work, head);
  });
}

int64_t attention_first_step_key(const ForgettingAttentionStepParams& params, int64_t batch,
                                 int64_t key_head, int64_t oldest, int64_t length) {
  int64_t first = length;
  with_data_types(params.q.dtype, [&](auto state, auto data) {
    first = StepPart<TypeOf<decltype(state)>, TypeOf<decltype(data)>>::first_key(
        params, batch, key_head, oldest, length);
  });
  return first;
}

void attention_step(const ForgettingAttentionStepParams& params, const StepItem& item) {
  with_data_types(params.q.dtype, [&](auto state, auto data) {
    StepPart<TypeOf<decltype(state)>, TypeOf<decltype(data)>>::run(params, item);
  });
}

void attention_combine_step(const ForgettingAttentionStepParams& params, int64_t batch,
                            int64_t head, const void* partials, int64_t stride, int64_t parts) {
  with_data_types(params.q.dtype, [&](auto state, auto data) {
    using R = TypeOf<decltype(state)>;
    StepPart<R, TypeOf<decltype(data)>>::combine(params, batch, head,
                                                 static_cast<const R*>(partials), stride, parts);
  });
}

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
