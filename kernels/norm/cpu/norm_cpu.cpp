// Norms of rows and the gated linear unit's product on the CPU: blocks of rows over the caller's
// threads. How rows are cut depends on their number alone, and so do the sums over them.

#include <algorithm>

#include "kernels/common/integers.h"
#include "kernels/norm/cpu/norm_kernels.h"

namespace tidegate::kernels::norm {
namespace {

constexpr int64_t kElements = 1 << 14;   // that are worth a thread
constexpr int64_t kRowsOfAPartial = 64;  // at least: short sums keep their digits
constexpr int64_t kMostPartials = 1 << 10;

/// body(range) for the rows in blocks of `each`.
template <class Body>
void for_row_blocks(int64_t rows, int64_t each, const ParallelFor& parallel, Body body) {
  parallel.run(ceil_div(rows, each), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      body(block, RowRange{block * each, std::min((block + 1) * each, rows)});
    }
  });
}

int64_t rows_worth_a_thread(int64_t channels) {
  return std::max<int64_t>(1, kElements / std::max<int64_t>(channels, 1));
}

/// Rows of one partial sum: whole tokens, so that each holds all heads.
int64_t rows_of_a_partial(const NormParams& p) {
  const int64_t tokens = row_count(p) / p.weight_heads;
  const int64_t wanted =
      std::max(ceil_div(kRowsOfAPartial, p.weight_heads), ceil_div(tokens, kMostPartials));
  return wanted * p.weight_heads;
}

}  // namespace

void norm_cpu(const NormParams& params, const ParallelFor& parallel) {
  const NormParams p = with_merged_rows(params);
  for_row_blocks(
      row_count(p), rows_worth_a_thread(p.channels), parallel,
      [&](int64_t, RowRange rows) { TIDEGATE_ACTIVE_KERNELS(kNormKernels).norm(p, rows); });
}

NormBackwardPlan norm_backward_plan_cpu(const NormBackwardParams& params) {
  NormBackwardPlan plan;
  plan.partials = ceil_div(row_count(params.forward), rows_of_a_partial(params.forward));
  return plan;
}

void norm_backward_cpu(const NormBackwardParams& params, const ParallelFor& parallel) {
  const NormBackwardParams p = with_merged_rows(params);
  for_row_blocks(row_count(p.forward), rows_of_a_partial(p.forward), parallel,
                 [&](int64_t block, RowRange rows) {
                   TIDEGATE_ACTIVE_KERNELS(kNormKernels).norm_backward(p, rows, block);
                 });
}

void glu_cpu(const GluParams& params, const ParallelFor& parallel) {
  const GluParams p = with_merged_rows(params);
  for_row_blocks(
      p.batch * p.time * p.heads, rows_worth_a_thread(p.channels), parallel,
      [&](int64_t, RowRange rows) { TIDEGATE_ACTIVE_KERNELS(kNormKernels).glu(p, rows); });
}

void glu_backward_cpu(const GluBackwardParams& params, const ParallelFor& parallel) {
  const GluBackwardParams p = with_merged_rows(params);
  const GluParams& f = p.forward;
  for_row_blocks(
      f.batch * f.time * f.heads, rows_worth_a_thread(f.channels), parallel,
      [&](int64_t, RowRange rows) { TIDEGATE_ACTIVE_KERNELS(kNormKernels).glu_backward(p, rows); });
}

}  // namespace tidegate::kernels::norm
