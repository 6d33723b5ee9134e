#pragma once

// From params to the code for their types.

#include "kernels/gla/cpu/key_block.h"
#include "kernels/gla/cpu/value_block.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {
namespace {

/// body(tags of the types of state, data and gate), with subnormal numbers taken as zeros.
template <class Body>
void with_types_of(const GlaParams& params, Body body) {
  const SubnormalsAreZero guard;
  with_real_types(params.q.dtype, params.gate.dtype, body);
}

void gla_forward_block(const GlaParams& params, const GlaBlock& block) {
  with_types_of(params, [&](auto state, auto data, auto gate) {
    ValueBlock<typename decltype(state)::Type, typename decltype(data)::Type,
               typename decltype(gate)::Type>::forward(params, block);
  });
}

void gla_backward_values_block(const GlaBackwardParams& params, const GlaBlock& block) {
  with_types_of(params.forward, [&](auto state, auto data, auto gate) {
    ValueBlock<typename decltype(state)::Type, typename decltype(data)::Type,
               typename decltype(gate)::Type>::backward(params, block);
  });
}

void gla_backward_keys_block(const GlaBackwardParams& params, const GlaBlock& block) {
  with_types_of(params.forward, [&](auto state, auto data, auto gate) {
    KeyBlock<typename decltype(state)::Type, typename decltype(data)::Type,
             typename decltype(gate)::Type>::run(params, block);
  });
}

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
