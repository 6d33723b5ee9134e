#pragma once

// The gated linear unit's product of a block of rows, for the per-ISA units.

#include "kernels/norm/cpu/row_block.h"

namespace tidegate::kernels::norm::TIDEGATE_ISA {
namespace {

template <class R, class E>
TIDEGATE_NOINLINE void glu_rows(const GluParams& p, RowRange rows) {
  const SubnormalsAreZero guard;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const E* const x = row_in<const E>(p, p.x, row);
    E* const y = row_in<E>(p, p.y, row);
    for_each_vector<R>(p.channels, [&](int64_t j, auto extent) {
      const Vec<R> gate = activated<R>(p.activation, load<R>(x + j, extent)).value;
      store<R>(y + j, gate * load<R>(x + p.channels + j, extent), extent);
    });
  }
}

template <class R, class E>
TIDEGATE_NOINLINE void glu_backward_rows(const GluBackwardParams& p, RowRange rows) {
  const SubnormalsAreZero guard;
  const GluParams& f = p.forward;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const E* const x = row_in<const E>(f, f.x, row);
    const E* const dy_row = row_in<const E>(f, p.dy, row);
    E* const dx = row_in<E>(f, p.dx, row);
    E* const y = f.y.data == nullptr ? nullptr : row_in<E>(f, f.y, row);
    for_each_vector<R>(f.channels, [&](int64_t j, auto extent) {
      const Activated<R> gate = activated<R>(f.activation, load<R>(x + j, extent));
      const Vec<R> dy = load<R>(dy_row + j, extent), value = load<R>(x + f.channels + j, extent);
      store<R>(dx + j, dy * value * gate.derivative, extent);
      store<R>(dx + f.channels + j, dy * gate.value, extent);
      if (y != nullptr) {
        store<R>(y + j, gate.value * value, extent);
      }
    });
  }
}

void glu(const GluParams& p, RowRange rows) {
  with_real_types(p.x.dtype, p.x.dtype, [&](auto r, auto e, auto) {
    glu_rows<typename decltype(r)::Type, typename decltype(e)::Type>(p, rows);
  });
}

void glu_backward(const GluBackwardParams& p, RowRange rows) {
  with_real_types(p.dy.dtype, p.dy.dtype, [&](auto r, auto e, auto) {
    glu_backward_rows<typename decltype(r)::Type, typename decltype(e)::Type>(p, rows);
  });
}

}  // namespace
}  // namespace tidegate::kernels::norm::TIDEGATE_ISA
