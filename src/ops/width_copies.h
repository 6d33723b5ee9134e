#pragma once

// Copies of tensors on a GPU to other widths, all of a call in one launch: a copy by torch takes
// the host as long as a kernel, and reads and writes memory twice to pad.

#include <ATen/core/Tensor.h>

#include <vector>

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/common/cuda/padded_copies.h"
#endif

namespace tidegate::ops {

/// Tensors of up to four dimensions and 2 or 4 bytes an element. Nothing is copied before run().
class WidthCopies {
 public:
  /// `op` is named in errors.
  explicit WidthCopies(const char* op) : op_(op) {}

  /// `tensor` with `width` elements in its last dimension, at least its own, of which those that it
  /// has not got are `fill`, and rows that begin aligned: itself where it is so already.
  at::Tensor widened(const at::Tensor& tensor, int64_t width, double fill = 0);
  /// widened() for a state [N, H, K, V], with `rows` in the place of K, too.
  at::Tensor widened_state(const at::Tensor& state, int64_t rows, int64_t width);

  /// Copies what `to` has room for; `from` has no dimension that is smaller.
  void narrow(const at::Tensor& from, const at::Tensor& to);
  /// The first elements of the last dimension, contiguous.
  at::Tensor narrowed(const at::Tensor& tensor, int64_t width);

  /// Makes the copies that were asked for so far.
  void run();

 private:
  void add(const at::Tensor& from, const at::Tensor& to, double fill);

  const char* op_;
  std::vector<at::Tensor> kept_;  // until run()
#ifdef TIDEGATE_WITH_CUDA
  kernels::PaddedCopies work_;
#endif
};

}  // namespace tidegate::ops
