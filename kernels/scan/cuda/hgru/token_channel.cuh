#pragma once

// One channel of a step of HGRN's recurrence in 16-bit data, for the kernels of a token.

#include "kernels/common/cuda/gates.cuh"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

using TokenMath = GateMath<float, true>;

/// after = lambda before exp(i theta) + (1 - lambda) in, of both parts where the state is complex;
/// f: the logit of lambda, whose lower bound is gamma; `in` before its activation.
template <int kParts>
__device__ __forceinline__ void step_channel(Activation activation, float f, float gamma,
                                             float cosine, float sine,
                                             const float (&before)[kParts],
                                             const float (&in)[kParts], float (&after)[kParts]) {
  const Sigmoids<float> s = sigmoids<TokenMath>(f);
  const float lambda = forget_gate(gamma, s), enters = (1.0f - gamma) * s.neg;
  float turned[kParts];
  turned[0] = before[0];
  if constexpr (kParts == 2) {
    turned[0] = fmaf(cosine, before[0], -(sine * before[1]));
    turned[1] = fmaf(cosine, before[1], sine * before[0]);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float x = in[part];
    const float entering = activation == Activation::kSilu ? x * sigmoids<TokenMath>(x).pos : x;
    after[part] = fmaf(lambda, turned[part], enters * entering);
  }
}

}  // namespace tidegate::kernels::scan
