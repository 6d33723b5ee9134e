#pragma once

// Schemas read at compile time (consteval: a call never pays for it). An op's schema is the one
// description of its arguments: from it come their names, for messages and for autograd, and their
// C++ types, as torchgen derives them for torch's own ops.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tidegate::ops {

/// "hgru" of "hgru(Tensor c, ...) -> ...".
consteval std::string_view schema_name(std::string_view schema) {
  return schema.substr(0, schema.find('('));
}

/// "Tensor c, ..." of "hgru(Tensor c, ...) -> ...".
consteval std::string_view schema_arguments(std::string_view schema) {
  const size_t begin = schema.find('(') + 1;
  return schema.substr(begin, schema.find(") ->") - begin);
}

consteval size_t argument_count(std::string_view schema) {
  const std::string_view list = schema_arguments(schema);
  size_t count = list.empty() ? 0 : 1;
  for (const char c : list) {
    count += c == ',';
  }
  return count;
}

/// "bool reverse", without the default value, of "..., bool reverse=False, ...".
consteval std::string_view argument_declaration(std::string_view schema, size_t index) {
  std::string_view rest = schema_arguments(schema);
  for (size_t i = 0; i < index; ++i) {
    rest.remove_prefix(rest.find(',') + 2);
  }
  return rest.substr(0, rest.find_first_of(",="));
}

/// "reverse" of "bool reverse".
consteval std::string_view argument_name(std::string_view schema, size_t index) {
  const std::string_view declaration = argument_declaration(schema, index);
  return declaration.substr(declaration.rfind(' ') + 1);
}

/// "bool" of "bool reverse".
consteval std::string_view argument_type(std::string_view schema, size_t index) {
  const std::string_view declaration = argument_declaration(schema, index);
  return declaration.substr(0, declaration.rfind(' '));
}

constexpr size_t kNoArgument = static_cast<size_t>(-1);

/// The place of the argument `name`, or kNoArgument.
consteval size_t argument_index(std::string_view schema, std::string_view name) {
  for (size_t i = 0; i < argument_count(schema); ++i) {
    if (argument_name(schema, i) == name) {
      return i;
    }
  }
  return kNoArgument;
}

/// Offsets of packed sequences: they have no gradient, and C++ callers may leave them on the CPU.
consteval bool is_offsets(std::string_view argument) { return argument.starts_with("cu_seqlens"); }

consteval bool is_tensor_type(std::string_view type) { return type.starts_with("Tensor"); }

/// Whether the op has a gradient in the argument.
consteval bool is_differentiable(std::string_view schema, size_t index) {
  return is_tensor_type(argument_type(schema, index)) && !is_offsets(argument_name(schema, index));
}

/// The number of arguments before `index` that the op has a gradient in.
consteval size_t differentiable_before(std::string_view schema, size_t index) {
  size_t count = 0;
  for (size_t i = 0; i < index; ++i) {
    count += is_differentiable(schema, i);
  }
  return count;
}

namespace schema_detail {

enum class Kind {
  kTensor,
  kWritten,
  kOptionalTensor,
  kBool,
  kFloat,
  kOptionalFloat,
  kInt,
  kOptionalInt,
  kString,
  kDtype,
  kOptionalDtype,
  kUnknown
};

consteval Kind kind_of(std::string_view type) {
  constexpr std::string_view kNames[] = {"Tensor", "Tensor(a!)", "Tensor?",    "bool",
                                         "float",  "float?",     "int",        "int?",
                                         "str",    "ScalarType", "ScalarType?"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (type == kNames[i]) {
      return static_cast<Kind>(i);
    }
  }
  return Kind::kUnknown;
}

template <Kind>
struct CppType;
template <>
struct CppType<Kind::kTensor> {
  using type = const at::Tensor&;
};
template <>
struct CppType<Kind::kWritten> {
  using type = at::Tensor&;
};
template <>
struct CppType<Kind::kOptionalTensor> {
  using type = const std::optional<at::Tensor>&;
};
template <>
struct CppType<Kind::kBool> {
  using type = bool;
};
template <>
struct CppType<Kind::kFloat> {
  using type = double;
};
template <>
struct CppType<Kind::kOptionalFloat> {
  using type = std::optional<double>;
};
template <>
struct CppType<Kind::kInt> {
  using type = int64_t;
};
template <>
struct CppType<Kind::kOptionalInt> {
  using type = std::optional<int64_t>;
};
template <>
struct CppType<Kind::kString> {
  using type = std::string_view;
};
template <>
struct CppType<Kind::kDtype> {
  using type = at::ScalarType;
};
template <>
struct CppType<Kind::kOptionalDtype> {
  using type = std::optional<at::ScalarType>;
};

}  // namespace schema_detail

/// The C++ type of argument `index` of `Op`, in which the dispatcher hands it over.
template <class Op, size_t index>
using Argument = typename schema_detail::CppType<schema_detail::kind_of(
    argument_type(Op::kSchema, index))>::type;

namespace schema_detail {

template <class Op>
inline constexpr auto kTerminatedName = [] {
  std::array<char, schema_name(Op::kSchema).size() + 1> text = {};
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    text[i] = Op::kSchema[i];
  }
  return text;
}();

}  // namespace schema_detail

/// The name of `Op` in messages: "hgru".
template <class Op>
inline constexpr const char* kOpName = schema_detail::kTerminatedName<Op>.data();

}  // namespace tidegate::ops
