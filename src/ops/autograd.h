#pragma once

// The gradient of an op, from the schemas of the op and of its backward op. Each argument of the
// backward op says by its name where it comes from, and so what is saved:
//   "d" + a result of the op      that result's gradient
//   an argument of the op, or one of its results      saved by the forward pass
//   an argument of the op + "_dtype"      the dtype of that argument, which itself is not kept
// The backward op returns the gradients of the op's tensors in the order of the op's arguments,
// offsets aside.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "src/ops/op.h"
#include "src/ops/recipes.h"

namespace tidegate::ops {
namespace autograd_detail {

/// The place of the result `name` of `Op`, or kNoArgument.
template <class Op>
consteval size_t result_index(std::string_view name) {
  for (size_t i = 0; i < std::size(Op::kResults); ++i) {
    if (Op::kResults[i] == name) {
      return i;
    }
  }
  return kNoArgument;
}

/// Where an argument of the backward op comes from, and its place there.
struct Origin {
  enum Kind { kGradient, kArgument, kResult, kDtype, kUnknown } kind;
  size_t index;
};

template <class Op>
consteval Origin origin_of(std::string_view name) {
  if (const size_t i = argument_index(Op::kSchema, name); i != kNoArgument) {
    return {Origin::kArgument, i};
  }
  if (const size_t i = result_index<Op>(name); i != kNoArgument) {
    return {Origin::kResult, i};
  }
  if (const size_t i = result_index<Op>(name.substr(1)); name[0] == 'd' && i != kNoArgument) {
    return {Origin::kGradient, i};
  }
  constexpr std::string_view kSuffix = "_dtype";
  if (name.ends_with(kSuffix)) {
    name.remove_suffix(kSuffix.size());
    return {Origin::kDtype, argument_index(Op::kSchema, name)};
  }
  return {Origin::kUnknown, kNoArgument};
}

template <class Op, class Backward>
consteval bool is_saved_tensor(size_t index) {
  const Origin origin = origin_of<Op>(argument_name(Backward::kSchema, index));
  return is_tensor_type(argument_type(Backward::kSchema, index)) &&
         (origin.kind == Origin::kArgument || origin.kind == Origin::kResult);
}

/// The place among the saved tensors of the backward op's argument `name`.
template <class Op, class Backward>
consteval size_t saved_index(std::string_view name) {
  size_t count = 0;
  for (size_t i = 0; argument_name(Backward::kSchema, i) != name; ++i) {
    count += is_saved_tensor<Op, Backward>(i);
  }
  return count;
}

/// `Op` as a torch::autograd::Function whose backward pass calls the op `Backward`. It returns the
/// first `returned` results. One without a gradient would have to be marked so, which compiled
/// autograd does not take; so a result that only the backward pass wants is not returned at all.
template <class Op, class Backward, size_t returned>
class OpFunction : public torch::autograd::Function<OpFunction<Op, Backward, returned>> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  template <size_t count>
  using Indices = std::make_index_sequence<count>;

  static constexpr size_t kArguments = argument_count(Op::kSchema);
  static constexpr size_t kBackwardArguments = argument_count(Backward::kSchema);

 public:
  static constexpr bool is_traceable = true;

  template <class... Args>
  static Tensors forward(Context* context, const Args&... arguments) {
    context->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto results = Entry<Op>::call(arguments...);
    save(context, std::tie(arguments...), results, Indices<kBackwardArguments>());
    return give_back(context, results, Indices<returned>());
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    if (std::none_of(gradients.begin(), gradients.end(),
                     [](const at::Tensor& gradient) { return gradient.defined(); })) {
      return Tensors(kArguments);  // zeros, as torch reads undefined tensors
    }
    for (const at::Tensor& gradient : gradients) {
      TORCH_CHECK(!gradient.defined() || !gradient._fw_grad(0).defined(), kOpName<Op>,
                  ": forward-mode differentiation is not supported, nor through its gradients");
    }
    const Tensors saved = saved_or_made(context);
    // Unless the gradients are to be differentiated, which the backward op's Autograd kernel
    // refuses by name, that kernel has nothing to do, and as a boxed one takes longer than all
    // checks.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!at::GradMode::is_enabled()) {
      below_autograd.emplace();
    }
    auto results = call_backward(context, saved, gradients, Indices<kBackwardArguments>());
    Tensors all(kArguments);
    give_out(saved, &results, &all, Indices<kArguments>());
    return all;
  }

