#pragma once

// The scans of the backward pass that give dq, dk, the gate's gradient and dgamma, for some columns
// of K.
// States are kept transposed, [V][columns of K], so that all of it works on vectors along K.
//
// With S the state before a sub-chunk, dS the gradient of the state after it, P(t, s) the product
// of the decays after s up to t, and dA(t, s) = do_t . v_s, inside a sub-chunk:
//
//   dq_t = P(t, start) S do_t  + sum over s <= t of dA(t, s) P(t, s) k_s
//   dk_s = P(end, s) dS v_s    + sum over t >= s of dA(t, s) P(t, s) q_t
//   dL/df_u = the sum over all paths from before u to u or later, each without its factor f_u:
//        from S to a later t, from an earlier s to dS, from S to dS, from an earlier s to a later
//        t.
//
// Every term is a product of decays and inputs: nothing is divided by a decay, and dlog f_u = f_u
// dL/df_u is no difference of long sums.

#include "kernels/gla/cpu/sub_chunk.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {
namespace {

template <class R, class E, class G>
struct KeyTile {
  using V = Vec<R>;

  const GlaBackwardParams& grads;
  const GlaParams& params;
  const GlaTile& tile;
  int64_t keys, values;  // padded width, padded V
  TokenRows<const E> q_rows, v_rows, do_rows;
  KeyRows<R, E, G> key_rows;
  TokenRows<E> dq_rows, dk_rows;
  TokenRows<G> dgate_rows;
  R *q, *k, *f, *open, *shut, *decayed;               // [16][keys]
  R *dq, *dk, *df, *from_start, *from_end;            // [16][keys]; S do_t, dS v_s
  R *v, *d_o, *pairs, *chain;                         // [16][values]; dA(t, s) at [s][t]
  R *total, *through, *dgamma, *dgamma_of_sub_chunk;  // [keys]
  R *state, *states, *segments;  // dS; S before each sub-chunk of a segment; of each segment

  KeyTile(const GlaBackwardParams& all, const GlaTile& part)
      : grads(all),
        params(all.forward),
        tile(part),
        keys(padded(part.width)),
        values(padded(params.value_dim)),
        q_rows(params.q, part, params.layout.reverse, part.column),
        v_rows(params.v, part, params.layout.reverse, 0),
        do_rows(all.d_o, part, params.layout.reverse, 0),
        key_rows(params, part, params.layout.reverse, part.column, part.width),
        dq_rows(all.dq, part, params.layout.reverse, part.column),
        dgate_rows(all.dgate, part, params.layout.reverse, params.gate_per_head ? 0 : part.column) {
    if (params.gate_kind == GateKind::kLogDecay) {
      dk_rows = {all.dk, part, params.layout.reverse, part.column};
    }
    Scratch<R> scratch(part);
    for (R** row : {&q, &k, &f, &open, &shut, &decayed, &dq, &dk, &df, &from_start, &from_end}) {
      *row = scratch.take(kSubChunk * keys);
    }
    for (R** row : {&v, &d_o}) *row = scratch.take(kSubChunk * values);
    for (R** row : {&total, &through, &dgamma, &dgamma_of_sub_chunk}) *row = scratch.take(keys);
    chain = scratch.take(values);
    pairs = scratch.take(kSubChunk * kSubChunk);
    state = scratch.take(values * keys);
    states = scratch.take_raw(sub_chunk_states(part.length) * values * keys);
    segments = scratch.take_raw(0);  // to the end
  }

  int64_t state_size() const { return values * keys; }

  /// The tile's part of a [K, V] state, transposed; zeros where it is null.
  void load_state(const void* from, R* to) const {
    for (int64_t i = 0; i < state_size(); i += kLanes<R>) set_row_vector(to + i, V{});
    const R* row = state_of<const R>(from, params, tile, tile.column, 0);
    if (row == nullptr) return;
    for (int64_t m = 0; m < tile.width; ++m, row += params.value_dim) {
      for (int64_t n = 0; n < params.value_dim; ++n) to[n * keys + m] = row[n];
    }
  }

  void load_values(int64_t first, int count, NextSubChunk next) {
    load_rows<R, E>(v_rows, first, count, next, params.value_dim, params.v_activation, R(1), v);
  }

  /// The state after the sub-chunk at `first` from the one before it.
  void advance(int64_t first, const R* before, R* after) {
    const int count = tokens_from(first, tile.length);
    key_rows.load_keys(first, count, NextSubChunk::kLater, k, f, nullptr, nullptr);
    load_values(first, count, NextSubChunk::kLater);
    decay_to_end<R>(k, f, keys, decayed, total);
    update_state<R, DecayOf::kColumn>(before, total, v, values, decayed, keys, after);
  }

