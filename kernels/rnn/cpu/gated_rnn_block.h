#pragma once

// The minimal gated RNN over a few sequences; the equations are in rnn.h. At every step one product
// with the matrix for all sequences, then the gates element by element.

#include "kernels/common/cpu_gates.h"
#include "kernels/common/cpu_sums.h"
#include "kernels/common/cpu_types.h"
#include "kernels/rnn/cpu/panel_product.h"

namespace tidegate::kernels::rnn::TIDEGATE_ISA {
namespace {

/// The row of `series` at a token of a sequence.
template <class E>
TIDEGATE_INLINE E* token_row(const TimeSeries& series, const RnnRow& row, int64_t step) {
  return static_cast<E*>(series.data) + row.batch * series.stride_b +
         (row.begin + step) * series.stride_t;
}

template <class R>
TIDEGATE_INLINE R* state_row(const void* data, int64_t dim, const RnnRow& row) {
  return data == nullptr ? nullptr : static_cast<R*>(const_cast<void*>(data)) + row.sequence * dim;
}

/// `to` = `from`, or zeros where that is null.
template <class R>
TIDEGATE_INLINE void copy_row(R* to, const R* from, int64_t dim) {
  for_each_vector<R>(dim, [&](int64_t j, auto extent) {
    store<R>(to + j, from == nullptr ? Vec<R>{} : load<R>(from + j, extent), extent);
  });
}

template <class R, class E, class G>
struct GatedRnnBlock {
  using V = Vec<R>;

  static TIDEGATE_INLINE V lower_bound(const R* gamma, int64_t j, auto extent) {
    return gamma == nullptr ? V{} : load<R>(gamma + j, extent);
  }

  /// The sequences that have a token at `step`: a prefix, since the longest come first.
  static TIDEGATE_INLINE int active(const RnnBlock& block, int64_t step) {
    int rows = block.count;
    while (rows > 0 && block.rows[rows - 1].length <= step) --rows;
    return rows;
  }

  static TIDEGATE_NOINLINE void forward(const GatedRnnParams& params, const RnnBlock& block) {
    const int64_t dim = params.channels;
    const int64_t stride = block.stride;
    R* states = static_cast<R*>(block.vectors);
    R* products = static_cast<R*>(block.products);
    for (int r = 0; r < block.count; ++r) {
      copy_row<R>(states + r * stride, state_row<R>(params.h0, dim, block.rows[r]), dim);
    }
    for (int64_t step = 0; step < block.rows[0].length; ++step) {
      const int rows = active(block, step);
      matrix_product<R>(static_cast<const R*>(block.panels), states, stride, dim, rows, products);
      for (int r = 0; r < rows; ++r) {
        forward_token(params, block.rows[r], step, products + r * stride, states + r * stride);
      }
    }
    for (int r = 0; r < block.count; ++r) {
      copy_row<R>(state_row<R>(params.h_final, dim, block.rows[r]), states + r * stride, dim);
    }
  }

  static TIDEGATE_INLINE void forward_token(const GatedRnnParams& params, const RnnRow& row,
                                            int64_t step, const R* product, R* state) {
    const G* z = token_row<const G>(params.z, row, step);
    const E* x = token_row<const E>(params.x, row, step);
    E* h = token_row<E>(params.h, row, step);
    R* kept = params.logits.data == nullptr ? nullptr : token_row<R>(params.logits, row, step);
    const R* bounds = static_cast<const R*>(params.gamma);
    for_each_vector<R>(params.channels, [&](int64_t j, auto extent) {
      const V logit = load<R>(z + j, extent) + load<R>(product + j, extent);
      const Sigmoids<R> gate = sigmoids<R>(logit);
      const V gamma = lower_bound(bounds, j, extent), part = R(1) - gamma;
      const V entering = part * gate.neg * load<R>(x + j, extent);
      const V open = forget_gate<R>(logit, gate, gamma, part);
      const V next = fma(open, load<R>(state + j, extent), entering);
      store<R>(state + j, next, extent);
      store<R>(h + j, next, extent);
      if (kept != nullptr) store<R>(kept + j, logit, extent);
    });
  }

