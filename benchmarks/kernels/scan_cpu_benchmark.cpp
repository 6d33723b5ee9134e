// hgru on the CPU beside copying the same number of bytes: copies and kernels alternate, on the
// same threads, and each figure is a median. The output is checked before anything is timed.
// There are two copies: memcpy, and one whose stores bypass the caches, as the kernels' do;
// memcpy's do not where the last-level cache is large. On a machine that others use, read the
// counters of CPU time.
//
//   bench_kernels --benchmark_filter=cpu [--benchmark_out=benchmarks/results/cpu_scan.json]

#include <benchmark/benchmark.h>

#include <cmath>
#include <string>
#include <vector>

#include "benchmarks/kernels/measure.h"
#include "kernels/common/cpu_isa.h"
#include "kernels/scan/scan.h"
#include "support/scan_reference.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;
using kernels::ParallelFor;
using kernels::TimeSeries;

struct Work {
  int64_t batch = 4;
  int64_t time = 2048;
  int64_t channels = 1024;
  DType dtype = DType::kFloat32;
  bool turns = false;
  bool backward = false;
  CpuIsa isa = CpuIsa::kGeneric;
  int threads = 2;

  int64_t elements() const { return batch * time * channels; }
  /// Tensors of [B, T, D] that cross the memory bus: complex ones count twice.
  int64_t bytes() const {
    const int64_t halves = turns ? 2 : 1;
    const int64_t rows = backward ? 4 * halves + 2 : 2 * halves + 1;
    return rows * elements() * element_size(dtype);
  }
  std::string name() const {
    return std::string("cpu/hgru/") + (backward ? "backward/" : "forward/") +
           (turns ? "complex/" : "real/") + kernels::dtype_name(dtype) + "/B" +
           std::to_string(batch) + "/T" + std::to_string(time) + "/D" + std::to_string(channels) +
           "/" + kernels::cpu_isa_name(isa) + "/threads" + std::to_string(threads);
  }
};

/// Inputs and outputs of one piece of work.
struct Hgru {
  explicit Hgru(const Work& work)
      : columns(work.turns ? 2 * work.channels : work.channels),
        c(work.batch * work.time * columns, work.dtype),
        f(work.elements(), work.dtype),
        h(work.batch * work.time * columns, work.dtype),
        dh(work.batch * work.time * columns, work.dtype),
        dc(work.batch * work.time * columns, work.dtype),
        df(work.elements(), work.dtype),
        gamma(work.channels, DType::kFloat32),
        theta(work.channels, DType::kFloat32),
        states(3 * work.batch * columns, DType::kFloat32),
        partials(2 * work.batch * work.channels, DType::kFloat32) {
    float* lower_bounds = static_cast<float*>(gamma.data());
    for (int64_t i = 0; i < work.channels; ++i) lower_bounds[i] = std::fabs(lower_bounds[i]) / 2;
    const auto series = [&](const Buffer& buffer, int64_t width) {
      return TimeSeries{buffer.data(), work.time * width, width, work.dtype};
    };
    kernels::scan::HgruParams& forward = params.forward;
    forward.layout.batch = forward.layout.sequences = work.batch;
    forward.layout.time = work.time;
    forward.channels = work.channels;
    forward.c = series(c, columns);
    forward.f = series(f, work.channels);
    forward.h = series(h, columns);
    forward.gamma = gamma.data();
    if (work.turns) forward.theta = theta.data();
    float* state = static_cast<float*>(states.data());
    float* partial = static_cast<float*>(partials.data());
    forward.h_final = state;
    params.dh = series(dh, columns);
    params.dh_final = state + work.batch * columns;
    params.dc = series(dc, columns);
    params.df = series(df, work.channels);
    params.dh0 = state + 2 * work.batch * columns;
    params.dgamma_partial = partial;
    if (work.turns) params.dtheta_partial = partial + work.batch * work.channels;
  }

  void run(const Work& work, const ParallelFor& parallel) const {
    if (work.backward) {
      kernels::scan::hgru_backward_cpu(params, parallel);
    } else {
      kernels::scan::hgru_forward_cpu(params.forward, parallel);
    }
  }

  int64_t columns;
  Buffer c, f, h, dh, dc, df, gamma, theta, states, partials;
  kernels::scan::HgruBackwardParams params;
};

