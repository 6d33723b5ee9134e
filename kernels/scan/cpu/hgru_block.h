#pragma once

// HGRN's recurrence over one block of channels, for every dtype.

#include "kernels/scan/cpu/hgru_complex_block.h"
#include "kernels/scan/cpu/hgru_real_block.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

template <class Body>
void with_hgru_types(const HgruParams& params, Body body) {
  with_real_types(params.c.dtype, params.f.dtype, [&](auto r, auto e, auto g) {
    using R = typename decltype(r)::Type;
    using E = typename decltype(e)::Type;
    using G = typename decltype(g)::Type;
    const bool silu = params.activation == Activation::kSilu;
    if (params.theta != nullptr) {
      silu ? body(HgruComplexBlock<R, E, G, true>{}) : body(HgruComplexBlock<R, E, G, false>{});
    } else {
      silu ? body(HgruRealBlock<R, E, G, true>{}) : body(HgruRealBlock<R, E, G, false>{});
    }
  });
}

void hgru_forward_block(const HgruParams& params, const ScanBlock& block) {
  with_hgru_types(params, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::forward(params, block);
    if (block.stream) finish_streaming();
  });
}

void hgru_backward_block(const HgruBackwardParams& params, const ScanBlock& block) {
  with_hgru_types(params.forward, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::backward(params, block);
    if (block.stream) finish_streaming();
  });
}

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
