#include "src/models/growing_cache.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "src/models/device_work.h"
#include "src/ops/capture.h"

#ifdef TIDEGATE_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/common/cuda/reserved_memory.h"
#endif

namespace tidegate::models {

using at::Tensor;

/// Addresses, of which a part has memory.
struct GrowingCache::Memory {
  virtual ~Memory() = default;
  /// Whether the first `tokens` of every row have memory now.
  virtual bool grow(int64_t tokens) = 0;
  virtual int64_t bytes() const = 0;
  virtual void* data() const = 0;
  /// Elements from one row to the next, and from one token to the next.
  virtual std::pair<int64_t, int64_t> strides() const = 0;
};

namespace memory {  // not anonymous: members of GrowingCache's own types are of these

/// How much a token is, and how many there can be.
struct Extent {
  int64_t rows, bound;
  int64_t elements, element_bytes;  // of a token

  Extent(const Tensor& like, int64_t bound)
      : rows(like.size(0)),
        bound(bound),
        elements(1),
        element_bytes(static_cast<int64_t>(like.element_size())) {
    for (int64_t i = 2; i < like.dim(); ++i) elements *= like.size(i);
  }
  int64_t bytes(int64_t tokens) const { return rows * tokens * elements * element_bytes; }
};

/// Row by row: the system gives a page of addresses its memory when something is written there.
class HostMemory {
 public:
  explicit HostMemory(const Extent& extent)
      : size_(static_cast<size_t>(extent.bytes(extent.bound))),
        data_(mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~HostMemory() {
    if (is_there()) munmap(data_, size_);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  bool is_there() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t size_;
  void* data_;
};

}  // namespace memory

struct GrowingCache::OfHost final : GrowingCache::Memory {
  explicit OfHost(const memory::Extent& given) : extent(given), pages(given) {}

  bool grow(int64_t wanted) override {
    // Beyond what is reserved, a row's tokens would be the next row's.
    if (wanted > extent.bound) return false;
    const auto free = free_bytes(at::kCPU);
    if (free && extent.bytes(wanted - tokens) > *free) return false;
    tokens = wanted;
    return true;
  }
  int64_t bytes() const override { return extent.bytes(tokens); }
  void* data() const override { return pages.data(); }
  std::pair<int64_t, int64_t> strides() const override {
    return {extent.bound * extent.elements, extent.elements};
  }

  memory::Extent extent;
  memory::HostMemory pages;
  int64_t tokens = 0;
};

#ifdef TIDEGATE_WITH_CUDA

/// Token by token, of all rows each: so that what they have is at the front.
struct GrowingCache::OfDevice final : GrowingCache::Memory {
  OfDevice(const memory::Extent& given, int device) : extent(given), device(device) {}
  // Waits for what is left of the caller's work, such as the zeros of a cache that an error ends at
  // once; for the steps' own stream its owner has waited.
  ~OfDevice() override {
    try {
      const auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
      if (!ops::is_capturing(stream.device())) stream.synchronize();
    } catch (const std::exception&) {  // at the end of a process the driver may be gone
    }
  }

  bool grow(int64_t tokens) override {
    const int64_t wanted = extent.bytes(tokens);
    cudaError_t error = pages.grow(wanted);
    if (error == cudaErrorMemoryAllocation) {
      // torch may hold memory that nobody uses.
      c10::cuda::CUDACachingAllocator::emptyCache();
      error = pages.grow(wanted);
    }
    TORCH_CHECK(error == cudaSuccess || error == cudaErrorMemoryAllocation,
                "generation: the device's pages: ", cudaGetErrorString(error));
    return error == cudaSuccess;
  }
  int64_t bytes() const override { return pages.bytes(); }
  void* data() const override { return pages.data(); }
  std::pair<int64_t, int64_t> strides() const override {
    return {extent.elements, extent.rows * extent.elements};
  }

  memory::Extent extent;
  int device;
  kernels::ReservedMemory pages;
};

#endif

GrowingCache::GrowingCache(const Tensor& like, int64_t bound) : tensor_(like.narrow(1, 0, 0)) {
  const memory::Extent extent(like, bound);
  if (extent.bytes(1) == 0) return;  // nothing to keep
  if (like.is_cpu()) {
    auto host = std::make_shared<OfHost>(extent);
    if (host->pages.is_there()) memory_ = std::move(host);
  }
#ifdef TIDEGATE_WITH_CUDA
  if (like.is_cuda()) {
    const c10::DeviceGuard guard(like.device());
    auto device = std::make_shared<OfDevice>(extent, like.get_device());
    const cudaError_t error = device->pages.reserve(like.get_device(), extent.bytes(bound));
    if (error == cudaSuccess) memory_ = std::move(device);
    // Elsewhere caches grow by copies.
  }
#endif
}

void GrowingCache::grow(int64_t tokens) {
  const int64_t before = tensor_.size(1);
  if (tokens <= before) return;
  std::vector<int64_t> shape = tensor_.sizes().vec();
  shape[1] = tokens;
  Tensor larger;
  if (memory_) {
    const c10::DeviceGuard guard(tensor_.device());
    if (!memory_->grow(tokens)) refuse(tokens);
    std::vector<int64_t> strides = tensor_.strides().vec();
    std::tie(strides[0], strides[1]) = memory_->strides();
    for (int64_t i = tensor_.dim() - 1, step = 1; i >= 2; step *= shape[i--]) strides[i] = step;
    larger = at::from_blob(
        memory_->data(), shape, strides, [kept = memory_](void*) {}, tensor_.options(),
        tensor_.device());
    // Pages of the system are zero.
    if (!tensor_.is_cpu()) larger.narrow(1, before, tokens - before).zero_();
  } else {
    larger = at::zeros(shape, tensor_.options());
    larger.narrow(1, 0, before).copy_(tensor_);
  }
  tensor_ = std::move(larger);
}

void GrowingCache::refuse(int64_t tokens) const {
  const auto free = free_bytes(tensor_.device());
  std::vector<int64_t> shape = tensor_.sizes().vec();
  shape[1] = tokens;
  C10_THROW_ERROR(OutOfMemoryError,
                  c10::str("generation: out of memory: a layer's cache ", at::IntArrayRef(shape),
                           " of ", tensor_.scalar_type(), " has room for ", tensor_.size(1),
                           " tokens a sequence, and the ", free ? c10::str(*free) : "few",
                           " bytes that ", tensor_.device(), " has left are not enough for more"));
}

int64_t GrowingCache::bytes() const {
  return memory_ ? memory_->bytes() : static_cast<int64_t>(tensor_.nbytes());
}

}  // namespace tidegate::models
