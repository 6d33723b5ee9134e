// gated_rnn on the CPU, forward and backward, through raw pointers: each instruction set, each
// number of threads. Bound by arithmetic: its figure is multiplications and additions with the
// matrix a second. The output is checked before anything is timed.
//
//   bench_kernels --benchmark_filter=cpu/gated_rnn

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "benchmarks/kernels/measure.h"
#include "kernels/common/cpu_isa.h"
#include "support/rnn_problem.h"
#include "support/thread_parallel.h"

namespace tidegate::testing {
namespace {

using kernels::CpuIsa;

struct Work {
  int64_t batch = 32;
  int64_t time = 256;
  int64_t dim = 128;
  bool backward = false;
  CpuIsa isa = CpuIsa::kGeneric;
  int threads = 2;

  double operations() const { return 2.0 * static_cast<double>(batch * time * dim * dim); }
  std::string name() const {
    return std::string("cpu/gated_rnn/") + (backward ? "backward" : "forward") + "/float32/B" +
           std::to_string(batch) + "/T" + std::to_string(time) + "/D" + std::to_string(dim) + "/" +
           kernels::cpu_isa_name(isa) + "/threads" + std::to_string(threads);
  }
};

void run_gated_rnn(benchmark::State& state, const Work& work) {
  const kernels::ParallelFor parallel = thread_parallel(work.threads);
  if (!kernels::use_cpu_isa(work.isa)) {
    state.SkipWithError("this machine cannot run it");
    return;
  }
  RnnProblem<float> sample(std::vector<int64_t>(5, 9), false, work.dim, 1);
  sample.run(parallel);
  if (!(sample.error() < 2e-6)) {
    state.SkipWithError(("wrong result, relative error " + std::to_string(sample.error())).c_str());
    return;
  }
  const std::vector<int64_t> lengths(static_cast<size_t>(work.batch), work.time);
  RnnProblem<float> problem(lengths, false, work.dim, 2);
  problem.run(parallel);
  Timer kernel;
  for (auto _ : state) {
    kernel.run([&] {
      if (work.backward) {
        kernels::rnn::gated_rnn_backward_cpu(problem.backward(), parallel);
      } else {
        kernels::rnn::gated_rnn_forward_cpu(problem.forward(), parallel);
      }
    });
    state.SetIterationTime(kernel.last());
  }
  state.counters["GFLOP/s"] = work.operations() * 1e-9 / kernel.wall();
  state.counters["GFLOP_a_cpu_second"] = work.operations() * 1e-9 / kernel.cpu();
}

const bool kRegistered = [] {
  Work work;
  for (int64_t dim : {128, 512}) {
    work.dim = dim;
    for (int threads : {2, 1}) {
      work.threads = threads;
      for (CpuIsa isa : {CpuIsa::kAvx512, CpuIsa::kAvx2, CpuIsa::kGeneric}) {
        work.isa = isa;
        for (bool backward : {false, true}) {
          work.backward = backward;
          benchmark::RegisterBenchmark(work.name().c_str(), run_gated_rnn, work)
              ->UseManualTime()
              ->Iterations(10)
              ->Unit(benchmark::kMillisecond);
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace tidegate::testing
