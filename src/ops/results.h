#pragma once

// The tensors that ops return. The sizes may be symbolic, so that Meta kernels make them too.

#include <ATen/core/Tensor.h>

#include <array>
#include <initializer_list>
#include <tuple>

#include "src/ops/checks.h"

namespace tidegate::ops {

/// What an op of several results returns.
template <size_t count>
using TensorTuple = decltype(std::tuple_cat(std::array<at::Tensor, count>()));

/// Uninitialised and contiguous, of the shape, dtype and device of `tensor`.
at::Tensor new_like(const at::Tensor& tensor);

/// Uninitialised and contiguous, of the shape and device of `tensor`, in another dtype.
at::Tensor new_like(const at::Tensor& tensor, at::ScalarType dtype);

/// Uninitialised, in the dtype in which a recurrence over `data` keeps its state.
at::Tensor new_state(const at::Tensor& data, std::initializer_list<c10::SymInt> shape);

/// What a backward op returns for an argument that was not given, as its results are defined
/// tensors only: [0] in the state's dtype of `data`.
at::Tensor no_gradient(const at::Tensor& data);

/// A parameter's gradient without values: like the parameter, or no_gradient().
at::Tensor new_gradient(const OptionalTensor& parameter, const at::Tensor& data);

/// A state's gradient without values: in the dtype of the state, or of new_state() where it was not
/// given.
at::Tensor new_state_gradient(const OptionalTensor& state, const at::Tensor& data,
                              std::initializer_list<c10::SymInt> shape);

/// `gradient` in the dtype of the argument that it belongs to: the real part where only that is
/// real; as it is where the argument was not given.
at::Tensor in_type_of(const OptionalTensor& argument, const at::Tensor& gradient);

/// A parameter's gradient: `sum`, over the rows of its partial sums, in the parameter's dtype, or
/// no_gradient() where the sum is undefined.
at::Tensor parameter_gradient(const OptionalTensor& parameter, const at::Tensor& sum,
                              const at::Tensor& data);

/// The end of a step: where the kernel worked on a copy of `state`, as contiguous_as() makes one,
/// what it has written there goes back. Throws c10::Error, naming the op, for an expanded state,
/// which cannot be written in place; it is left as it was.
void write_back(const char* op, const at::Tensor& written, at::Tensor& state);

}  // namespace tidegate::ops
