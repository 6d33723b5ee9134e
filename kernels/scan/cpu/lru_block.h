#pragma once

// The linear recurrent unit's recurrence over one block of channels, real or complex: rows of x and
// h are [Re | Im] where it is complex.

#include "kernels/scan/cpu/block_rows.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

/// One vector of numbers: its real parts and, where there are any, its imaginary ones.
template <class R, int kParts>
struct Numbers {
  Vec<R> part[kParts];
};

template <class R, class E, bool kIsComplex>
struct LruBlock {
  static constexpr int kParts = kIsComplex ? 2 : 1;
  using V = Vec<R>;
  using Z = Numbers<R, kParts>;

  template <class Extent>
  static TIDEGATE_INLINE Z load_parts(const E* row, int64_t j, int64_t half, Extent extent) {
    Z z;
    for (int p = 0; p < kParts; ++p) z.part[p] = load<R>(row + p * half + j, extent);
    return z;
  }
  template <class Extent>
  static TIDEGATE_INLINE void store_parts(E* row, int64_t j, int64_t half, const Z& z,
                                          Extent extent, bool stream) {
    for (int p = 0; p < kParts; ++p) store<R>(row + p * half + j, z.part[p], extent, stream);
  }
  static TIDEGATE_INLINE Z at(const StateRows<R, kParts>& rows, int64_t j) {
    Z z;
    for (int p = 0; p < kParts; ++p) z.part[p] = rows.parts[p].at(j);
    return z;
  }
  static TIDEGATE_INLINE void set(StateRows<R, kParts>& rows, int64_t j, const Z& z) {
    for (int p = 0; p < kParts; ++p) rows.parts[p].set(j, z.part[p]);
  }
  template <class Cursor>
  static TIDEGATE_INLINE void prefetch(const Cursor& cursor, int64_t j, int64_t half) {
    for (int p = 0; p < kParts; ++p) cursor.prefetch(p * half + j);
  }

  /// a * z + c.
  static TIDEGATE_INLINE Z multiply_add(const Z& a, const Z& z, const Z& c) {
    if constexpr (kIsComplex) {
      return {{fma(a.part[0], z.part[0], fma(-a.part[1], z.part[1], c.part[0])),
               fma(a.part[0], z.part[1], fma(a.part[1], z.part[0], c.part[1]))}};
    } else {
      return {{fma(a.part[0], z.part[0], c.part[0])}};
    }
  }
  /// conj(a) * z + c.
  static TIDEGATE_INLINE Z conj_multiply_add(Z a, const Z& z, const Z& c) {
    if constexpr (kIsComplex) a.part[1] = -a.part[1];
    return multiply_add(a, z, c);
  }

  /// What the workspace says of the block's channels.
  struct Channels {
    const R* rows;
    int64_t stride;

    Channels(const LruParams& params, const ScanBlock& block)
        : rows(static_cast<const R*>(params.workspace) + block.channel), stride(params.channels) {}

    template <class Extent>
    TIDEGATE_INLINE V row(int which, int64_t j, Extent extent) const {
      return load<R>(rows + which * stride + j, extent);
    }
    /// `which`: the row of the real parts, which that of the imaginary ones follows.
    template <class Extent>
    TIDEGATE_INLINE Z decay(int which, int64_t j, Extent extent) const {
      Z z;
      for (int p = 0; p < kParts; ++p) z.part[p] = row(which + p, j, extent);
      return z;
    }
    /// lambda * z + c.
    template <class Extent>
    TIDEGATE_INLINE Z decayed(const Z& z, Z c, int64_t j, Extent extent) const {
      if constexpr (sizeof(R) == 4) {
        c = multiply_add(decay(kLruDecayReRest, j, extent), z, c);
      }
      return multiply_add(decay(kLruDecayRe, j, extent), z, c);
    }
    /// conj(lambda) * z.
    template <class Extent>
    TIDEGATE_INLINE Z conj_decayed(const Z& z, int64_t j, Extent extent) const {
      Z c = {};
      if constexpr (sizeof(R) == 4) {
        c = conj_multiply_add(decay(kLruDecayReRest, j, extent), z, c);
      }
      return conj_multiply_add(decay(kLruDecayRe, j, extent), z, c);
    }
  };

  static TIDEGATE_NOINLINE void forward(const LruParams& params, const ScanBlock& block) {
    const bool reverse = params.layout.reverse;
    const bool stream = block.stream;
    const int64_t half = params.channels;
    auto x = forward_cursor<const E>(params.x, block, reverse);
    auto h = forward_cursor<E>(params.h, block, reverse);
    const Channels channels(params, block);
    StateRows<R, kParts> state;
    state.fill(params.h0, block, half);
    for (int64_t step = 0; step < block.length; ++step) {
      for_each_vector<R>(block.width, h.descends(), [&](int64_t j, auto extent) {
        prefetch(x, j, half);
        const V gamma = channels.row(kLruGamma, j, extent);
        Z entering = load_parts(x.row, j, half, extent);
        for (int p = 0; p < kParts; ++p) entering.part[p] *= gamma;
        const Z next = channels.decayed(at(state, j), entering, j, extent);
        set(state, j, next);
        store_parts(h.row, j, half, next, extent, stream);
      });
      x.advance(), h.advance();
    }
    state.write_to(params.h_final, block, half);
  }

