// The scan kernels, compiled once an instruction set (kernels/CMakeLists.txt).

#include "kernels/scan/cpu/hgru_block.h"
#include "kernels/scan/cpu/linear_scan_block.h"
#include "kernels/scan/cpu/lru_block.h"
#include "kernels/scan/cpu/scan_kernels.h"
#include "kernels/scan/cpu/wkv4_block.h"

namespace tidegate::kernels::scan::TIDEGATE_ISA {

const ScanKernels kScanKernels = {
    linear_scan_forward_block, linear_scan_backward_block, hgru_forward_block, hgru_backward_block,
    lru_forward_block,         lru_backward_block,         wkv4_forward_block, wkv4_backward_block,
};

}  // namespace tidegate::kernels::scan::TIDEGATE_ISA
