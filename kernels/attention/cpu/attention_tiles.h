#pragma once

// What forward and backward pass share: rows of a tensor as tiles in scratch memory, the gates
// between the tokens of two tiles, and which keys a tile of queries sees.

#include "kernels/attention/cpu/tile_products.h"
#include "kernels/common/cpu_types.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {
namespace {

/// Hands out pieces of an item's scratch memory.
template <class R>
class Scratch {
 public:
  explicit Scratch(void* memory) : next_(static_cast<R*>(memory)) {}

  R* take(int64_t count) {
    R* piece = next_;
    next_ += count;
    return piece;
  }

 private:
  R* next_;
};

/// The rows of one head of a tensor.
template <class E>
struct HeadRows {
  E* first = nullptr;
  int64_t step = 0;

  HeadRows(const HeadSeries& series, int64_t batch, int64_t begin, int64_t head)
      : first(static_cast<E*>(series.data) + batch * series.stride_b + begin * series.stride_t +
              head * series.stride_h),
        step(series.stride_t) {}

  E* row(int64_t token) const { return first + token * step; }
};

template <class R, class E>
TIDEGATE_INLINE R element(const E* from) {
  return load<R>(from, Part{1})[0];
}
template <class R, class E>
TIDEGATE_INLINE void set_element(E* to, R value) {
  store<R>(to, splat(value), Part{1});
}

/// tile[i] = factor * rows[first + i] for i < count, [.][padded width]; zeros for the rest up to a
/// whole group of rows. Returns whether all of it is finite.
template <class R, class E>
TIDEGATE_NOINLINE bool load_tile(const HeadRows<const E>& rows, int64_t first, int64_t count,
                                 int64_t width, R factor, R* tile) {
  const int64_t stride = padded_row(width);
  Vec<R> zero{};  // as long as everything is finite
  for (int64_t i = 0; i < count; ++i) {
    const E* row = rows.row(first + i);
    R* to = tile + i * stride;
    for_each_vector<R>(width, [&](int64_t j, auto extent) {
      const Vec<R> x = factor * load<R>(row + j, extent);
      zero += x - x;
      set_row_vector(to + j, x);
    });
    for (int64_t j = whole_vectors<R>(width); j < stride; j += kLanes<R>) {
      set_row_vector(to + j, Vec<R>{});
    }
  }
  for (R* rest = tile + count * stride; rest < tile + whole_groups(count) * stride;
       rest += kLanes<R>) {
    set_row_vector(rest, Vec<R>{});
  }
  R sum = 0;
  for (int i = 0; i < kLanes<R>; ++i) sum += zero[i];
  return sum == 0;
}

/// to[j][i] = tile[i][j], j < width: rows of kQueryTile numbers, zeros for i >= count.
template <class R>
TIDEGATE_NOINLINE void transpose_tile(const R* tile, int64_t count, int64_t width, R* to) {
  const int64_t stride = padded_row(width);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < width; ++j) to[j * kQueryTile + i] = tile[i * stride + j];
  }
  if (count == kQueryTile) return;
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = count; i < kQueryTile; ++i) to[j * kQueryTile + i] = 0;
  }
}

/// c of one sequence's head at its tokens.
template <class P>
TIDEGATE_INLINE double* gate_sums_of(const P& params, const AttentionWork& work,
                                     const AttentionHead& head) {
  return work.gate_sums + (head.batch * params.heads + head.head) * work.key_time + head.key_begin;
}
/// Where a head's numbers a query begin.
TIDEGATE_INLINE int64_t query_index(const ForgettingAttentionParams& params,
                                    const AttentionWork& work, const AttentionHead& head) {
  return (head.batch * params.heads + head.head) * work.query_time + head.query_begin;
}

/// One tile of queries beside one tile of keys.
struct TilePair {
  int64_t position = 0;  // of the first query
  int64_t queries = 0;   // their number
  int64_t key = 0;       // the first key
  int64_t keys = 0;      // their number
  int64_t window = 0;    // 0: none

  /// Whether some key is not seen by some query.
  TIDEGATE_INLINE bool is_edge() const {
    return key + keys - 1 > position || (window > 0 && position + queries - 1 - window >= key);
  }
  /// Query i sees key j if first(i) <= j <= last(i), both counted from the tile's first key.
  TIDEGATE_INLINE int64_t last(int64_t i) const { return position + i - key; }
  TIDEGATE_INLINE int64_t first(int64_t i) const {
    return window > 0 ? last(i) - window + 1 : -kKeyTile;
  }
};

