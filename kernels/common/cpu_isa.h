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

/// The table for the instruction set in use, of those that the sets' units define.
template <class Kernels>
const Kernels& active_of(const Kernels& generic, const Kernels& avx2, const Kernels& avx512) {
  switch (active_cpu_isa()) {
    case CpuIsa::kAvx512:
      return avx512;
    case CpuIsa::kAvx2:
      return avx2;
    case CpuIsa::kGeneric:
      break;
  }
  return generic;
}

}  // namespace tidegate::kernels

/// Declares a family's table of kernels: X/cpu/X_isa.cpp defines it in a namespace for each
/// instruction set. Stands in the family's namespace.
#define TIDEGATE_ISA_KERNELS(Kernels, name) \
  namespace generic {                       \
  extern const Kernels name;                \
  }                                         \
  namespace avx2 {                          \
  extern const Kernels name;                \
  }                                         \
  namespace avx512 {                        \
  extern const Kernels name;                \
  }

/// The family's table for the set in use. Where nothing is dispatched there is but one.
#ifdef TIDEGATE_X86_DISPATCH
#define TIDEGATE_ACTIVE_KERNELS(name) \
  ::tidegate::kernels::active_of(generic::name, avx2::name, avx512::name)
#else
#define TIDEGATE_ACTIVE_KERNELS(name) generic::name
#endif
