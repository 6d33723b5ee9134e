// The GPU's name, from the one file that needs CUDA's headers.
#pragma once

#include <string>

namespace tidegate::benchmarks {

/// Tells the current GPU's name. Empty names where CUDA is not compiled in.
using GpuName = std::string (*)();
GpuName& gpu_name();

}  // namespace tidegate::benchmarks
