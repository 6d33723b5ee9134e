#include "src/models/device_work.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "src/ops/capture.h"

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

#ifdef TIDEGATE_WITH_CUDA
namespace allocator = c10::cuda::CUDACachingAllocator;
#endif

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

/// Torch's own streams are 32 a device and given out in turn, so that a program may have got the
/// same one: these are nobody else's. What nobody needs any more is taken again, and none is ever
/// destroyed, since torch's allocator keeps memory by streams.
std::mutex free_streams_lock;
std::map<c10::DeviceIndex, std::vector<c10::cuda::CUDAStream>>& free_streams() {
  static auto* const streams = new std::map<c10::DeviceIndex, std::vector<c10::cuda::CUDAStream>>();
  return *streams;
}

c10::cuda::CUDAStream take_stream(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> guard(free_streams_lock);
  auto& left = free_streams()[device];
  if (left.empty()) {
    cudaStream_t made = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return c10::cuda::getStreamFromExternal(made, device);
  }
  const c10::cuda::CUDAStream stream = left.back();
  left.pop_back();
  return stream;
}

/// What `later` gets from now on comes after what `earlier` has.
void order(c10::cuda::CUDAStream earlier, c10::cuda::CUDAStream later) {
  at::cuda::CUDAEvent event;
  event.record(earlier);
  event.block(later);
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
    order(caller, own);
    guard.emplace(own);
  }
  ~Streams() {
    guard.reset();
    order(own, caller);
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

void OwnStream::follow_caller() const {
  if (!stream_ || ops::is_capturing(stream_->stream.device())) return;
  order(c10::cuda::getCurrentCUDAStream(stream_->stream.device_index()), stream_->stream);
}

void OwnStream::uses(const at::Tensor& tensor) const {
  if (stream_ && tensor.is_cuda()) tensor.record_stream(stream_->stream.unwrap());
}

OwnStream::Scope::Scope(OwnStream& stream) {
  if (stream.stream_) streams_ = std::make_unique<Streams>(stream.stream_->stream);
}

/// A CUDA graph with the memory that it works in. Not torch's CUDAGraph: that enters every graph in
/// a list of the device's default generator, which has no lock, and while it captures, no other
/// thread can draw from that generator.
struct CapturedWork::Graph {
  Graph(c10::cuda::CUDAStream stream, std::shared_ptr<at::cuda::MempoolId_t> pool)
      : stream(stream), pool(std::move(pool)) {}
  ~Graph() {
    // A capture of the caller's own bears it in this mode. Nobody is left to tell of an error.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (has_memory) allocator::releasePool(stream.device_index(), *pool);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Once. False where something else has broken the capture: then nothing of the work has run.
  bool capture(const std::function<void()>& work) {
    const cudaStream_t own = stream.stream();
    allocator::beginAllocateToPool(stream.device_index(), *pool,
                                   [own](cudaStream_t asking) { return asking == own; });
    has_memory = true;
    std::exception_ptr failure;
    cudaGraph_t graph = nullptr;
    // Other threads may go on with their own work meanwhile.
    cudaError_t error = cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) {
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
      error = cudaStreamEndCapture(own, &graph);
    }
    allocator::endAllocateToPool(stream.device_index(), *pool);
    if (error == cudaErrorStreamCaptureInvalidated) {
      cudaGetLastError();
      TORCH_WARN_ONCE(
          "generation: something else in the process has ended the capture of a step, which runs "
          "without a graph; the next one is captured (waiting for a device ends captures)");
      return false;
    }
    if (error == cudaSuccess && !failure) {
      // As torch does: allocators that put their own nodes into a graph need the flag.
      error = cudaGraphInstantiate(&executable, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch);
    }
    if (graph != nullptr) C10_CUDA_CHECK_WARN(cudaGraphDestroy(graph));
    if (failure) std::rethrow_exception(failure);
    C10_CUDA_CHECK(error);
    return true;
  }

  void replay() const { C10_CUDA_CHECK(cudaGraphLaunch(executable, stream.stream())); }

  const c10::cuda::CUDAStream stream;
  const std::shared_ptr<at::cuda::MempoolId_t> pool;
  cudaGraphExec_t executable = nullptr;
  bool has_memory = false;
};

void CapturedWork::run(OwnStream& stream, bool use_graph, const std::function<void()>& work) {
  if (!use_graph || !stream.stream_) {
    work();
    return;
  }
  if (!graph_) {
    if (prepared_.insert(std::this_thread::get_id()).second) {
      work();
      return;
    }
    auto made = std::make_unique<Graph>(stream.stream_->stream, stream.stream_->shared_pool());
    if (!made->capture(work)) {
      work();
      return;
    }
    graph_ = std::move(made);
  }
  graph_->replay();
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
  const auto stats = allocator::getDeviceStats(device.index());
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
void OwnStream::follow_caller() const {}
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

}  // namespace tidegate::models
