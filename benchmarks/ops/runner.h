#pragma once

// Times a function over rotating inputs: K calls on K sets of inputs, each writing its own results,
// so that together they touch far more memory than a cache holds.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tidegate::testing {

using Results = std::vector<at::Tensor>;
using Call = std::function<Results()>;

class Runner {
 public:
  virtual ~Runner() = default;
  /// Seconds of one call, from one pass over all of them.
  virtual double seconds() = 0;
  /// What the first call gave the last time.
  virtual const Results& first() const = 0;
};

/// On the CPU the calls are timed by the clock. On CUDA they are captured in one CUDA graph and
/// timed by device events around a replay, so no dispatcher, allocator or launch on the host is in
/// it.
std::unique_ptr<Runner> make_runner(std::vector<Call> calls, at::Device device);

/// Where CUDA is compiled in and a GPU is there: its name; otherwise empty.
std::string gpu_name();

/// Set by runner_cuda.cpp where it is compiled.
struct CudaRunners {
  std::unique_ptr<Runner> (*make)(std::vector<Call> calls) = nullptr;
  std::string (*gpu_name)() = nullptr;
};
CudaRunners& cuda_runners();

}  // namespace tidegate::testing
