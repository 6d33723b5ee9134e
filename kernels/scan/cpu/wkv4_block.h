#pragma once

// RWKV-4's token mixing over one block of channels; the equations are in ../wkv4.h, the reasons in
// docs/kernels/wkv4.md.

#include <limits>

#include "kernels/scan/cpu/block_rows.h"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {
namespace {

/// Two terms of a sum, scaled by the larger of their weights.
template <class R>
struct Wkv4Weights {
  Vec<R> first;
  Vec<R> second;

  /// Those whose logarithms differ by `distance` = second - first.
  static TIDEGATE_INLINE Wkv4Weights at(Vec<R> distance) {
    const Vec<R> smaller = exp_of_nonpositive(minus_abs(distance));
    const Vec<R> one = splat(R(1));
    const auto second_leads = distance > 0;
    return {second_leads ? smaller : one, second_leads ? one : smaller};
  }
};

/// exp(x) for any x.
template <class R>
TIDEGATE_INLINE Vec<R> exp_of_any(Vec<R> x) {
  const Vec<R> smaller = exp_of_nonpositive(minus_abs(x));
  return x > 0 ? R(1) / smaller : smaller;
}

/// Infinity as the largest number; NaN stays NaN.
template <class R>
TIDEGATE_INLINE Vec<R> bounded(Vec<R> x) {
  const Vec<R> largest = splat(std::numeric_limits<R>::max());
  const Vec<R> below = x > largest ? largest : x;
  return below < -largest ? -largest : below;
}

/// The state of some channels: sums scaled by exp(-m - rest). Inside the kernel the scaling
/// exponent is a sum of two floats, so that slow decays stay exact beside large exponents; in
/// memory it is one.
template <class R>
struct Wkv4State {
  using V = Vec<R>;
  V y, z, m;
  V rest = V{};

  TIDEGATE_INLINE auto is_empty() const { return minus_abs(y) + minus_abs(z) == 0; }

  /// Adds a token; returns the weights of the old sums and of the token. The exponent is the
  /// largest weight of all tokens so far.
  TIDEGATE_INLINE Wkv4Weights<R> add(V w, V k, V v) {
    const V change = rest - w;
    const V decayed = m + change;
    const V left = change - (decayed - m);
    const V distance = (k - decayed) - left;
    const Wkv4Weights<R> weights = Wkv4Weights<R>::at(distance);
    y = fma(weights.first, y, weights.second * v);
    z = fma(weights.first, z, weights.second);
    const auto token_leads = distance > 0;
    m = token_leads ? k : decayed;
    rest = token_leads ? V{} : left;
    return weights;
  }

  /// This state with a single-float exponent: the sums take over the rest.
  TIDEGATE_INLINE Wkv4State absorb_rest() const {
    const V more = fma(rest * R(0.5), rest, rest);  // exp(rest) - 1
    return {fma(y, more, y), fma(z, more, z), m};
  }
};

/// A token's output from the state before it.
template <class R>
struct Wkv4Output {
  using V = Vec<R>;
  Wkv4Weights<R> weights;  // of the sums and of the token with its bonus
  V scale;                 // 1 / the sum of the weights
  V o;

  static TIDEGATE_INLINE Wkv4Output of(const Wkv4State<R>& s, V u, V k, V v) {
    V distance = ((k - s.m) - s.rest) + u;
    const V least = s.is_empty() ? splat(R(kWkv4LeastBesideEmpty)) : splat(R(kWkv4NoWeight));
    distance = distance < least && k > R(kWkv4NoWeight) ? least : distance;
    const Wkv4Weights<R> weights = Wkv4Weights<R>::at(distance);
    const V scale = R(1) / fma(weights.first, s.z, weights.second);
    return {weights, scale, fma(weights.first, s.y, weights.second * v) * scale};
  }
};

/// Three rows of an [.., 3, D] array: y, z, m.
template <class R>
struct Wkv4StateRows {
  R* first = nullptr;
  int64_t columns = 0;

