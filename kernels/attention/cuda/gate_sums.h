#pragma once

// Sums of gates over time, and the way back from gradients of scores to gradients of gates: two
// scans over time in float64, cut into chunks that run at the same time. Sums have a fixed order.

#include "kernels/attention/forgetting_attention_cuda.h"

namespace tidegate::kernels::attention {

/// Doubles for the totals of chunks of one scan.
int64_t gate_totals_count(const ForgettingAttentionParams& params);

/// Doubles that gate_sums needs: c, [B, Hq, Tk], then its scratch.
int64_t gate_sums_count(const ForgettingAttentionParams& params);

/// c_j = sum of log_f over a sequence's tokens 1 .. j, each at least kLeastLogGate. NaN stays.
cudaError_t gate_sums(const ForgettingAttentionParams& params, double* c, cudaStream_t stream);

/// dlog_f_u = sum over positions t >= u of (row sum of dS of the query at t, if there is one) -
/// (column sum of key t); zero for a sequence's first token. Sums are [B, Hq, Tq] and [B, Hq, Tk].
cudaError_t gate_gradients(const ForgettingAttentionBackwardParams& params, const double* row_sums,
                           const double* column_sums, double* totals, cudaStream_t stream);

}  // namespace tidegate::kernels::attention
