#pragma once

// Norms of a block of rows, for the per-ISA units. A row is read once for each sum and once for the
// results, from the first-level cache after the first time.

#include "kernels/norm/cpu/row_block.h"

namespace tidegate::kernels::norm::TIDEGATE_ISA {
namespace {

/// One row, in vectors of R: Data and Stream as in norm.h.
template <class R, class Data, class Stream>
struct NormRow {
  const NormParams& p;
  const Stream* x;
  const Data *addend, *gate;
  int64_t of_head;  // where the row's weights begin
  // The mean is the sum of two numbers: next to a spread that is small beside it, the roundings of
  // one would be seen.
  R mean = 0, rest = 0, scale = 1;

  TIDEGATE_INLINE NormRow(const NormParams& params, int64_t row)
      : p(params),
        x(row_in<const Stream>(p, p.x, row)),
        addend(row_in<const Data>(p, p.addend, row)),
        gate(row_in<const Data>(p, p.gate, row)),
        of_head(row % p.weight_heads * p.channels) {}

  TIDEGATE_INLINE bool gate_first() const { return gate != nullptr && p.gate_first; }
  TIDEGATE_INLINE bool gate_after() const { return gate != nullptr && !p.gate_first; }

  template <class Extent>
  TIDEGATE_INLINE Activated<R> gate_at(int64_t j, Extent extent) const {
    return activated<R>(p.activation, load<R>(gate + j, extent));
  }

  /// What is normed.
  template <class Extent>
  TIDEGATE_INLINE Vec<R> normed(int64_t j, Extent extent) const {
    const Vec<R> u = load<R>(x + j, extent);
    if (addend != nullptr) {
      // Rounded as it is stored, so that the backward pass norms the same.
      Stream rounded[kLanes<R>];
      store<R>(rounded, u + load<R>(addend + j, extent), Whole{});
      return load<R>(rounded, Whole{});
    }
    return gate_first() ? rounded(u * gate_at(j, extent).value) : u;
  }

  /// u minus the mean.
  TIDEGATE_INLINE Vec<R> minus_mean(Vec<R> u) const { return (u - mean) - rest; }

  /// normed() minus the mean; zero past the end of the row.
  template <class Extent>
  TIDEGATE_INLINE Vec<R> centred(int64_t j, Extent extent) const {
    return within<R>(minus_mean(normed(j, extent)), extent);
  }

  template <class Extent>
  TIDEGATE_INLINE Vec<R> parameter(const void* from, DType dtype, int64_t j, R otherwise,
                                   Extent extent) const {
    if (from == nullptr) return splat(otherwise);
    if (dtype == p.y.dtype) return load<R>(static_cast<const Data*>(from) + of_head + j, extent);
    return load<R>(static_cast<const R*>(from) + of_head + j, extent);
  }
  template <class Extent>
  TIDEGATE_INLINE Vec<R> weight(int64_t j, Extent extent) const {
    return parameter(p.weight, p.weight_dtype, j, R(1), extent);
  }
  template <class Extent>
  TIDEGATE_INLINE Vec<R> bias(int64_t j, Extent extent) const {
    return parameter(p.bias, p.bias_dtype, j, R(0), extent);
  }

  TIDEGATE_INLINE void find_moments() {
    const R channels = static_cast<R>(p.channels);
    if (p.kind == NormKind::kLayer) {
      Vec<R> sum = Vec<R>{};
      for_each_vector<R>(
          p.channels, [&](int64_t j, auto extent) { sum += within<R>(normed(j, extent), extent); });
      mean = sum_of_lanes<R>(sum) / channels;
    }
    Vec<R> squares = Vec<R>{}, left = Vec<R>{};
    for_each_vector<R>(p.channels, [&](int64_t j, auto extent) {
      const Vec<R> c = centred(j, extent);
      squares = fma(c, c, squares);
      left += c;
    });
    R variance = sum_of_lanes<R>(squares) / channels;
    if (p.kind == NormKind::kLayer) {
      rest = sum_of_lanes<R>(left) / channels;
      variance -= rest * rest;
      variance = variance < 0 ? 0 : variance;  // NaN stays
    }
    scale = R(1) / square_root(variance + static_cast<R>(p.eps));
  }
};

template <class R, class Data, class Stream>
TIDEGATE_NOINLINE void norm_rows(const NormParams& p, RowRange rows) {
  const SubnormalsAreZero guard;
  for (int64_t index = rows.begin; index < rows.end; ++index) {
    NormRow<R, Data, Stream> row(p, index);
    row.find_moments();
    Data* const y = row_in<Data>(p, p.y, index);
    Stream* const sum = row_in<Stream>(p, p.sum, index);
    for_each_vector<R>(p.channels, [&](int64_t j, auto extent) {
      const Vec<R> u = row.normed(j, extent);
      Vec<R> value = fma(row.minus_mean(u) * row.scale, row.weight(j, extent), row.bias(j, extent));
      if (row.gate_after()) value *= row.gate_at(j, extent).value;
      if (row.addend != nullptr) store<R>(sum + j, u, extent);
      store<R>(y + j, value, extent);
    });
  }
}

/// A row's gradients; `dweight` and `dbias` are the head's sums, or null.
template <class R, class Data, class Stream>
struct NormBackwardRow {
  const NormBackwardParams& p;
  NormRow<R, Data, Stream> row;
  const Data* dy;
  const Stream* dsum;
  Stream* dx;
  Data *daddend, *dgate, *y;

