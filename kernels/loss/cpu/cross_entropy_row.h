#pragma once

// Cross-entropy of a row of logits: its maximum, its exponentials in its own place, its gradient.
// A row is read from memory once and then lies in the second-level cache.

#include "kernels/common/cpu_simd.h"
#include "kernels/common/cpu_types.h"
#include "kernels/loss/cross_entropy.h"

namespace tidegate::kernels::loss::TIDEGATE_ISA {
namespace {

using namespace ::tidegate::kernels::TIDEGATE_ISA;  // NOLINT: the vectors of this instruction set

TIDEGATE_INLINE float logarithm(float x) { return __builtin_logf(x); }
TIDEGATE_INLINE double logarithm(double x) { return __builtin_log(x); }

/// The vectors of a row, four at a time: sums and maxima have as many chains, which hide the
/// latency of their additions and make a sum of 50,000 terms four times shorter.
constexpr int kChains = 4;

/// body(j, extent, chain) for the vectors that cover [0, count).
template <class R, class Body>
TIDEGATE_INLINE void for_each_chained(int64_t count, Body body) {
  constexpr int64_t kStep = kChains * kLanes<R>;
  int64_t j = 0;
  for (; j + kStep <= count; j += kStep) {
    for (int chain = 0; chain < kChains; ++chain) body(j + chain * kLanes<R>, Whole{}, chain);
  }
  for (; j + kLanes<R> <= count; j += kLanes<R>) body(j, Whole{}, 0);
  if (j < count) body(j, Part{static_cast<int>(count - j)}, 0);
}

template <class R>
TIDEGATE_INLINE R sum_of(const Vec<R> (&chains)[kChains]) {
  const Vec<R> all = (chains[0] + chains[1]) + (chains[2] + chains[3]);
  R sum = 0;
  for (int i = 0; i < kLanes<R>; ++i) sum += all[i];
  return sum;
}

template <class R>
TIDEGATE_INLINE R max_of(const Vec<R> (&chains)[kChains]) {
  R max = chains[0][0];
  for (const Vec<R>& chain : chains) {
    for (int i = 0; i < kLanes<R>; ++i) max = chain[i] > max ? chain[i] : max;
  }
  return max;
}

/// What the first pass over a row finds. A NaN may be lost in the maximum; the exponentials have it
/// again.
template <class R>
struct RowSums {
  R max;
  R total;  // sum of the logits
};

/// Adds the bias, where there is one, to the row itself.
template <class R>
TIDEGATE_INLINE RowSums<R> read_row(R* z, const R* bias, int64_t vocab) {
  Vec<R> max[kChains], total[kChains];
  for (int chain = 0; chain < kChains; ++chain) {
    max[chain] = splat(-static_cast<R>(__builtin_inf()));
    total[chain] = Vec<R>{};
  }
  for_each_chained<R>(vocab, [&](int64_t j, auto extent, int chain) {
    Vec<R> v = load<R>(z + j, extent);
    if (bias != nullptr) {
      v += load<R>(bias + j, extent);
      store<R>(z + j, v, extent);
    }
    total[chain] += v;
    if constexpr (!decltype(extent)::kIsWhole) {  // the lanes past the row are zeros
      for (int i = extent.count; i < kLanes<R>; ++i) v[i] = v[0];
    }
    max[chain] = v > max[chain] ? v : max[chain];
  });
  return {max_of<R>(max), sum_of<R>(total)};
}

/// sum_j exp(z_j - max); with `keep` the row becomes its terms.
template <class R, bool keep>
TIDEGATE_INLINE R exponentiate(R* z, R max, int64_t vocab) {
  Vec<R> sum[kChains] = {};
  for_each_chained<R>(vocab, [&](int64_t j, auto extent, int chain) {
    Vec<R> e = exp_of_nonpositive(load<R>(z + j, extent) - max);
    if constexpr (keep) store<R>(z + j, e, extent);
    if constexpr (!decltype(extent)::kIsWhole) {
      for (int i = extent.count; i < kLanes<R>; ++i) e[i] = 0;
    }
    sum[chain] += e;
  });
  return sum_of<R>(sum);
}

template <class R>
TIDEGATE_INLINE void fill(R* z, R value, int64_t count) {
  for_each_vector<R>(count, [&](int64_t j, auto extent) { store<R>(z + j, splat(value), extent); });
}

/// Exponentials of a row, exp(z_j - max), become its gradient: times `factor`, less `shift`.
template <class R>
TIDEGATE_INLINE void scale_row(R* z, R factor, R shift, int64_t vocab) {
  for_each_vector<R>(vocab, [&](int64_t j, auto extent) {
    store<R>(z + j, fma(load<R>(z + j, extent), splat(factor), splat(-shift)), extent);
  });
}

/// Returns the row's loss.
template <class R>
TIDEGATE_NOINLINE R cross_entropy_row(const CrossEntropyParams& p, int64_t row) {
  R* const z = static_cast<R*>(p.logits) + row * p.stride;
  const int64_t label = p.labels[row];
  if (p.gradient) fill(z + p.vocab, R(0), p.columns - p.vocab);
  if (label == p.ignored) {
    if (p.gradient) fill(z, R(0), p.vocab);
    return 0;
  }
  const RowSums<R> sums = read_row<R>(z, static_cast<const R*>(p.bias), p.vocab);
  if (label < 0 || label >= p.vocab) {
    if (p.gradient) fill(z, static_cast<R>(__builtin_nan("")), p.vocab);
    return static_cast<R>(__builtin_nan(""));
  }
  const R below_max = sums.max - z[label];
  const R sum = p.gradient ? exponentiate<R, true>(z, sums.max, p.vocab)
                           : exponentiate<R, false>(z, sums.max, p.vocab);
  const R log_sum = logarithm(sum), lse = sums.max + log_sum;
  const R smooth = static_cast<R>(p.label_smoothing), z_loss = static_cast<R>(p.z_loss);
  if (p.gradient) {
    const R g = p.row_gradient == nullptr ? R(1) : static_cast<const R*>(p.row_gradient)[row];
    const R each = g * smooth / static_cast<R>(p.vocab);
    scale_row<R>(z, g * (1 + 2 * z_loss * lse) / sum, each, p.vocab);
    z[label] -= g * (1 - smooth);
  }
  // Next to the maximum: lse - z_y would lose the digits of a small loss.
  R loss = log_sum + (1 - smooth) * below_max + z_loss * lse * lse;
  if (smooth != 0) loss += smooth * (sums.max - sums.total / static_cast<R>(p.vocab));
  return loss;
}

template <class R>
TIDEGATE_INLINE void rows_of(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const R loss = cross_entropy_row<R>(p, row);
    if (p.loss != nullptr) static_cast<R*>(p.loss)[row] = loss;
  }
}

void cross_entropy_rows(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  if (p.dtype == DType::kFloat64) {
    rows_of<double>(p, begin, end);
  } else {
    rows_of<float>(p, begin, end);
  }
}

}  // namespace
}  // namespace tidegate::kernels::loss::TIDEGATE_ISA
