#pragma once

// The forward pass of one tile of queries: scores lie [key][query], so that maxima and sums over
// keys are whole vectors of queries, and keys are read as they lie.

#include "kernels/attention/cpu/attention_tiles.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {
namespace {

template <class R, class E>
struct ForwardTile {
  const ForgettingAttentionParams& params;
  const AttentionWork& work;
  const AttentionHead& head;
  TilePair pair;  // of the queries and whichever tile of keys is on
  int64_t width, stride, lanes;
  const double* c;

  // Scratch memory. Rows: [kQueryTile][stride]; lanes: [..][kQueryTile].
  R *o, *q_rows, *q_lanes, *k, *v, *weights;
  R *maximum, *sum, *shrink, *row_high, *row_low;

  ForwardTile(const ForgettingAttentionParams& all, const AttentionWork& where,
              const AttentionItem& item)
      : params(all), work(where), head(item.head), width(all.head_dim), stride(padded_row(width)) {
    const int64_t first = item.tile * kQueryTile;
    pair.queries = head.queries - first < kQueryTile ? head.queries - first : kQueryTile;
    pair.position = first + head.keys - head.queries;
    pair.window = params.window;
    lanes = whole_vectors<R>(pair.queries);
    c = gate_sums_of(params, work, head);
    Scratch<R> scratch(item.scratch);
    o = scratch.take(kQueryTile * stride);
    q_rows = scratch.take(kQueryTile * stride);
    q_lanes = scratch.take(kQueryTile * stride);
    k = scratch.take(kKeyTile * stride);
    v = scratch.take(kKeyTile * stride);
    weights = scratch.take(kKeyTile * kQueryTile);
    for (R** numbers : {&maximum, &sum, &shrink, &row_high, &row_low}) {
      *numbers = scratch.take(kQueryTile);
    }
  }

  static TIDEGATE_NOINLINE void run(const ForgettingAttentionParams& params,
                                    const AttentionWork& work, const AttentionItem& item) {
    ForwardTile tile(params, work, item);
    tile.load_queries(item.tile * kQueryTile);
    tile.iterate(item.tile * kQueryTile);
    tile.write(item.tile * kQueryTile);
  }

  void load_queries(int64_t first) {
    const HeadRows<const E> rows(params.q, head.batch, head.query_begin, head.head);
    load_tile<R>(rows, first, pair.queries, width, static_cast<R>(params.scale), q_rows);
    transpose_tile(q_rows, pair.queries, width, q_lanes);
    for (int64_t i = 0; i < kQueryTile * stride; i += kLanes<R>) set_row_vector(o + i, Vec<R>{});
    for (int64_t i = 0; i < kQueryTile; ++i) {
      maximum[i] = -static_cast<R>(__builtin_inf());
      sum[i] = 0;
    }
  }

  void iterate(int64_t first) {
    const int64_t end = pair.position + pair.queries;
    if (end <= 0) return;  // more queries than keys: none of these has any
    // Rows before the first key have nothing to compare with, and no gate of their own.
    const int64_t from = pair.position > 0 ? pair.position : 0;
    const double norm = params.prune > 0 ? query_norm<R, E>(params, head, first, pair.queries) : 0;
    const int64_t first_key = first_key_of(params, work, head, from, end - from, norm);
    for (int64_t i = 0; i < kQueryTile; ++i) {
      const int64_t position = pair.position + i;
      const bool exists = position >= 0 && i < pair.queries;
      const GateOffset<R> offset = gate_offset<R>(exists ? c[position] : c[from], c[from]);
      row_high[i] = offset.high;
      row_low[i] = offset.low;
    }
    const HeadRows<const E> keys(params.k, head.batch, head.key_begin, head.key_head);
    const HeadRows<const E> values(params.v, head.batch, head.key_begin, head.key_head);
    for (pair.key = first_key; pair.key < end; pair.key += kKeyTile) {
      pair.keys = end - pair.key < kKeyTile ? end - pair.key : kKeyTile;
      load_tile<R>(keys, pair.key, pair.keys, width, R(1), k);
      const bool finite = load_tile<R>(values, pair.key, pair.keys, width, R(1), v);
      tile_product<R, Left::kRows, Into::kReplace>({k, stride}, {q_lanes, kQueryTile},
                                                   whole_groups(pair.keys), lanes, width,
                                                   {weights, kQueryTile});
      const bool edge = pair.is_edge();
      if (edge) {
        weigh<true>(c[from]);
      } else {
        weigh<false>(c[from]);
      }
      shrink_sums();
      if (edge && !finite) {
        add_seen_values();
      } else {
        tile_product<R, Left::kColumns, Into::kAdd>({weights, kQueryTile}, {v, stride},
                                                    whole_groups(pair.queries), stride, pair.keys,
                                                    {o, stride});
      }
    }
  }