  static TIDEGATE_NOINLINE void run(const GlaBackwardParams& grads, const GlaTile& tile) {
    KeyTile self(grads, tile);
    const int64_t sub_chunks = (tile.length + kSubChunk - 1) / kSubChunk;
    const int64_t segments = (sub_chunks + kSegmentSubChunks - 1) / kSegmentSubChunks;
    self.load_state(grads.dh_final, self.state);
    self.load_state(self.params.h0, self.segments);
    for (int64_t s = 0; s + 1 < segments; ++s) self.find_segment(s);
    for (int64_t s = segments - 1; s >= 0; --s) {
      const int64_t begin = s * kSegmentSubChunks;
      const int64_t end =
          begin + kSegmentSubChunks < sub_chunks ? begin + kSegmentSubChunks : sub_chunks;
      self.scan_segment(s, begin, end);
    }
    self.store_dgamma();
  }

  /// The state at the beginning of segment s + 1 from that of segment s.
  void find_segment(int64_t s) {
    R* next = segments + (s + 1) * state_size();
    const R* before = segments + s * state_size();
    for (int64_t i = 0; i < kSegmentSubChunks; ++i) {
      advance((s * kSegmentSubChunks + i) * kSubChunk, before, next);
      before = next;
    }
  }

  void scan_segment(int64_t s, int64_t begin, int64_t end) {
    const R* before = segments + s * state_size();
    for (int64_t i = begin; i + 1 < end; ++i) {
      R* after = states + (i - begin) * state_size();
      advance(i * kSubChunk, before, after);
      before = after;
    }
    for (int64_t i = end - 1; i >= begin; --i) {
      const R* start =
          i == begin ? segments + s * state_size() : states + (i - begin - 1) * state_size();
      sub_chunk_gradients(i * kSubChunk, start);
    }
  }

  /// All gradients of one sub-chunk; `start` is the state before it, `state` the gradient after it.
  void sub_chunk_gradients(int64_t first, const R* start) {
    const int count = tokens_from(first, tile.length);
    constexpr NextSubChunk kNext = NextSubChunk::kEarlier;
    load_rows<R, E>(q_rows, first, count, kNext, tile.width, params.q_activation,
                    static_cast<R>(params.scale), q);
    key_rows.load_keys(first, count, kNext, k, f, open, shut);
    load_values(first, count, kNext);
    load_rows<R, E>(do_rows, first, count, kNext, params.value_dim, InputActivation::kNone, R(1),
                    d_o);
    token_product<R>(d_o, values, start, keys, from_start);
    token_product<R>(v, values, state, keys, from_end);
    pair_products<R, false>({d_o, v, nullptr, values, chain, pairs});
    rows_of_both_states(start);
    between_states();
    between_tokens(count);
    store_results(first, count);
    decay_from_start<R>(q, f, keys, decayed, total);
    update_state<R, DecayOf::kColumn>(state, total, d_o, values, decayed, keys, state);
  }

