#pragma once

// The backward pass of pairs of tiles: scores lie [query][key]. A tile of keys iterates over all
// queries that see it, for dk, dv and sums over columns; dq and sums over rows come from the same
// dS, at once or, where there are more threads than heads, in a pass of their own over the same
// tiles in the same order.

#include "kernels/attention/cpu/attention_tiles.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {
namespace {

template <class R, class E>
struct BackwardTile {
  using Grads = ForgettingAttentionBackwardParams;
  static constexpr bool kOwnType = sizeof(R) == sizeof(E);

  const Grads& grads;
  const ForgettingAttentionParams& params;
  const AttentionWork& work;
  AttentionHead head;
  TilePair pair;
  int64_t width, stride;

  // Scratch memory: queries' rows are [kQueryTile][stride], keys' also [width][kKeyTile] (_lanes).
  R *q, *d_o, *dq, *k, *k_lanes, *v, *v_lanes, *dk, *dv;
  R *weights, *d_scores;  // [kQueryTile][kKeyTile]: P and dS
  R *row_offset, *row_high, *row_low, *row_lse, *row_term, *row_parts, *key_high, *key_low;
  double column_sums[kKeyTile];

  BackwardTile(const Grads& all, const AttentionWork& where, const AttentionItem& item)
      : grads(all),
        params(all.forward),
        work(where),
        head(item.head),
        width(all.forward.head_dim),
        stride(padded_row(all.forward.head_dim)) {
    pair.window = params.window;
    Scratch<R> scratch(item.scratch);
    for (R** tile : {&q, &d_o, &dq, &k, &k_lanes, &v, &v_lanes, &dk, &dv}) {
      *tile = scratch.take(kQueryTile * stride);
    }
    weights = scratch.take(kQueryTile * kKeyTile);
    d_scores = scratch.take(kQueryTile * kKeyTile);
    row_parts = scratch.take(kQueryTile * kRowPadding);
    for (R** numbers :
         {&row_offset, &row_high, &row_low, &row_lse, &row_term, &key_high, &key_low}) {
      *numbers = scratch.take(kQueryTile);
    }
  }

  // ---- The passes ----

  static TIDEGATE_NOINLINE void prepare(const Grads& grads, const AttentionWork& work,
                                        const AttentionItem& item) {
    BackwardTile tile(grads, work, item);
    tile.set_queries(item.tile);
    tile.find_delta(item.tile * kQueryTile);
    const ForgettingAttentionParams& p = grads.forward;
    const int64_t end = tile.pair.position + tile.pair.queries;
    const int64_t from = tile.pair.position > 0 ? tile.pair.position : 0;
    int64_t first_key = 0;
    if (end > 0) {
      const double norm =
          p.prune > 0 ? query_norm<R, E>(p, tile.head, item.tile * kQueryTile, tile.pair.queries)
                      : 0;
      first_key = first_key_of(p, work, tile.head, from, end - from, norm);
    }
    tile.first_key(item.tile) = first_key;
  }

  static TIDEGATE_NOINLINE void keys(const Grads& grads, const AttentionWork& work,
                                     const AttentionItem& item, bool with_queries) {
    BackwardTile tile(grads, work, item);
    tile.load_keys(item.tile);
    for (R* sums : {tile.dk, tile.dv}) {
      for (int64_t i = 0; i < kKeyTile * tile.stride; i += kLanes<R>) {
        set_row_vector(sums + i, Vec<R>{});
      }
    }
    const int64_t group = grads.forward.heads / grads.forward.key_heads;
    for (int64_t i = 0; i < group; ++i, ++tile.head.head) tile.iterate_queries(with_queries);
    tile.head = item.head;
    tile.store_keys();
  }

