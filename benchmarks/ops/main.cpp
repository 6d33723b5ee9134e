// Every op's benchmarks: on the CPU, and on CUDA where there is a device.

#include <benchmark/benchmark.h>

#include <iostream>
#include <string>

#include "benchmarks/machine_context.h"
#include "benchmarks/ops/beside_copy.h"
#include "benchmarks/ops/runner.h"

int main(int argc, char** argv) {
  using namespace tidegate::testing;  // NOLINT: the benchmarks of this folder
  const auto register_all = [](at::DeviceType device) {
    register_scan_benchmarks(device);
    register_gla_benchmarks(device);
    register_wkv4_benchmarks(device);
    register_attention_benchmarks(device);
    register_rnn_benchmarks(device);
  };
  register_all(at::kCPU);
  const std::string gpu = gpu_name();
  if (gpu.empty()) {
    std::cerr << "bench_ops: no CUDA device, or a build without CUDA: ops/cuda/... left out\n";
  } else {
    benchmark::AddCustomContext("gpu", gpu);
    register_all(at::kCUDA);
  }
  return run_benchmarks(argc, argv);
}
