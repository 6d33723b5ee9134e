#pragma once

// Small matrix products in registers: between 16 tokens and a state, and between tokens. All
// matrices are rows of a multiple of kPadding numbers, 64-byte aligned.

#include "kernels/common/cpu_unrolled.h"
#include "kernels/gla/cpu/gla_kernels.h"

namespace tidegate::kernels::gla::TIDEGATE_ISA {

using namespace tidegate::kernels::TIDEGATE_ISA;  // NOLINT: the vectors of cpu_simd.h

namespace {

/// out[t] = sum over p < depth of x[t][p] * matrix[p], for 16 tokens t.
template <class R>
TIDEGATE_NOINLINE void token_product(const R* x, int64_t depth, const R* matrix, int64_t width,
                                     R* out) {
  for (int t = 0; t < kSubChunk; t += kTileRows) {
    for_each_tile_column<R>(width, [&](int64_t j, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      const R* rows[kTileRows];
      Vec<R> sums[kTileRows][kVectors];
      unrolled<kTileRows>([&](auto i) {
        rows[i.value] = x + (t + i.value) * depth;
        unrolled<kVectors>([&](auto n) { sums[i.value][n.value] = Vec<R>{}; });
      });
      const R* columns = matrix + j;
      for (int64_t p = 0; p < depth; ++p, columns += width) {
        Vec<R> right[kVectors];
        unrolled<kVectors>(
            [&](auto n) { right[n.value] = row_vector(columns + n.value * kLanes<R>); });
        unrolled<kTileRows>([&](auto i) {
          const Vec<R> left = broadcast(rows[i.value][p]);
          unrolled<kVectors>([&](auto n) {
            sums[i.value][n.value] = fma(left, right[n.value], sums[i.value][n.value]);
          });
        });
      }
      unrolled<kTileRows>([&](auto i) {
        unrolled<kVectors>([&](auto n) {
          set_row_vector(out + (t + i.value) * width + j + n.value * kLanes<R>,
                         sums[i.value][n.value]);
        });
      });
    });
  }
}

/// Which index of a state the decays belong to.
enum class DecayOf : bool { kRow, kColumn };

/// to[m] = decay * from[m] + sum over 16 tokens t of left[t][m] * right[t], for `rows` rows m.
template <class R, DecayOf kDecayOf>
TIDEGATE_NOINLINE void update_state(const R* from, const R* decay, const R* left, int64_t rows,
                                    const R* right, int64_t width, R* to) {
  for (int64_t m = 0; m < rows; m += kTileRows) {
    for_each_tile_column<R>(width, [&](int64_t j, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      Vec<R> sums[kTileRows][kVectors];
      unrolled<kTileRows>([&](auto i) {
        unrolled<kVectors>([&](auto n) {
          const int64_t column = j + n.value * kLanes<R>;
          const Vec<R> factor = kDecayOf == DecayOf::kRow ? broadcast(decay[m + i.value])
                                                          : row_vector(decay + column);
          sums[i.value][n.value] = factor * row_vector(from + (m + i.value) * width + column);
        });
      });
      const R* of_token = left + m;
      const R* columns = right + j;
      for (int t = 0; t < kSubChunk; ++t, of_token += rows, columns += width) {
        Vec<R> right_now[kVectors];
        unrolled<kVectors>(
            [&](auto n) { right_now[n.value] = row_vector(columns + n.value * kLanes<R>); });
        unrolled<kTileRows>([&](auto i) {
          const Vec<R> left_now = broadcast(of_token[i.value]);
          unrolled<kVectors>([&](auto n) {
            sums[i.value][n.value] = fma(left_now, right_now[n.value], sums[i.value][n.value]);
          });
        });
      }
      unrolled<kTileRows>([&](auto i) {
        unrolled<kVectors>([&](auto n) {
          set_row_vector(to + (m + i.value) * width + j + n.value * kLanes<R>,
                         sums[i.value][n.value]);
        });
      });
    });
  }
}

/// out += sum over i < count of weights[i * step] * rows[i]: one token's row from those of others.
template <class R>
TIDEGATE_INLINE void add_weighted_rows(const R* weights, int64_t step, const R* rows, int count,
                                       int64_t width, R* out) {
  constexpr int kVectors = 4;
  const auto add = [&](int64_t j, auto vectors) {
    constexpr int kCount = decltype(vectors)::value;
    Vec<R> sums[kCount];
    unrolled<kCount>([&](auto n) { sums[n.value] = row_vector(out + j + n.value * kLanes<R>); });
    for (int i = 0; i < count; ++i) {
      const Vec<R> weight = broadcast(weights[i * step]);
      unrolled<kCount>([&](auto n) {
        sums[n.value] =
            fma(weight, row_vector(rows + i * width + j + n.value * kLanes<R>), sums[n.value]);
      });
    }
    unrolled<kCount>([&](auto n) { set_row_vector(out + j + n.value * kLanes<R>, sums[n.value]); });
  };
  int64_t j = 0;
  for (; j + kVectors * kLanes<R> <= width; j += kVectors * kLanes<R>) add(j, Constant<kVectors>{});
  for (; j < width; j += kLanes<R>) add(j, Constant<1>{});
}

// ---- Products between the tokens of a sub-chunk ---------------------------------------------

/// What pair_products reads and writes, all rows of `width` numbers.
template <class R>
struct Pairs {
  const R* late;   // [16][width], of the later token t
  const R* early;  // [16][width], of the earlier token s
  const R* f;      // [16][width] decays, or null for none
  int64_t width;
  R* chain;  // [width], scratch
  R* out;    // [16 s][16 t]
};

/// Pairs of token s with the tokens first, first + 1, ... of the kLanes from `group` on. The
/// decays multiply up along t, from token s or, where not kStarts, from where `chain` stands.
template <class R, bool kDecays, bool kStarts, int kFirst>
TIDEGATE_NOINLINE void pair_group(const Pairs<R>& pairs, int s, int group) {
  const int64_t width = pairs.width;
  const bool goes_on = group + kLanes<R> < kSubChunk;
  Vec<R> sums[kLanes<R>];
  unrolled<kLanes<R>>([&](auto i) { sums[i.value] = Vec<R>{}; });
  const R* late = pairs.late + group * width;
  const R* f = pairs.f + (kDecays ? group * width : 0);
  const R* early = kStarts || !kDecays ? pairs.early + s * width : pairs.chain;
  for (int64_t j = 0; j < width; j += kLanes<R>) {
    Vec<R> with = row_vector(early + j);
    unrolled<kLanes<R> - kFirst>([&](auto i) {
      constexpr int kToken = kFirst + decltype(i)::value;
      if constexpr (kDecays && !(kStarts && kToken == kFirst)) {
        with *= row_vector(f + kToken * width + j);
      }
      sums[kToken] = fma(row_vector(late + kToken * width + j), with, sums[kToken]);
    });
    if (kDecays && goes_on) set_row_vector(pairs.chain + j, with);
  }
  set_row_vector(pairs.out + s * kSubChunk + group, sums_of_lanes<R>(sums));
}

template <class R, bool kDecays, int... kFirst>
TIDEGATE_INLINE void start_pairs(const Pairs<R>& pairs, int s, Indices<kFirst...>) {
  using Start = void (*)(const Pairs<R>&, int, int);
  static constexpr Start kStart[] = {pair_group<R, kDecays, true, kFirst>...};
  kStart[s % kLanes<R>](pairs, s, s - s % kLanes<R>);
}

/// out[s][t] = sum over the width of late[t] * early[s] * (product of f over s < r <= t), for
/// s <= t; something else, to be left alone, for s > t. What is in a token after t never enters.
template <class R, bool kDecays>
TIDEGATE_NOINLINE void pair_products(const Pairs<R>& pairs) {
  for (int s = 0; s < kSubChunk; ++s) {
    start_pairs<R, kDecays>(pairs, s, typename IndicesUpTo<kLanes<R>>::Type{});
    for (int group = s - s % kLanes<R> + kLanes<R>; group < kSubChunk; group += kLanes<R>) {
      pair_group<R, kDecays, false, 0>(pairs, s, group);
    }
  }
}

}  // namespace
}  // namespace tidegate::kernels::gla::TIDEGATE_ISA
