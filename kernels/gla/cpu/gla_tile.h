#pragma once

// From params to the code for their types.

#include "kernels/gla/cpu/key_tile.h"
#include "kernels/gla/cpu/value_tile.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {
namespace {

/// body(tags of the types of state, data and gate), with subnormal numbers taken as zeros.
template <class Body>
void with_types_of(const GlaParams& params, Body body) {
  const SubnormalsAreZero guard;
  with_real_types(params.q.dtype, params.gate.dtype, body);
}

void gla_forward_tile(const GlaParams& params, const GlaTile& tile) {
  with_types_of(params, [&](auto state, auto data, auto gate) {
    ValueTile<typename decltype(state)::Type, typename decltype(data)::Type,
              typename decltype(gate)::Type>::forward(params, tile);
  });
}

void gla_backward_values_tile(const GlaBackwardParams& params, const GlaTile& tile) {
  with_types_of(params.forward, [&](auto state, auto data, auto gate) {
    ValueTile<typename decltype(state)::Type, typename decltype(data)::Type,
              typename decltype(gate)::Type>::backward(params, tile);
  });
}

void gla_backward_keys_tile(const GlaBackwardParams& params, const GlaTile& tile) {
  with_types_of(params.forward, [&](auto state, auto data, auto gate) {
    KeyTile<typename decltype(state)::Type, typename decltype(data)::Type,
            typename decltype(gate)::Type>::run(params, tile);
  });
}

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
