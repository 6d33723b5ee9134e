#pragma once

// 16 tokens of one head in scratch memory: q, keys and decays of some columns of K, v or do of some
// columns of V, in the type of the state, as [16][padded width] rows. The scan of a sequence
// gives its sub-chunks in order; columns past the width are zeros, tokens past the sequence's end
// are zeros with decays of one.

#include "kernels/common/cpu_gates.h"
#include "kernels/common/cpu_types.h"
#include "kernels/gla/cpu/products.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {
namespace {

/// Hands out pieces of a tile's scratch memory, zeroed.
template <class R>
class Scratch {
 public:
  explicit Scratch(const GlaTile& tile) : next_(static_cast<R*>(tile.scratch)) {}

  R* take(int64_t count) {
    R* piece = next_;
    for (int64_t i = 0; i < count; i += kLanes<R>) set_row_vector(piece + i, Vec<R>{});
    next_ += count;
    return piece;
  }
  /// Not zeroed: for what is written before it is read.
  R* take_raw(int64_t count) {
    R* piece = next_;
    next_ += count;
    return piece;
  }

 private:
  R* next_;
};

/// The rows of one tensor in the order of the scan, from `column` of the tile's head on.
template <class E>
struct TokenRows {
  E* first = nullptr;
  int64_t step = 0;

  TokenRows() = default;
  TokenRows(const HeadSeries& series, const GlaTile& tile, bool reverse, int64_t column) {
    const int64_t start = reverse ? tile.begin + tile.length - 1 : tile.begin;
    first = static_cast<E*>(series.data) + tile.batch * series.stride_b + start * series.stride_t +
            tile.head * series.stride_h + column;
    step = reverse ? -series.stride_t : series.stride_t;
  }
  E* row(int64_t token) const { return first + token * step; }

  /// The arithmetic of a sub-chunk takes longer than memory needs to bring the rows of the next
  /// one, which the hardware's prefetchers do not expect: heads lie between a token's row and the
  /// next. A prefetch outside the tensor does no harm.
  void prefetch(int64_t token, int64_t width) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(E));
    const E* from = row(token);
    for (int64_t j = 0; j < width; j += kLine) __builtin_prefetch(from + j, 0, 2);
  }
};

/// Which sub-chunk a scan comes to next.
enum class NextSubChunk : int64_t { kLater = kSubChunk, kEarlier = -kSubChunk };

/// act(x), and its derivative.
template <class R>
TIDEGATE_INLINE Vec<R> activated(Vec<R> x, InputActivation activation) {
  if (activation == InputActivation::kNone) return x;
  const Vec<R> s = sigmoids<R>(x).pos;
  return activation == InputActivation::kSilu ? x * s : s;
}
template <class R>
TIDEGATE_INLINE Vec<R> activation_slope(Vec<R> x, InputActivation activation) {
  if (activation == InputActivation::kNone) return splat(R(1));
  const Sigmoids<R> s = sigmoids<R>(x);
  return activation == InputActivation::kSilu ? s.pos * fma(x, s.neg, splat(R(1))) : s.pos * s.neg;
}

/// to[i] = factor * act(row first + i), for `count` tokens; zeros for the rest of the 16.
template <class R, class E>
TIDEGATE_NOINLINE void load_rows(const TokenRows<const E>& rows, int64_t first, int count,
                                 NextSubChunk next, int64_t width, InputActivation activation,
                                 R factor, R* to) {
  const int64_t stride = padded(width);
  for (int i = 0; i < count; ++i) {
    rows.prefetch(first + i + static_cast<int64_t>(next), width);
    const E* row = rows.row(first + i);
    for_each_vector<R>(width, [&](int64_t j, auto extent) {
      const Vec<R> x = load<R>(row + j, extent);
      store<R>(to + i * stride + j, factor * activated<R>(x, activation), extent);
    });
  }
  for (R* rest = to + count * stride; rest < to + kSubChunk * stride; rest += kLanes<R>) {
    set_row_vector(rest, Vec<R>{});
  }
}

/// Where the keys and decays of a sub-chunk come from: some columns of one head.
template <class R, class E, class G>
struct KeyRows {
  const GlaParams& params;
  int64_t width;
  TokenRows<const E> k;
  TokenRows<const G> gate;
  const R* gamma = nullptr;  // of the tile's columns

  KeyRows(const GlaParams& all, const GlaTile& tile, bool reverse, int64_t column, int64_t count)
      : params(all), width(count) {
    gate = {all.gate, tile, reverse, all.gate_per_head ? 0 : column};
    if (all.gate_kind == GateKind::kLogDecay) k = {all.k, tile, reverse, column};
    if (all.gamma != nullptr) {
      gamma = static_cast<const R*>(all.gamma) + tile.head * all.key_dim + column;
    }
  }

  template <class Extent>
  TIDEGATE_INLINE Vec<R> gamma_at(int64_t j, Extent extent) const {
    return gamma != nullptr ? load<R>(gamma + j, extent) : Vec<R>{};
  }

