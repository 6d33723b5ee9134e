#pragma once

#include <cstdint>

namespace tidegate::kernels {

/// Instruction sets that the CPU kernels are compiled for, each in units of its own.
enum class CpuIsa : uint8_t { kGeneric, kAvx2, kAvx512 };

/// Whether this program has code for `isa` and this machine can run it.
bool cpu_isa_available(CpuIsa isa);

/// What the CPU kernels use: the widest available set, or the one that the environment variable
/// TIDEGATE_CPU_ISA (generic, avx2, avx512) names where it is available. Read once.
CpuIsa active_cpu_isa();

/// For tests and benchmarks: uses `isa` from now on. Returns false, changing nothing, where it is
/// not available.
bool use_cpu_isa(CpuIsa isa);

const char* cpu_isa_name(CpuIsa isa);

}  // namespace tidegate::kernels
