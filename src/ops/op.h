#pragma once

// An op as a struct: its schema, its arguments as members in the schema's order, and what the
// dispatcher calls on them. From that follow the functions with the dispatcher's signature, the
// Autocast kernel and the call through the dispatcher; src/ops/autograd.h adds the gradient.
//
// clang-format off
//   struct Scale {
//     static constexpr std::string_view kSchema = "scale(Tensor x, float by=2.0) -> Tensor";
//     // Autocast is asked for by this argument's device, and offsets of C++ callers go to it.
//     static constexpr std::string_view kData = "x";
//     // Optional: what autocast does to the arguments.
//     static constexpr CastRule kCasts[] = {{"x", Cast::kLower}};
//
//     const at::Tensor& x;
//     double by;
//
//     // What CPU and CUDA run.
//     at::Tensor kernel() const;
//     // The checks, then results without values.
//     at::Tensor meta() const;
//   };
// clang-format on
//
// An op that src/ops/autograd.h gives a gradient names its results (kResults); a backward op needs
// no kData, and says by kGradientLike what a missing gradient is zeros like.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "src/ops/autocast.h"
#include "src/ops/capture.h"
#include "src/ops/checks.h"
#include "src/ops/registration.h"
#include "src/ops/schema.h"

namespace tidegate::ops {

/// What autocast does to an argument that it does not leave as it is.
enum class Cast {
  kKeep,
  kLower,        // to autocast's type; float64, complex and integers stay as they are
  kAlong,        // to autocast's type where the argument `of` goes there
  kUnlessFloat,  // as kLower, but float32 stays float32
  kToTypeOf,     // to the type of the argument `of`, where that is floating-point
};

struct CastRule {
  std::string_view argument;
  Cast cast;
  std::string_view of = {};
};

namespace op_detail {

template <class Op>
consteval CastRule cast_rule(std::string_view argument) {
  for (const CastRule& rule : Op::kCasts) {
    if (rule.argument == argument) {
      return rule;
    }
  }
  return {argument, Cast::kKeep};
}

template <class Op, size_t index, class Arguments>
decltype(auto) cast_argument(const AutocastGuard& autocast, const Arguments& arguments) {
  constexpr CastRule rule = cast_rule<Op>(argument_name(Op::kSchema, index));
  Argument<Op, index> argument = std::get<index>(arguments);
  if constexpr (rule.cast == Cast::kKeep) {
    return static_cast<Argument<Op, index>>(argument);
  } else if constexpr (rule.cast == Cast::kLower) {
    return autocast.cast(argument);
  } else if constexpr (rule.cast == Cast::kUnlessFloat &&
                       std::is_same_v<std::decay_t<decltype(argument)>, OptionalTensor>) {
    return is_given(argument) ? OptionalTensor(autocast.cast_unless_float(*argument)) : argument;
  } else if constexpr (rule.cast == Cast::kUnlessFloat) {
    return autocast.cast_unless_float(argument);
  } else {
    const at::Tensor& of = std::get<argument_index(Op::kSchema, rule.of)>(arguments);
    if constexpr (rule.cast == Cast::kAlong) {
      return autocast.cast_along(argument, of);
    } else {
      return at::isFloatingType(of.scalar_type()) ? argument.to(of.scalar_type()) : argument;
    }
  }
}

template <class Op, size_t index>
void check_argument_given(const Argument<Op, index>& argument) {
  if constexpr (std::is_same_v<std::decay_t<Argument<Op, index>>, at::Tensor>) {
    if (!argument.defined()) {
      constexpr std::string_view name = argument_name(Op::kSchema, index);
      check_given(kOpName<Op>, std::string(name).c_str(), argument);
    }
  }
}

/// Offsets on the device of the data; every other argument as it is.
template <class Op, size_t index>
decltype(auto) argument_on_device(Argument<Op, index> argument, at::Device device) {
  if constexpr (is_offsets(argument_name(Op::kSchema, index))) {
    return offsets_on(kOpName<Op>, argument, device);
  } else {
    return static_cast<Argument<Op, index>>(argument);
  }
}

}  // namespace op_detail

/// The functions of `Op` that have the dispatcher's signature.
template <class Op, class Indices = std::make_index_sequence<argument_count(Op::kSchema)>>
struct Entry;

template <class Op, size_t... index>
struct Entry<Op, std::index_sequence<index...>> {
  using Results = decltype(std::declval<const Op&>().meta());

  static Results kernel(Argument<Op, index>... arguments) { return Op{arguments...}.kernel(); }

  static Results meta(Argument<Op, index>... arguments) { return Op{arguments...}.meta(); }

  /// The place of the data among the arguments.
  static constexpr size_t kData = argument_index(Op::kSchema, Op::kData);

  static Results autocast(Argument<Op, index>... arguments) {
    const auto all = std::forward_as_tuple(arguments...);
    const AutocastGuard autocast(std::get<kData>(all).device());
    return call(op_detail::cast_argument<Op, index>(autocast, all)...);
  }

  /// Through the dispatcher.
  static Results call(Argument<Op, index>... arguments) {
    static const auto handle =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow((std::string("tidegate::") + kOpName<Op>).c_str(), "")
            .template typed<Results(Argument<Op, index>...)>();
    return handle.call(arguments...);
  }

  /// Neither the dispatcher nor torch::autograd::Function has a name for an undefined tensor.
  static void check_all_given(const Argument<Op, index>&... arguments) {
    (op_detail::check_argument_given<Op, index>(arguments), ...);
  }

  /// The public C++ function: names what is missing, moves offsets to the data's device, calls.
  static Results call_public(Argument<Op, index>... arguments) {
    check_all_given(arguments...);
    const at::Device device = std::get<kData>(std::forward_as_tuple(arguments...)).device();
    return call(op_detail::argument_on_device<Op, index>(arguments, device)...);
  }
};

/// Calls `Op` through the dispatcher, as C++ programs do.
template <class Op, class... Args>
auto call_public(Args&&... arguments) {
  return Entry<Op>::call_public(arguments...);
}

/// Defines `Op`, with its kernels for CPU and CUDA, Meta and, where it has rules of casts,
/// Autocast.
template <class Op>
void register_op(torch::Library& library) {
  define_op(library, Op::kSchema.data());
  register_kernels<&Entry<Op>::kernel, &Entry<Op>::meta>(library, kOpName<Op>);
  if constexpr (requires { Op::kCasts; }) {
    register_autocast<&Entry<Op>::autocast>(library, kOpName<Op>);
  }
}

/// Defines `Op`, the step of an op: it may overwrite a state, as its schema says, and has no
/// gradient.
template <class Op>
void register_step(torch::Library& library) {
  register_op<Op>(library);
  register_step(library, kOpName<Op>);
}

}  // namespace tidegate::ops
