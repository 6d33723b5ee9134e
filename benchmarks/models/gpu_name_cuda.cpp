#include <ATen/cuda/CUDAContext.h>

#include <string>

#include "benchmarks/models/gpu_name.h"

namespace tidegate::benchmarks {
namespace {

std::string current_gpu() { return at::cuda::getCurrentDeviceProperties()->name; }

const bool kRegistered = [] {
  gpu_name() = &current_gpu;
  return true;
}();

}  // namespace
}  // namespace tidegate::benchmarks
