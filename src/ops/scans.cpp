#include "src/ops/scans.h"

#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

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

}  // namespace tidegate::ops