 private:
  static consteval std::string_view name_of(size_t backward_argument) {
    return argument_name(Backward::kSchema, backward_argument);
  }

  // ---- forward ----

  template <class Arguments, class Results, size_t... index>
  static void save(Context* context, const Arguments& arguments, const Results& results,
                   std::index_sequence<index...>) {
    Tensors tensors;
    tensors.reserve(sizeof...(index));
    (save_one<index>(context, arguments, results, &tensors), ...);
    save_or_recipe(context, std::move(tensors));
  }

  template <size_t index, class Arguments, class Results>
  static void save_one(Context* context, const Arguments& arguments, const Results& results,
                       Tensors* tensors) {
    constexpr Origin origin = origin_of<Op>(name_of(index));
    static_assert(origin.index != kNoArgument,
                  "an argument of the backward op is none of the op's, nor a result of it");
    if constexpr (origin.kind == Origin::kResult) {
      tensors->push_back(std::get<origin.index>(results));
    } else if constexpr (is_saved_tensor<Op, Backward>(index)) {
      tensors->push_back(tensor_or_none(std::get<origin.index>(arguments)));
    } else if constexpr (origin.kind == Origin::kArgument) {
      context->saved_data[std::string(name_of(index))] =
          to_ivalue(std::get<origin.index>(arguments));
    } else if constexpr (origin.kind == Origin::kDtype) {
      context->saved_data[std::string(name_of(index))] =
          static_cast<int64_t>(std::get<origin.index>(arguments).scalar_type());
    }
  }

  static const at::Tensor& tensor_or_none(const at::Tensor& tensor) { return tensor; }
  static at::Tensor tensor_or_none(const OptionalTensor& tensor) {
    return tensor.value_or(at::Tensor());
  }

  template <class T>
  static c10::IValue to_ivalue(const T& value) {
    return value;
  }
  static c10::IValue to_ivalue(std::string_view value) { return std::string(value); }

  template <class Results, size_t... index>
  static Tensors give_back(Context* context, const Results& results,
                           std::index_sequence<index...>) {
    if constexpr ((!has_gradient(index) || ...)) {
      Tensors marked;
      (mark_unless_differentiable<index>(results, &marked), ...);
      context->mark_non_differentiable(marked);
    }
    return {std::get<index>(results)...};
  }

  template <size_t index, class Results>
  static void mark_unless_differentiable(const Results& results, Tensors* marked) {
    if constexpr (!has_gradient(index)) {
      marked->push_back(std::get<index>(results));
    }
  }

  /// Whether the backward op takes a gradient of this result.
  static consteval bool has_gradient(size_t result) {
    for (size_t i = 0; i < kBackwardArguments; ++i) {
      const Origin origin = origin_of<Op>(name_of(i));
      if (origin.kind == Origin::kGradient && origin.index == result) {
        return true;
      }
    }
    return false;
  }

  // ---- backward ----

  template <size_t... index>
  static auto call_backward(Context* context, const Tensors& saved, const Tensors& gradients,
                            std::index_sequence<index...>) {
    return Entry<Backward>::call(backward_argument<index>(context, saved, gradients)...);
  }

  template <size_t index>
  static decltype(auto) backward_argument(Context* context, const Tensors& saved,
                                          const Tensors& gradients) {
    using Type = std::decay_t<Argument<Backward, index>>;
    constexpr Origin origin = origin_of<Op>(name_of(index));
    if constexpr (origin.kind == Origin::kGradient) {
      return gradient_of_result<Type>(gradients[origin.index], saved);
    } else if constexpr (std::is_same_v<Type, at::Tensor>) {
      constexpr size_t place = saved_index<Op, Backward>(name_of(index));
      return saved[place];
    } else if constexpr (std::is_same_v<Type, OptionalTensor>) {
      constexpr size_t place = saved_index<Op, Backward>(name_of(index));
      return optional(saved[place]);
    } else {
      return saved_option<Type>(context->saved_data[std::string(name_of(index))]);
    }
  }