  /// through = sum over V of S * dS.
  TIDEGATE_NOINLINE void rows_of_both_states(const R* start) {
    for (int64_t j = 0; j < keys; j += kLanes<R>) {
      V sums[4] = {};
      for (int64_t n = 0; n < values; n += 4) {
        unrolled<4>([&](auto i) {
          const int64_t at = (n + i.value) * keys + j;
          sums[i.value] = fma(row_vector(start + at), row_vector(state + at), sums[i.value]);
        });
      }
      set_row_vector(through + j, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  }

  /// What comes from the state before the sub-chunk or goes to the one after it.
  TIDEGATE_NOINLINE void between_states() {
    for (int64_t j = 0; j < keys; j += kLanes<R>) {
      const auto at = [&](const R* rows, int t) { return row_vector(rows + t * keys + j); };
      // Forwards: the decay from the start, and the paths that began at earlier tokens.
      DecayProduct<R> from_begin, to_end;
      V begun = V{}, before[kSubChunk];
      const V across = row_vector(through + j);
      for (int u = 0; u < kSubChunk; ++u) {
        before[u] = from_begin.value();
        set_row_vector(df + u * keys + j, fma(before[u], across, begun));
        const V f_now = at(f, u);
        from_begin.multiply(f_now);
        set_row_vector(dq + u * keys + j, from_begin.value() * at(from_start, u));
        begun = fma(f_now, begun, at(k, u) * at(from_end, u));
      }
      // Backwards: the decay to the end, and the paths that will end at later tokens.
      V ending = V{};
      for (int u = kSubChunk - 1; u >= 0; --u) {
        ending = fma(at(q, u), at(from_start, u), ending);
        const V decay = to_end.value();
        set_row_vector(df + u * keys + j, fma(decay, at(df, u), before[u] * ending));
        set_row_vector(dk + u * keys + j, decay * at(from_end, u));
        const V f_now = at(f, u);
        ending *= f_now;
        to_end.multiply(f_now);
      }
    }
  }

  /// The paths from a token to another one of the sub-chunk. While u goes forwards,
  /// reached[t] = sum over s < u of dA(t, s) P(u - 1, s) k_s.
  TIDEGATE_NOINLINE void between_tokens(int count) {
    for (int64_t j = 0; j < keys; j += kLanes<R>) {
      V reached[kSubChunk] = {};
      for (int u = 0; u < count; ++u) {
        const R* weights = pairs + u * kSubChunk;
        const R* f_row = f + u * keys + j;
        const V f_now = row_vector(f_row), k_now = row_vector(k + u * keys + j);
        V query = row_vector(q + u * keys + j), decay = splat(R(1));
        V df_now = query * reached[u];
        V dk_now = broadcast(weights[u]) * query;
        const V dq_now = fma(f_now, reached[u], broadcast(weights[u]) * k_now);
        for (int t = u + 1; t < count; ++t) {
          decay *= row_vector(f + t * keys + j);
          query = decay * row_vector(q + t * keys + j);
          const V weight = broadcast(weights[t]);
          df_now = fma(query, reached[t], df_now);
          dk_now = fma(weight, query, dk_now);
          reached[t] = fma(f_now, reached[t], weight * k_now);
        }
        add(dq + u * keys + j, dq_now);
        add(dk + u * keys + j, dk_now);
        add(df + u * keys + j, df_now);
      }
    }
  }

  static TIDEGATE_INLINE void add(R* to, V v) { set_row_vector(to, row_vector(to) + v); }

  // ---- results ----

  TIDEGATE_NOINLINE void store_results(int64_t first, int count) {
    const R scale = static_cast<R>(params.scale);
    for (int i = 0; i < count; ++i) {
      const int64_t row = i * keys;
      const E* q_in = q_rows.row(first + i);
      E* to = dq_rows.row(first + i);
      for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
        V grad = scale * row_vector(dq + row + j);
        if (params.q_activation != InputActivation::kNone) {
          grad *= activation_slope<R>(load<R>(q_in + j, extent), params.q_activation);
        }
        store<R>(to + j, grad, extent);
      });
      if (params.gate_kind == GateKind::kLogit) {
        store_logit(first + i, row);
      } else {
        store_log_decay(first + i, row);
      }
    }
    // In two levels, so that the rounding errors of a long sum grow with its sub-chunks only.
    for (int64_t j = 0; j < keys; j += kLanes<R>) {
      add(dgamma + j, row_vector(dgamma_of_sub_chunk + j));
      set_row_vector(dgamma_of_sub_chunk + j, V{});
    }
  }

  /// dx = (dL/df - dk) (1 - gamma) s(x) s(-x),  dgamma = sum of (dL/df - dk) s(-x).
  void store_logit(int64_t token, int64_t row) {
    G* to = dgate_rows.row(token);
    for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
      const V from_both = row_vector(df + row + j) - row_vector(dk + row + j);
      store<R>(to + j, from_both * row_vector(k + row + j) * row_vector(open + row + j), extent);
      add(dgamma_of_sub_chunk + j, from_both * row_vector(shut + row + j));
    });
  }

  void store_log_decay(int64_t token, int64_t row) {
    E* to = dk_rows.row(token);
    G* to_gate = dgate_rows.row(token);
    V sum = V{};
    for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
      store<R>(to + j, row_vector(dk + row + j), extent);
      const V dlog_f = row_vector(f + row + j) * row_vector(df + row + j);
      if (params.gate_per_head) {
        sum += dlog_f;  // columns past the width are zero
      } else {
        store<R>(to_gate + j, dlog_f, extent);
      }
    });
    if (!params.gate_per_head) return;
    R lanes[kLanes<R>];
    store<R>(lanes, sum, Whole{});
    for (int i = 1; i < kLanes<R>; ++i) lanes[0] += lanes[i];
    store<R>(to_gate, splat(lanes[0]), Part{1});
  }

  void store_dgamma() const {
    if (grads.dgamma_partial == nullptr) return;
    R* to = static_cast<R*>(grads.dgamma_partial) + tile.sequence * params.channels +
            tile.head * params.key_dim + tile.column;
    for_each_vector<R>(tile.width, [&](int64_t j, auto extent) {
      store<R>(to + j, row_vector(dgamma + j), extent);
    });
  }
};

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