  /// Keys and decays of `count` tokens; with `open` and `shut` given and logits, sigmoid(x) and
  /// sigmoid(-x), too.
  TIDEGATE_NOINLINE void load_keys(int64_t first, int count, NextSubChunk next, R* keys, R* decays,
                                   R* open, R* shut) const {
    const int64_t stride = padded(width);
    if (params.gate_kind == GateKind::kLogDecay) {
      load_rows<R, E>(k, first, count, next, width, InputActivation::kNone, R(1), keys);
    }
    for (int i = 0; i < count; ++i) {
      const int64_t row = i * stride;
      const G* x = gate.row(first + i);
      gate.prefetch(first + i + static_cast<int64_t>(next), params.gate_per_head ? 1 : width);
      if (params.gate_per_head) {
        const Vec<R> decay = exp_of_nonpositive(broadcast(load<R>(x, Part{1})[0]));
        for_each_vector<R>(
            width, [&](int64_t j, auto extent) { store<R>(decays + row + j, decay, extent); });
      } else if (params.gate_kind == GateKind::kLogDecay) {
        for_each_vector<R>(width, [&](int64_t j, auto extent) {
          store<R>(decays + row + j, exp_of_nonpositive(load<R>(x + j, extent)), extent);
        });
      } else {
        for_each_vector<R>(width, [&](int64_t j, auto extent) {
          const Vec<R> logit = load<R>(x + j, extent);
          const Vec<R> bound = gamma_at(j, extent);
          const Vec<R> rest = R(1) - bound;
          const Sigmoids<R> s = sigmoids<R>(logit);
          store<R>(decays + row + j, forget_gate<R>(logit, s, bound, rest), extent);
          store<R>(keys + row + j, rest * s.neg, extent);
          if (open != nullptr) {
            store<R>(open + row + j, s.pos, extent);
            store<R>(shut + row + j, s.neg, extent);
          }
        });
      }
    }
    for (int64_t i = count * stride; i < kSubChunk * stride; i += kLanes<R>) {
      set_row_vector(decays + i, splat(R(1)));
      set_row_vector(keys + i, Vec<R>{});
      if (open != nullptr) {
        set_row_vector(open + i, Vec<R>{});
        set_row_vector(shut + i, Vec<R>{});
      }
    }
  }
};

/// A product of decays with its rounding error. Next to one, (1 - a)(1 - b) rounds to 1 - a - b as
/// long as a b is less than half a unit in the last place: always too small, in every sub-chunk of
/// a sequence, until a state that is hardly forgotten has lost its last digits.
template <class R>
class DecayProduct {
 public:
  TIDEGATE_INLINE void multiply(Vec<R> f) {
    const Vec<R> next = high_ * f;
    low_ = fma(low_, f, fma(high_, f, -next));
    high_ = next;
  }
  TIDEGATE_INLINE Vec<R> value() const { return high_ + low_; }

 private:
  Vec<R> high_ = splat(R(1));
  Vec<R> low_ = Vec<R>{};
};

/// What meets the state before the sub-chunk: to[t] = from[t] * (product of f up to t). `total` is
/// the product over all 16.
template <class R>
TIDEGATE_NOINLINE void decay_from_start(const R* from, const R* f, int64_t width, R* to, R* total) {
  for (int64_t j = 0; j < width; j += kLanes<R>) {
    DecayProduct<R> product;
    for (int t = 0; t < kSubChunk; ++t) {
      product.multiply(row_vector(f + t * width + j));
      set_row_vector(to + t * width + j, product.value() * row_vector(from + t * width + j));
    }
    set_row_vector(total + j, product.value());
  }
}

/// What reaches the state after the sub-chunk: to[t] = from[t] * (product of f after t). `total` is
/// the product over all 16.
template <class R>
TIDEGATE_NOINLINE void decay_to_end(const R* from, const R* f, int64_t width, R* to, R* total) {
  for (int64_t j = 0; j < width; j += kLanes<R>) {
    DecayProduct<R> product;
    for (int t = kSubChunk - 1; t >= 0; --t) {
      set_row_vector(to + t * width + j, product.value() * row_vector(from + t * width + j));
      product.multiply(row_vector(f + t * width + j));
    }
    set_row_vector(total + j, product.value());
  }
}

/// An [K][V] part of a state: rows `stride` apart in the tensor, `to_stride` in scratch memory.
template <class R>
TIDEGATE_NOINLINE void copy_state(const R* from, int64_t from_stride, int64_t rows, int64_t width,
                                  R* to, int64_t to_stride) {
  for (int64_t m = 0; m < rows; ++m) {
    for_each_vector<R>(width, [&](int64_t j, auto extent) {
      store<R>(to + m * to_stride + j, load<R>(from + m * from_stride + j, extent), extent);
    });
  }
}

/// The [K, V] state of the tile's head and sequence, from row `k` and column `v` on; null stays.
template <class R>
R* state_of(const void* data, const GlaParams& params, const GlaTile& tile, int64_t k, int64_t v) {
  if (data == nullptr) return nullptr;
  const int64_t index = tile.sequence * params.heads + tile.head;
  return static_cast<R*>(const_cast<void*>(data)) +
         (index * params.key_dim + k) * params.value_dim + v;
}

TIDEGATE_INLINE int tokens_from(int64_t first, int64_t length) {
  return static_cast<int>(length - first < kSubChunk ? length - first : kSubChunk);
}

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
