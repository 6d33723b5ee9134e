// Drivers of cross-entropy on the CPU.

#include <algorithm>

#include "kernels/common/integers.h"
#include "kernels/loss/cpu/loss_kernels.h"
#include "kernels/loss/cross_entropy.h"

namespace tidegate::kernels::loss {
namespace {

constexpr int64_t kElements = 1 << 14;  // that are worth a thread

template <class Real>
void sum_losses(const LossSumParams& p) {
  const Real* const losses = static_cast<const Real*>(p.losses);
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = 0; row < p.rows; ++row) {
    sum += losses[row];
    count += p.labels[row] != p.ignored;
  }
  const double scale = p.mean ? 1.0 / static_cast<double>(std::max<int64_t>(count, 1)) : 1.0;
  *static_cast<Real*>(p.loss) = static_cast<Real>(sum * scale);
  *static_cast<Real*>(p.scale) = static_cast<Real>(scale);
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyParams& params, const ParallelFor& parallel) {
  const LossKernels& kernels = TIDEGATE_ACTIVE_KERNELS(kLossKernels);
  const int64_t each = std::max<int64_t>(1, kElements / params.columns);
  parallel.run(ceil_div(params.rows, each), [&](int64_t begin, int64_t end) {
    kernels.cross_entropy_rows(params, begin * each, std::min(end * each, params.rows));
  });
}

void loss_sum_cpu(const LossSumParams& params) {
  if (params.dtype == DType::kFloat64) {
    sum_losses<double>(params);
  } else {
    sum_losses<float>(params);
  }
}

}  // namespace tidegate::kernels::loss
