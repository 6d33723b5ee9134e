// hgrn2 on the CPU, forward and backward, through raw pointers: each instruction set, each number
// of threads. It is bound by arithmetic rather than memory, so its figure is multiplications and
// additions with a state of K x V (forward two a token and head, backward six) a second; beside it
// stands what copying as many bytes would take. The output is checked before anything is timed.
//
//   bench_kernels --benchmark_filter=cpu/hgrn2

#include <benchmark/benchmark.h>

#include <cmath>
#include <string>
#include <vector>

#include "benchmarks/kernels/measure.h"
#include "kernels/common/cpu_isa.h"
#include "kernels/gla/gla.h"
#include "support/gla_reference.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;
using kernels::HeadSeries;
using kernels::ParallelFor;

struct Work {
  int64_t batch = 2;
  int64_t time = 1024;
  int64_t heads = 4;
  int64_t dim = 64;  // K and V
  DType dtype = DType::kFloat32;
  bool backward = false;
  CpuIsa isa = CpuIsa::kGeneric;
  int threads = 2;

  int64_t elements() const { return batch * time * heads * dim; }
  /// q, f, v; o  |  q, f, v, do; dq, df, dv
  int64_t bytes() const { return (backward ? 7 : 4) * elements() * element_size(dtype); }
  double operations() const {
    return 2.0 * (backward ? 6 : 2) * static_cast<double>(elements() * dim);
  }
  std::string name() const {
    return std::string("cpu/hgrn2/") + (backward ? "backward/" : "forward/") +
           kernels::dtype_name(dtype) + "/B" + std::to_string(batch) + "/T" + std::to_string(time) +
           "/H" + std::to_string(heads) + "/K" + std::to_string(dim) + "/" +
           kernels::cpu_isa_name(isa) + "/threads" + std::to_string(threads);
  }
};

/// Inputs and outputs of one piece of work.
class Hgrn2 {
 public:
  explicit Hgrn2(const Work& work)
      : work_(work),
        q_(work.elements(), work.dtype),
        f_(work.elements(), work.dtype),
        v_(work.elements(), work.dtype),
        o_(work.elements(), work.dtype),
        d_o_(work.elements(), work.dtype),
        dq_(work.elements(), work.dtype),
        df_(work.elements(), work.dtype),
        dv_(work.elements(), work.dtype),
        states_(2 * work.batch * work.heads * work.dim * work.dim, DType::kFloat32) {
    const auto series = [&](const Buffer& buffer) {
      const int64_t row = work.heads * work.dim;
      return HeadSeries{buffer.data(), work.time * row, row, work.dim, work.dtype};
    };
    kernels::gla::GlaParams& forward = params_.forward;
    forward.layout.batch = forward.layout.sequences = work.batch;
    forward.layout.time = work.time;
    forward.heads = work.heads;
    forward.key_dim = forward.value_dim = work.dim;
    forward.channels = work.heads * work.dim;
    forward.gate_kind = kernels::gla::GateKind::kLogit;
    forward.q_activation = kernels::gla::InputActivation::kSilu;
    forward.q = series(q_);
    forward.gate = series(f_);
    forward.v = series(v_);
    forward.o = series(o_);
    forward.h_final = states_.data();
    forward.plan = kernels::gla::gla_plan_cpu(forward);
    params_.d_o = series(d_o_);
    params_.dq = series(dq_);
    params_.dgate = series(df_);
    params_.dv = series(dv_);
    params_.dh0 =
        static_cast<float*>(states_.data()) + work.batch * work.heads * work.dim * work.dim;
  }
  Hgrn2(const Hgrn2&) = delete;
  Hgrn2& operator=(const Hgrn2&) = delete;

  void run(bool backward, const ParallelFor& parallel) const {
    if (backward) {
      kernels::gla::gla_backward_cpu(params_, parallel);
    } else {
      kernels::gla::gla_forward_cpu(params_.forward, parallel);
    }
  }

