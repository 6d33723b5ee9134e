#pragma once

// The two scans that carry a state [K][columns of V]: forward for o and the final state, backward
// for dv and dh0. With P(t, s) the product of the decays after s up to t,
//
//   o_t  = q_t^T S_t,    S_t  = sum over s <= t of P(t, s) k_s v_s^T  + P(t, -1) h0
//   dv_s = dS_s^T k_s,   dS_s = sum over t >= s of P(t, s) q_t do_t^T + P(T - 1, s) dh_final
//
// so the second is the first with q and k, and v and do, exchanged and time turned round.

#include "kernels/gla/cpu/sub_chunk.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {
namespace {

template <class R, class E, class G>
struct ValueTile {
  const GlaParams& params;
  const GlaTile& tile;
  int64_t keys, values;  // padded K, padded width
  TokenRows<const E> q_rows, v_rows;
  KeyRows<R, E, G> key_rows;
  R *state, *q, *k, *f, *q_in, *k_out, *total,
      *chain;           // q_in, k_out: decayed to the sub-chunk's edges
  R *in, *out, *pairs;  // in: v or do; out: o or dv

  ValueTile(const GlaParams& all, const GlaTile& part)
      : params(all),
        tile(part),
        keys(padded(all.key_dim)),
        values(padded(part.width)),
        q_rows(all.q, part, all.layout.reverse, 0),
        v_rows(all.v, part, all.layout.reverse, part.column),
        key_rows(all, part, all.layout.reverse, 0, all.key_dim) {
    Scratch<R> scratch(part);
    state = scratch.take(keys * values);
    for (R** row : {&q, &k, &f, &q_in, &k_out}) *row = scratch.take(kSubChunk * keys);
    for (R** row : {&in, &out}) *row = scratch.take(kSubChunk * values);
    total = scratch.take(keys);
    chain = scratch.take(keys);
    pairs = scratch.take(kSubChunk * kSubChunk);
  }

  void load_state(const void* from) {
    if (from == nullptr) return;
    copy_state<R>(state_of<R>(from, params, tile, 0, tile.column), params.value_dim, params.key_dim,
                  tile.width, state, values);
  }
  void store_state(void* to) const {
    if (to == nullptr) return;
    copy_state<R>(state, values, params.key_dim, tile.width,
                  state_of<R>(to, params, tile, 0, tile.column), params.value_dim);
  }

  /// q, k, f and all that follows from them, of the sub-chunk that begins at token `first`.
  void load_sub_chunk(int64_t first, int count, NextSubChunk next) {
    load_rows<R, E>(q_rows, first, count, next, params.key_dim, params.q_activation,
                    static_cast<R>(params.scale), q);
    key_rows.load_keys(first, count, next, k, f, nullptr, nullptr);
    decay_from_start<R>(q, f, keys, q_in, total);
    decay_to_end<R>(k, f, keys, k_out, total);
    pair_products<R, true>({q, k, f, keys, chain, pairs});
  }

  // ---- forward ----

