#include "benchmarks/ops/runner.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <utility>

namespace tidegate::testing {
namespace {

class CpuRunner : public Runner {
 public:
  explicit CpuRunner(std::vector<Call> calls) : calls_(std::move(calls)) { seconds(); }

  double seconds() override {
    results_.resize(calls_.size());
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < calls_.size(); ++i) results_[i] = calls_[i]();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    return passed.count() / static_cast<double>(calls_.size());
  }

  const Results& first() const override { return results_.front(); }

 private:
  std::vector<Call> calls_;
  std::vector<Results> results_;
};

}  // namespace

CudaRunners& cuda_runners() {
  static CudaRunners runners;
  return runners;
}

std::string gpu_name() {
  return cuda_runners().gpu_name == nullptr ? "" : cuda_runners().gpu_name();
}

std::unique_ptr<Runner> make_runner(std::vector<Call> calls, at::Device device) {
  if (device.is_cpu()) return std::make_unique<CpuRunner>(std::move(calls));
  TORCH_CHECK(device.is_cuda() && cuda_runners().make != nullptr, "no benchmarks on ", device);
  return cuda_runners().make(std::move(calls));
}

}  // namespace tidegate::testing
