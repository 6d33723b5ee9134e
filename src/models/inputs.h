// Checks of what models are called with, in the words of Python's (models/_inputs.py). Ids and
// labels are looked at on the CPU alone, where that waits for no device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace tidegate::models {

/// Throws c10::ValueError unless labels are integers of `shape`, called `like`, and, as far as can
/// be seen, -100 or from 0 to below `end`.
void check_labels(const char* owner, const at::Tensor& labels, at::IntArrayRef shape,
                  const std::string& like, int64_t end);

/// Throws c10::ValueError where labels are the ids themselves, from which a model that sees a token
/// before it predicts it learns nothing; as far as can be seen, also where they are equal, unless
/// every id is the next one, too.
void refuse_own_labels(const char* owner, const at::Tensor& ids, const at::Tensor& labels);

/// Throws c10::ValueError unless positions is int64 `[B, P]`, of tokens that ids `[B, T]` has, as
/// far as can be seen.
void check_positions(const char* owner, const at::Tensor& positions, const at::Tensor& ids);

}  // namespace tidegate::models