/// `x` cut to where it decides the same for all tokens of two tiles.
TIDEGATE_INLINE int64_t near_tile(int64_t x) {
  constexpr int64_t kFar = 2 * (kQueryTile + kKeyTile);
  return x < -kFar ? -kFar : x > kFar ? kFar : x;
}

/// 0, 1, 2, ...
template <class R>
TIDEGATE_INLINE Vec<R> lane_numbers() {
  Vec<R> lane;
  for (int i = 0; i < kLanes<R>; ++i) lane[i] = static_cast<R>(i);
  return lane;
}

/// c_p - c_j, where neither number alone has the digits: a -> (hi + lo) relative to a reference,
/// and differences of both parts. Where several gates of a tile are shut, c runs to -10^6 within it
/// and still has to tell neighbours apart.
template <class R>
struct GateOffset {
  R high, low;
};
template <class R>
TIDEGATE_INLINE GateOffset<R> gate_offset(double c, double reference) {
  const double offset = c - reference;
  const R high = static_cast<R>(offset);
  return {high, static_cast<R>(offset - static_cast<double>(high))};
}

/// The first key that a tile of queries looks at, a multiple of kKeyTile: by the window, and by
/// what pruning may drop. `query_norm` is the largest |q| of the tile.
///
/// Key j of row p weighs at most exp(s_pj - s_pp) with |q . k| <= |q| |k|, that is
/// exp(2 scale |q| |k|max + c_p - c_j); c falls with time, so the keys whose weight is below
/// prune / (number of keys) for the tile's first row are a prefix of all rows, and what they weigh
/// together is below prune.
TIDEGATE_NOINLINE int64_t first_key_of(const ForgettingAttentionParams& params,
                                       const AttentionWork& work, const AttentionHead& head,
                                       int64_t position, int64_t queries, double query_norm) {
  int64_t first = 0;
  if (params.window > 0 && position - params.window + 1 > 0) first = position - params.window + 1;
  if (params.prune > 0 && position > 0) {
    const int64_t last = position + queries - 1;
    const double key_norm =
        work.key_norms[(head.batch * params.key_heads + head.key_head) * work.key_tiles +
                       head.key_tile + last / kKeyTile];
    // The norms are rounded sums of rounded squares: a thousandth is more than they can be off.
    const double scores = 2.002 * params.scale * query_norm * key_norm;
    const double least = __builtin_log(params.prune / static_cast<double>(last + 1)) - scores;
    const double* c = gate_sums_of(params, work, head);
    const double at_row = c[position];
    int64_t low = 0, high = position;  // keys before `low` may go
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (at_row - c[middle] <= least) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low > first) first = low;
  }
  return first / kKeyTile * kKeyTile;
}

template <class R, class E>
TIDEGATE_INLINE double norm_of(const E* row, int64_t width) {
  Vec<R> squares{};
  for_each_vector<R>(width, [&](int64_t j, auto extent) {
    const Vec<R> x = load<R>(row + j, extent);
    squares = fma(x, x, squares);
  });
  double sum = 0;
  for (int i = 0; i < kLanes<R>; ++i) sum += static_cast<double>(squares[i]);
  return __builtin_sqrt(sum);
}

/// The largest norms of a head's keys, each up to the end of a tile.
template <class R, class E>
TIDEGATE_NOINLINE void norm_keys(const ForgettingAttentionParams& params, const AttentionWork& work,
                                 const AttentionHead& head) {
  const HeadRows<const E> keys(params.k, head.batch, head.key_begin, head.key_head);
  double* const norms = work.key_norms +
                        (head.batch * params.key_heads + head.key_head) * work.key_tiles +
                        head.key_tile;
  double largest = 0;
  for (int64_t first = 0; first < head.keys; first += kKeyTile) {
    const int64_t end = first + kKeyTile < head.keys ? first + kKeyTile : head.keys;
    for (int64_t j = first; j < end; ++j) {
      const double norm = norm_of<R>(keys.row(j), params.head_dim);
      if (!(norm <= largest)) largest = norm;  // NaN, too, and then nothing is dropped
    }
    norms[first / kKeyTile] = largest;
  }
}

/// The largest |q| of a tile.
template <class R, class E>
TIDEGATE_NOINLINE double query_norm(const ForgettingAttentionParams& params,
                                    const AttentionHead& head, int64_t first, int64_t count) {
  const HeadRows<const E> rows(params.q, head.batch, head.query_begin, head.head);
  double largest = 0;
  for (int64_t i = first; i < first + count; ++i) {
    const double norm = norm_of<R>(rows.row(i), params.head_dim);
    if (!(norm <= largest)) largest = norm;
  }
  return largest;
}

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