  static TIDEGATE_NOINLINE void queries(const Grads& grads, const AttentionWork& work,
                                        const AttentionItem& item) {
    BackwardTile tile(grads, work, item);
    tile.set_queries(item.tile);
    const int64_t end = tile.pair.position + tile.pair.queries;
    if (end <= 0) return;
    tile.load_queries(item.tile * kQueryTile);
    for (int64_t key = tile.first_key(item.tile); key < end; key += kKeyTile) {
      tile.load_keys(key / kKeyTile);
      tile.find_gates();
      tile.score();
      tile.add_to_queries(item.tile * kQueryTile);
    }
  }

  void iterate_queries(bool with_queries) {
    for (double& sum : column_sums) sum = 0;
    const int64_t offset = head.keys - head.queries;
    const int64_t before = pair.key - offset;  // the first query that sees the tile's first key
    for (int64_t tile = before > 0 ? before / kQueryTile : 0; tile * kQueryTile < head.queries;
         ++tile) {
      set_queries(tile);
      if (pair.window > 0 && pair.position - pair.window >= pair.key + pair.keys - 1) break;
      if (pair.position + pair.queries <= pair.key || first_key(tile) > pair.key) continue;
      load_queries(tile * kQueryTile);
      find_gates();
      score();
      add_columns();
      tile_product<R, Left::kColumns, Into::kAdd>({weights, kKeyTile}, {d_o, stride},
                                                  whole_groups(pair.keys), stride, pair.queries,
                                                  {dv, stride});
      tile_product<R, Left::kColumns, Into::kAdd>({d_scores, kKeyTile}, {q, stride},
                                                  whole_groups(pair.keys), stride, pair.queries,
                                                  {dk, stride});
      if (with_queries) add_to_queries(tile * kQueryTile);
    }
    double* const sums = work.column_sums +
                         (head.batch * params.heads + head.head) * work.key_time + head.key_begin +
                         pair.key;
    for (int64_t j = 0; j < pair.keys; ++j) sums[j] = column_sums[j];
  }

  // ---- What is read ----

  void set_queries(int64_t tile) {
    const int64_t first = tile * kQueryTile;
    pair.queries = head.queries - first < kQueryTile ? head.queries - first : kQueryTile;
    pair.position = first + head.keys - head.queries;
  }

  int64_t& first_key(int64_t tile) const {
    return work.first_keys[(head.batch * params.heads + head.head) * work.query_tiles +
                           head.query_tile + tile];
  }

  void load_keys(int64_t tile) {
    pair.key = tile * kKeyTile;
    pair.keys = head.keys - pair.key < kKeyTile ? head.keys - pair.key : kKeyTile;
    const HeadRows<const E> keys(params.k, head.batch, head.key_begin, head.key_head);
    const HeadRows<const E> values(params.v, head.batch, head.key_begin, head.key_head);
    load_tile<R>(keys, pair.key, pair.keys, width, static_cast<R>(params.scale), k);
    load_tile<R>(values, pair.key, pair.keys, width, R(1), v);
    transpose_tile(k, pair.keys, width, k_lanes);
    transpose_tile(v, pair.keys, width, v_lanes);
  }

  void load_queries(int64_t first) {
    const HeadRows<const E> rows(params.q, head.batch, head.query_begin, head.head);
    const HeadRows<const E> outs(grads.d_o, head.batch, head.query_begin, head.head);
    load_tile<R>(rows, first, pair.queries, width, R(1), q);
    load_tile<R>(outs, first, pair.queries, width, R(1), d_o);
    const int64_t at = query_index(params, work, head) + first;
    const R* lse = static_cast<const R*>(params.lse) + at;
    const R* delta = static_cast<const R*>(work.delta) + at;
    for (int64_t i = 0; i < pair.queries; ++i) {
      // A query without keys: of a finite number, so that its weights are zeros.
      row_lse[i] = pair.position + i >= 0 ? lse[i] : R(0);
      row_term[i] = delta[i];
    }
  }

