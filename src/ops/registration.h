#pragma once

// Dispatcher kernels that do not depend on what an op computes, registered by name.

#include <torch/library.h>

#include <type_traits>

namespace tidegate::ops {

/// Defines an op by its schema and registers what every op of tidegate refuses by name: vmap,
/// and sparse and other layouts that are not dense.
/// `schema` is a whole one: "name(Tensor x, ...) -> Tensor".
void define_op(torch::Library& library, const char* schema);

/// Autograd kernel of a `*_backward` op: its results cannot be differentiated, and say so when
/// someone tries (without it second derivatives would silently be zero).
void register_no_double_backward(torch::Library& library, const char* name);

/// Autograd kernel of a `*_saving` op, which the op without that ending calls for its own gradient:
/// an error when a gradient of the saving op itself is asked for.
void register_no_gradient(torch::Library& library, const char* name);

/// Kernels of a `*_step` op: an error when a gradient is asked for, and the version of the state is
/// bumped, so that autograd notices when a tensor it saved has been overwritten; conjugate and
/// negative views are made real first.
void register_step(torch::Library& library, const char* name);

/// Kernels of an op that overwrites its arguments outside autograd, whatever the grad mode.
void register_unrecorded_in_place(torch::Library& library, const char* name);

/// What must hold before an Autograd kernel applies its Function: no torch.func transform, no
/// forward-mode derivative (neither has a formula here), no nested tensor.
/// Null and undefined tensors are passed over, here and below.
void check_differentiable(const char* op, c10::ArrayRef<const at::Tensor*> tensors);

/// Whether gradients are recorded and one of `tensors` asks for one: an op keeps something for its
/// backward pass only then.
bool asks_for_gradient(c10::ArrayRef<const at::Tensor*> tensors);

#ifndef TIDEGATE_WITH_CUDA
/// Refuses CUDA tensors by name, in a build without CUDA kernels.
void register_no_cuda(torch::Library& library, const char* name);
#endif

/// Kernel for the CPU and, where CUDA kernels are built, CUDA; MetaKernel for fake tensors.
template <auto* Kernel, auto* MetaKernel>
void register_kernels(torch::Library& library, const char* name) {
  library.impl(name, torch::dispatch(c10::DispatchKey::CPU, Kernel));
#ifdef TIDEGATE_WITH_CUDA
  library.impl(name, torch::dispatch(c10::DispatchKey::CUDA, Kernel));
#else
  register_no_cuda(library, name);
#endif
  library.impl(name, torch::dispatch(c10::DispatchKey::Meta, MetaKernel));
}

template <auto* Kernel>
void register_autograd(torch::Library& library, const char* name) {
  library.impl(name, torch::dispatch(c10::DispatchKey::Autograd, Kernel));
}

template <auto* Kernel>
void register_autocast(torch::Library& library, const char* name) {
  library.impl(name, torch::dispatch(c10::DispatchKey::AutocastCPU, Kernel));
  library.impl(name, torch::dispatch(c10::DispatchKey::AutocastCUDA, Kernel));
}

/// Calls the op `tidegate::name` through the dispatcher; `Kernel` is any function with the C++
/// signature of its kernels.
template <auto* Kernel, class... Args>
auto call_op(const char* name, Args&&... args) {
  // One handle for each Kernel: `name` must always be the same with it.
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(name, "")
                                 .template typed<std::remove_pointer_t<decltype(Kernel)>>();
  return handle.call(std::forward<Args>(args)...);
}

}  // namespace tidegate::ops
