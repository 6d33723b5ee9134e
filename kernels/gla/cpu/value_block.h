#pragma once

// The two walks that carry a state [K][columns of V]: forward for o and the final state, backward
// for dv and dh0. With P(t, s) the product of the decays after s up to t,
//
//   o_t  = q_t^T S_t,    S_t  = sum over s <= t of P(t, s) k_s v_s^T  + P(t, -1) h0
//   dv_s = dS_s^T k_s,   dS_s = sum over t >= s of P(t, s) q_t do_t^T + P(T - 1, s) dh_final
//
// so the second is the first with q and k, and v and do, exchanged and time turned round.

#include "kernels/gla/cpu/token_block.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {
namespace {

template <class R, class E, class G>
struct ValueBlock {
  const GlaParams& params;
  const GlaBlock& block;
  int64_t keys, values;  // padded K, padded width
  TokenRows<const E> q_rows, v_rows;
  KeyRows<R, E, G> key_rows;
  R *state, *q, *k, *f, *q_in, *k_out, *total, *chain;  // q_in, k_out: decayed to the block's edges
  R *in, *out, *pairs;                                  // in: v or do; out: o or dv

  ValueBlock(const GlaParams& all, const GlaBlock& part)
      : params(all),
        block(part),
        keys(padded(all.key_dim)),
        values(padded(part.width)),
        q_rows(all.q, part, all.layout.reverse, 0),
        v_rows(all.v, part, all.layout.reverse, part.column),
        key_rows(all, part, all.layout.reverse, 0, all.key_dim) {
    Scratch<R> scratch(part);
    state = scratch.take(keys * values);
    for (R** row : {&q, &k, &f, &q_in, &k_out}) *row = scratch.take(kTokens * keys);
    for (R** row : {&in, &out}) *row = scratch.take(kTokens * values);
    total = scratch.take(keys);
    chain = scratch.take(keys);
    pairs = scratch.take(kTokens * kTokens);
  }

  void load_state(const void* from) {
    if (from == nullptr) return;
    copy_state<R>(state_of<R>(from, params, block, 0, block.column), params.value_dim,
                  params.key_dim, block.width, state, values);
  }
  void store_state(void* to) const {
    if (to == nullptr) return;
    copy_state<R>(state, values, params.key_dim, block.width,
                  state_of<R>(to, params, block, 0, block.column), params.value_dim);
  }

  /// q, k, f and all that follows from them, of the block that begins at token `first`.
  void load_block(int64_t first, int count, NextBlock next) {
    load_rows<R, E>(q_rows, first, count, next, params.key_dim, params.q_activation,
                    static_cast<R>(params.scale), q);
    key_rows.load_keys(first, count, next, k, f, nullptr, nullptr);
    decay_from_start<R>(q, f, keys, q_in, total);
    decay_to_end<R>(k, f, keys, k_out, total);
    pair_products<R, true>({q, k, f, keys, chain, pairs});
  }

  // ---- forward ----

  static TIDEGATE_NOINLINE void forward(const GlaParams& params, const GlaBlock& block) {
    if (block.length <= kFewTokens) return forward_by_token(params, block);
    ValueBlock self(params, block);
    self.load_state(params.h0);
    const TokenRows<E> o_rows(params.o, block, params.layout.reverse, block.column);
    for (int64_t first = 0; first < block.length; first += kTokens) {
      const int count = tokens_from(first, block.length);
      self.load_block(first, count, NextBlock::kLater);
      load_rows<R, E>(self.v_rows, first, count, NextBlock::kLater, block.width,
                      params.v_activation, R(1), self.in);
      self.forward_tokens(count);
      self.store_out(o_rows, first, count);
    }
    self.store_state(params.h_final);
  }

  /// Rows of `in` after token t never enter out[t], whatever is in them.
  void forward_tokens(int count) {
    token_product<R>(q_in, keys, state, values, out);
    for (int t = 0; t < count; ++t) {
      add_weighted_rows<R>(pairs + t, kTokens, in, t + 1, values, out + t * values);
    }
    update_state<R, DecayOf::kRow>(state, total, k_out, keys, in, values, state);
  }

