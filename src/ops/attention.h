#pragma once

// What forgetting_attention and its step share: checks, and how gates and the scale reach the
// kernels.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/common/time_series.h"
#include "src/ops/checks.h"

namespace tidegate::ops {

void check_attention_options(const char* op, std::optional<double> scale,
                             std::optional<int64_t> window);

void check_prune(const char* op, std::optional<double> prune);

/// Keys, values and gates of Tk tokens; `names`: k, v, log_f as this op calls them.
void check_attention_keys(const Reference& q, const char* const (&names)[3], const at::Tensor& k,
                          const at::Tensor& v, const at::Tensor& gates, const char* key_shape,
                          const char* gate_shape);

void check_attention_head_dim(const char* op, int64_t head_dim);

/// The scale of the logits: 1 / sqrt(D) unless one is given.
double attention_scale(std::optional<double> scale, int64_t head_dim);

/// The window as kernels take it: 0, which is none, where it hides none of so many keys. Positions
/// and windows are added up in 32 bits there.
int64_t attention_window(std::optional<int64_t> window, int64_t keys);

/// log_f [B, T, H]: any strides, so no row has to be contiguous.
kernels::HeadSeries attention_gates(const at::Tensor& gates);

}  // namespace tidegate::ops