  /// Zeros where the backward op cannot do without the gradient and the result was not used.
  template <class Type>
  static Type gradient_of_result(const at::Tensor& gradient, const Tensors& saved) {
    if constexpr (std::is_same_v<Type, OptionalTensor>) {
      return optional(gradient);
    } else {
      constexpr size_t place = saved_index<Op, Backward>(Backward::kGradientLike);
      return gradient.defined() ? gradient : at::zeros_like(saved[place]);
    }
  }

  template <class Type>
  static Type saved_option(const c10::IValue& value) {
    if constexpr (std::is_same_v<Type, std::string_view>) {
      return value.toStringRef();
    } else if constexpr (std::is_same_v<Type, at::ScalarType>) {
      return static_cast<at::ScalarType>(value.toInt());
    } else {
      return value.to<Type>();
    }
  }

  template <class Results, size_t... index>
  static void give_out(const Tensors& saved, Results* results, Tensors* all,
                       std::index_sequence<index...>) {
    (give_out_one<index>(saved, results, all), ...);
  }

  /// An argument that was not given has no gradient; the backward op returns [0] for it.
  template <size_t index, class Results>
  static void give_out_one(const Tensors& saved, Results* results, Tensors* all) {
    if constexpr (is_differentiable(Op::kSchema, index)) {
      if constexpr (argument_type(Op::kSchema, index) == "Tensor?") {
        constexpr size_t place = saved_index<Op, Backward>(argument_name(Op::kSchema, index));
        if (!saved[place].defined()) {
          return;
        }
      }
      constexpr size_t gradient = differentiable_before(Op::kSchema, index);
      (*all)[index] = std::move(std::get<gradient>(*results));
    }
  }
};

/// The tensor that the op has a gradient in, or null.
template <class Op, size_t index>
const at::Tensor* differentiable_tensor(const Argument<Op, index>& argument) {
  if constexpr (!is_differentiable(Op::kSchema, index)) {
    return nullptr;
  } else if constexpr (std::is_same_v<std::decay_t<Argument<Op, index>>, at::Tensor>) {
    return &argument;
  } else {
    return argument.has_value() ? &*argument : nullptr;
  }
}

template <class Op, class Backward, class Saving,
          class Indices = std::make_index_sequence<argument_count(Op::kSchema)>>
struct Autograd;

template <class Op, class Backward, class Saving, size_t... index>
struct Autograd<Op, Backward, Saving, std::index_sequence<index...>> {
  using Results = typename Entry<Op>::Results;

  /// The op's Autograd kernel.
  static Results call(Argument<Op, index>... arguments) {
    Entry<Op>::check_all_given(arguments...);
    const at::Tensor* const tensors[] = {differentiable_tensor<Op, index>(arguments)...};
    check_differentiable(kOpName<Op>, tensors);
    if (!asks_for_gradient(tensors)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return Entry<Op>::call(arguments...);
    }
    constexpr size_t kReturned = std::tuple_size_v<Results>;
    const auto results = OpFunction<Saving, Backward, kReturned>::apply(arguments...);
    return [&]<size_t... result>(std::index_sequence<result...>) {
      return Results(results[result]...);
    }(std::make_index_sequence<kReturned>());
  }
};

}  // namespace autograd_detail

/// Gives `Op` the gradient that the op `Backward` computes. Where the backward pass needs more than
/// `Op` returns, `Saving` is the op that returns that too: it is called where a gradient is asked
/// for.
template <class Op, class Backward, class Saving = Op>
void register_gradient(torch::Library& library) {
  register_autograd<&autograd_detail::Autograd<Op, Backward, Saving>::call>(library, kOpName<Op>);
}

/// Defines `Backward`, the op that computes another one's gradients.
template <class Backward>
void register_backward(torch::Library& library) {
  register_op<Backward>(library);
  register_no_double_backward(library, kOpName<Backward>);
}

}  // namespace tidegate::ops
