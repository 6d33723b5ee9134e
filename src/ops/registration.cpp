#include "src/ops/registration.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace tidegate::ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

/// "hgru" of "tidegate::hgru".
std::string short_name(const OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.substr(name.rfind(':') + 1);
}

/// Calls `visit(argument, tensor)` for each defined tensor among the op's arguments on the stack.
template <class Visit>
void for_each_tensor(const OperatorHandle& op, const Stack& stack, const Visit& visit) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (value.isTensor() && value.toTensor().defined()) {
      visit(arguments[i], value.toTensor());
    }
  }
}

void refuse_vmap(const OperatorHandle& op, Stack*) {
  TORCH_CHECK(false, short_name(op), ": vmap is not supported; pass the batch as dimension 0");
}

/// What is not dense in `tensor`, or null.
const char* odd_layout(const at::Tensor& tensor) {
  if (tensor.is_nested()) {
    return "nested";
  }
  if (tensor.is_quantized()) {
    return "quantized";
  }
  switch (tensor.layout()) {
    case at::kStrided:
      return nullptr;
    case at::kMkldnn:
      return "mkldnn";
    case at::kSparse:
      return "sparse_coo";
    case at::kSparseCsr:
      return "sparse_csr";
    case at::kSparseCsc:
      return "sparse_csc";
    case at::kSparseBsr:
      return "sparse_bsr";
    case at::kSparseBsc:
      return "sparse_bsc";
    default:
      return "another one";
  }
}

void refuse_layout(const OperatorHandle& op, Stack* stack) {
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, const at::Tensor& tensor) {
    const char* layout = odd_layout(tensor);
    TORCH_CHECK(layout == nullptr, short_name(op), ": ", argument.name(),
                " must be a dense tensor (layout strided), got layout ", layout);
  });
  TORCH_CHECK(false, short_name(op), ": expected dense tensors (layout strided)");
}

#ifndef TIDEGATE_WITH_CUDA
void refuse_cuda(const OperatorHandle& op, Stack* stack) {
  // The first tensor is the data, with which the others are compared.
  const auto& data = op.schema().arguments().front().name();
  const at::Tensor first = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == first.device(), short_name(op), ": expected all tensors on ",
                first.device(), " like ", data, ", got ", argument.name(), " on ", tensor.device());
  });
  TORCH_CHECK(false, short_name(op), ": ", data, " is on ", first.device(),
              ", but this tidegate was built without CUDA kernels (no CUDA toolkit was found, or "
              "TIDEGATE_CUDA=OFF was given, when it was built)");
}
#endif

/// Runs an op on the stack under its backend's kernel.
void redispatch_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

/// The results of a backward op, tied to its arguments by a node that raises.
class NoDoubleBackward : public torch::autograd::Function<NoDoubleBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    std::string name = short_name(op);
    name.resize(name.rfind("_backward"));
    ctx->saved_data["op"] = std::move(name);
    ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    redispatch_below_autograd(op, keys, stack);
    variable_list results;
    for (const c10::IValue& value : *stack) {
      results.push_back(value.toTensor());
    }
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    TORCH_CHECK(false, ctx->saved_data["op"].toStringRef(),
                ": double backward is not supported: its gradients cannot be differentiated");
  }
};

void no_double_backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  variable_list inputs;
  bool is_dual = false;
  for_each_tensor(op, *stack, [&](const c10::Argument&, const at::Tensor& tensor) {
    inputs.push_back(tensor);
    is_dual = is_dual || tensor._fw_grad(0).defined();
  });
  // Without a graph there is nothing to refuse but a forward-mode derivative, which torch does.
  if (!c10::GradMode::is_enabled() && !is_dual) {
    redispatch_below_autograd(op, keys, stack);
    return;
  }
  // Apart from the caller's stack, which may hold more than this op's arguments.
  const size_t count = op.schema().arguments().size();
  Stack own(std::make_move_iterator(stack->end() - static_cast<std::ptrdiff_t>(count)),
            std::make_move_iterator(stack->end()));
  stack->resize(stack->size() - count);
  for (at::Tensor& result : NoDoubleBackward::apply(at::TensorList(inputs), op, keys, &own)) {
    stack->emplace_back(std::move(result));
  }
}

void refuse_gradient(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const std::string name = short_name(op);
  if (c10::GradMode::is_enabled()) {
    for_each_tensor(op, *stack, [&](const c10::Argument&, const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.requires_grad(), name,
                  ": an argument requires a gradient, but this op records none; call ",
                  name.substr(0, name.rfind("_saving")));
    });
  }
  redispatch_below_autograd(op, keys, stack);
}

