#pragma once

// The gated linear unit's product: parameters and the CPU entry points. The CUDA entry points are
// in glu_cuda.h.

#include "kernels/norm/norm.h"

namespace tidegate::kernels::norm {

/// y = act(gate) * value, of rows x = [gate | value]; all in one dtype.
struct GluParams {
  int64_t batch = 0, time = 0, heads = 0, channels = 0;
  Activation activation = Activation::kSilu;
  HeadSeries x;  // [B, T, H, 2 * channels]
  HeadSeries y;  // [B, T, H, channels]
};

/// dx = [dgate | dvalue], from x and dy alone.
struct GluBackwardParams {
  GluParams forward;  // whose y is written again where it has data
  HeadSeries dy;      // [B, T, H, channels]
  HeadSeries dx;      // [B, T, H, 2 * channels]
};

void glu_cpu(const GluParams& params, const ParallelFor& parallel);
void glu_backward_cpu(const GluBackwardParams& params, const ParallelFor& parallel);

/// Merges the dimensions of rows as with_merged_rows of norms does (norm.h).
GluParams with_merged_rows(GluParams params);
GluBackwardParams with_merged_rows(GluBackwardParams params);

}  // namespace tidegate::kernels::norm
