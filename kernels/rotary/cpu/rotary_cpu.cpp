// Rotary positions on the CPU: one pass, bound by memory, so what every x86-64 has is enough.

#include <algorithm>

#include "kernels/rotary/rotary.h"

namespace tidegate::kernels::rotary {
namespace {

constexpr int64_t kElements = 1 << 15;  // that are worth a thread

template <class Real>
void turn_tokens(const RotaryParams& p, int64_t begin, int64_t end) {
  const int64_t half = p.half;
  const Real sign = p.inverse ? Real(-1) : Real(1);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / p.time, t = token % p.time;
    const int64_t row = ((p.shared_angles ? 0 : b) * p.time + t) * half;
    const Real* const cos = static_cast<const Real*>(p.cos) + row;
    const Real* const sin = static_cast<const Real*>(p.sin) + row;
    for (int64_t head = 0; head < p.heads; ++head) {
      const Real* const x = static_cast<const Real*>(p.x.data) + b * p.x.stride_b +
                            t * p.x.stride_t + head * p.x.stride_h;
      Real* const y =
          static_cast<Real*>(p.y.data) + b * p.y.stride_b + t * p.y.stride_t + head * p.y.stride_h;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const Real low = x[i], high = x[half + i], s = sign * sin[i];
        y[i] = low * cos[i] - high * s;
        y[half + i] = high * cos[i] + low * s;
      }
    }
  }
}

}  // namespace

void rotary_cpu(const RotaryParams& params, const ParallelFor& parallel) {
  const int64_t tokens = params.batch * params.time;
  const int64_t each = std::max<int64_t>(1, kElements / (2 * params.half * params.heads + 1));
  parallel.run((tokens + each - 1) / each, [&](int64_t begin, int64_t end) {
    begin *= each;
    end = std::min(end * each, tokens);
    if (params.x.dtype == DType::kFloat64) {
      turn_tokens<double>(params, begin, end);
    } else {
      turn_tokens<float>(params, begin, end);
    }
  });
}

}  // namespace tidegate::kernels::rotary