  template <class Extent>
  TIDEGATE_INLINE Wkv4State<R> load_state(int64_t j, Extent extent) const {
    return {load<R>(first + j, extent), load<R>(first + columns + j, extent),
            load<R>(first + 2 * columns + j, extent)};
  }
  template <class Extent>
  TIDEGATE_INLINE void store_state(int64_t j, const Wkv4State<R>& state, Extent extent) const {
    const Wkv4State<R> s = state.absorb_rest();
    store<R>(first + j, s.y, extent);
    store<R>(first + columns + j, s.z, extent);
    store<R>(first + 2 * columns + j, s.m, extent);
  }
};

template <class R, class E>
struct Wkv4Block {
  using V = Vec<R>;
  static constexpr int64_t kChunk = kWkv4SavedEvery;

  static Wkv4StateRows<R> state_rows(const void* states, const Wkv4Params& params,
                                     const ScanBlock& block) {
    return {state_row<R>(states, block.sequence, 3 * params.channels, block.channel),
            params.channels};
  }
  static Wkv4StateRows<R> saved_rows(const Wkv4Params& params, const ScanBlock& block,
                                     int64_t step) {
    const int64_t row =
        block.batch * wkv4_saved_rows(params.layout.time) + (block.begin + step) / kChunk;
    return {state_row<R>(params.saved, row, 3 * params.channels, block.channel), params.channels};
  }

  /// The state before the first token, whose k is given. An empty one takes the exponent of
  /// that token, so that nothing is lost beside an exponent that stands for nothing.
  template <class Extent>
  static TIDEGATE_INLINE Wkv4State<R> initial(const Wkv4StateRows<R>& given, int64_t j, V k,
                                              Extent extent) {
    const V lowest = splat(R(kWkv4NoWeight));
    Wkv4State<R> s = {V{}, V{}, k < lowest ? lowest : k};
    if (given.first != nullptr) {
      const Wkv4State<R> g = given.load_state(j, extent);
      s = {g.y, g.z, g.is_empty() ? s.m : g.m};
    }
    return s;
  }

