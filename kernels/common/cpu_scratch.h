#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace tidegate::kernels {

/// Memory for the length of a pass on the CPU: aligned to a cache line, contents undefined.
class CpuScratch {
 public:
  explicit CpuScratch(int64_t bytes)
      : memory_(static_cast<std::byte*>(
            ::operator new[](static_cast<size_t>(bytes), std::align_val_t(kAlignment)))) {}

  std::byte* get() const { return memory_.get(); }

 private:
  static constexpr size_t kAlignment = 64;
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }
  };
  std::unique_ptr<std::byte[], Delete> memory_;
};

}  // namespace tidegate::kernels
