// Rotary positions on the CPU: one pass, bound by memory, over the caller's threads.

#include <algorithm>

#include "kernels/common/integers.h"
#include "kernels/rotary/cpu/rotary_kernels.h"

namespace tidegate::kernels::rotary {
namespace {

constexpr int64_t kElements = 1 << 15;  // that are worth a thread

}  // namespace

void rotary_cpu(const RotaryParams& params, const ParallelFor& parallel) {
  const int64_t tokens = params.batch * params.time;
  const int64_t each = std::max<int64_t>(1, kElements / (2 * params.half * params.heads + 1));
  parallel.run(ceil_div(tokens, each), [&](int64_t begin, int64_t end) {
    TIDEGATE_ACTIVE_KERNELS(kRotaryKernels)
        .turn(params, TokenRange{begin * each, std::min(end * each, tokens)});
  });
}

}  // namespace tidegate::kernels::rotary