bool overwrites(const OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

void step_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (c10::GradMode::is_enabled()) {
    for_each_tensor(op, *stack, [&](const c10::Argument& argument, const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.requires_grad(), short_name(op), ": ", argument.name(),
                  " requires a gradient, but a step has none",
                  overwrites(op) ? ": it overwrites the state" : "",
                  ". Call it under torch.no_grad(), or use the op over whole sequences");
    });
  }
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void unrecorded_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void bump_versions(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  variable_list written;
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, const at::Tensor& tensor) {
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      written.push_back(tensor);
    }
  });
  redispatch_below_autograd(op, keys, stack);
  for (const at::Tensor& tensor : written) {
    torch::autograd::impl::bump_version(tensor);
  }
}

/// Conjugate and negative views: materialised where they are read, refused where they would be
/// written (torch's own fallback asserts on a written argument that is not returned).
template <DispatchKey key>
void resolve_views(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) {
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    const bool written = arguments[i].alias_info() != nullptr;
    TORCH_CHECK(!written || !(tensor.is_conj() || tensor.is_neg()), short_name(op), ": ",
                arguments[i].name(),
                " is overwritten and must not be a conjugate or negative view");
    value = tensor.resolve_conj().resolve_neg();
  }
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, key), stack);
}

template <auto* Kernel>
void register_boxed(torch::Library& library, const char* name, DispatchKey key) {
  library.impl(name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<Kernel>()));
}

}  // namespace

void define_op(torch::Library& library, const char* schema) {
  library.def(schema, {at::Tag::pt2_compliant_tag});
  const std::string text(schema);
  const std::string name = text.substr(0, text.find('('));
  register_boxed<&refuse_vmap>(library, name.c_str(), DispatchKey::FuncTorchBatched);
  for (const DispatchKey key :
       {DispatchKey::SparseCPU, DispatchKey::SparseCUDA, DispatchKey::SparseCsrCPU,
        DispatchKey::SparseCsrCUDA, DispatchKey::SparseMeta, DispatchKey::SparseCsrMeta,
        DispatchKey::QuantizedCPU, DispatchKey::QuantizedCUDA, DispatchKey::MkldnnCPU,
        DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA}) {
    register_boxed<&refuse_layout>(library, name.c_str(), key);
  }
}

void register_no_gradient(torch::Library& library, const char* name) {
  register_boxed<&refuse_gradient>(library, name, DispatchKey::Autograd);
}

#ifndef TIDEGATE_WITH_CUDA
void register_no_cuda(torch::Library& library, const char* name) {
  register_boxed<&refuse_cuda>(library, name, DispatchKey::CUDA);
}
#endif

void register_no_double_backward(torch::Library& library, const char* name) {
  register_boxed<&no_double_backward>(library, name, DispatchKey::Autograd);
}

void register_step(torch::Library& library, const char* name) {
  register_boxed<&step_autograd>(library, name, DispatchKey::Autograd);
  register_boxed<&bump_versions>(library, name, DispatchKey::ADInplaceOrView);
  register_boxed<&resolve_views<DispatchKey::Conjugate>>(library, name, DispatchKey::Conjugate);
  register_boxed<&resolve_views<DispatchKey::Negative>>(library, name, DispatchKey::Negative);
}

void register_unrecorded_in_place(torch::Library& library, const char* name) {
  register_boxed<&unrecorded_autograd>(library, name, DispatchKey::Autograd);
  register_boxed<&bump_versions>(library, name, DispatchKey::ADInplaceOrView);
}

void check_differentiable(const char* op, c10::ArrayRef<const at::Tensor*> tensors) {
  if (const auto& functorch = at::functorch::functorchTLSAccessor()) {
    try {
      functorch->checkSupportsCppAutogradFunction();
    } catch (const c10::Error&) {  // names no op
      TORCH_CHECK(false, op, ": torch.func transforms (grad, vjp, vmap, ...) are not supported");
    }
  }
  for (const at::Tensor* tensor : tensors) {
    if (tensor == nullptr || !tensor->defined()) {
      continue;
    }
    // torch's Function asks a tensor for its sizes before any backend can refuse it.
    TORCH_CHECK(!tensor->is_nested(), op,
                ": expected dense tensors (layout strided), got layout nested");
    TORCH_CHECK(!tensor->_fw_grad(/*level=*/0).defined(), op,
                ": forward-mode differentiation is not supported");
  }
}

bool asks_for_gradient(c10::ArrayRef<const at::Tensor*> tensors) {
  return c10::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) {
           return tensor != nullptr && tensor->defined() && tensor->requires_grad();
         });
}

}  // namespace tidegate::ops
