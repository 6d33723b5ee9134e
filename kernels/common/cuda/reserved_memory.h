#pragma once

// Device memory that grows where it is: a range of addresses is reserved, and pages are put under
// its front as they are needed ("virtual memory management" of the driver).

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace tidegate::kernels {

/// Such memory, on one device. Kernels, copies and captured graphs see ordinary memory, whose
/// addresses stay as it grows: the device's own page table is the one that finds a page.
class ReservedMemory {
 public:
  ReservedMemory() = default;
  /// All work on it is done by then: to wait for the device here would break captures of CUDA
  /// graphs that other threads are at.
  ~ReservedMemory();
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;

  /// Addresses for so many bytes, at least one; no memory yet. cudaErrorNotSupported where the
  /// device or the driver has no such thing.
  [[nodiscard]] cudaError_t reserve(int device, int64_t bytes);
  /// Puts memory behind the first `bytes` of them, in whole pages; what new memory holds is not
  /// defined. cudaErrorMemoryAllocation, and all as it was, where the device has no more, or more
  /// is asked for than was reserved.
  [[nodiscard]] cudaError_t grow(int64_t bytes);

  void* data() const { return reinterpret_cast<void*>(address_); }
  /// Bytes from the front that have memory.
  int64_t bytes() const { return mapped_; }
  int64_t page_bytes() const { return page_bytes_; }

 private:
  int device_ = 0;
  unsigned long long address_ = 0;  // CUdeviceptr
  int64_t reserved_ = 0, mapped_ = 0, page_bytes_ = 0;
  std::vector<int64_t> pieces_;  // bytes that each growth has brought, in their order
};

}  // namespace tidegate::kernels
