// Copies to other widths on a CUDA device, held against loops on the host.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/common/cuda/padded_copies.h"
#include "support/device_mirror.h"

namespace tidegate::testing {
namespace {

using kernels::PaddedCopies;
using kernels::PaddedCopy;

/// Strided tensors [2, 3, rows, width] in buffers whose every byte is 0xff between rows.
struct Copy {
  PaddedCopy work;
  std::vector<unsigned char> from, to;
  std::unique_ptr<DeviceBuffer> from_device, to_device;

  Copy(int bytes, int64_t rows, int64_t width, int64_t to_rows, int64_t to_width, int64_t gap,
       uint32_t fill) {
    const auto strides = [gap](int64_t rows, int64_t width, int64_t (&out)[3]) {
      out[2] = width + gap;
      out[1] = rows * out[2] + gap;
      out[0] = 3 * out[1];
    };
    work.element_bytes = bytes;
    work.fill = fill;
    work.sizes[0] = 2;
    work.sizes[1] = 3;
    work.sizes[2] = to_rows;
    work.from_rows = rows;
    work.from_width = width;
    work.to_width = to_width;
    strides(rows, width, work.from_strides);
    strides(to_rows, to_width, work.to_strides);
    from.resize(2 * work.from_strides[0] * bytes);
    std::mt19937 engine(static_cast<uint32_t>(width * 31 + to_width));
    for (unsigned char& byte : from) byte = static_cast<unsigned char>(engine());
    to.assign((2 * work.to_strides[0]) * bytes, 0xff);
    from_device = std::make_unique<DeviceBuffer>(from.size());
    to_device = std::make_unique<DeviceBuffer>(to.size());
    check_cuda(cudaMemcpy(from_device->data(), from.data(), from.size(), cudaMemcpyHostToDevice),
               "up");
    work.from = from_device->data();
    work.to = to_device->data();
  }

  void expect() {
    std::vector<unsigned char> found(to.size());
    check_cuda(cudaMemcpy(found.data(), to_device->data(), to.size(), cudaMemcpyDeviceToHost),
               "down");
    const size_t bytes = work.element_bytes;
    const auto offset = [bytes](const int64_t (&strides)[3], int64_t i, int64_t j, int64_t r,
                                int64_t c) {
      return (i * strides[0] + j * strides[1] + r * strides[2] + c) * bytes;
    };
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 3; ++j) {
        for (int64_t r = 0; r < work.sizes[2]; ++r) {
          for (int64_t c = 0; c < work.to_width; ++c) {
            const bool exists = r < work.from_rows && c < work.from_width;
            const void* value =
                exists ? static_cast<const void*>(&from[offset(work.from_strides, i, j, r, c)])
                       : &work.fill;
            std::memcpy(&to[offset(work.to_strides, i, j, r, c)], value, bytes);
          }
        }
      }
    }
    EXPECT_TRUE(found == to) << work.from_width << " to " << work.to_width;
  }
};

TEST(CudaPaddedCopies, EveryWidth) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    GTEST_SKIP() << "no CUDA device";
  }
  for (const int bytes : {2, 4}) {
    for (const int64_t gap : {0, 1, 2}) {
      std::vector<Copy> copies;
      for (const int64_t width : {1, 15, 105, 255}) {
        const int64_t wide = (width + 15) / 16 * 16;
        copies.emplace_back(bytes, 41, width, 41, wide, gap, 0x3c00u);  // wider
        // Narrower, of all rows and of some.
        copies.emplace_back(bytes, 41, wide, width % 10 == 5 ? 41 : 37, width, gap, 0u);
      }
      PaddedCopies all;
      for (const Copy& copy : copies) all.copies[all.count++] = copy.work;
      all.copies[3].sizes[1] = 0;  // one that has no elements
      check_cuda(kernels::copy_padded(all, nullptr), "copy_padded");
      for (size_t i = 0; i < copies.size(); ++i) {
        if (i != 3) copies[i].expect();
      }
    }
  }
  // A state: rows of zeros beside columns of zeros.
  Copy state(4, 5, 3, 16, 16, 0, 0);
  PaddedCopies one;
  one.copies[one.count++] = state.work;
  check_cuda(kernels::copy_padded(one, nullptr), "copy_padded");
  state.expect();
}

}  // namespace
}  // namespace tidegate::testing
