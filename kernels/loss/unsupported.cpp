#include "kernels/common/limits.h"
#include "kernels/loss/cross_entropy.h"

namespace tidegate::kernels::loss {

// Columns of a row are counted in 32 bits, and a block strides over them.
constexpr int64_t kMaxColumns = int64_t{1} << 30;

const char* cross_entropy_unsupported(const CrossEntropyParams& params) {
  if (const char* why = complex_unsupported("x", params.dtype)) {
    return why;
  }
  if (params.vocab < 1 || params.vocab > kMaxColumns) {
    return unsupported("weight must have between 1 and 2^30 rows, got %lld",
                       static_cast<long long>(params.vocab));
  }
  if (params.stride % kRowPack != 0 || params.columns < params.vocab ||
      params.columns > params.stride) {
    return unsupported(
        "logits must have V <= columns <= stride, a multiple of %lld, got V = %lld, "
        "%lld columns and a stride of %lld",
        static_cast<long long>(kRowPack), static_cast<long long>(params.vocab),
        static_cast<long long>(params.columns), static_cast<long long>(params.stride));
  }
  return nullptr;
}

}  // namespace tidegate::kernels::loss