  void find_delta(int64_t first) {
    const HeadRows<const E> outs(params.o, head.batch, head.query_begin, head.head);
    const HeadRows<const E> d_outs(grads.d_o, head.batch, head.query_begin, head.head);
    const int64_t at = query_index(params, work, head) + first;
    R* delta = static_cast<R*>(work.delta) + at;
    for (int64_t i = 0; i < pair.queries; ++i) {
      const E *a = outs.row(first + i), *b = d_outs.row(first + i);
      Vec<R> products{};
      for_each_vector<R>(width, [&](int64_t j, auto extent) {
        products = fma(load<R>(a + j, extent), load<R>(b + j, extent), products);
      });
      double sum = 0;
      for (int l = 0; l < kLanes<R>; ++l) sum += static_cast<double>(products[l]);
      if (grads.dlse != nullptr) {
        sum -= static_cast<double>(static_cast<const R*>(grads.dlse)[at + i]);
      }
      delta[i] = static_cast<R>(sum);
      work.row_sums[at + i] = 0;
      R* to = dq_row(grads, work, head, first + i);
      for_each_vector<R>(width,
                         [&](int64_t j, auto extent) { store<R>(to + j, Vec<R>{}, extent); });
    }
  }

  /// dq of 16-bit data, from where it was added up.
  static TIDEGATE_NOINLINE void write_dq(const Grads& grads, const AttentionWork& work,
                                         const AttentionHead& head) {
    if constexpr (!kOwnType) {
      const HeadRows<E> to(grads.dq, head.batch, head.query_begin, head.head);
      for (int64_t i = 0; i < head.queries; ++i) {
        const R* from = dq_row(grads, work, head, i);
        E* row = to.row(i);
        for_each_vector<R>(grads.forward.head_dim, [&](int64_t j, auto extent) {
          store<R>(row + j, load<R>(from + j, extent), extent);
        });
      }
    }
  }

  /// Where dq is added up: in place, where it has the state's type.
  static R* dq_row(const Grads& grads, const AttentionWork& work, const AttentionHead& head,
                   int64_t query) {
    if constexpr (kOwnType) {
      return HeadRows<R>(grads.dq, head.batch, head.query_begin, head.head).row(query);
    } else {
      const int64_t row = head.batch * work.query_time + head.query_begin + query;
      return static_cast<R*>(work.dq) +
             (row * grads.forward.heads + head.head) * grads.forward.head_dim;
    }
  }

  void find_gates() {
    const double* c = gate_sums_of(params, work, head);
    const double reference = c[pair.position > 0 ? pair.position : 0];
    for (int64_t i = 0; i < pair.queries; ++i) {
      const int64_t position = pair.position + i;
      const GateOffset<R> offset =
          gate_offset<R>(position >= 0 ? c[position] : reference, reference);
      row_high[i] = offset.high;
      row_low[i] = offset.low;
    }
    for (int64_t j = 0; j < kKeyTile; ++j) {
      const GateOffset<R> offset =
          gate_offset<R>(j < pair.keys ? c[pair.key + j] : reference, reference);
      key_high[j] = offset.high;
      key_low[j] = offset.low;
    }
  }

  // ---- What is computed ----

  /// P and dS of the pair, and the sums of dS over keys and over queries, both without the
  /// diagonal, which would be in both and cancel.
  void score() {
    const int64_t rows = whole_groups(pair.queries), lanes = whole_vectors<R>(pair.keys);
    tile_product<R, Left::kRows, Into::kReplace>({q, stride}, {k_lanes, kKeyTile}, rows, lanes,
                                                 width, {weights, kKeyTile});
    tile_product<R, Left::kRows, Into::kReplace>({d_o, stride}, {v_lanes, kKeyTile}, rows, lanes,
                                                 width, {d_scores, kKeyTile});
    for (int64_t i = 0; i < pair.queries; ++i) set_row_vector(part(i), Vec<R>{});
    if (pair.is_edge() || lanes != pair.keys) {
      differentiate<true>(lanes);
    } else {
      differentiate<false>(lanes);
    }
  }

