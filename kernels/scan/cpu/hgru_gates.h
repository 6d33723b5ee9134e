#pragma once

// What HGRN's real and complex recurrences share: activation, per-channel constants, and the rows
// that a backward pass reads and writes.

#include <math.h>

#include "kernels/common/cpu_gates.h"
#include "kernels/scan/cpu/block_rows.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

/// act(c) and its derivative, from the sigmoids of c.
template <class R, bool kSilu>
TIDEGATE_INLINE Vec<R> activated(Vec<R> c, const Sigmoids<R>& s) {
  return kSilu ? c * s.pos : c;
}
template <class R, bool kSilu>
TIDEGATE_INLINE Vec<R> activation_slope(Vec<R> c, const Sigmoids<R>& s) {
  return kSilu ? s.pos * fma(c, s.neg, splat(R(1))) : splat(R(1));
}

/// Per-channel constants of a block.
template <class R, bool kIsComplex>
struct HgruChannels {
  RowBuffer<R> gamma;
  RowBuffer<R> one_minus_gamma;
  RowBuffer<R> cos_theta;
  RowBuffer<R> sin_theta;

  void fill(const HgruParams& params, const ScanBlock& block) {
    gamma.fill(state_row<R>(params.gamma, 0, 0, block.channel), block.width, R(0));
    for_each_vector<R>(block.width,
                       [&](int64_t j, auto) { one_minus_gamma.set(j, R(1) - gamma.at(j)); });
    if constexpr (kIsComplex) {
      const R* theta = state_row<R>(params.theta, 0, 0, block.channel);
      cos_theta.fill(nullptr, block.width, R(1));
      sin_theta.fill(nullptr, block.width, R(0));
      for (int64_t j = 0; j < block.width; ++j) {
        cos_theta.values[j] = static_cast<R>(::cos(static_cast<double>(theta[j])));
        sin_theta.values[j] = static_cast<R>(::sin(static_cast<double>(theta[j])));
      }
    }
  }
};

/// The rows of a backward pass at one step, and what it keeps from step to step in either form.
template <class R, class E, class G, bool kIsComplex>
struct HgruBackwardRows {
  RowCursor<const E> c, h, dh;
  RowCursor<const G> f;
  RowCursor<E> dc;
  RowCursor<G> df;
  HgruChannels<R, kIsComplex> channels;
  TimeSum<R> dgamma;
  int64_t width;
  bool stream;

  void start(const HgruBackwardParams& params, const ScanBlock& block) {
    const HgruParams& forward = params.forward;
    const bool reverse = forward.layout.reverse;
    c = backward_cursor<const E>(forward.c, block, reverse);
    f = backward_cursor<const G>(forward.f, block, reverse);
    h = backward_cursor<const E>(forward.h, block, reverse);
    dh = backward_cursor<const E>(params.dh, block, reverse);
    dc = backward_cursor<E>(params.dc, block, reverse);
    df = backward_cursor<G>(params.df, block, reverse);
    channels.fill(forward, block);
    dgamma.clear(block.width);
    width = block.width;
    stream = block.stream;
  }
  /// All but h, which is one step ahead: a step reads h_{t-1}.
  TIDEGATE_INLINE void advance() {
    c.advance(), f.advance(), dh.advance(), dc.advance(), df.advance();
  }
};

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
