#include "benchmarks/models/measure.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace tidegate::benchmarks {
namespace {

// Linux: sets VmHWM, the largest resident set, back to the present one.
bool reset_largest_resident_set() {
  std::ofstream file("/proc/self/clear_refs");
  return static_cast<bool>(file << 5 << std::flush);
}

// Bytes of a line of /proc/self/status.
std::optional<int64_t> status_bytes(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name + ":", 0) == 0) return 1024 * std::stoll(line.substr(name.size() + 1));
  }
  return std::nullopt;
}

// The libraries' part, before any work.
const std::optional<int64_t> kResidentAtStart = status_bytes("VmRSS");

}  // namespace

void Stopwatch::mark() {
  if (device_.is_cpu()) {
    times_.push_back(std::chrono::steady_clock::now());
    return;
  }
  const c10::impl::VirtualGuardImpl backend(device_.type());
  events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  events_.back().record(backend.getStream(device_));
}

std::vector<double> Stopwatch::spans() {
  std::vector<double> seconds;
  for (size_t i = 1; i < times_.size(); ++i) {
    seconds.push_back(std::chrono::duration<double>(times_[i] - times_[i - 1]).count());
  }
  if (!events_.empty()) events_.back().synchronize();
  for (size_t i = 1; i < events_.size(); ++i) {
    seconds.push_back(1e-3 * events_[i - 1].elapsedTime(events_[i]));
  }
  return seconds;
}

PeakMemory::PeakMemory(c10::Device device) : device_(device) {
  if (device_.is_cpu()) {
    release_memory(device_);
    is_known_ = reset_largest_resident_set();
  } else {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  }
}

std::optional<int64_t> PeakMemory::bytes() const {
  if (!is_known_) return std::nullopt;
  if (device_.is_cpu()) {
    const auto largest = status_bytes("VmHWM");
    return largest ? std::optional(*largest - kResidentAtStart.value_or(0)) : std::nullopt;
  }
  const auto stats = c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index());
  return stats.allocated_bytes[0].peak;  // of all pools together
}

void release_memory(c10::Device device) {
  if (device.is_cpu()) {
    malloc_trim(0);
  } else {
    c10::getDeviceAllocator(device.type())->emptyCache();
  }
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace tidegate::benchmarks