  R* part(int64_t row) const { return row_parts + row * kRowPadding; }

  Vec<R> columns[kKeyTile / kLanes<R>];

  template <bool kEdge>
  TIDEGATE_INLINE void differentiate(int64_t lanes) {
    const Vec<R> lane = lane_numbers<R>();
    for (int64_t j = 0; j < lanes; j += kLanes<R>) {
      const Vec<R> high = row_vector(key_high + j), low = row_vector(key_low + j);
      const Vec<R> exists = splat(static_cast<R>(pair.keys - j));
      Vec<R> column{};
      for (int64_t i = 0; i < pair.queries; ++i) {
        R* const at = weights + i * kKeyTile + j;
        R* const d_at = d_scores + i * kKeyTile + j;
        Vec<R> gates = splat(row_high[i]) - high;
        if constexpr (kEdge) gates += splat(row_low[i]) - low;
        Vec<R> weight = exp_of_nonpositive(row_vector(at) + (gates - splat(row_lse[i])));
        const Vec<R> last = splat(static_cast<R>(near_tile(pair.last(i) - j)));
        if constexpr (kEdge) {
          const Vec<R> first = splat(static_cast<R>(near_tile(pair.first(i) - j)));
          weight = lane <= last ? weight : Vec<R>{};
          weight = lane >= first ? weight : Vec<R>{};
          weight = lane < exists ? weight : Vec<R>{};
        }
        Vec<R> d_score = weight * (row_vector(d_at) - splat(row_term[i]));
        if constexpr (kEdge) d_score = weight == Vec<R>{} ? Vec<R>{} : d_score;
        set_row_vector(at, weight);
        set_row_vector(d_at, d_score);
        if constexpr (kEdge) d_score = lane == last ? Vec<R>{} : d_score;
        column += d_score;
        set_row_vector(part(i), row_vector(part(i)) + d_score);
      }
      columns[j / kLanes<R>] = column;
    }
  }

  void add_columns() {
    for (int64_t j = 0; j < pair.keys; ++j) {
      column_sums[j] += static_cast<double>(columns[j / kLanes<R>][j % kLanes<R>]);
    }
  }

  void add_to_queries(int64_t first) {
    double* const sums = work.row_sums + query_index(params, work, head) + first;
    for (int64_t i = 0; i < pair.queries; ++i) {
      double sum = 0;
      for (int l = 0; l < kLanes<R>; ++l) sum += static_cast<double>(part(i)[l]);
      sums[i] += sum;
    }
    tile_product<R, Left::kRows, Into::kReplace>({d_scores, kKeyTile}, {k, stride},
                                                 whole_groups(pair.queries), stride, pair.keys,
                                                 {dq, stride});
    for (int64_t i = 0; i < pair.queries; ++i) {
      R* to = dq_row(grads, work, head, first + i);
      for_each_vector<R>(width, [&](int64_t j, auto extent) {
        store<R>(to + j, load<R>(to + j, extent) + row_vector(dq + i * stride + j), extent);
      });
    }
  }

  // ---- What is written ----

  void store_keys() {
    const HeadRows<E> to_k(grads.dk, head.batch, head.key_begin, head.key_head);
    const HeadRows<E> to_v(grads.dv, head.batch, head.key_begin, head.key_head);
    const Vec<R> scale = splat(static_cast<R>(params.scale));
    for (int64_t j = 0; j < pair.keys; ++j) {
      E *k_row = to_k.row(pair.key + j), *v_row = to_v.row(pair.key + j);
      for_each_vector<R>(width, [&](int64_t n, auto extent) {
        store<R>(k_row + n, scale * row_vector(dk + j * stride + n), extent);
        store<R>(v_row + n, row_vector(dv + j * stride + n), extent);
      });
    }
  }
};

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
