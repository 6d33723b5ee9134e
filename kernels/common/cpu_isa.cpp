#include "kernels/common/cpu_isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace tidegate::kernels {
namespace {

constexpr CpuIsa kWidestFirst[] = {CpuIsa::kAvx512, CpuIsa::kAvx2, CpuIsa::kGeneric};

CpuIsa choose_cpu_isa() {
  const char* wanted = std::getenv("TIDEGATE_CPU_ISA");
  if (wanted != nullptr) {
    for (CpuIsa isa : kWidestFirst) {
      if (std::strcmp(wanted, cpu_isa_name(isa)) == 0 && cpu_isa_available(isa)) return isa;
    }
  }
  for (CpuIsa isa : kWidestFirst) {
    if (cpu_isa_available(isa)) return isa;
  }
  return CpuIsa::kGeneric;
}

std::atomic<CpuIsa>& chosen_cpu_isa() {
  static std::atomic<CpuIsa> chosen{choose_cpu_isa()};
  return chosen;
}

}  // namespace

bool cpu_isa_available(CpuIsa isa) {
#ifdef TIDEGATE_X86_DISPATCH
  switch (isa) {
    case CpuIsa::kGeneric:
      return true;
    case CpuIsa::kAvx2:
      // Every processor with AVX2 has F16C, whose name not all compilers know here.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case CpuIsa::kAvx512:
      return cpu_isa_available(CpuIsa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
  }
  return false;
#else
  return isa == CpuIsa::kGeneric;
#endif
}

CpuIsa active_cpu_isa() { return chosen_cpu_isa().load(std::memory_order_relaxed); }

bool use_cpu_isa(CpuIsa isa) {
  if (!cpu_isa_available(isa)) return false;
  chosen_cpu_isa().store(isa, std::memory_order_relaxed);
  return true;
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return "generic";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace tidegate::kernels
