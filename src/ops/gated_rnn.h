#pragma once

// What gated_rnn and its step share: checks, and the way to the kernels.

#include <ATen/core/Tensor.h>

#include "kernels/rnn/rnn.h"
#include "src/ops/checks.h"
#include "src/ops/gated_rnn_products.h"
#include "src/ops/op.h"
#include "src/ops/views.h"

namespace tidegate::ops {

/// z and x go to autocast's type. w_zh stays float32 where it is, since the kernels compute with
/// all its digits; a 16-bit one goes to autocast's type.
inline constexpr CastRule kGatedRnnCasts[] = {
    {"z", Cast::kLower}, {"x", Cast::kLower}, {"w_zh", Cast::kUnlessFloat}};

void check_gated_rnn_matrix(const Reference& data, const at::Tensor& w_zh);

/// Checks values: of offsets on the CPU always, of those on a GPU and of gamma with
/// TIDEGATE_DEBUG=1.
void check_gated_rnn_values(const Reference& data, const OptionalTensor& cu_seqlens,
                            const OptionalTensor& gamma);

/// The tensors that both directions read, in the form that the kernels take.
struct GatedRnnInputs {
  at::Tensor w, h0, cu_seqlens, gamma;
  bool w_is_16_bit;

  /// `op` is any of the ops, or has the members of theirs that are named here.
  template <class Op>
  GatedRnnInputs(const Op& op, at::ScalarType data)
      : w(contiguous_as(op.w_zh, state_dtype(data))),
        h0(contiguous_as(op.h0, state_dtype(data))),
        cu_seqlens(contiguous_or_none(op.cu_seqlens)),
        gamma(contiguous_as(op.gamma, state_dtype(data))),
        w_is_16_bit(op.w_zh.element_size() == 2) {}

  kernels::rnn::GatedRnnParams params(const at::Tensor& data) const;
};

/// Runs the forward kernel, or torch's products where no kernel holds the matrix: writes `results`,
/// of which h_final may be the inputs' h0 when T = 1.
void run_gated_rnn(const char* op, const at::Tensor& gate, const at::Tensor& data,
                   const GatedRnnInputs& inputs, const GatedRnnResults& results);

}  // namespace tidegate::ops