/// The relative error of h and df against the reference, on a small piece of the same kind of work.
double relative_error(Work work, const ParallelFor& parallel) {
  work.batch = 2;
  work.time = 70;
  work.channels = 67;
  const Hgru hgru(work);
  kernels::scan::hgru_forward_cpu(hgru.params.forward, parallel);
  kernels::scan::hgru_backward_cpu(hgru.params, parallel);

  const auto number = [&](const Buffer& buffer, int64_t i, DType dtype) {
    return decode(static_cast<const char*>(buffer.data()) + i * element_size(dtype), dtype).real();
  };
  const auto values = [&](const Buffer& buffer) {
    ComplexArray<double> all;
    for (int64_t i = 0; i < work.elements(); ++i) {
      const int64_t at = i / work.channels * hgru.columns + i % work.channels;
      all.push_back({number(buffer, at, work.dtype),
                     work.turns ? number(buffer, at + work.channels, work.dtype) : 0});
    }
    return all;
  };
  HgruReference<double> reference;
  ReferenceLayout layout;
  layout.sequences = {{0, work.time}, {work.time, work.time}};
  layout.tokens = work.batch * work.time;
  layout.channels = work.channels;
  std::vector<double> gates;
  for (int64_t i = 0; i < work.elements(); ++i) gates.push_back(number(hgru.f, i, work.dtype));
  ComplexArray<double> dh_final;
  const float* end = static_cast<const float*>(hgru.params.dh_final);
  for (int64_t i = 0; i < work.batch * work.channels; ++i) {
    const int64_t at = i / work.channels * hgru.columns + i % work.channels;
    dh_final.push_back({end[at], work.turns ? end[at + work.channels] : 0});
  }
  for (int64_t j = 0; j < work.channels; ++j) {
    reference.gamma.push_back(number(hgru.gamma, j, DType::kFloat32));
    reference.theta.push_back(work.turns ? number(hgru.theta, j, DType::kFloat32) : 0);
  }
  reference.forward(layout, values(hgru.c), gates, {});
  reference.backward(layout, values(hgru.c), gates, reference.h, {}, values(hgru.dh), dh_final);

  double error = 0;
  double size = 0;
  const ComplexArray<double> h = values(hgru.h);
  for (int64_t i = 0; i < work.elements(); ++i) {
    error += std::norm(h[i] - reference.h[i]);
    error += std::norm(number(hgru.df, i, work.dtype) - reference.df[i]);
    size += std::norm(reference.h[i]) + std::norm(reference.df[i]);
  }
  return std::sqrt(error / size);
}

void hgru_beside_copy(benchmark::State& state, const Work& work) {
  const ParallelFor parallel = thread_parallel(work.threads);
  if (!kernels::use_cpu_isa(work.isa)) {
    state.SkipWithError("this machine cannot run it");
    return;
  }
  const double error = relative_error(work, parallel);
  if (!(error < (work.dtype == DType::kFloat32 ? 1e-6 : 1e-2))) {
    state.SkipWithError(("wrong result, relative error " + std::to_string(error)).c_str());
    return;
  }
  const Hgru hgru(work);
  const Copy copy(work.bytes());
  Timer plain;
  Timer streaming;
  Timer kernel;
  for (auto _ : state) {
    plain.run([&] { copy.run(parallel, false); });
    streaming.run([&] { copy.run(parallel, true); });
    kernel.run([&] { hgru.run(work, parallel); });
    state.SetIterationTime(kernel.last());
  }
  const double gigabytes = static_cast<double>(work.bytes()) * 1e-9;
  state.counters["GB/s"] = gigabytes / kernel.wall();
  state.counters["copy_GB/s"] = gigabytes / plain.wall();
  state.counters["percent_of_copy"] = 100 * plain.wall() / kernel.wall();
  state.counters["percent_of_streaming_copy"] = 100 * streaming.wall() / kernel.wall();
  state.counters["GB_a_cpu_second"] = gigabytes / kernel.cpu();
  state.counters["copy_GB_a_cpu_second"] = gigabytes / plain.cpu();
  state.counters["cpu_percent_of_copy"] = 100 * plain.cpu() / kernel.cpu();
  state.counters["cpu_percent_of_streaming_copy"] = 100 * streaming.cpu() / kernel.cpu();
}

void register_work(const Work& work) {
  benchmark::RegisterBenchmark(work.name().c_str(), hgru_beside_copy, work)
      ->UseManualTime()
      ->Iterations(40)
      ->Unit(benchmark::kMillisecond);
}

const bool kRegistered = [] {
  Work work;
  for (int threads : {2, 1}) {
    work.threads = threads;
    for (CpuIsa isa : {CpuIsa::kAvx512, CpuIsa::kAvx2, CpuIsa::kGeneric}) {
      work.isa = isa;
      for (bool backward : {false, true}) {
        work.backward = backward;
        for (bool turns : {false, true}) {
          work.turns = turns;
          for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            work.dtype = dtype;
            const bool common = isa != CpuIsa::kGeneric || (dtype == DType::kFloat32 && !turns);
            if (common) register_work(work);
          }
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace tidegate::testing
