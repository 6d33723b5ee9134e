// Time and memory of what runs on a device, without a line that needs CUDA to compile.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace tidegate::benchmarks {

/// Times the spans between marks. On a GPU by device events, so that the host never waits between
/// two marks and may run ahead as it does in training.
class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : device_(device) {}

  void mark();
  /// Waits for the device; the seconds between each mark and the next.
  std::vector<double> spans();

 private:
  c10::Device device_;
  std::vector<c10::Event> events_;
  std::vector<std::chrono::steady_clock::time_point> times_;
};

/// The most memory in use since it was made: on a GPU what torch's caching allocator gave out, on
/// the CPU the process's resident set beyond what it had at its start, with what earlier work left
/// behind given back first.
class PeakMemory {
 public:
  explicit PeakMemory(c10::Device device);
  /// Nothing where the system does not say.
  std::optional<int64_t> bytes() const;

 private:
  c10::Device device_;
  bool is_known_ = true;
};

/// Gives memory that nothing uses back to the system.
void release_memory(c10::Device device);

double median(std::vector<double> values);

}  // namespace tidegate::benchmarks