  static TIDEGATE_NOINLINE void forward(const GlaParams& params, const GlaTile& tile) {
    if (tile.length <= kFewTokens) return forward_by_token(params, tile);
    ValueTile self(params, tile);
    self.load_state(params.h0);
    const TokenRows<E> o_rows(params.o, tile, params.layout.reverse, tile.column);
    for (int64_t first = 0; first < tile.length; first += kSubChunk) {
      const int count = tokens_from(first, tile.length);
      self.load_sub_chunk(first, count, NextSubChunk::kLater);
      load_rows<R, E>(self.v_rows, first, count, NextSubChunk::kLater, tile.width,
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
      add_weighted_rows<R>(pairs + t, kSubChunk, in, t + 1, values, out + t * values);
    }
    update_state<R, DecayOf::kRow>(state, total, k_out, keys, in, values, state);
  }

  void store_out(const TokenRows<E>& rows, int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      E* row = rows.row(first + i);
      for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
        store<R>(row + j, row_vector(out + i * values + j), extent);
      });
    }
  }

  // ---- a few tokens, one after another ----

  /// Where sub-chunks would be mostly empty: a decoding step reads and writes the state once, in
  /// place.
  static constexpr int64_t kFewTokens = 2;

  static void forward_by_token(const GlaParams& params, const GlaTile& tile) {
    const R* from = state_of<const R>(params.h0, params, tile, 0, tile.column);
    R* to = state_of<R>(params.h_final, params, tile, 0, tile.column);
    const int64_t stride = params.value_dim;
    if (tile.length == 0) return hand_over(from, params.key_dim, tile.width, stride, to);
    Scratch<R> scratch(tile);
    const int64_t keys = padded(params.key_dim), values = padded(tile.width);
    R* own = to == nullptr ? scratch.take(keys * values) : nullptr;
    R *q = scratch.take(kSubChunk * keys), *k = scratch.take(kSubChunk * keys),
      *f = scratch.take(kSubChunk * keys), *v = scratch.take(kSubChunk * values),
      *out = scratch.take(values);
    const bool reverse = params.layout.reverse;
    const int count = static_cast<int>(tile.length);
    const TokenRows<E> o_rows(params.o, tile, reverse, tile.column);
    load_rows<R, E>({params.q, tile, reverse, 0}, 0, count, NextSubChunk::kLater, params.key_dim,
                    params.q_activation, static_cast<R>(params.scale), q);
    load_rows<R, E>({params.v, tile, reverse, tile.column}, 0, count, NextSubChunk::kLater,
                    tile.width, params.v_activation, R(1), v);
    KeyRows<R, E, G>(params, tile, reverse, 0, params.key_dim)
        .load_keys(0, count, NextSubChunk::kLater, k, f, nullptr, nullptr);
    const int64_t to_stride = own != nullptr ? values : stride;
    R* state = own != nullptr ? own : to;
    int64_t from_stride = stride;
    for (int t = 0; t < count; ++t) {
      for (int64_t j = 0; j < values; j += kLanes<R>) set_row_vector(out + j, Vec<R>{});
      for (int64_t m = 0; m < params.key_dim; ++m) {
        const Vec<R> decay = broadcast(f[t * keys + m]), key = broadcast(k[t * keys + m]),
                     query = broadcast(q[t * keys + m]);
        for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
          const Vec<R> before =
              from != nullptr ? load<R>(from + m * from_stride + j, extent) : Vec<R>{};
          const Vec<R> after = fma(key, row_vector(v + t * values + j), decay * before);
          store<R>(state + m * to_stride + j, after, extent);
          set_row_vector(out + j, fma(query, after, row_vector(out + j)));
        });
      }
      from = state;
      from_stride = to_stride;
      for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
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

  static TIDEGATE_NOINLINE void backward(const GlaBackwardParams& grads, const GlaTile& tile) {
    const GlaParams& params = grads.forward;
    ValueTile self(params, tile);
    self.load_state(grads.dh_final);
    const bool reverse = params.layout.reverse;
    const TokenRows<const E> do_rows(grads.d_o, tile, reverse, tile.column);
    const TokenRows<E> dv_rows(grads.dv, tile, reverse, tile.column);
    const int64_t sub_chunks = (tile.length + kSubChunk - 1) / kSubChunk;
    for (int64_t first = (sub_chunks - 1) * kSubChunk; first >= 0; first -= kSubChunk) {
      const int count = tokens_from(first, tile.length);
      self.load_sub_chunk(first, count, NextSubChunk::kEarlier);
      load_rows<R, E>(do_rows, first, count, NextSubChunk::kEarlier, tile.width,
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
      add_weighted_rows<R>(pairs + s * kSubChunk + s, 1, in + s * values, count - s, values,
                           out + s * values);
    }
    update_state<R, DecayOf::kRow>(state, total, q_in, keys, in, values, state);
  }

  void slope_of_v(int64_t first, int count) {
    if (params.v_activation == InputActivation::kNone) return;
    for (int i = 0; i < count; ++i) {
      const E* v = v_rows.row(first + i);
      R* row = out + i * values;
      for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
        const Vec<R> slope = activation_slope<R>(load<R>(v + j, extent), params.v_activation);
        set_row_vector(row + j, slope * row_vector(row + j));
      });
    }
  }
};

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
