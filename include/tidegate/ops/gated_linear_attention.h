#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tidegate {

/// Gated linear attention (arXiv 2312.06635, eq. 3; HGRN2, arXiv 2404.07904, is a case of it), for
/// every head:
///
///   S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,   o_t = scale * q_t^T S_t,   S_{-1} = h0
///
/// q, k:  [B, T, H, K]; float32, float64, bfloat16 or float16. K and V from 1 to 512.
/// v:     [B, T, H, V] in q's dtype.
/// log_f: [B, T, H, K] natural logarithms of the decays, or [B, T, H, 1] for one gate a head; at
///        most 0, down to -infinity (a decay of zero); q's dtype, or float32 for 16-bit q.
/// h0:    [N, H, K, V]; zero when absent; float32 (float64 for float64) or q's dtype.
/// scale: of the output; 1 (other libraries default to K^-0.5).
/// reverse: scan each sequence from its last token; h0 enters after the last token and the final
///        state is the first token's.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to T: N sequences packed along time, with
///        B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to q's device
///        when it is on the CPU (an error while a CUDA graph is captured).
///
/// Returns (o, final state): o [B, T, H, V] in q's dtype, contiguous; the state [N, H, K, V] in
/// float32 (float64 for float64), which can be passed back as h0. At T = 0 it is a copy of h0.
/// N = B without cu_seqlens.
///
/// Exact for any mixture of decays: no clamp, no overflow, no slow path. Any strides with a unit
/// last stride are read in place, but 16-bit rows on CUDA that tensor cores do not take (backward
/// unaligned ones, and sizes that are no multiples of 16) are copied first. Accumulates in float32
/// (float64 for float64). Bitwise deterministic. Differentiable once in q, k, v, log_f and h0
/// through both results; training keeps the inputs only and computes the states again. Throws
/// c10::Error, naming op, argument, expected and given, for shapes, dtypes or devices other than
/// these; with TIDEGATE_DEBUG=1 also for log_f above 0 and for cu_seqlens on a GPU whose values do
/// not fit. Cost O(B T H K V).
std::tuple<at::Tensor, at::Tensor> gated_linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    const std::optional<at::Tensor>& h0 = std::nullopt, double scale = 1.0, bool reverse = false,
    const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// One token of gated_linear_attention, for decoding.
///
/// q, k [B, H, K]; v [B, H, V]; log_f [B, H, K] or [B, H, 1]; state [B, H, K, V] as
/// gated_linear_attention returns it, updated in place. Returns o [B, H, V]. Has no gradient:
/// throws c10::Error when one of the arguments requires one while gradients are recorded. Cost O(B
/// H K V): reads and writes the state once.
at::Tensor gated_linear_attention_step(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& log_f,
                                       at::Tensor state, double scale = 1.0);

}  // namespace tidegate