  void store_out(const TokenRows<E>& rows, int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      E* row = rows.row(first + i);
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        store<R>(row + j, row_vector(out + i * values + j), extent);
      });
    }
  }

  // ---- a few tokens, one after another ----

  /// Where blocks would be mostly empty: a decoding step reads and writes the state once, in place.
  static constexpr int64_t kFewTokens = 2;

  static void forward_by_token(const GlaParams& params, const GlaBlock& block) {
    const R* from = state_of<const R>(params.h0, params, block, 0, block.column);
    R* to = state_of<R>(params.h_final, params, block, 0, block.column);
    const int64_t stride = params.value_dim;
    if (block.length == 0) return hand_over(from, params.key_dim, block.width, stride, to);
    Scratch<R> scratch(block);
    const int64_t keys = padded(params.key_dim), values = padded(block.width);
    R* own = to == nullptr ? scratch.take(keys * values) : nullptr;
    R *q = scratch.take(kTokens * keys), *k = scratch.take(kTokens * keys),
      *f = scratch.take(kTokens * keys), *v = scratch.take(kTokens * values),
      *out = scratch.take(values);
    const bool reverse = params.layout.reverse;
    const int count = static_cast<int>(block.length);
    const TokenRows<E> o_rows(params.o, block, reverse, block.column);
    load_rows<R, E>({params.q, block, reverse, 0}, 0, count, NextBlock::kLater, params.key_dim,
                    params.q_activation, static_cast<R>(params.scale), q);
    load_rows<R, E>({params.v, block, reverse, block.column}, 0, count, NextBlock::kLater,
                    block.width, params.v_activation, R(1), v);
    KeyRows<R, E, G>(params, block, reverse, 0, params.key_dim)
        .load_keys(0, count, NextBlock::kLater, k, f, nullptr, nullptr);
    const int64_t to_stride = own != nullptr ? values : stride;
    R* state = own != nullptr ? own : to;
    int64_t from_stride = stride;
    for (int t = 0; t < count; ++t) {
      for (int64_t j = 0; j < values; j += kLanes<R>) set_row_vector(out + j, Vec<R>{});
      for (int64_t m = 0; m < params.key_dim; ++m) {
        const Vec<R> decay = broadcast(f[t * keys + m]), key = broadcast(k[t * keys + m]),
                     query = broadcast(q[t * keys + m]);
        for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
          const Vec<R> before =
              from != nullptr ? load<R>(from + m * from_stride + j, extent) : Vec<R>{};
          const Vec<R> after = fma(key, row_vector(v + t * values + j), decay * before);
          store<R>(state + m * to_stride + j, after, extent);
          set_row_vector(out + j, fma(query, after, row_vector(out + j)));
        });
      }
      from = state;
      from_stride = to_stride;
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        store<R>(o_rows.row(t) + j, row_vector(out + j), extent);
      });
    }
  }

  static void hand_over(const R* from, int64_t rows, int64_t width, int64_t stride, R* to) {
    if (to == nullptr || to == from) return;
    for (int64_t m = 0; m < rows; ++m) {
      for_each_vector<R>(width, [&](int64_t j, auto extent) {
        const Vec<R> value = from != nullptr ? load<R>(from + m * stride + j, extent) : Vec<R>{};
        store<R>(to + m * stride + j, value, extent);
      });
    }
  }

  // ---- backward ----

  static TIDEGATE_NOINLINE void backward(const GlaBackwardParams& grads, const GlaBlock& block) {
    const GlaParams& params = grads.forward;
    ValueBlock self(params, block);
    self.load_state(grads.dh_final);
    const bool reverse = params.layout.reverse;
    const TokenRows<const E> do_rows(grads.d_o, block, reverse, block.column);
    const TokenRows<E> dv_rows(grads.dv, block, reverse, block.column);
    const int64_t blocks = (block.length + kTokens - 1) / kTokens;
    for (int64_t first = (blocks - 1) * kTokens; first >= 0; first -= kTokens) {
      const int count = tokens_from(first, block.length);
      self.load_block(first, count, NextBlock::kEarlier);
      load_rows<R, E>(do_rows, first, count, NextBlock::kEarlier, block.width,
                      InputActivation::kNone, R(1), self.in);
      self.backward_tokens(count);
      self.slope_of_v(first, count);
      self.store_out(dv_rows, first, count);
    }
    self.store_state(grads.dh0);
  }

  void backward_tokens(int count) {
    token_product<R>(k_out, keys, state, values, out);
    for (int s = 0; s < count; ++s) {
      add_weighted_rows<R>(pairs + s * kTokens + s, 1, in + s * values, count - s, values,
                           out + s * values);
    }
    update_state<R, DecayOf::kRow>(state, total, q_in, keys, in, values, state);
  }

  void slope_of_v(int64_t first, int count) {
    if (params.v_activation == InputActivation::kNone) return;
    for (int i = 0; i < count; ++i) {
      const E* v = v_rows.row(first + i);
      R* row = out + i * values;
      for_each_vector<R>(block.width, [&](int64_t j, auto extent) {
        const Vec<R> slope = activation_slope<R>(load<R>(v + j, extent), params.v_activation);
        set_row_vector(row + j, slope * row_vector(row + j));
      });
    }
  }
};

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
