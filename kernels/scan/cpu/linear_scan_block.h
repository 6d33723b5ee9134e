#pragma once

// h_t = a_t h_{t-1} + x_t over one block of channels. A complex block is a real one of twice the
// width whose products mix neighbouring lanes.

#include "kernels/scan/cpu/block_rows.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

template <class R, class E, class G, bool kIsComplex>
struct LinearScanBlock {
  static constexpr int64_t kScale = kIsComplex ? 2 : 1;
  using V = Vec<R>;

  static TIDEGATE_INLINE V decayed(V a, V h, V x) {
    if constexpr (kIsComplex) {
      return complex_fma<R>(a, h, x);
    } else {
      return fma(a, h, x);
    }
  }
  static TIDEGATE_INLINE V conj_mul(V a, V b) {
    if constexpr (kIsComplex) {
      return complex_conj_mul<R>(a, b);
    } else {
      return a * b;
    }
  }

  static TIDEGATE_NOINLINE void forward(const LinearScanParams& params, const ScanBlock& block) {
    const bool reverse = params.layout.reverse;
    const bool stream = block.stream;
    const int64_t width = block.width * kScale;
    const int64_t columns = params.channels * kScale;
    const int64_t column = block.channel * kScale;
    auto x = forward_cursor<const E>(params.x, block, reverse, kScale);
    auto a = forward_cursor<const G>(params.a, block, reverse, kScale);
    auto h = forward_cursor<E>(params.h, block, reverse, kScale);
    RowBuffer<R> state;
    state.fill(state_row<R>(params.h0, block.sequence, columns, column), width, R(0));
    for (int64_t step = 0; step < block.length; ++step) {
      for_each_vector<R>(width, h.descends(), [&](int64_t j, auto extent) {
        x.prefetch(j), a.prefetch(j);
        const V next = decayed(load<R>(a.row + j, extent), state.at(j), load<R>(x.row + j, extent));
        state.set(j, next);
        store<R>(h.row + j, next, extent, stream);
      });
      x.advance(), a.advance(), h.advance();
    }
    state.write_to(state_row<R>(params.h_final, block.sequence, columns, column), width);
  }

  struct Gradients {
    RowCursor<const G> a;
    RowCursor<const E> h, dh;
    RowCursor<E> dx;
    RowCursor<G> da;
    RowBuffer<R> p;  // p_{t+1} = dL/dh_t along the recurrence
    TimeSum<R> da_sum;
    int64_t width;
    bool a_is_constant;
    bool stream;

    /// One step: g = dh_t + p, dx_t = g, da_t = g conj(h_{t-1}), p = g conj(a_t).
    template <class Previous>
    TIDEGATE_INLINE void row(const Previous* h_before) {
      for_each_vector<R>(width, dh.descends(), [&](int64_t j, auto extent) {
        a.prefetch(j), h.prefetch(j), dh.prefetch(j);
        const V g = load<R>(dh.row + j, extent) + p.at(j);
        const V da_now = conj_mul(load<R>(h_before + j, extent), g);
        p.set(j, conj_mul(load<R>(a.row + j, extent), g));
        store<R>(dx.row + j, g, extent, stream);
        if (a_is_constant) {
          da_sum.add(j, da_now);
        } else {
          store<R>(da.row + j, da_now, extent, stream);
        }
      });
      a.advance(), dh.advance(), dx.advance(), da.advance();
    }
  };

  static TIDEGATE_NOINLINE void backward(const LinearScanBackwardParams& params,
                                         const ScanBlock& block) {
    const LinearScanParams& forward = params.forward;
    const bool reverse = forward.layout.reverse;
    const int64_t width = block.width * kScale;
    const int64_t columns = forward.channels * kScale;
    const int64_t column = block.channel * kScale;
    Gradients grads;
    grads.a = backward_cursor<const G>(forward.a, block, reverse, kScale);
    grads.h = backward_cursor<const E>(forward.h, block, reverse, kScale);
    grads.dh = backward_cursor<const E>(params.dh, block, reverse, kScale);
    grads.dx = backward_cursor<E>(params.dx, block, reverse, kScale);
    if (!forward.a_is_constant) {
      grads.da = backward_cursor<G>(params.da, block, reverse, kScale);
    }
    grads.width = width;
    grads.a_is_constant = forward.a_is_constant;
    grads.stream = block.stream;
    grads.p.fill(state_row<R>(params.dh_final, block.sequence, columns, column), width, R(0));
    if (forward.a_is_constant) grads.da_sum.clear(width);

    for (int64_t step = block.length - 1; step > 0; --step) {
      grads.h.advance();
      grads.row(grads.h.row);
      if (forward.a_is_constant) grads.da_sum.settle(step, width);
    }
    if (block.length > 0) {
      RowBuffer<R> h0;
      h0.fill(state_row<R>(forward.h0, block.sequence, columns, column), width, R(0));
      grads.row(h0.values);
    }
    if (forward.a_is_constant) {
      grads.da_sum.settle(0, width);
      grads.da_sum.total.write_to(state_row<R>(params.da_partial, block.sequence, columns, column),
                                  width);
    }
    grads.p.write_to(state_row<R>(params.dh0, block.sequence, columns, column), width);
  }
};

template <class Body>
void with_linear_scan_types(DType data, DType gate, Body body) {
  if (data == DType::kComplex64) {
    body(LinearScanBlock<float, float, float, true>{});
  } else if (data == DType::kComplex128) {
    body(LinearScanBlock<double, double, double, true>{});
  } else {
    with_real_types(data, gate, [&](auto r, auto e, auto g) {
      body(LinearScanBlock<typename decltype(r)::Type, typename decltype(e)::Type,
                           typename decltype(g)::Type, false>{});
    });
  }
}

void linear_scan_forward_block(const LinearScanParams& params, const ScanBlock& block) {
  with_linear_scan_types(params.x.dtype, params.a.dtype, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::forward(params, block);
    if (block.stream) finish_streaming();
  });
}

void linear_scan_backward_block(const LinearScanBackwardParams& params, const ScanBlock& block) {
  with_linear_scan_types(params.dh.dtype, params.forward.a.dtype, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::backward(params, block);
    if (block.stream) finish_streaming();
  });
}

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
