#include "src/ops/scans.h"

#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace tidegate::ops {

c10::SymInt check_scan_data(const Reference& data, const char* phase_name,
                            const OptionalTensor& phase, bool step) {
  const bool complex = is_given(phase);
  const std::string shape =
      !complex ? (step ? "[B, D]" : "[B, T, D]")
               : std::string(step ? "[B, 2D] (" : "[B, T, 2D] (") + phase_name + " is given)";
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, step ? 2 : 3, shape.c_str());
  const c10::SymInt width = data.tensor.sym_sizes().back();
  if (!complex) {
    return width;
  }
  TORCH_SYM_CHECK((width % 2).sym_eq(0), data.op, ": ", data.name, " must have shape ", shape,
                  " with an even number of channels, got ", data.tensor.sym_sizes());
  return width / 2;
}

c10::SymInt check_scan_states(const Reference& data, const OptionalTensor& cu_seqlens,
                              const OptionalTensor& h0, bool complex) {
  c10::SymInt sequences = check_cu_seqlens(data, cu_seqlens);
  check_state(data, "h0", h0, complex ? "[N, 2D]" : "[N, D]", {sequences, data.tensor.sym_size(2)});
  return sequences;
}

void check_scan_gradients(const Reference& data, const at::Tensor& h, const at::Tensor& dh,
                          const OptionalTensor& dh_final, bool complex,
                          const c10::SymInt& sequences) {
  check_like(data, "h", h);
  check_like(data, "dh", dh);
  check_state(data, "dh_final", dh_final, complex ? "[N, 2D]" : "[N, D]",
              {sequences, data.tensor.sym_size(2)});
}

bool scans_in_float32(const at::Tensor& data, const at::Tensor& gate,
                      std::initializer_list<at::Tensor> rows) {
  if (gate.scalar_type() == data.scalar_type() || !data.is_cuda() || data.element_size() != 2) {
    return false;
  }
  // A copy that in_rows makes is aligned if D is even; to ask for more than that does no harm.
  const auto in_packs = [](const at::Tensor& tensor) {
    bool even =
        tensor.size(-1) % 2 == 0 &&
        reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % (2 * tensor.element_size()) == 0;
    for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
      even &= tensor.size(i) <= 1 || tensor.stride(i) % 2 == 0;
    }
    return even;
  };
  return !std::all_of(rows.begin(), rows.end(), in_packs);
}

}  // namespace tidegate::ops
