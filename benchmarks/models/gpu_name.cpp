#include "benchmarks/models/gpu_name.h"

namespace tidegate::benchmarks {

GpuName& gpu_name() {
  static GpuName name = [] { return std::string(); };
  return name;
}

}  // namespace tidegate::benchmarks