  static TIDEGATE_NOINLINE void forward(const Wkv4Params& params, const ScanBlock& block) {
    auto k = forward_cursor<const E>(params.k, block, false);
    auto v = forward_cursor<const E>(params.v, block, false);
    auto o = forward_cursor<E>(params.o, block, false);
    const R* w = state_row<R>(params.w, 0, 0, block.channel);
    const R* u = state_row<R>(params.u, 0, 0, block.channel);
    const Wkv4StateRows<R> given = state_rows(params.state, params, block);
    const Wkv4StateRows<R> final_state = state_rows(params.final_state, params, block);
    if (block.length == 0) {
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        final_state.store_state(
            j, given.first != nullptr ? given.load_state(j, extent) : Wkv4State<R>{V{}, V{}, V{}},
            extent);
      });
      return;
    }
    RowBuffer<R> y, z, m, rest;
    for (int64_t step = 0; step < block.length; ++step) {
      const bool save = params.saved != nullptr && step > 0 && (block.length - step) % kChunk == 0;
      const Wkv4StateRows<R> saved = save ? saved_rows(params, block, step) : Wkv4StateRows<R>{};
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        k.prefetch(j), v.prefetch(j);
        const V k_now = load<R>(k.row + j, extent);
        const V v_now = load<R>(v.row + j, extent);
        Wkv4State<R> s = step == 0 ? initial(given, j, k_now, extent)
                                   : Wkv4State<R>{y.at(j), z.at(j), m.at(j), rest.at(j)};
        if (save) saved.store_state(j, s, extent);
        const auto output = Wkv4Output<R>::of(s, load<R>(u + j, extent), k_now, v_now);
        s.add(load<R>(w + j, extent), k_now, v_now);
        y.set(j, s.y), z.set(j, s.z), m.set(j, s.m), rest.set(j, s.rest);
        store<R>(o.row + j, output.o, extent, block.stream);
      });
      k.advance(), v.advance(), o.advance();
    }
    for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
      final_state.store_state(j, {y.at(j), z.at(j), m.at(j), rest.at(j)}, extent);
    });
  }

  /// What flows back into y and z, times exp(m) of the state that it flows into.
  struct Gradients {
    RowBuffer<R> y, z, m;
    TimeSum<R> dw, du;
  };

  /// Rows of one chunk, from its first token.
  struct ChunkRows {
    const E *k, *v, *grad_o;
    E *dk, *dv;
    int64_t k_step, v_step, grad_o_step, dk_step, dv_step;
    int64_t count;
    Wkv4StateRows<R> entering;  // null: the given state, and it is the first chunk
  };

  static ChunkRows chunk_rows(const Wkv4BackwardParams& params, const ScanBlock& block,
                              int64_t first, int64_t count) {
    const Wkv4Params& forward = params.forward;
    const auto k = forward_cursor<const E>(forward.k, block, false);
    const auto v = forward_cursor<const E>(forward.v, block, false);
    const auto grad_o = forward_cursor<const E>(params.grad_o, block, false);
    const auto dk = forward_cursor<E>(params.dk, block, false);
    const auto dv = forward_cursor<E>(params.dv, block, false);
    return {k.row + first * k.step,
            v.row + first * v.step,
            grad_o.row + first * grad_o.step,
            dk.row + first * dk.step,
            dv.row + first * dv.step,
            k.step,
            v.step,
            grad_o.step,
            dk.step,
            dv.step,
            count,
            first > 0 ? saved_rows(forward, block, first) : Wkv4StateRows<R>{}};
  }

  /// Some channels of one chunk: forward through it again, then back.
  template <class Extent>
  static TIDEGATE_INLINE void backward_chunk(const Wkv4BackwardParams& params,
                                             const ChunkRows& rows, const ScanBlock& block,
                                             bool is_last, Gradients& grads, int64_t j,
                                             Extent extent) {
    const Wkv4Params& forward = params.forward;
    const V w = load<R>(state_row<R>(forward.w, 0, 0, block.channel) + j, extent);
    const V u = load<R>(state_row<R>(forward.u, 0, 0, block.channel) + j, extent);
    const Wkv4StateRows<R> given = state_rows(forward.state, forward, block);
    Wkv4State<R> states[kChunk];  // that enter a token
    Wkv4Weights<R> weights[kChunk];
    Wkv4State<R> s = rows.entering.first != nullptr
                         ? rows.entering.load_state(j, extent)
                         : initial(given, j, load<R>(rows.k + j, extent), extent);
    for (int64_t i = 0; i < rows.count; ++i) {
      // The chunk before this one comes next.
      __builtin_prefetch(rows.k + (i - kChunk) * rows.k_step + j);
      __builtin_prefetch(rows.v + (i - kChunk) * rows.v_step + j);
      __builtin_prefetch(rows.grad_o + (i - kChunk) * rows.grad_o_step + j);
      states[i] = s;
      weights[i] = s.add(w, load<R>(rows.k + i * rows.k_step + j, extent),
                         load<R>(rows.v + i * rows.v_step + j, extent));
    }
    Wkv4State<R> flow = {grads.y.at(j), grads.z.at(j), grads.m.at(j)};
    if (is_last) {
      flow = {V{}, V{}, s.m};
      if (params.dfinal_state != nullptr) {
        flow = state_rows(params.dfinal_state, forward, block).load_state(j, extent);
        flow.m = state_rows(forward.final_state, forward, block).load_state(j, extent).m;
      }
    }
    // Rescales to the exponent that the chunk has led to now, which may be another one by a
    // rounding.
    const V scale = exp_of_any<R>((s.m - flow.m) + s.rest);
    V py = flow.y * scale;
    V pz = flow.z * scale;
    for (int64_t i = rows.count - 1; i >= 0; --i) {
      const V k = load<R>(rows.k + i * rows.k_step + j, extent);
      const V v = load<R>(rows.v + i * rows.v_step + j, extent);
      const auto output = Wkv4Output<R>::of(states[i], u, k, v);
      const V g = load<R>(rows.grad_o + i * rows.grad_o_step + j, extent) * output.scale;
      const V by_token = g * output.weights.second;
      const V by_sums = g * output.weights.first;
      // v - o, from what does not cancel.
      const V apart = output.weights.first * output.scale * fma(states[i].z, v, -states[i].y);
      const V bonus = by_token * apart;
      const V token = weights[i].second;
      const V old = weights[i].first;
      store<R>(rows.dv + i * rows.dv_step + j, fma(token, py, by_token), extent, block.stream);
      store<R>(rows.dk + i * rows.dk_step + j, fma(token, fma(v, py, pz), bonus), extent,
               block.stream);
      grads.du.add(j, bonus);
      grads.dw.add(j, -old * fma(py, states[i].y, pz * states[i].z));
      py = fma(old, py, by_sums);
      pz = fma(old, pz, -by_sums * output.o);
    }
    grads.y.set(j, py), grads.z.set(j, pz), grads.m.set(j, states[0].m);
    if (rows.entering.first == nullptr) {
      // From the scan's exponent to that of the state as it was given.
      V back = splat(R(1));
      if (given.first != nullptr) {
        const V largest = splat(kWkv4LargestGradientScale<R>);
        const V distance = given.load_state(j, extent).m - states[0].m;
        back = exp_of_any<R>(distance > largest ? largest : distance);
      }
      state_rows(params.dstate, forward, block)
          .store_state(j, {bounded<R>(py * back), bounded<R>(pz * back), V{}}, extent);
    }
  }

  static TIDEGATE_NOINLINE void backward(const Wkv4BackwardParams& params, const ScanBlock& block) {
    const Wkv4Params& forward = params.forward;
    Gradients grads;
    grads.y.fill(nullptr, block.width, R(0));
    grads.z.fill(nullptr, block.width, R(0));
    grads.m.fill(nullptr, block.width, R(0));
    grads.dw.clear(block.width);
    grads.du.clear(block.width);
    for (int64_t end = block.length; end > 0; end -= kChunk) {
      const int64_t first = end > kChunk ? end - kChunk : 0;
      const ChunkRows rows = chunk_rows(params, block, first, end - first);
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        backward_chunk(params, rows, block, end == block.length, grads, j, extent);
      });
      grads.dw.settle_all(block.width);
      grads.du.settle_all(block.width);
    }
    if (block.length == 0) {
      const R* d =
          state_row<R>(params.dfinal_state, block.sequence, 3 * forward.channels, block.channel);
      const Wkv4StateRows<R> dstate = state_rows(params.dstate, forward, block);
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        Wkv4State<R> s = {V{}, V{}, V{}};
        if (d != nullptr) {
          s.y = load<R>(d + j, extent);
          s.z = load<R>(d + forward.channels + j, extent);
        }
        dstate.store_state(j, s, extent);
      });
    }
    const auto write = [&](const TimeSum<R>& sum, void* partial) {
      sum.total.write_to(state_row<R>(partial, block.sequence, forward.channels, block.channel),
                         block.width);
    };
    write(grads.dw, params.dw_partial);
    write(grads.du, params.du_partial);
  }
};

template <class Body>
void with_wkv4_types(DType data, Body body) {
  with_real_types(data, data, [&](auto r, auto e, auto) {
    body(Wkv4Block<typename decltype(r)::Type, typename decltype(e)::Type>{});
  });
}

void wkv4_forward_block(const Wkv4Params& params, const ScanBlock& block) {
  with_wkv4_types(params.k.dtype, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::forward(params, block);
    if (block.stream) finish_streaming();
  });
}

void wkv4_backward_block(const Wkv4BackwardParams& params, const ScanBlock& block) {
  with_wkv4_types(params.forward.k.dtype, [&](auto kernel) {
    const SubnormalsAreZero scope{};
    decltype(kernel)::backward(params, block);
    if (block.stream) finish_streaming();
  });
}

}  // namespace
}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
