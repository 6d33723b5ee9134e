// Rotary positions, compiled once an instruction set (kernels/CMakeLists.txt): 16-bit data is
// widened and narrowed in registers, so that nothing is held beside x and y.

#include "kernels/common/cpu_types.h"
#include "kernels/rotary/cpu/rotary_kernels.h"

namespace tidegate::kernels::rotary::TIDEGATE_ISA {
namespace {

using namespace kernels::TIDEGATE_ISA;

/// R: the type of the angles, which is computed in; E: the data's.
template <class R, class E>
TIDEGATE_NOINLINE void turn_tokens(const RotaryParams& p, TokenRange tokens) {
  const int64_t half = p.half;
  const Vec<R> sign = splat(p.inverse ? R(-1) : R(1));
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    const int64_t b = token / p.time, t = token % p.time;
    const int64_t row = ((p.shared_angles ? 0 : b) * p.time + t) * half;
    const R* const cos = static_cast<const R*>(p.cos) + row;
    const R* const sin = static_cast<const R*>(p.sin) + row;
    for (int64_t head = 0; head < p.heads; ++head) {
      const E* const x = static_cast<const E*>(p.x.data) + b * p.x.stride_b + t * p.x.stride_t +
                         head * p.x.stride_h;
      E* const y =
          static_cast<E*>(p.y.data) + b * p.y.stride_b + t * p.y.stride_t + head * p.y.stride_h;
      for_each_vector<R>(half, [&](int64_t i, auto extent) {
        const Vec<R> low = load<R>(x + i, extent), high = load<R>(x + half + i, extent);
        const Vec<R> c = load<R>(cos + i, extent), s = sign * load<R>(sin + i, extent);
        store<R>(y + i, fma(low, c, -(high * s)), extent);
        store<R>(y + half + i, fma(high, c, low * s), extent);
      });
    }
  }
}

void turn(const RotaryParams& p, TokenRange tokens) {
  with_real_types(p.x.dtype, p.x.dtype, [&](auto r, auto e, auto) {
    turn_tokens<typename decltype(r)::Type, typename decltype(e)::Type>(p, tokens);
  });
}

}  // namespace

const RotaryKernels kRotaryKernels = {turn};

}  // namespace tidegate::kernels::rotary::TIDEGATE_ISA
