#pragma once

// What benchmarks of CPU kernels share: memory, times, and copies to compare with.

#include <time.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/common/parallel_for.h"
#include "support/typed_series.h"

namespace tidegate::testing {

/// Cache-line aligned memory, filled with numbers in [-1, 1) of `dtype`; after kPeriod they repeat.
class Buffer {
 public:
  Buffer(int64_t count, DType dtype)
      : data_(std::aligned_alloc(64, (count * element_size(dtype) + 63) / 64 * 64)) {
    const int64_t size = element_size(dtype);
    char* const first = static_cast<char*>(data_.get());
    for (int64_t i = 0; i < std::min(count, kPeriod); ++i) {
      const double value = static_cast<double>((i * 2654435761u >> 8) % 2003) / 1001.5 - 1;
      encode(first + i * size, dtype, value);
    }
    for (int64_t i = kPeriod; i < count; i += kPeriod) {
      std::memcpy(first + i * size, first, std::min(count - i, kPeriod) * size);
    }
  }
  void* data() const { return data_.get(); }

 private:
  static constexpr int64_t kPeriod = 1 << 16;
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
};

inline double clock_seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Times of one thing, done again and again: on the wall's clock, and on the processor's. The
/// latter does not count the waiting for a core that other programs use.
class Timer {
 public:
  void run(const auto& body) {
    const double wall = clock_seconds(CLOCK_MONOTONIC);
    const double cpu = clock_seconds(CLOCK_PROCESS_CPUTIME_ID);
    body();
    cpu_.push_back(clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    wall_.push_back(clock_seconds(CLOCK_MONOTONIC) - wall);
  }
  double last() const { return wall_.back(); }
  double wall() const { return median(wall_); }
  double cpu() const { return median(cpu_); }

 private:
  std::vector<double> wall_;
  std::vector<double> cpu_;
};

/// Copies `bytes` / 2 from one half of a buffer to the other: as much traffic as the kernel's.
class Copy {
 public:
  explicit Copy(int64_t bytes) : bytes_(bytes / 2), memory_(bytes / 4 + 64, DType::kFloat32) {}

  void run(const kernels::ParallelFor& parallel, bool streaming) const {
    constexpr int64_t kPage = 4096;
    char* to = static_cast<char*>(memory_.data());
    const char* from = to + bytes_;
    parallel.run(bytes_ / kPage, [=](int64_t begin, int64_t end) {
      const auto copy = streaming ? stream : plain;
      copy(to + begin * kPage, from + begin * kPage, (end - begin) * kPage);
    });
  }

 private:
  static void plain(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }
  static void stream(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
    for (int64_t i = 0; i < bytes; i += 16) {
      const __m128i part = _mm_load_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
    }
    _mm_sfence();
#else
    plain(to, from, bytes);
#endif
  }

  int64_t bytes_;
  Buffer memory_;
};

}  // namespace tidegate::testing
