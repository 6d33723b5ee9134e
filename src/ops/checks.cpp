#include "src/ops/checks.h"

#include <ATen/ops/isfinite.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "src/ops/capture.h"

namespace tidegate::ops {
namespace {

template <class T>
std::string listed(const std::vector<T>& values) {
  constexpr size_t kShown = 16;
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < std::min(values.size(), kShown); ++i) {
    out << (i == 0 ? "" : ", ") << values[i];
  }
  out << (values.size() > kShown ? ", ...]" : "]");
  return out.str();
}

std::string listed(c10::SymIntArrayRef values) {
  return listed(std::vector<c10::SymInt>(values.begin(), values.end()));
}

bool has_shape(const at::Tensor& tensor, c10::ArrayRef<c10::SymInt> expected) {
  if (tensor.dim() != static_cast<int64_t>(expected.size())) {
    return false;
  }
  const auto sizes = tensor.sym_sizes();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!sizes[i].sym_eq(expected[i]).expect_true(__FILE__, __LINE__)) {
      return false;
    }
  }
  return true;
}

/// Debug checks read values back, which a stream that is being captured cannot do.
bool can_check_values(const OptionalTensor& tensor) {
  return is_given(tensor) && debug_checks_enabled() && !is_capturing(tensor->device());
}

/// The offsets, looked at as the header says; empty when they are not.
std::vector<int64_t> check_offsets_values(const Reference& data, const char* name,
                                          const char* time_name, const OptionalTensor& cu_seqlens) {
  if (!is_given(cu_seqlens) || !(cu_seqlens->is_cpu() || can_check_values(cu_seqlens))) {
    return {};
  }
  const at::Tensor offsets = cu_seqlens->to(at::kCPU, at::kLong).contiguous();
  const int64_t* begin = offsets.const_data_ptr<int64_t>();
  std::vector<int64_t> values(begin, begin + offsets.numel());
  const int64_t time = data.tensor.size(1);
  TORCH_CHECK(
      values.front() == 0 && values.back() == time && std::is_sorted(values.begin(), values.end()),
      data.op, ": ", name, " must rise from 0 to ", time_name, " = ", time, ", got ",
      listed(values));
  return values;
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);  // a std::string_view in later torch
}

void check_scale(const char* op, double scale) {
  TORCH_CHECK(scale > 0 && std::isfinite(scale), op, ": scale must be above 0 and finite, got ",
              scale);
}

at::ScalarType state_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

at::ScalarType single_type(at::ScalarType dtype) {
  return at::isComplexType(dtype) ? at::kComplexFloat : at::kFloat;
}

void check_given(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), op, ": ", name, " must be a tensor, got an undefined one");
}

void check_data_dtype(const Reference& data, ComplexData complex) {
  check_given(data.op, data.name, data.tensor);
  const at::ScalarType dtype = data.tensor.scalar_type();
  const bool real =
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
  const bool fits = real || (complex == ComplexData::kAccepted &&
                             (dtype == at::kComplexFloat || dtype == at::kComplexDouble));
  TORCH_CHECK(
      fits, data.op, ": ", data.name, " must be float32, float64, bfloat16",
      complex == ComplexData::kAccepted ? ", float16, complex64 or complex128" : " or float16",
      ", got ", dtype_name(dtype));
}

void check_rank(const Reference& data, int64_t rank, const char* shape_name) {
  TORCH_CHECK(data.tensor.dim() == rank, data.op, ": ", data.name, " must have shape ", shape_name,
              ", got ", listed(data.tensor.sym_sizes()));
}

void check_device(const Reference& data, const char* name, const at::Tensor& tensor) {
  check_given(data.op, name, tensor);
  TORCH_CHECK(tensor.device() == data.tensor.device(), data.op, ": expected all tensors on ",
              data.tensor.device(), " like ", data.name, ", got ", name, " on ", tensor.device());
}

void check_gate(const Reference& data, const char* name, const at::Tensor& tensor) {
  check_gate(data, data.tensor.scalar_type(), name, tensor);
}

void check_gate(const Reference& data, at::ScalarType own, const char* name,
                const at::Tensor& tensor) {
  check_device(data, name, tensor);
  const at::ScalarType single = single_type(own);
  const at::ScalarType given = tensor.scalar_type();
  TORCH_CHECK(given == own || given == single, data.op, ": ", name, " must be ", dtype_name(own),
              own == single ? "" : " or " + dtype_name(single), " (", data.name, " is ",
              dtype_name(own), "), got ", dtype_name(given));
}

void check_channel_parameter(const Reference& data, const char* name,
                             const OptionalTensor& parameter, const c10::SymInt& channels) {
  if (is_given(parameter)) {
    check_gate(data, name, *parameter);
    check_shape(data.op, name, *parameter, "[D]", {channels});
  }
}

void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* shape_name,
                 std::initializer_list<c10::SymInt> expected, std::string_view note) {
  const c10::ArrayRef<c10::SymInt> sizes(expected.begin(), expected.size());
  TORCH_CHECK(has_shape(tensor, sizes), op, ": ", name, " must have shape ", shape_name, " = ",
              listed(sizes.vec()), note, ", got ", listed(tensor.sym_sizes()));
}

