#pragma once

// CUDA graphs: while a stream is captured, nothing may be read back or copied from the host.

#include <ATen/core/Tensor.h>

#include <optional>

namespace tidegate::ops {

/// Whether the current stream of `device` is being captured into a CUDA graph.
bool is_capturing(at::Device device);

/// `cu_seqlens`, copied to `device` when it is on the CPU (an error while capturing).
std::optional<at::Tensor> offsets_on(const char* op, const std::optional<at::Tensor>& cu_seqlens,
                                     at::Device device);

}  // namespace tidegate::ops
