#pragma once

// What the JSON says of the machine beside Google Benchmark's own lines.

#include <benchmark/benchmark.h>

#include <fstream>
#include <string>

namespace tidegate::testing {

/// The CPU's name as Linux tells it, or empty.
inline std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "";
}

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