  /// The error of o, dq, df and dv together, after both passes.
  double relative_error() const {
    GlaReference<double> reference;
    reference.heads = work_.heads;
    reference.key_dim = reference.value_dim = work_.dim;
    reference.logits = true;
    reference.q_activation = kernels::gla::InputActivation::kSilu;
    reference.q = values(q_);
    reference.gate = values(f_);
    reference.v = values(v_);
    reference.d_o = values(d_o_);
    ReferenceLayout layout;
    layout.tokens = work_.batch * work_.time;
    for (int64_t n = 0; n < work_.batch; ++n) {
      layout.sequences.push_back({n * work_.time, work_.time});
    }
    reference.run(layout);
    double error = 0, size = 0;
    const auto add = [&](const Buffer& found, const std::vector<double>& expected) {
      const std::vector<double> got = values(found);
      for (size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - expected[i]) * (got[i] - expected[i]);
        size += expected[i] * expected[i];
      }
    };
    add(o_, reference.o);
    add(dq_, reference.dq);
    add(df_, reference.dgate);
    add(dv_, reference.dv);
    return std::sqrt(error / size);
  }

 private:
  std::vector<double> values(const Buffer& buffer) const {
    const auto* data = static_cast<const char*>(buffer.data());
    std::vector<double> all(work_.elements());
    for (int64_t i = 0; i < work_.elements(); ++i) {
      all[i] = decode(data + i * element_size(work_.dtype), work_.dtype).real();
    }
    return all;
  }

  Work work_;
  Buffer q_, f_, v_, o_, d_o_, dq_, df_, dv_, states_;
  kernels::gla::GlaBackwardParams params_;
};

double error_of(Work work, const ParallelFor& parallel) {
  work.time = 70;
  work.heads = 2;
  const Hgrn2 hgrn2(work);
  hgrn2.run(false, parallel);
  hgrn2.run(true, parallel);
  return hgrn2.relative_error();
}

void run_hgrn2(benchmark::State& state, const Work& work) {
  const ParallelFor parallel = thread_parallel(work.threads);
  if (!kernels::use_cpu_isa(work.isa)) {
    state.SkipWithError("this machine cannot run it");
    return;
  }
  const double error = error_of(work, parallel);
  if (!(error < (work.dtype == DType::kFloat32 ? 1e-6 : 1e-2))) {  // NaN does not pass
    state.SkipWithError(("wrong result, relative error " + std::to_string(error)).c_str());
    return;
  }
  const Hgrn2 hgrn2(work);
  const Copy copy(work.bytes());
  Timer copying, kernel;
  for (auto _ : state) {
    copying.run([&] { copy.run(parallel, false); });
    kernel.run([&] { hgrn2.run(work.backward, parallel); });
    state.SetIterationTime(kernel.last());
  }
  state.counters["GFLOP/s"] = work.operations() * 1e-9 / kernel.wall();
  state.counters["GFLOP_a_cpu_second"] = work.operations() * 1e-9 / kernel.cpu();
  state.counters["copies"] = kernel.wall() / copying.wall();
  state.counters["copies_by_cpu_time"] = kernel.cpu() / copying.cpu();
}

const bool kRegistered = [] {
  Work work;
  for (int64_t dim : {64, 128}) {
    work.dim = dim;
    for (int threads : {2, 1}) {
      work.threads = threads;
      for (CpuIsa isa : {CpuIsa::kAvx512, CpuIsa::kAvx2, CpuIsa::kGeneric}) {
        work.isa = isa;
        for (bool backward : {false, true}) {
          work.backward = backward;
          for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            work.dtype = dtype;
            if (isa == CpuIsa::kGeneric && (dtype != DType::kFloat32 || dim != 64)) continue;
            benchmark::RegisterBenchmark(work.name().c_str(), run_hgrn2, work)
                ->UseManualTime()
                ->Iterations(20)
                ->Unit(benchmark::kMillisecond);
          }
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace tidegate::testing