  struct Gradients {
    RowCursor<const E> x, h, dh;
    RowCursor<E> dx;
    Channels channels;
    StateRows<R, kParts> p;  // what flows from step t + 1 into h_t
    TimeSum<R> g_h[kParts];  // sum of conj(g_t) h_{t-1}
    TimeSum<R> g_x;          // sum of Re(conj(g_t) x_t)
    int64_t width, half;
    bool stream;

    Gradients(const LruBackwardParams& params, const ScanBlock& block)
        : channels(params.forward, block),
          width(block.width),
          half(params.forward.channels),
          stream(block.stream) {
      const LruParams& forward = params.forward;
      const bool reverse = forward.layout.reverse;
      x = backward_cursor<const E>(forward.x, block, reverse);
      h = backward_cursor<const E>(forward.h, block, reverse);
      dh = backward_cursor<const E>(params.dh, block, reverse);
      dx = backward_cursor<E>(params.dx, block, reverse);
      p.fill(params.dh_final, block, half);
      for (auto& sum : g_h) sum.clear(width);
      g_x.clear(width);
    }

    /// One step: g = dh_t + p, dx = gamma g, p = conj(lambda) g. `before` [kParts] rows of h_{t-1}.
    template <class Previous>
    TIDEGATE_INLINE void row(const Previous* const (&before)[kParts]) {
      for_each_vector<R>(width, dh.descends(), [&](int64_t j, auto extent) {
        prefetch(x, j, half), prefetch(h, j, half), prefetch(dh, j, half);
        const V gamma = channels.row(kLruGamma, j, extent);
        Z g = load_parts(dh.row, j, half, extent);
        Z out, earlier;
        for (int q = 0; q < kParts; ++q) {
          g.part[q] += p.parts[q].at(j);
          out.part[q] = gamma * g.part[q];
          earlier.part[q] = load<R>(before[q] + j, extent);
        }
        store_parts(dx.row, j, half, out, extent, stream);
        const Z x_now = load_parts(x.row, j, half, extent);
        const Z of_x = conj_multiply_add(g, x_now, Z{});
        const Z of_h = conj_multiply_add(g, earlier, Z{});
        g_x.add(j, of_x.part[0]);
        for (int q = 0; q < kParts; ++q) g_h[q].add(j, of_h.part[q]);
        set(p, j, channels.conj_decayed(g, j, extent));
      });
      x.advance(), dh.advance(), dx.advance();
    }

    void settle(int64_t step) {
      for (auto& sum : g_h) sum.settle(step, width);
      g_x.settle(step, width);
    }

    /// With S the sum of conj(g) h_{t-1}: dnu_log = -nu Re(lambda S),
    /// dtheta_log = -theta Im(lambda S), dgamma_log = gamma sum of Re(conj(g) x).
    void finish(const LruBackwardParams& params, const ScanBlock& block) {
      R* dnu = state_row<R>(params.dnu_log_partial, block.sequence, half, block.channel);
      R* dtheta = state_row<R>(params.dtheta_log_partial, block.sequence, half, block.channel);
      R* dgamma = state_row<R>(params.dgamma_log_partial, block.sequence, half, block.channel);
      for_each_vector<R>(width, [&](int64_t j, auto extent) {
        Z sum;
        for (int q = 0; q < kParts; ++q) sum.part[q] = g_h[q].total.at(j);
        const Z turned = channels.decayed(sum, Z{}, j, extent);
        store<R>(dnu + j, -channels.row(kLruNu, j, extent) * turned.part[0], extent);
        if constexpr (kIsComplex) {
          store<R>(dtheta + j, -channels.row(kLruTheta, j, extent) * turned.part[1], extent);
        }
        store<R>(dgamma + j, channels.row(kLruGamma, j, extent) * g_x.total.at(j), extent);
      });
      p.write_to(params.dh0, block, half);
    }
  };

  static TIDEGATE_NOINLINE void backward(const LruBackwardParams& params, const ScanBlock& block) {
    Gradients grads(params, block);
    for (int64_t step = block.length - 1; step > 0; --step) {
      grads.h.advance();
      const E* before[kParts];
      for (int q = 0; q < kParts; ++q) before[q] = grads.h.row + q * grads.half;
      grads.row(before);
      grads.settle(step);
    }
    if (block.length > 0) {
      StateRows<R, kParts> h0;
      h0.fill(params.forward.h0, block, grads.half);
      const R* before[kParts];
      for (int q = 0; q < kParts; ++q) before[q] = h0.parts[q].values;
      grads.row(before);
    }
    grads.settle(0);
    grads.finish(params, block);
  }
};

template <class Body>
void with_lru_types(const LruParams& params, Body body) {
  with_real_types(params.x.dtype, params.x.dtype, [&](auto r, auto e, auto) {
    using R = typename decltype(r)::Type;
    using E = typename decltype(e)::Type;
    if (params.theta_log != nullptr) {
      body(LruBlock<R, E, true>{});
    } else {
      body(LruBlock<R, E, false>{});
    }
  });
}

void lru_forward_block(const LruParams& params, const ScanBlock& block) {
  with_lru_types(params, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::forward(params, block);
    if (block.stream) finish_streaming();
  });
}

void lru_backward_block(const LruBackwardParams& params, const ScanBlock& block) {
  with_lru_types(params.forward, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::backward(params, block);
    if (block.stream) finish_streaming();
  });
}

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
