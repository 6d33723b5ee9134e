#pragma once

// An op beside `copy_` that moves as many bytes in the same harness (runner.h): the two take turns,
// figures are medians. Results are checked before anything is timed.

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/ops/runner.h"

namespace tidegate::testing {

using OptionalTensor = std::optional<at::Tensor>;

template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// Where and in what a piece of work is done.
struct OpWork {
  bool backward = false;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;

  int64_t element_bytes() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  double tolerance() const { return dtype == at::kFloat ? 2e-5 : 1e-2; }
  /// Input sets enough to overflow the caches many times over.
  int64_t sets(int64_t bytes) const {
    const int64_t wanted = device.is_cuda() ? 1'500'000'000 : 400'000'000;
    return std::clamp<int64_t>((wanted + bytes - 1) / bytes, 2, 40);
  }
  std::string dtype_name() const { return dtype == at::kFloat ? "float32" : "bfloat16"; }
};

/// "/B8": a part of a name.
inline std::string name_part(char letter, int64_t value) {
  return std::string{'/', letter}.append(std::to_string(value));
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// `copy_`, reading and writing `bytes` in all, on `sets` pairs of tensors.
inline std::vector<Call> copies(int64_t bytes, int64_t sets, at::Device device) {
  std::vector<Call> calls;
  for (int64_t i = 0; i < sets; ++i) {
    const auto source = at::randn({bytes / 8}, at::TensorOptions().device(device));
    const at::Tensor target = at::empty_like(source);
    calls.push_back([source, target] { return Results{target.copy_(source)}; });
  }
  return calls;
}

/// `Ops` is made from a Work, has its calls(), and tells the relative error() of what the first one
/// gave.
template <class Ops, class Work>
void beside_copy(benchmark::State& state, const Work& work) {
  const Ops ops(work);
  const auto runner = make_runner(ops.calls(), work.device);
  const double error = ops.error(runner->first());
  if (!(error < work.tolerance())) {  // NaN does not pass
    state.SkipWithError(("wrong result, relative error " + std::to_string(error)).c_str());
    return;
  }
  const auto copy =
      make_runner(copies(work.bytes(), work.sets(work.bytes()), work.device), work.device);
  std::vector<double> copy_times, times;
  for (auto _ : state) {
    copy_times.push_back(copy->seconds());
    times.push_back(runner->seconds());
    state.SetIterationTime(times.back());
  }
  const double gigabytes = static_cast<double>(work.bytes()) * 1e-9;
  state.counters["GB/s"] = gigabytes / median(times);
  state.counters["copy_GB/s"] = gigabytes / median(copy_times);
  state.counters["percent_of_copy"] = 100 * median(copy_times) / median(times);
}

/// `run`: void(benchmark::State&, const Work&).
template <class Work, class Run>
void register_timed(const Work& work, Run run) {
  benchmark::RegisterBenchmark(work.name().c_str(), run, work)
      ->UseManualTime()
      ->Iterations(work.device.is_cuda() ? 40 : 11)
      ->Unit(work.device.is_cuda() ? benchmark::kMicrosecond : benchmark::kMillisecond);
}

template <class Ops, class Work>
void register_work(const Work& work) {
  register_timed(work, beside_copy<Ops, Work>);
}

/// The benchmarks of each family, on the CPU or on CUDA.
void register_scan_benchmarks(at::DeviceType device);
void register_gla_benchmarks(at::DeviceType device);
void register_wkv4_benchmarks(at::DeviceType device);
void register_attention_benchmarks(at::DeviceType device);
void register_rnn_benchmarks(at::DeviceType device);

}  // namespace tidegate::testing
