// The driver of products of a few rows on the CPU: channels of the result over the caller's
// threads.

#include <algorithm>

#include "kernels/common/integers.h"
#include "kernels/product/cpu/product_kernels.h"

namespace tidegate::kernels::product {
namespace {

constexpr int64_t kWeights = 1 << 17;  // that are worth a thread
constexpr int64_t kChannels = 8;       // of a block, at least: whole tiles

}  // namespace

void few_rows_cpu(const FewRowsParams& params, const ParallelFor& parallel) {
  const ProductKernels& kernels = TIDEGATE_ACTIVE_KERNELS(kProductKernels);
  const int64_t worth = ceil_div(kWeights, std::max<int64_t>(params.inner * params.rows, 1));
  const int64_t each = ceil_div(worth, kChannels) * kChannels;
  if (params.outer <= each) {
    kernels.few_rows(params, 0, params.outer);
    return;
  }
  parallel.run(ceil_div(params.outer, each), [&](int64_t begin, int64_t end) {
    kernels.few_rows(params, begin * each, std::min(end * each, params.outer));
  });
}

}  // namespace tidegate::kernels::product
