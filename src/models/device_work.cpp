#include "src/models/device_work.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#ifdef TIDEGATE_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace tidegate::models {
namespace {

/// Bytes by a line of /proc/meminfo.
std::optional<int64_t> memory_info(const char* wanted) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  int64_t kilobytes = 0;
  while (file >> name >> kilobytes) {
    if (name == wanted) return kilobytes * 1024;
    std::getline(file, unit);
  }
  return std::nullopt;
}

}  // namespace

#ifdef TIDEGATE_WITH_CUDA

namespace {

/// torch has 32 streams a device and gives them out in turn: those that nobody needs any more are
/// taken again, so that two objects rarely share one.
std::mutex free_streams_lock;
std::map<c10::DeviceIndex, std::vector<c10::cuda::CUDAStream>>& free_streams() {
  static auto* const streams = new std::map<c10::DeviceIndex, std::vector<c10::cuda::CUDAStream>>();
  return *streams;
}

c10::cuda::CUDAStream take_stream(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> guard(free_streams_lock);
  auto& left = free_streams()[device];
  if (left.empty()) return c10::cuda::getStreamFromPool(false, device);
  const c10::cuda::CUDAStream stream = left.back();
  left.pop_back();
  return stream;
}

}  // namespace

struct OwnStream::Stream {
  explicit Stream(c10::DeviceIndex device) : stream(take_stream(device)) {}
  ~Stream() {
    const std::lock_guard<std::mutex> guard(free_streams_lock);
    free_streams()[stream.device_index()].push_back(stream);
  }

  /// The pool that all graphs of the stream share, none of which leaves anything in it. Torch's
  /// allocators take no pool up again that has gone out of use: when the last graph is gone, the
  /// next one gets another.
  std::shared_ptr<at::cuda::MempoolId_t> shared_pool() {
    std::shared_ptr<at::cuda::MempoolId_t> found = pool.lock();
    if (!found) {
      found = std::make_shared<at::cuda::MempoolId_t>(at::cuda::graph_pool_handle());
      pool = found;
    }
    return found;
  }

  c10::cuda::CUDAStream stream;
  std::weak_ptr<at::cuda::MempoolId_t> pool;
};

struct OwnStream::Scope::Streams {
  explicit Streams(c10::cuda::CUDAStream own)
      : own(own), caller(c10::cuda::getCurrentCUDAStream(own.device_index())) {
    wait(own, caller);
    guard.emplace(own);
  }
  ~Streams() {
    guard.reset();
    wait(caller, own);
  }

  static void wait(c10::cuda::CUDAStream later, c10::cuda::CUDAStream earlier) {
    at::cuda::CUDAEvent event;
    event.record(earlier);
    event.block(later);
  }

  c10::cuda::CUDAStream own, caller;
  std::optional<c10::cuda::CUDAStreamGuard> guard;
};

OwnStream::OwnStream(at::Device device) {
  if (!device.is_cuda()) return;
  const c10::DeviceGuard guard(device);
  stream_ = std::make_unique<Stream>(c10::cuda::current_device());
}

void OwnStream::wait() const {
  if (stream_) stream_->stream.synchronize();
}

void OwnStream::uses(const at::Tensor& tensor) const {
  if (stream_ && tensor.is_cuda()) tensor.record_stream(stream_->stream.unwrap());
}

OwnStream::Scope::Scope(OwnStream& stream) {
  if (stream.stream_) streams_ = std::make_unique<Streams>(stream.stream_->stream);
}

struct CapturedWork::Graph {
  explicit Graph(std::shared_ptr<at::cuda::MempoolId_t> pool) : pool(std::move(pool)) {}

  std::shared_ptr<at::cuda::MempoolId_t> pool;  // lives longer than the graph
  at::cuda::CUDAGraph graph;
};

void CapturedWork::run(OwnStream& stream, bool use_graph, const std::function<void()>& work) {
  if (!use_graph || !stream.stream_ || calls_++ == 0) {
    work();
    return;
  }
  if (!graph_) {
    auto captured = std::make_unique<Graph>(stream.stream_->shared_pool());
    {
      // It may make tensors of torch's random generator, which others write outside of this mode.
      const c10::InferenceMode normal(false);
      // Other threads may go on with their own work meanwhile.
      captured->graph.capture_begin(*captured->pool, cudaStreamCaptureModeThreadLocal);
    }
    try {
      work();
    } catch (...) {
      try {
        captured->graph.capture_end();
      } catch (...) {  // what stopped the work says more
      }
      throw;
    }
    captured->graph.capture_end();
    graph_ = std::move(captured);
  }
  graph_->graph.replay();
}

struct HostCopy::Event {
  at::cuda::CUDAEvent event;
};

HostCopy::HostCopy(const at::Tensor& source) {
  if (!source.is_cuda()) {
    values_ = source.clone();
    return;
  }
  values_ = at::empty(source.sizes(), source.options().device(at::kCPU).pinned_memory(true));
  values_.copy_(source, /*non_blocking=*/true);
  event_ = std::make_shared<Event>();
  event_->event.record(c10::cuda::getCurrentCUDAStream(source.get_device()));
}

const at::Tensor& HostCopy::wait() {
  if (event_) event_->event.synchronize();
  event_.reset();
  return values_;
}

std::optional<int64_t> free_bytes(at::Device device) {
  if (device.is_cpu()) return memory_info("MemAvailable:");
  if (!device.is_cuda()) return std::nullopt;
  const c10::DeviceGuard guard(device);
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return std::nullopt;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  const int64_t unused = stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
  return static_cast<int64_t>(free) + unused;
}

std::optional<int64_t> all_bytes(at::Device device) {
  if (device.is_cpu()) return memory_info("MemTotal:");
  if (!device.is_cuda()) return std::nullopt;
  const c10::DeviceGuard guard(device);
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return std::nullopt;
  return static_cast<int64_t>(total);
}

bool uses_cuda_graphs(at::Device device) {
  const char* const set = std::getenv("TIDEGATE_CUDA_GRAPHS");
  const bool is_off = set != nullptr && std::strcmp(set, "0") == 0;
  return device.is_cuda() && !is_off && !at::autocast::is_autocast_enabled(device.type());
}

#else

struct OwnStream::Stream {};
struct OwnStream::Scope::Streams {};
struct CapturedWork::Graph {};
struct HostCopy::Event {};

OwnStream::OwnStream(at::Device) {}
void OwnStream::wait() const {}
void OwnStream::uses(const at::Tensor&) const {}
OwnStream::Scope::Scope(OwnStream&) {}

void CapturedWork::run(OwnStream&, bool, const std::function<void()>& work) { work(); }

HostCopy::HostCopy(const at::Tensor& source) : values_(source.clone()) {}
const at::Tensor& HostCopy::wait() { return values_; }

std::optional<int64_t> free_bytes(at::Device device) {
  return device.is_cpu() ? memory_info("MemAvailable:") : std::nullopt;
}
std::optional<int64_t> all_bytes(at::Device device) {
  return device.is_cpu() ? memory_info("MemTotal:") : std::nullopt;
}

bool uses_cuda_graphs(at::Device) { return false; }

#endif

OwnStream::~OwnStream() = default;
OwnStream::Scope::~Scope() = default;
CapturedWork::CapturedWork() = default;
CapturedWork::~CapturedWork() = default;
CapturedWork::CapturedWork(CapturedWork&&) noexcept = default;
CapturedWork& CapturedWork::operator=(CapturedWork&&) noexcept = default;
bool CapturedWork::is_captured() const { return graph_ != nullptr; }

}  // namespace tidegate::models
