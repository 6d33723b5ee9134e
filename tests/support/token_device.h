#pragma once

// What tests of the kernels of a token share: small tensors, and their copies on a CUDA device.

#include <cmath>
#include <random>
#include <vector>

#include "support/device_mirror.h"
#include "support/typed_series.h"

namespace tidegate::testing {

/// Normal numbers in rows side by side, which depend on the arguments alone. (In its buffer, a copy
/// of a series may lie elsewhere.)
inline TypedSeries numbers(DType dtype, int64_t rows, int64_t columns, double size = 1,
                           uint64_t seed = 1) {
  TypedSeries made(dtype, 1, rows, columns);
  std::mt19937_64 engine(seed + static_cast<uint64_t>(31 * rows + columns));
  std::normal_distribution<double> normal(0, size);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) made.set(r, c, normal(engine));
  }
  return made;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Host numbers that are copied to the device and back.
struct TokenDevice : DeviceMirror {
  using DeviceMirror::add;
  template <class T>
  void add(std::vector<T>& all) {
    DeviceMirror::add(all.data(), all.size() * sizeof(T));
  }
  template <class T>
  T* at(T* host) const {
    translate(host);
    return host;
  }
  void finish() const {
    check_cuda(cudaDeviceSynchronize(), "kernels");
    download();
  }
};

/// Heads side by side, of which `data` is the first element.
inline kernels::HeadSeries heads_of(const TypedSeries& t, const void* data, int64_t dim) {
  const int64_t stride = t.columns();
  return {const_cast<void*>(data), stride, stride, dim, t.dtype()};
}
inline kernels::TimeSeries row_of(const TypedSeries& t, const void* data) {
  const int64_t stride = t.columns();
  return {const_cast<void*>(data), stride, stride, t.dtype()};
}

}  // namespace tidegate::testing
