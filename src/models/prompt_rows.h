// Laying out prompts and results, and a model's modes while it generates.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace tidegate::models {

/// Rows of ids `[B, T]` cut to `lengths` `[B]` and laid end to end: `[1, sum]`, and their bounds
/// `[B+1]`. Reads the lengths on the host; throws c10::ValueError unless minimum <= length <= T.
std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& ids, const at::Tensor& lengths,
                                        int64_t minimum = 0);

/// The lengths on the host, checked as pack() does; T for every row where they are undefined.
std::vector<int64_t> host_lengths(const at::Tensor& ids, const at::Tensor& lengths,
                                  int64_t minimum);

/// Each row's prompt, then its row of `tokens`, then `fill`: `[B, T + n]`. lengths may be
/// undefined.
at::Tensor append(const at::Tensor& ids, const at::Tensor& lengths, const at::Tensor& tokens,
                  int64_t fill);

/// While one lives nothing is recorded for gradients, also where the caller is in inference mode;
/// what is made then can be written outside of it.
struct Unrecorded {
  const c10::InferenceMode normal{false};
  const torch::NoGradGuard no_grad;
};

/// Dropout is off while one of these lives, also where threads generate with one model at a time:
/// the first to come notes the modules' modes, and the last to go sets them again.
class Evaluating {
 public:
  explicit Evaluating(torch::nn::Module& model);
  ~Evaluating();
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  torch::nn::Module& model_;
};

}  // namespace tidegate::models