  static TIDEGATE_NOINLINE void backward(const GatedRnnBackwardParams& params,
                                         const RnnBlock& block) {
    const GatedRnnParams& forward = params.forward;
    const int64_t dim = forward.channels;
    const int64_t stride = block.stride;
    R* gate_grads = static_cast<R*>(block.vectors);  // da
    R* carries = static_cast<R*>(block.products);    // what flows from step t + 1 into h_t
    R* bound_grads = static_cast<R*>(block.sums);    // dgamma's short sums (cpu_sums.h)
    for (int r = 0; r < block.count; ++r) {
      copy_row<R>(bound_grads + r * stride, nullptr, dim);
      if (R* total = state_row<R>(params.dgamma_partial, dim, block.rows[r])) {
        copy_row<R>(total, nullptr, dim);
      }
    }
    for (int64_t step = block.rows[0].length - 1; step >= 0; --step) {
      const int rows = active(block, step);
      for (int r = 0; r < rows; ++r) {
        R* carry = carries + r * stride;
        // lambda dh, what of h_t's gradient passes to h_{t-1} directly, waits in dh0, where it
        // ends.
        R* passed_on = state_row<R>(params.dh0, dim, block.rows[r]);
        if (step == block.rows[r].length - 1) {
          copy_row<R>(carry, state_row<R>(params.dh_final, dim, block.rows[r]), dim);
        } else {
          add_row(carry, passed_on, dim);
        }
        R* bound_grad = bound_grads + r * stride;
        backward_token(params, block.rows[r], step,
                       {carry, gate_grads + r * stride, bound_grad, passed_on});
        R* total = state_row<R>(params.dgamma_partial, dim, block.rows[r]);
        if (total != nullptr && step % kShortSumTokens == 0) {
          add_row(total, bound_grad, dim);
          copy_row<R>(bound_grad, nullptr, dim);
        }
      }
      matrix_product<R>(static_cast<const R*>(block.panels), gate_grads, stride, dim, rows,
                        carries);
    }
    for (int r = 0; r < block.count; ++r) {
      R* dh0 = state_row<R>(params.dh0, dim, block.rows[r]);
      if (block.rows[r].length == 0) {
        copy_row<R>(dh0, state_row<R>(params.dh_final, dim, block.rows[r]), dim);
      } else {
        add_row(dh0, carries + r * stride, dim);
      }
    }
  }

  static TIDEGATE_INLINE void add_row(R* to, const R* from, int64_t dim) {
    for_each_vector<R>(dim, [&](int64_t j, auto extent) {
      store<R>(to + j, load<R>(to + j, extent) + load<R>(from + j, extent), extent);
    });
  }

  /// Rows of one sequence, D numbers each.
  struct BackwardRows {
    const R* carry;  // what comes from step t + 1
    R* gate_grad;    // da
    R* bound_grad;   // gets dgamma's terms
    R* passed_on;    // lambda dh: goes on to h_{t-1}
  };

  /// With dh = dh_t + what comes from step t + 1, what GatedRnnBackwardParams says.
  static TIDEGATE_INLINE void backward_token(const GatedRnnBackwardParams& params,
                                             const RnnRow& row, int64_t step,
                                             const BackwardRows& rows) {
    const GatedRnnParams& forward = params.forward;
    if (step > 0) {
      gradients(params, row, step, token_row<const E>(forward.h, row, step - 1), rows);
    } else {
      gradients(params, row, step, state_row<const R>(forward.h0, forward.channels, row), rows);
    }
  }

  template <class Before>
  static TIDEGATE_INLINE void gradients(const GatedRnnBackwardParams& params, const RnnRow& row,
                                        int64_t step, const Before* before,
                                        const BackwardRows& rows) {
    const GatedRnnParams& forward = params.forward;
    const R* logits = token_row<const R>(forward.logits, row, step);
    const E* x = token_row<const E>(forward.x, row, step);
    const E* dh = token_row<const E>(params.dh, row, step);
    G* dz = token_row<G>(params.dz, row, step);
    E* dx = token_row<E>(params.dx, row, step);
    E* h_before = token_row<E>(params.h_before, row, step);
    const R* bounds = static_cast<const R*>(forward.gamma);
    for_each_vector<R>(forward.channels, [&](int64_t j, auto extent) {
      const V logit = load<R>(logits + j, extent);
      const Sigmoids<R> gate = sigmoids<R>(logit);
      const V gamma = lower_bound(bounds, j, extent), part = R(1) - gamma;
      const V h = before == nullptr ? V{} : load<R>(before + j, extent);
      const V g = load<R>(dh + j, extent) + load<R>(rows.carry + j, extent);
      const V bound_term = gate.neg * (h - load<R>(x + j, extent)) * g;
      const V da = part * gate.pos * bound_term;
      store<R>(rows.gate_grad + j, da, extent);
      store<R>(dz + j, da, extent);
      store<R>(dx + j, part * gate.neg * g, extent);
      store<R>(rows.bound_grad + j, load<R>(rows.bound_grad + j, extent) + bound_term, extent);
      store<R>(rows.passed_on + j, forget_gate<R>(logit, gate, gamma, part) * g, extent);
      store<R>(h_before + j, h, extent);
    });
  }
};

template <class Body>
void with_rnn_types(const GatedRnnParams& params, Body body) {
  with_real_types(params.x.dtype, params.z.dtype, [&](auto r, auto e, auto g) {
    const SubnormalsAreZero scope{};
    body(GatedRnnBlock<typename decltype(r)::Type, typename decltype(e)::Type,
                       typename decltype(g)::Type>{});
  });
}

void gated_rnn_forward_block(const GatedRnnParams& params, const RnnBlock& block) {
  with_rnn_types(params, [&](auto kernel) { decltype(kernel)::forward(params, block); });
}

void gated_rnn_backward_block(const GatedRnnBackwardParams& params, const RnnBlock& block) {
  with_rnn_types(params.forward, [&](auto kernel) { decltype(kernel)::backward(params, block); });
}

}  // namespace
}  // namespace tidegate::kernels::rnn::TIDEGATE_ISA