  /// Scores to exp(score - maximum), the maximum and the sum brought up to date.
  template <bool kEdge>
  TIDEGATE_INLINE void weigh(double reference) {
    GateOffset<R> of_key[kKeyTile];
    for (int64_t j = 0; j < pair.keys; ++j) {
      of_key[j] = gate_offset<R>(c[pair.key + j], reference);
    }
    const R none = -static_cast<R>(__builtin_inf());
    const Vec<R> lane = lane_numbers<R>();
    for (int64_t i = 0; i < lanes; i += kLanes<R>) {
      const Vec<R> high = row_vector(row_high + i), low = row_vector(row_low + i);
      const Vec<R> before = row_vector(maximum + i);
      Vec<R> top = before;
      for (int64_t j = 0; j < pair.keys; ++j) {
        R* at = weights + j * kQueryTile + i;
        Vec<R> gates = high - of_key[j].high;
        // Before the first query the low parts are nothing: where c is large, the weight is zero.
        if constexpr (kEdge) gates += low - of_key[j].low;
        Vec<R> score = row_vector(at) + gates;
        if constexpr (kEdge) {
          // first(i + lane) <= j <= last(i + lane): small numbers, or cut to small ones.
          const Vec<R> lowest = splat(static_cast<R>(near_tile(j - pair.last(i))));
          score = lane >= lowest ? score : splat(none);
          if (pair.window > 0) {
            const Vec<R> highest = splat(static_cast<R>(near_tile(j - pair.first(i))));
            score = lane <= highest ? score : splat(none);
          }
        }
        set_row_vector(at, score);
        top = at_least(top, score);
      }
      const Vec<R> against = top == none ? Vec<R>{} : top;  // no key yet: every weight is zero
      Vec<R> total{};
      for (int64_t j = 0; j < pair.keys; ++j) {
        R* at = weights + j * kQueryTile + i;
        const Vec<R> weight = exp_of_nonpositive(row_vector(at) - against);
        set_row_vector(at, weight);
        total += weight;
      }
      const Vec<R> factor = exp_of_nonpositive(before - against);
      set_row_vector(maximum + i, top);
      set_row_vector(shrink + i, factor);
      set_row_vector(sum + i, fma(row_vector(sum + i), factor, total));
    }
  }

  void shrink_sums() {
    for (int64_t i = 0; i < pair.queries; ++i) {
      if (shrink[i] == R(1)) continue;
      const Vec<R> factor = splat(shrink[i]);
      for (int64_t j = 0; j < stride; j += kLanes<R>) {
        set_row_vector(o + i * stride + j, factor * row_vector(o + i * stride + j));
      }
    }
  }

  /// A weight of zero times a value that is not a number is not a number, so with such values every
  /// query takes the keys that it sees and no other.
  TIDEGATE_NOINLINE void add_seen_values() {
    for (int64_t i = 0; i < pair.queries; ++i) {
      const int64_t first = pair.first(i) > 0 ? pair.first(i) : 0;
      const int64_t last = pair.last(i) < pair.keys - 1 ? pair.last(i) : pair.keys - 1;
      for (int64_t j = first; j <= last; ++j) {
        const Vec<R> weight = splat(weights[j * kQueryTile + i]);
        for (int64_t n = 0; n < stride; n += kLanes<R>) {
          R* at = o + i * stride + n;
          set_row_vector(at, fma(weight, row_vector(v + j * stride + n), row_vector(at)));
        }
      }
    }
  }

  void write(int64_t first) {
    const HeadRows<E> rows(params.o, head.batch, head.query_begin, head.head);
    R* const lse = static_cast<R*>(params.lse) + query_index(params, work, head) + first;
    for (int64_t i = 0; i < pair.queries; ++i) {
      const bool any = sum[i] != R(0);
      const Vec<R> inverse = splat(any ? R(1) / sum[i] : R(0));
      E* to = rows.row(first + i);
      for_each_vector<R>(width, [&](int64_t j, auto extent) {
        store<R>(to + j, inverse * row_vector(o + i * stride + j), extent);
      });
      lse[i] = any ? static_cast<R>(static_cast<double>(maximum[i]) +
                                    __builtin_log(static_cast<double>(sum[i])))
                   : -static_cast<R>(__builtin_inf());
    }
  }
};

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
