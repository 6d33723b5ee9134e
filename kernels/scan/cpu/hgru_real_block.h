#pragma once

// HGRN's recurrence with real states; the equations are in scan.h.

#include "kernels/scan/cpu/hgru_gates.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

template <class R, class E, class G, bool kSilu>
struct HgruRealBlock {
  using V = Vec<R>;

  static TIDEGATE_INLINE void both_sigmoids(V f, V c, Sigmoids<R>& of_f, Sigmoids<R>& of_c) {
    if constexpr (kSilu) {
      sigmoids_of_two<R>(f, c, of_f, of_c);
    } else {
      of_f = sigmoids<R>(f);
    }
  }

  static TIDEGATE_NOINLINE void forward(const HgruParams& params, const ScanBlock& block) {
    const bool reverse = params.layout.reverse;
    const bool stream = block.stream;
    auto c = forward_cursor<const E>(params.c, block, reverse);
    auto f = forward_cursor<const G>(params.f, block, reverse);
    auto h = forward_cursor<E>(params.h, block, reverse);
    HgruChannels<R, false> channels;
    channels.fill(params, block);
    RowBuffer<R> state;
    state.fill(state_row<R>(params.h0, block.sequence, params.channels, block.channel), block.width,
               R(0));
    for (int64_t step = 0; step < block.length; ++step) {
      for_each_vector<R>(block.width, h.descends(), [&](int64_t j, auto extent) {
        c.prefetch(j), f.prefetch(j);
        const V c_now = load<R>(c.row + j, extent);
        const V f_now = load<R>(f.row + j, extent);
        Sigmoids<R> of_f, of_c;
        both_sigmoids(f_now, c_now, of_f, of_c);
        const V one_minus_gamma = channels.one_minus_gamma.at(j);
        const V lambda = forget_gate<R>(f_now, of_f, channels.gamma.at(j), one_minus_gamma);
        const V input = one_minus_gamma * of_f.neg * activated<R, kSilu>(c_now, of_c);
        const V next = fma(lambda, state.at(j), input);
        state.set(j, next);
        store<R>(h.row + j, next, extent, stream);
      });
      c.advance(), f.advance(), h.advance();
    }
    state.write_to(state_row<R>(params.h_final, block.sequence, params.channels, block.channel),
                   block.width);
  }

  struct Gradients : HgruBackwardRows<R, E, G, false> {
    using Rows = HgruBackwardRows<R, E, G, false>;
    using Rows::c, Rows::f, Rows::h, Rows::dh, Rows::dc, Rows::df;
    using Rows::channels, Rows::dgamma, Rows::width, Rows::stream;
    RowBuffer<R> p;  // p_{t+1} = dL/dh_t along the recurrence

    /// One step: g = dh_t + p, dlambda = g (h_{t-1} - act(c)), and lambda's derivatives
    /// (1 - gamma) s(f) s(-f) by f and s(-f) by gamma.
    template <class Previous>
    TIDEGATE_INLINE void row(const Previous* h_before) {
      for_each_vector<R>(width, dh.descends(), [&](int64_t j, auto extent) {
        c.prefetch(j), f.prefetch(j), h.prefetch(j), dh.prefetch(j);
        const V c_now = load<R>(c.row + j, extent);
        const V f_now = load<R>(f.row + j, extent);
        Sigmoids<R> of_f, of_c;
        both_sigmoids(f_now, c_now, of_f, of_c);
        const V one_minus_gamma = channels.one_minus_gamma.at(j);
        const V input_gate = one_minus_gamma * of_f.neg;  // 1 - lambda
        const V g = load<R>(dh.row + j, extent) + p.at(j);
        const V from = load<R>(h_before + j, extent) - activated<R, kSilu>(c_now, of_c);
        const V dlambda = g * from;
        dgamma.add(j, dlambda * of_f.neg);
        p.set(j, forget_gate<R>(f_now, of_f, channels.gamma.at(j), one_minus_gamma) * g);
        store<R>(dc.row + j, g * input_gate * activation_slope<R, kSilu>(c_now, of_c), extent,
                 stream);
        store<R>(df.row + j, dlambda * input_gate * of_f.pos, extent, stream);
      });
      this->advance();
    }
  };

  static TIDEGATE_NOINLINE void backward(const HgruBackwardParams& params, const ScanBlock& block) {
    const HgruParams& forward = params.forward;
    const int64_t columns = forward.channels;
    Gradients grads;
    grads.start(params, block);
    grads.p.fill(state_row<R>(params.dh_final, block.sequence, columns, block.channel), block.width,
                 R(0));

    for (int64_t step = block.length - 1; step > 0; --step) {
      grads.h.advance();
      grads.row(grads.h.row);
      grads.dgamma.settle(step, block.width);
    }
    if (block.length > 0) {
      RowBuffer<R> h0;
      h0.fill(state_row<R>(forward.h0, block.sequence, columns, block.channel), block.width, R(0));
      grads.row(h0.values);
    }
    grads.dgamma.settle(0, block.width);
    grads.dgamma.total.write_to(
        state_row<R>(params.dgamma_partial, block.sequence, columns, block.channel), block.width);
    grads.p.write_to(state_row<R>(params.dh0, block.sequence, columns, block.channel), block.width);
  }
};

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
