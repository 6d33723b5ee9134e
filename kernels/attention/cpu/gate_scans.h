#pragma once

// Sums of gates over time, and the scan that turns sums over rows and columns of dS into dlog_f.

#include "kernels/attention/cpu/attention_tiles.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {
namespace {

/// A gate's logarithm, not less than kLeastLogGate; NaN stays NaN.
TIDEGATE_INLINE double held_log_gate(double log_f) {
  return log_f < kLeastLogGate ? kLeastLogGate : log_f;
}

/// log_f of one head, read and written as double.
template <class R, class G>
struct GateRows {
  G* first;
  int64_t step;

  GateRows(const HeadSeries& series, int64_t batch, int64_t begin, int64_t head) {
    const HeadRows<G> rows(series, batch, begin, head);
    first = rows.first;
    step = rows.step;
  }
  double at(int64_t token) const { return static_cast<double>(element<R>(first + token * step)); }
  void set(int64_t token, double value) const {
    set_element<R>(first + token * step, static_cast<R>(value));
  }
};

/// The first token's gate is in no difference of two sums, so c starts at zero behind it.
template <class R, class G>
TIDEGATE_NOINLINE void sum_gates(const ForgettingAttentionParams& params, const AttentionWork& work,
                                 const AttentionHead& head) {
  const GateRows<R, const G> gates(params.log_f, head.batch, head.key_begin, head.head);
  double* const c = gate_sums_of(params, work, head);
  double sum = 0;
  for (int64_t t = 0; t < head.keys; ++t) {
    if (t > 0) sum += held_log_gate(gates.at(t));
    c[t] = sum;
  }
}

/// dlog_f_u = sum over t >= u of (row sum - column sum). No pair lies around the first token's
/// gate.
template <class R, class G>
TIDEGATE_NOINLINE void scan_gate_gradient(const ForgettingAttentionBackwardParams& grads,
                                          const AttentionWork& work, const AttentionHead& head) {
  const ForgettingAttentionParams& params = grads.forward;
  const GateRows<R, G> to(grads.dlog_f, head.batch, head.key_begin, head.head);
  const double* rows = work.row_sums + query_index(params, work, head);
  const double* columns =
      work.column_sums + (head.batch * params.heads + head.head) * work.key_time + head.key_begin;
  const int64_t offset = head.keys - head.queries;
  double sum = 0;
  for (int64_t t = head.keys - 1; t >= 0; --t) {
    if (t - offset >= 0) sum += rows[t - offset];
    sum -= columns[t];
    to.set(t, t > 0 ? sum : 0);
  }
}

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
