#pragma once

// The forward pass on tensor cores (tensor_forward.cuh): its plan and launch, and its units, one a
// dtype and class of head dimensions.

#include "kernels/attention/forgetting_attention_cuda.h"

namespace tidegate::kernels::attention {

struct TensorAttention;

/// Whether the tensor-core kernels take these inputs: 16-bit data, D a multiple of 8 from 16 on,
/// rows of q, k, v and o aligned to 16 bytes.
bool tensor_forward_fits(const ForgettingAttentionParams& params);
/// Whether rows of a 16-bit tensor are aligned to 16 bytes.
bool rows_aligned(const HeadSeries& t);

cudaError_t tensor_forward_plan(const ForgettingAttentionParams& params,
                                ForgettingAttentionPlan* plan);
cudaError_t tensor_forward(const ForgettingAttentionParams& params, cudaStream_t stream);

/// Bytes of work.score_bounds; see ScoreBounds. Zero for a pass that does not prune.
int64_t score_bounds_bytes(const ForgettingAttentionParams& params, bool of_queries);
/// Finds the keys' part of them, which is zero before; row_terms_kernel finds the queries'.
cudaError_t find_key_norms(const TensorAttention& work, cudaStream_t stream);

/// The classes of head dimensions: up to 96, and above.
enum class HeadDims : uint8_t { kSmall, kLarge };
constexpr int64_t kLargestSmallHeadDim = 96;

template <class Data, HeadDims kDims>
struct AttentionForwardUnit {
  /// Fills in work.tiles.
  static cudaError_t launch(TensorAttention work, cudaStream_t stream);
};

}  // namespace tidegate::kernels::attention
