#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tidegate {

/// Forgetting attention (Forgetting Transformer, arXiv 2503.02130, eq. 10-12): causal
/// softmax attention whose scores lose what the forget gates between key and query have forgotten.
/// For every head, with c = cumsum(log_f) over time and query i at position p = i + Tk - Tq,
///
///   s_ij = scale * q_i . k_j + c_p - c_j,   lse_i = log(sum over j <= p of exp(s_ij)),
///   o_i = sum over j <= p of exp(s_ij - lse_i) v_j
///
/// q:     [B, Tq, Hq, D]; float32, float64, bfloat16 or float16. D from 1 to 256.
/// k, v:  [B, Tk, Hkv, D] in q's dtype; Hkv divides Hq, and query head h reads head h / (Hq / Hkv).
/// log_f: [B, Tk, Hq] natural logarithms of the forget gates, at most 0; float32 or q's dtype. What
///        is below -1e5, -infinity included, counts as -1e5: it shuts any gate. The first token's
///        gate is in no sum.
/// scale: above 0; 1 / sqrt(D) when absent.
/// window: a query sees itself and the window - 1 keys before it; at least 1; all keys when absent.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to Tq: N sequences packed along time, with
///        B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to q's device
///        when it is on the CPU (an error while a CUDA graph is captured).
/// cu_seqlens_k: the same for keys, rising to Tk; cu_seqlens when absent, and then Tk is Tq.
/// Tq <= Tk in every sequence: the last query is on the last key.
/// prune: in [0, 1). Leaves out keys whose weights in a row are proven to be below prune together,
///        from the norms of q and k: an element of o changes by at most 2 prune max|v|
///        (docs/numerics.md). Worth it with gates that forget.
///
/// Returns (o, lse): o [B, Tq, Hq, D] in q's dtype and lse [B, Hq, Tq] in float32 (float64 for
/// float64), both contiguous. A query without a key (more queries than keys, which only unchecked
/// offsets on a GPU can bring about) has o = 0 and lse = -infinity.
///
/// Memory is linear in Tq and Tk. Any strides with a unit last stride are read in place, but on
/// CUDA 16-bit rows that do not begin at multiples of 16 bytes, or whose D is below 16 or no
/// multiple of 8, are copied first. The forward pass is bitwise deterministic; so is the backward
/// pass on the CPU, and on CUDA under torch.use_deterministic_algorithms(true), while its default
/// may add up dq and the row sums behind dlog_f with atomics. Differentiable once in q, k, v and
/// log_f through both results; training keeps the inputs, o and lse. Throws c10::Error, naming op,
/// argument, expected and given, for shapes, dtypes or devices other than these; with
/// TIDEGATE_DEBUG=1 also for log_f above 0 and for offsets on a GPU whose values do not fit. Cost
/// O(B Hq Tq Tk D), less what window and prune leave out.
std::tuple<at::Tensor, at::Tensor> forgetting_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_f,
    std::optional<double> scale = std::nullopt, std::optional<int64_t> window = std::nullopt,
    const std::optional<at::Tensor>& cu_seqlens = std::nullopt,
    const std::optional<at::Tensor>& cu_seqlens_k = std::nullopt,
    std::optional<double> prune = std::nullopt);

/// The newest token of forgetting_attention against a cache, for decoding.
///
/// q [B, Hq, D]; k_cache, v_cache [B, Tmax, Hkv, D] in q's dtype; gate_cache [B, Tmax, Hq]: each
/// token's own log_f, in float32 (float64 for float64). Sums are taken here, from the newest token
/// backwards, so they keep their digits however long the cache is. lengths: int32 [B], the number
/// of tokens in each row of the cache, the current one included (0: o = 0; below 0 counts as 0,
/// above Tmax as Tmax, with TIDEGATE_DEBUG=1 both throw, and so does a gate above 0). What lies
/// behind them is never read. prune in [0, 1) leaves out the oldest keys whose weights are proven
/// to be below it together, unread: an element of o changes by at most 2 prune max|v|. It needs
/// key_norms [B, Hkv] in gate_cache's dtype, any strides: at least the length of the longest key
/// that a row of the cache holds of each head (with TIDEGATE_DEBUG=1 less throws). Returns o [B,
/// Hq, D]. Has no gradient: throws c10::Error when one of the arguments requires one while
/// gradients are recorded. Cost O(B Hq Tmax D); on CUDA, one pass over the cache for up to eight
/// query heads a key head (four on CUDA cores).
at::Tensor forgetting_attention_step(const at::Tensor& q, const at::Tensor& k_cache,
                                     const at::Tensor& v_cache, const at::Tensor& gate_cache,
                                     const at::Tensor& lengths,
                                     std::optional<double> scale = std::nullopt,
                                     std::optional<int64_t> window = std::nullopt,
                                     std::optional<double> prune = std::nullopt,
                                     const std::optional<at::Tensor>& key_norms = std::nullopt);

}  // namespace tidegate