void check_shape(const char* op, const char* name, const at::Tensor& tensor, const char* shape_name,
                 c10::SymIntArrayRef expected) {
  TORCH_CHECK(has_shape(tensor, expected), op, ": ", name, " must have shape ", shape_name, " = ",
              listed(expected), ", got ", listed(tensor.sym_sizes()));
}

void check_same_type(const Reference& data, const char* name, const at::Tensor& tensor) {
  check_device(data, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == data.tensor.scalar_type(), data.op, ": ", name, " must be ",
              dtype_name(data.tensor.scalar_type()), " like ", data.name, ", got ",
              dtype_name(tensor.scalar_type()));
}

void check_like(const Reference& data, const char* name, const at::Tensor& tensor) {
  check_same_type(data, name, tensor);
  TORCH_CHECK(has_shape(tensor, data.tensor.sym_sizes()), data.op, ": ", name, " must have shape ",
              listed(data.tensor.sym_sizes()), " like ", data.name, ", got ",
              listed(tensor.sym_sizes()));
}

void check_state(const Reference& data, const char* name, const OptionalTensor& tensor,
                 const char* shape_name, std::initializer_list<c10::SymInt> expected) {
  if (!is_given(tensor)) {
    return;
  }
  check_gate(data, name, *tensor);
  check_shape(data.op, name, *tensor, shape_name, expected);
}

void check_step_state(const Reference& data, const at::Tensor& state, const char* shape_name,
                      std::initializer_list<c10::SymInt> expected) {
  check_gate(data, "state", state);
  check_shape(data.op, "state", state, shape_name, expected);
}

c10::SymInt check_cu_seqlens(const Reference& data, const OptionalTensor& cu_seqlens) {
  if (!is_given(cu_seqlens)) {
    return data.tensor.sym_size(0);
  }
  const at::Tensor& offsets = *cu_seqlens;
  check_device(data, "cu_seqlens", offsets);
  TORCH_CHECK(offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong, data.op,
              ": cu_seqlens must be int32 or int64, got ", dtype_name(offsets.scalar_type()));
  TORCH_CHECK(offsets.dim() == 1 && offsets.sym_size(0).sym_ge(1).expect_true(__FILE__, __LINE__),
              data.op, ": cu_seqlens must have shape [N + 1], got ", listed(offsets.sym_sizes()));
  TORCH_SYM_CHECK(data.tensor.sym_size(0).sym_eq(1), data.op, ": ", data.name,
                  " must have a batch of 1 when cu_seqlens is given, got ",
                  listed(data.tensor.sym_sizes()));
  return offsets.sym_size(0) - 1;
}

bool debug_checks_enabled() {
  const char* value = std::getenv("TIDEGATE_DEBUG");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

void check_cu_seqlens_values(const Reference& data, const OptionalTensor& cu_seqlens) {
  check_offsets_values(data, "cu_seqlens", "T", cu_seqlens);
}

void check_key_offsets_values(const Reference& keys, const OptionalTensor& cu_seqlens,
                              const OptionalTensor& cu_seqlens_k) {
  const std::vector<int64_t> offsets =
      check_offsets_values(keys, "cu_seqlens_k", "Tk", cu_seqlens_k);
  if (offsets.empty()) {
    return;
  }
  const at::Tensor queries = cu_seqlens->to(at::kCPU, at::kLong).contiguous();
  const int64_t* begin = queries.const_data_ptr<int64_t>();
  for (size_t n = 0; n + 1 < offsets.size(); ++n) {
    const int64_t of_queries = begin[n + 1] - begin[n], of_keys = offsets[n + 1] - offsets[n];
    TORCH_CHECK(of_queries <= of_keys, keys.op,
                ": q must not have more tokens than k (the last query is on the last key), got "
                "Tq = ",
                of_queries, " and Tk = ", of_keys, " in sequence ", n);
  }
}

void check_bound_values(const Reference& data, const char* name, const OptionalTensor& tensor) {
  if (!can_check_values(tensor) || tensor->numel() == 0) {
    return;
  }
  const bool fits = tensor->ge(0).logical_and(tensor->lt(1)).all().item<bool>();
  TORCH_CHECK(fits, data.op, ": ", name, " must lie in [0, 1), got values from ",
              tensor->min().item<double>(), " to ", tensor->max().item<double>());
}

void check_log_decay_values(const Reference& data, const char* name, const at::Tensor& tensor) {
  if (!can_check_values(tensor) || tensor.numel() == 0) {
    return;
  }
  TORCH_CHECK(tensor.le(0).all().item<bool>(), data.op, ": ", name,
              " must be at most 0 (the logarithm of a decay), got values up to ",
              tensor.max().item<double>());
}

void check_finite_values(const Reference& data, const char* name, const OptionalTensor& tensor) {
  if (!can_check_values(tensor)) {
    return;
  }
  const int64_t bad = tensor->numel() - at::isfinite(*tensor).sum().item<int64_t>();
  TORCH_CHECK(bad == 0, data.op, ": ", name, " must be finite, got ", bad,
              " values that are not, of ", tensor->numel());
}

}  // namespace tidegate::ops
