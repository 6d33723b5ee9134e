#pragma once

// What wkv4 and its step share: checks, and the way to the kernels. An `Op` is any struct with
// members w, u, k, v and, where a function reads them, state and cu_seqlens.

#include <ATen/core/Tensor.h>

#include "src/ops/checks.h"
#include "src/ops/kernel_sets.h"
#include "src/ops/op.h"
#include "src/ops/views.h"

namespace tidegate::ops {

/// k and v go to autocast's type; w and u keep fp32, as does the state.
inline constexpr CastRule kWkv4Casts[] = {
    {"w", Cast::kUnlessFloat}, {"u", Cast::kUnlessFloat}, {"k", Cast::kLower}, {"v", Cast::kLower}};

/// k, which the others are compared with, then v, w and u of `channels`.
template <class Op>
void check_wkv4_tensors(const Reference& data, const Op& op, int64_t rank, const char* shape_name) {
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, rank, shape_name);
  check_like(data, "v", op.v);
  const c10::SymInt channels = op.k.sym_sizes().back();
  check_gate(data, "w", op.w);
  check_shape(data.op, "w", op.w, "[D]", {channels});
  check_gate(data, "u", op.u);
  check_shape(data.op, "u", op.u, "[D]", {channels});
}

/// In debug mode: no rate is below 0 (or NaN).
void check_wkv4_rates(const char* op, const at::Tensor& w);

/// What both directions read.
template <class Op>
kernels::scan::Wkv4Params wkv4_params(const Op& op, KernelInputs* read) {
  kernels::scan::Wkv4Params params;
  params.layout = read->layout(op.k, op.cu_seqlens, /*reverse=*/false);
  params.channels = op.k.size(2);
  params.k = read->rows(op.k);
  params.v = read->rows(op.v);
  params.w = read->state(op.w);
  params.u = read->state(op.u);
  params.state = read->state(op.state);
  return params;
}

/// Writes `o` [B, T, D], `final_state` [N, 3, D], which may be the op's state when T = 1, and
/// `saved`, which wkv4_backward needs, where it is defined.
template <class Op>
void run_wkv4(const char* name, const Op& op, const at::Tensor& o, const at::Tensor& final_state,
              const at::Tensor& saved) {
  KernelInputs read(op.k);
  kernels::scan::Wkv4Params params = wkv4_params(op, &read);
  params.o = time_series(o);
  params.final_state = final_state.data_ptr();
  params.saved = data_or_null(saved);
  Launch(name, &params, o).run();
}

}  // namespace tidegate::ops
