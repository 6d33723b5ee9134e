#pragma once

// HGRN's recurrence with complex states: rows of c and h are [Re | Im], D channels each.

#include "kernels/scan/cpu/hgru_gates.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

/// Each sigmoid has a division of its own here, so that a NaN in one half stays there at its step.
template <class R, class E, class G, bool kSilu>
struct HgruComplexBlock {
  using V = Vec<R>;

  static TIDEGATE_INLINE Sigmoids<R> sigmoids_of_input(V c) {
    if constexpr (kSilu) return sigmoids<R>(c);
    return Sigmoids<R>();
  }

  static TIDEGATE_NOINLINE void forward(const HgruParams& params, const ScanBlock& block) {
    const bool reverse = params.layout.reverse;
    const bool stream = block.stream;
    const int64_t half = params.channels;
    auto c = forward_cursor<const E>(params.c, block, reverse);
    auto f = forward_cursor<const G>(params.f, block, reverse);
    auto h = forward_cursor<E>(params.h, block, reverse);
    HgruChannels<R, true> channels;
    channels.fill(params, block);
    StateRows<R, 2> state;
    state.fill(params.h0, block, half);
    for (int64_t step = 0; step < block.length; ++step) {
      for_each_vector<R>(block.width, h.descends(), [&](int64_t j, auto extent) {
        c.prefetch(j), c.prefetch(half + j), f.prefetch(j);
        const V c_re = load<R>(c.row + j, extent);
        const V c_im = load<R>(c.row + half + j, extent);
        const V f_now = load<R>(f.row + j, extent);
        const Sigmoids<R> of_f = sigmoids<R>(f_now);
        const V one_minus_gamma = channels.one_minus_gamma.at(j);
        const V lambda = forget_gate<R>(f_now, of_f, channels.gamma.at(j), one_minus_gamma);
        const V input_gate = one_minus_gamma * of_f.neg;  // 1 - lambda
        const V decay_re = lambda * channels.cos_theta.at(j);
        const V decay_im = lambda * channels.sin_theta.at(j);
        const V re = state.parts[0].at(j);
        const V im = state.parts[1].at(j);
        const V u_re = activated<R, kSilu>(c_re, sigmoids_of_input(c_re));
        const V u_im = activated<R, kSilu>(c_im, sigmoids_of_input(c_im));
        const V next_re = fma(decay_re, re, fma(-decay_im, im, input_gate * u_re));
        const V next_im = fma(decay_re, im, fma(decay_im, re, input_gate * u_im));
        state.parts[0].set(j, next_re);
        state.parts[1].set(j, next_im);
        store<R>(h.row + j, next_re, extent, stream);
        store<R>(h.row + half + j, next_im, extent, stream);
      });
      c.advance(), f.advance(), h.advance();
    }
    state.write_to(params.h_final, block, half);
  }

  struct Gradients : HgruBackwardRows<R, E, G, true> {
    using Rows = HgruBackwardRows<R, E, G, true>;
    using Rows::c, Rows::f, Rows::h, Rows::dh, Rows::dc, Rows::df;
    using Rows::channels, Rows::dgamma, Rows::width, Rows::stream;
    StateRows<R, 2> p;  // p_{t+1} = dL/dh_t along the recurrence
    TimeSum<R> dtheta;
    int64_t half;

    /// One step: g = dh_t + p and, with turned = exp(i theta) h_{t-1},
    /// dlambda = Re(conj(g) (turned - act(c))), dtheta = Re(conj(g) i lambda turned),
    /// p = lambda exp(-i theta) g.
    template <class Previous>
    TIDEGATE_INLINE void row(const Previous* before_re, const Previous* before_im) {
      for_each_vector<R>(width, dh.descends(), [&](int64_t j, auto extent) {
        c.prefetch(j), c.prefetch(half + j), f.prefetch(j);
        h.prefetch(j), h.prefetch(half + j), dh.prefetch(j), dh.prefetch(half + j);
        const V f_now = load<R>(f.row + j, extent);
        const Sigmoids<R> of_f = sigmoids<R>(f_now);
        const V one_minus_gamma = channels.one_minus_gamma.at(j);
        const V lambda = forget_gate<R>(f_now, of_f, channels.gamma.at(j), one_minus_gamma);
        const V input_gate = one_minus_gamma * of_f.neg;  // 1 - lambda
        const V cosine = channels.cos_theta.at(j);
        const V sine = channels.sin_theta.at(j);
        const V g_re = load<R>(dh.row + j, extent) + p.parts[0].at(j);
        const V g_im = load<R>(dh.row + half + j, extent) + p.parts[1].at(j);
        p.parts[0].set(j, lambda * fma(cosine, g_re, sine * g_im));
        p.parts[1].set(j, lambda * fma(cosine, g_im, -sine * g_re));

        const V h_re = load<R>(before_re + j, extent);
        const V h_im = load<R>(before_im + j, extent);
        const V turned_re = fma(cosine, h_re, -sine * h_im);
        const V turned_im = fma(cosine, h_im, sine * h_re);
        dtheta.add(j, lambda * fma(g_im, turned_re, -g_re * turned_im));

        const V u_re = input_gradient(j, extent, c.row, dc.row, g_re * input_gate);
        const V u_im = input_gradient(j, extent, c.row + half, dc.row + half, g_im * input_gate);
        const V dlambda = fma(g_re, turned_re - u_re, g_im * (turned_im - u_im));
        dgamma.add(j, dlambda * of_f.neg);
        store<R>(df.row + j, dlambda * input_gate * of_f.pos, extent, stream);
      });
      this->advance();
    }

    /// Writes one half's dc = du act'(c) and returns act(c).
    template <class Extent>
    TIDEGATE_INLINE V input_gradient(int64_t j, Extent extent, const E* c_row, E* dc_row, V du) {
      const V c_now = load<R>(c_row + j, extent);
      const Sigmoids<R> of_c = sigmoids_of_input(c_now);
      store<R>(dc_row + j, du * activation_slope<R, kSilu>(c_now, of_c), extent, stream);
      return activated<R, kSilu>(c_now, of_c);
    }
  };

  static TIDEGATE_NOINLINE void backward(const HgruBackwardParams& params, const ScanBlock& block) {
    const HgruParams& forward = params.forward;
    const int64_t half = forward.channels;
    Gradients grads;
    grads.start(params, block);
    grads.p.fill(params.dh_final, block, half);
    grads.dtheta.clear(block.width);
    grads.half = half;

    for (int64_t step = block.length - 1; step > 0; --step) {
      grads.h.advance();
      grads.row(grads.h.row, grads.h.row + half);
      grads.dgamma.settle(step, block.width);
      grads.dtheta.settle(step, block.width);
    }
    if (block.length > 0) {
      StateRows<R, 2> h0;
      h0.fill(forward.h0, block, half);
      grads.row(h0.parts[0].values, h0.parts[1].values);
    }
    grads.dgamma.settle(0, block.width);
    grads.dtheta.settle(0, block.width);
    grads.dgamma.total.write_to(
        state_row<R>(params.dgamma_partial, block.sequence, half, block.channel), block.width);
    grads.dtheta.total.write_to(
        state_row<R>(params.dtheta_partial, block.sequence, half, block.channel), block.width);
    grads.p.write_to(params.dh0, block, half);
  }
};

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
