#pragma once

// What the JSON says of the machine beside Google Benchmark's own lines.

#include <benchmark/benchmark.h>

#include <string>

#include "benchmarks/cpu_name.h"

namespace tidegate::testing {

inline void add_machine_context() {
  const std::string name = cpu_name();
  if (!name.empty()) benchmark::AddCustomContext("cpu", name);
}

/// BENCHMARK_MAIN, with the machine's name in the output.
inline int run_benchmarks(int argc, char** argv) {
  add_machine_context();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace tidegate::testing