  TIDEGATE_INLINE NormBackwardRow(const NormBackwardParams& params, int64_t index)
      : p(params),
        row(p.forward, index),
        dy(row_in<const Data>(p.forward, p.dy, index)),
        dsum(row_in<const Stream>(p.forward, p.dsum, index)),
        dx(row_in<Stream>(p.forward, p.dx, index)),
        daddend(row_in<Data>(p.forward, p.daddend, index)),
        dgate(row_in<Data>(p.forward, p.dgate, index)),
        y(row_in<Data>(p.forward, p.forward.y, index)) {}

  /// The gradient of the normed row times weight plus bias.
  template <class Extent>
  TIDEGATE_INLINE Vec<R> gradient(int64_t j, Extent extent) const {
    const Vec<R> g = load<R>(dy + j, extent);
    return row.gate_after() ? g * row.gate_at(j, extent).value : g;
  }

  TIDEGATE_INLINE void run(R* dweight, R* dbias) {
    row.find_moments();
    const int64_t channels = row.p.channels;
    Vec<R> sum_e = Vec<R>{}, sum_en = Vec<R>{};
    for_each_vector<R>(channels, [&](int64_t j, auto extent) {
      const Vec<R> g = gradient(j, extent);
      const Vec<R> n = row.centred(j, extent) * row.scale;
      const Vec<R> e = rounded(g * row.weight(j, extent));
      sum_e += e;
      sum_en = fma(e, n, sum_en);
      if (dweight != nullptr) {
        store<R>(dweight + j, fma(g, n, load<R>(dweight + j, extent)), extent);
      }
      if (dbias != nullptr) store<R>(dbias + j, g + load<R>(dbias + j, extent), extent);
    });
    const R count = static_cast<R>(channels);
    const bool is_layer = row.p.kind == NormKind::kLayer;
    const R mean_e = is_layer ? sum_of_lanes<R>(sum_e) / count : R(0);
    const R mean_en = sum_of_lanes<R>(sum_en) / count;
    for_each_vector<R>(channels,
                       [&](int64_t j, auto extent) { store_row(j, mean_e, mean_en, extent); });
  }

  template <class Extent>
  TIDEGATE_INLINE void store_row(int64_t j, R mean_e, R mean_en, Extent extent) const {
    const Vec<R> n = row.centred(j, extent) * row.scale;
    const Vec<R> e = rounded(gradient(j, extent) * row.weight(j, extent));
    Vec<R> du = (e - mean_e - n * mean_en) * row.scale;
    if (y != nullptr) {
      const Vec<R> value = fma(n, row.weight(j, extent), row.bias(j, extent));
      store<R>(y + j, row.gate_after() ? value * row.gate_at(j, extent).value : value, extent);
    }
    if (row.gate != nullptr) {
      const Activated<R> gate = row.gate_at(j, extent);
      const Vec<R> through =
          row.gate_first()
              ? du * load<R>(row.x + j, extent)
              : load<R>(dy + j, extent) * fma(n, row.weight(j, extent), row.bias(j, extent));
      store<R>(dgate + j, through * gate.derivative, extent);
      if (row.gate_first()) du *= gate.value;
    }
    if (dsum != nullptr) du += load<R>(dsum + j, extent);
    store<R>(dx + j, du, extent);
    if (daddend != nullptr) store<R>(daddend + j, du, extent);
  }
};

template <class R, class Data, class Stream>
TIDEGATE_NOINLINE void norm_backward_rows(const NormBackwardParams& p, RowRange rows,
                                          int64_t partial) {
  const SubnormalsAreZero guard;
  const NormParams& f = p.forward;
  const int64_t width = f.weight_heads * f.channels;
  R* const sums[] = {static_cast<R*>(p.dweight), static_cast<R*>(p.dbias)};
  for (R* const sum : sums) {
    if (sum == nullptr) continue;
    for (int64_t j = 0; j < width; ++j) sum[partial * width + j] = R(0);
  }
  for (int64_t index = rows.begin; index < rows.end; ++index) {
    NormBackwardRow<R, Data, Stream> row(p, index);
    const int64_t begin = partial * width + row.row.of_head;
    row.run(sums[0] == nullptr ? nullptr : sums[0] + begin,
            sums[1] == nullptr ? nullptr : sums[1] + begin);
  }
}

void norm(const NormParams& p, RowRange rows) {
  with_real_types(p.y.dtype, p.x.dtype, [&](auto r, auto data, auto stream) {
    norm_rows<typename decltype(r)::Type, typename decltype(data)::Type,
              typename decltype(stream)::Type>(p, rows);
  });
}

void norm_backward(const NormBackwardParams& p, RowRange rows, int64_t partial) {
  with_real_types(p.dy.dtype, p.forward.x.dtype, [&](auto r, auto data, auto stream) {
    norm_backward_rows<typename decltype(r)::Type, typename decltype(data)::Type,
                       typename decltype(stream)::Type>(p, rows, partial);
  });
}

}  // namespace
}  // namespace tidegate::kernels::norm::TIDEGATE_ISA
