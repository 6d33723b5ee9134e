#include "src/ops/results.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <c10/core/SymIntArrayRef.h>

#include "src/ops/views.h"

namespace tidegate::ops {
namespace {

at::TensorOptions state_options(const at::Tensor& data) {
  return data.options().dtype(state_dtype(data.scalar_type()));
}

c10::SymIntArrayRef sizes_of(std::initializer_list<c10::SymInt> shape) {
  return {shape.begin(), shape.size()};
}

}  // namespace

at::Tensor new_like(const at::Tensor& tensor) { return new_like(tensor, tensor.scalar_type()); }

at::Tensor new_like(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options().dtype(dtype));
}

at::Tensor new_state(const at::Tensor& data, std::initializer_list<c10::SymInt> shape) {
  return at::empty_symint(sizes_of(shape), state_options(data));
}

at::Tensor no_gradient(const at::Tensor& data) { return at::empty({0}, state_options(data)); }

at::Tensor new_gradient(const OptionalTensor& parameter, const at::Tensor& data) {
  return is_given(parameter) ? new_like(*parameter) : no_gradient(data);
}

at::Tensor new_state_gradient(const OptionalTensor& state, const at::Tensor& data,
                              std::initializer_list<c10::SymInt> shape) {
  return at::empty_symint(sizes_of(shape),
                          is_given(state) ? state->options() : state_options(data));
}

at::Tensor in_type_of(const OptionalTensor& argument, const at::Tensor& gradient) {
  if (!is_given(argument)) {
    return gradient;
  }
  const bool drop_imaginary = gradient.is_complex() && !argument->is_complex();
  return in_dtype(drop_imaginary ? at::real(gradient) : gradient, argument->scalar_type())
      .contiguous();
}

at::Tensor parameter_gradient(const OptionalTensor& parameter, const at::Tensor& sum,
                              const at::Tensor& data) {
  return sum.defined() ? in_dtype(sum, parameter->scalar_type()) : no_gradient(data);
}

void write_back(const char* op, const at::Tensor& written, at::Tensor& state) {
  if (written.is_same(state)) {
    return;
  }
  for (int64_t i = 0; i < state.dim(); ++i) {
    TORCH_CHECK(state.stride(i) != 0 || state.size(i) <= 1, op,
                ": state must have memory of its own, got an expanded tensor: clone() it");
  }
  state.copy_(written);
}

}  // namespace tidegate::ops
