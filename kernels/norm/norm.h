#pragma once

// Norms of rows: parameters, plan and the CPU entry points. The CUDA entry points are in
// norm_cuda.h.

#include <cstdint>

#include "kernels/common/parallel_for.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::norm {

enum class NormKind : uint8_t { kLayer, kRms };

/// What a gate's logits pass through.
enum class Activation : uint8_t { kNone, kSigmoid, kSilu };

/// The rows of [batch, time, heads, channels], each normed by itself:
///
///   u = x + addend, rounded to x's dtype, or act(gate) * x, or x
///   y = (u - mean) / sqrt(mean((u - mean)^2) + eps) * weight + bias      mean: 0 for kRms
///   y *= act(gate), where the gate comes after
///
/// There is an addend or a gate, not both. `Data` below is the dtype of y, `Stream` that of x: the
/// same, or float32 beside 16-bit data, where there is no gate.
struct NormParams {
  int64_t batch = 0, time = 0, heads = 0, channels = 0;
  NormKind kind = NormKind::kRms;
  Activation activation = Activation::kSilu;
  bool gate_first = false;
  double eps = 0;
  HeadSeries x;       // Stream
  HeadSeries addend;  // Data, no data where there is none
  HeadSeries gate;    // Data, no data where there is none
  HeadSeries y;       // Data
  HeadSeries sum;     // Stream: x + addend, written where there is an addend
  // [channels], or [weight_heads, channels] of which row r takes row r % weight_heads; in Data or
  // in the state's dtype; null where there is none.
  const void* weight = nullptr;
  const void* bias = nullptr;
  DType weight_dtype = DType::kFloat32, bias_dtype = DType::kFloat32;
  int64_t weight_heads = 1;
};

/// How the backward pass is cut up. It depends on shapes, strides, alignment and the device alone.
struct NormBackwardPlan {
  int64_t partials = 0;         // P, rows of partial sums of dweight and dbias
  int64_t workspace_bytes = 0;  // of scratch memory
  bool is_plain = false;        // CUDA: by the kernels for any size
};

/// `forward`: its x is what was normed (the sum where there was an addend, which then is none
/// here). forward.y is written again where it has data, and otherwise only its dtype counts;
/// forward.sum is not looked at.
struct NormBackwardParams {
  NormParams forward;
  HeadSeries dy;       // Data
  HeadSeries dsum;     // Stream: what else reaches x; no data where there is nothing
  HeadSeries dx;       // Stream
  HeadSeries daddend;  // Data: dx rounded, no data where nobody asks for it
  HeadSeries dgate;    // Data, where there is a gate
  // [P, weight_heads * channels] in the state's dtype; null where nobody asks for them.
  void* dweight = nullptr;
  void* dbias = nullptr;
  NormBackwardPlan plan;
  void* workspace = nullptr;
};

/// Reads and writes everything once.
void norm_cpu(const NormParams& params, const ParallelFor& parallel);

NormBackwardPlan norm_backward_plan_cpu(const NormBackwardParams& params);
void norm_backward_cpu(const NormBackwardParams& params, const ParallelFor& parallel);

// ---- Rows ----

constexpr int64_t row_count(const NormParams& p) { return p.batch * p.time * p.heads; }

/// Merges the dimensions of rows that lie so in all tensors that one stride reaches them, so that
/// to find a row takes as few divisions as can be. The order of the rows stays.
NormParams with_merged_rows(NormParams params);
NormBackwardParams with_merged_rows(NormBackwardParams params);

}  // namespace tidegate::kernels::norm
