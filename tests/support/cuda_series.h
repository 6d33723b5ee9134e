#pragma once

// Tensors on a CUDA device with a copy on the host, for tests on raw pointers without torch.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <complex>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/common/time_series.h"
#include "support/typed_series.h"

namespace tidegate::testing {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

/// Whether a device is there; the tests skip, and say so, where it is not.
inline bool has_cuda_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// Device memory whose every byte is 0xff at first: NaN in all dtypes, and a canary where nothing
/// may be written.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : host_(bytes, 0xff) {
    check_cuda(cudaMalloc(&device_, bytes + 1), "cudaMalloc");
    upload();
  }
  ~DeviceBuffer() { (void)cudaFree(device_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  unsigned char* host() { return host_.data(); }
  const unsigned char* host() const { return host_.data(); }
  unsigned char* device() const { return static_cast<unsigned char*>(device_); }
  size_t size() const { return host_.size(); }

  void upload() {
    check_cuda(cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice), "upload");
  }
  void download() {
    check_cuda(cudaMemcpy(host_.data(), device_, host_.size(), cudaMemcpyDeviceToHost), "download");
  }

 private:
  std::vector<unsigned char> host_;
  void* device_ = nullptr;
};

/// A [tokens, columns] tensor in a larger buffer: rows `gap` elements apart, the first element
/// `shift` elements after an aligned address. get and set work on the host's copy.
class DeviceSeries {
 public:
  DeviceSeries(DType dtype, int64_t batch, int64_t time, int64_t columns, int64_t gap,
               int64_t shift)
      : dtype_(dtype),
        tokens_(batch * time),
        time_(time),
        columns_(columns),
        stride_(columns + gap),
        shift_(shift),
        buffer_((shift + batch * time * (columns + gap) + gap) * element_size(dtype)) {}

  DType dtype() const { return dtype_; }
  int64_t size() const { return tokens_ * columns_; }
  DeviceBuffer& buffer() { return buffer_; }

  std::complex<double> get(int64_t token, int64_t column) const {
    return decode(buffer_.host() + offset(token, column), dtype_);
  }
  void set(int64_t token, int64_t column, std::complex<double> value) {
    encode(buffer_.host() + offset(token, column), dtype_, value);
  }
  std::complex<double> at(int64_t i) const { return get(i / columns_, i % columns_); }

  void* device() { return buffer_.device() + offset(0, 0); }
  kernels::TimeSeries series() { return {device(), time_ * stride_, stride_, dtype_}; }

  /// Whether the bytes that belong to no element are still 0xff (after a download).
  bool surroundings_untouched() const {
    std::vector<unsigned char> copy(buffer_.host(), buffer_.host() + buffer_.size());
    for (int64_t token = 0; token < tokens_; ++token) {
      std::memset(copy.data() + offset(token, 0), 0xff, columns_ * element_size(dtype_));
    }
    for (const unsigned char byte : copy) {
      if (byte != 0xff) {
        return false;
      }
    }
    return true;
  }

 private:
  int64_t offset(int64_t token, int64_t column) const {
    return (shift_ + token * stride_ + column) * element_size(dtype_);
  }

  DType dtype_;
  int64_t tokens_, time_, columns_, stride_, shift_;
  DeviceBuffer buffer_;
};

}  // namespace tidegate::testing
