// What mixers remember between calls: how it starts, and what may come in as a state.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace tidegate::nn {

/// The dtype of states beside data or weights of `dtype`: fp64 for fp64, else fp32.
at::ScalarType wide_dtype(at::ScalarType dtype);

/// Zeros for a mixer's state: fp32, fp64 for dtype fp64; device and dtype default to the weight's.
at::Tensor empty_state(at::IntArrayRef shape, const at::Tensor& weight,
                       std::optional<at::Device> device, std::optional<at::ScalarType> dtype);

/// Throws c10::ValueError unless both sizes that init_state() takes are at least zero.
void check_sizes(const char* owner, int64_t batch, std::optional<int64_t> capacity);

/// N: how many sequences x `[B, T, dim]` holds.
int64_t sequence_count(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens);

/// Throws c10::ValueError, naming module and state, unless `state` has this shape and dtype. part:
/// what follows "state" in the text, for one tensor of several.
void check_state_tensor(const char* owner, const char* part, const at::Tensor& state,
                        at::IntArrayRef shape, at::ScalarType dtype);

/// Throws c10::ValueError, beginning with `name` (module and state), for an expanded tensor, which
/// cannot be written in place.
void check_own_memory(const std::string& name, const at::Tensor& state);

}  // namespace tidegate::nn
