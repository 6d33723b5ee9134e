#include "tidegate/version.h"

#include "tidegate/build_config.h"

namespace tidegate {

const char* version() noexcept { return TIDEGATE_VERSION; }

const char* build_info() noexcept {
  return "version: " TIDEGATE_VERSION
         "\n"
         "torch: " TIDEGATE_BUILT_TORCH " (" TIDEGATE_BUILT_TORCH_VARIANT
         ")\n"
         "cuda: " TIDEGATE_BUILT_CUDA
         "\n"
         "architectures: " TIDEGATE_BUILT_ARCHITECTURES
         "\n"
         "compiler: " TIDEGATE_BUILT_COMPILER "\n";
}

}  // namespace tidegate
