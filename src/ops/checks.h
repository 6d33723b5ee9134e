#pragma once

// Checks of what users pass in. Every message names the op, the argument, what was expected and
// what was given. All of them read only metadata, through symbolic sizes, so that they serve the
// Meta kernels too; the exceptions are the check_*_values functions, which say when they apply.

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace tidegate::ops {

using OptionalTensor = std::optional<at::Tensor>;

/// "float32" and the like, as torch has them in Python.
std::string dtype_name(at::ScalarType dtype);

/// What scores or outputs are multiplied by.
void check_scale(const char* op, double scale);

inline bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// For what may be an undefined tensor, as saved ones and gradients may.
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

/// An op and that argument of it with which the others are compared.
struct Reference {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

enum class ComplexData : bool { kRefused, kAccepted };

/// The type in which a recurrence over `dtype` keeps its state: fp32 for 16- and 32-bit reals, and
/// itself for everything wider.
at::ScalarType state_dtype(at::ScalarType dtype);

/// Single precision of `dtype`'s kind, in which gates, bounds and states may come whatever the
/// data's precision: float32, complex64 for complex types.
at::ScalarType single_type(at::ScalarType dtype);

/// What an op cannot do without. The checks below look too; C++ functions and autograd's functions
/// come before them, and neither the dispatcher nor torch::autograd::Function has a name for an
/// undefined tensor (Python's None).
void check_given(const char* op, const char* name, const at::Tensor& tensor);

/// "op: name must be float32, float64, ..., got int64".
void check_data_dtype(const Reference& data, ComplexData complex);

/// "op: name must have shape [B, T, D], got [5, 8]".
void check_rank(const Reference& data, int64_t rank, const char* shape_name);

/// "op: expected all tensors on cpu like c, got name on cuda:0".
void check_device(const Reference& data, const char* name, const at::Tensor& tensor);

/// A gate, bound or state: on the data's device, in its dtype or in single precision.
/// "op: name must be bfloat16 or float32 (c is bfloat16), got float64".
void check_gate(const Reference& data, const char* name, const at::Tensor& tensor);

/// Checks a gate of what is made of `data` in the dtype `own`, by which messages name it.
void check_gate(const Reference& data, at::ScalarType own, const char* name,
                const at::Tensor& tensor);

/// Where it is given, a gate's dtype and the shape [D], of `channels`.
void check_channel_parameter(const Reference& data, const char* name,
                             const OptionalTensor& parameter, const c10::SymInt& channels);

/// "op: name must have shape [N, D] = [2, 8]<note>, got [2, 7]".
void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* shape_name,
                 std::initializer_list<c10::SymInt> expected, std::string_view note = "");

/// check_shape for any number of dimensions.
void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* shape_name,
                 c10::SymIntArrayRef expected);

/// Device and dtype of `data`.
/// "op: name must be bfloat16 like q, got float32".
void check_same_type(const Reference& data, const char* name, const at::Tensor& tensor);

/// Device, dtype and shape of `data`: for gradients and results in the backward ops.
void check_like(const Reference& data, const char* name, const at::Tensor& tensor);

/// A state or its gradient, where given: of the state's type or the data's, on the data's device.
void check_state(const Reference& data, const char* name, const OptionalTensor& tensor,
                 const char* shape_name, std::initializer_list<c10::SymInt> expected);

/// The state that a step overwrites, in a type and on the device as above.
void check_step_state(const Reference& data, const at::Tensor& state, const char* shape_name,
                      std::initializer_list<c10::SymInt> expected);

/// The number of sequences, N: the batch, or one less than the offsets in `cu_seqlens`.
c10::SymInt check_cu_seqlens(const Reference& data, const OptionalTensor& cu_seqlens);

/// Whether TIDEGATE_DEBUG is set: values that only a synchronisation can show are then checked.
bool debug_checks_enabled();

/// `cu_seqlens` rises from 0 to T. Offsets on the CPU are always checked, others in debug mode.
void check_cu_seqlens_values(const Reference& data, const OptionalTensor& cu_seqlens);

/// `cu_seqlens` `[N + 1]`, checked by the two above: int64, a copy on the data's device.
at::Tensor packed_bounds(const Reference& data, const at::Tensor& cu_seqlens);

/// `cu_seqlens_k`, where given, rises from 0 to Tk, and no sequence has more queries than keys.
/// Looks at offsets where check_cu_seqlens_values does, which comes first.
void check_key_offsets_values(const Reference& keys, const OptionalTensor& cu_seqlens,
                              const OptionalTensor& cu_seqlens_k);

/// In debug mode: every element lies in [0, 1).
void check_bound_values(const Reference& data, const char* name, const OptionalTensor& tensor);

/// In debug mode: no element is above 0 (or NaN).
void check_log_decay_values(const Reference& data, const char* name, const at::Tensor& tensor);

/// In debug mode: every element is finite.
void check_finite_values(const Reference& data, const char* name, const OptionalTensor& tensor);

}  // namespace tidegate::ops
