#include "kernels/common/cuda/reserved_memory.h"

#include <cuda.h>  // types; nothing of libcuda is linked

#include "kernels/common/cuda/device.h"
#include "kernels/common/integers.h"

namespace tidegate::kernels {
namespace {

static_assert(sizeof(CUdeviceptr) == sizeof(unsigned long long));

/// The driver's functions, found at run time, so that a program that links this library runs where
/// there is no driver.
struct Driver {
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDeviceGetAttribute) attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  bool is_whole = true;

  Driver() {
    find("cuDeviceGet", &device_get);
    find("cuDeviceGetAttribute", &attribute);
    find("cuMemGetAllocationGranularity", &granularity);
    find("cuMemAddressReserve", &reserve);
    find("cuMemAddressFree", &free_address);
    find("cuMemCreate", &create);
    find("cuMemRelease", &release);
    find("cuMemMap", &map);
    find("cuMemUnmap", &unmap);
    find("cuMemSetAccess", &set_access);
  }

  template <class Function>
  void find(const char* name, Function* function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
    is_whole = is_whole && error == cudaSuccess && result == cudaDriverEntryPointSuccess &&
               found != nullptr;
    *function = reinterpret_cast<Function>(found);
  }
};

const Driver& driver() {
  static const Driver* const found = new Driver();  // outlives every object with memory
  return *found;
}

cudaError_t error_of(CUresult result) {
  return result == CUDA_SUCCESS               ? cudaSuccess
         : result == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation
         : result == CUDA_ERROR_NOT_SUPPORTED ? cudaErrorNotSupported
                                              : cudaErrorUnknown;
}

#define TIDEGATE_RETURN_IF_DRIVER_ERROR(expression) \
  TIDEGATE_RETURN_IF_CUDA_ERROR(error_of(expression))

CUmemAllocationProp memory_of(int device) {
  CUmemAllocationProp memory = {};
  memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory.location.id = device;
  return memory;
}

}  // namespace

cudaError_t ReservedMemory::reserve(int device, int64_t bytes) {
  if (!driver().is_whole) return cudaErrorNotSupported;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaFree(nullptr));  // a context, which the driver asks for
  CUdevice handle = 0;
  TIDEGATE_RETURN_IF_DRIVER_ERROR(driver().device_get(&handle, device));
  int has_it = 0;
  TIDEGATE_RETURN_IF_DRIVER_ERROR(
      driver().attribute(&has_it, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, handle));
  if (has_it == 0) return cudaErrorNotSupported;
  const CUmemAllocationProp memory = memory_of(device);
  size_t page = 0;
  TIDEGATE_RETURN_IF_DRIVER_ERROR(
      driver().granularity(&page, &memory, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  const int64_t page_bytes = static_cast<int64_t>(page);
  const int64_t reserved = ceil_div(bytes, page_bytes) * page_bytes;
  CUdeviceptr address = 0;
  TIDEGATE_RETURN_IF_DRIVER_ERROR(
      driver().reserve(&address, static_cast<size_t>(reserved), 0, 0, 0));
  device_ = device;
  address_ = address;
  reserved_ = reserved;
  page_bytes_ = page_bytes;
  return cudaSuccess;
}

cudaError_t ReservedMemory::grow(int64_t bytes) {
  if (bytes <= mapped_) return cudaSuccess;
  if (bytes > reserved_) return cudaErrorMemoryAllocation;
  const int64_t more = ceil_div(bytes - mapped_, page_bytes_) * page_bytes_;
  const auto size = static_cast<size_t>(more);
  const CUdeviceptr at = address_ + static_cast<unsigned long long>(mapped_);
  const CUmemAllocationProp memory = memory_of(device_);
  CUmemGenericAllocationHandle handle = 0;
  TIDEGATE_RETURN_IF_DRIVER_ERROR(driver().create(&handle, size, &memory, 0));
  const cudaError_t mapped = error_of(driver().map(at, size, 0, handle, 0));
  driver().release(handle);  // the mapping keeps the memory
  TIDEGATE_RETURN_IF_CUDA_ERROR(mapped);
  CUmemAccessDesc access = {};
  access.location = memory.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (const cudaError_t error = error_of(driver().set_access(at, size, &access, 1));
      error != cudaSuccess) {
    driver().unmap(at, size);
    return error;
  }
  pieces_.push_back(more);
  mapped_ += more;
  return cudaSuccess;
}

ReservedMemory::~ReservedMemory() {
  if (address_ == 0) return;
  // Nobody is left to tell of an error: at the end of a process the driver may be gone.
  CUdeviceptr at = address_;
  for (const int64_t bytes : pieces_) {
    driver().unmap(at, static_cast<size_t>(bytes));
    at += static_cast<unsigned long long>(bytes);
  }
  driver().free_address(address_, static_cast<size_t>(reserved_));
}

}  // namespace tidegate::kernels
