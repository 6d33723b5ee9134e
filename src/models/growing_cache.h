// A cache of tokens that grows where it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tidegate::models {

/// What a layer keeps of the tokens of some rows, `[rows, tokens, ...]`. Addresses are reserved for
/// as many tokens as the device's memory could ever hold, and get memory as tokens come: on a GPU
/// in pages, which its own page table finds, so that nothing is copied, nothing moves, and kernels
/// see one tensor; on the CPU by the operating system, at the first write. Where neither can be had
/// (is_in_place()), more memory is allocated and what is held is copied.
class GrowingCache {
 public:
  /// `like`: `[rows, any, ...]`, whose type and device the cache has. `bound`: tokens of a row that
  /// addresses are reserved for.
  GrowingCache(const at::Tensor& like, int64_t bound);

  /// Memory for so many tokens of every row; what is new is zero. Throws c10::OutOfMemoryError, and
  /// all is as it was, where there is none.
  void grow(int64_t tokens);

  /// Gives up the last growth where it was a copy: steps have gone on with `before`, the tensor()
  /// of then. In place there is nothing to give up.
  void go_back_to(const at::Tensor& before) {
    if (!is_in_place()) tensor_ = before;
  }

  /// The rows and the tokens that there is memory for.
  const at::Tensor& tensor() const { return tensor_; }
  /// What it takes of the device's memory: whole pages.
  int64_t bytes() const;
  bool is_in_place() const { return memory_ != nullptr; }

 private:
  struct Memory;
  struct OfHost;
  struct OfDevice;

  [[noreturn]] void refuse(int64_t tokens) const;

  std::shared_ptr<Memory> memory_;
  at::Tensor tensor_;
};

}  // namespace tidegate::models
