// CUDA's half of runner.h.

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <utility>

#include "benchmarks/ops/runner.h"

namespace tidegate::testing {
namespace {

class GraphRunner : public Runner {
 public:
  explicit GraphRunner(std::vector<Call> calls)
      : calls_(std::move(calls)), stream_(c10::cuda::getStreamFromPool()) {
    C10_CUDA_CHECK(cudaEventCreate(&begin_));
    C10_CUDA_CHECK(cudaEventCreate(&end_));
    C10_CUDA_CHECK(cudaDeviceSynchronize());  // the inputs were made on another stream
    const c10::cuda::CUDAStreamGuard guard(stream_);
    calls_.front()();  // loads what cannot be loaded during the capture
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    graph_.capture_begin();
    for (const Call& call : calls_) results_.push_back(call());
    graph_.capture_end();
    graph_.replay();
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  }

  ~GraphRunner() override {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  double seconds() override {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    graph_.replay();  // the device is busy while the host enqueues what is timed
    C10_CUDA_CHECK(cudaEventRecord(begin_, stream_.stream()));
    graph_.replay();
    C10_CUDA_CHECK(cudaEventRecord(end_, stream_.stream()));
    C10_CUDA_CHECK(cudaEventSynchronize(end_));
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds * 1e-3 / static_cast<double>(calls_.size());
  }

  const Results& first() const override { return results_.front(); }

 private:
  std::vector<Call> calls_;
  std::vector<Results> results_;
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAGraph graph_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

std::unique_ptr<Runner> make_graph_runner(std::vector<Call> calls) {
  return std::make_unique<GraphRunner>(std::move(calls));
}

std::string name_of_gpu() {
  return c10::cuda::device_count() == 0 ? "" : at::cuda::getCurrentDeviceProperties()->name;
}

const bool kRegistered = [] {
  cuda_runners() = {&make_graph_runner, &name_of_gpu};
  return true;
}();

}  // namespace
}  // namespace tidegate::testing
