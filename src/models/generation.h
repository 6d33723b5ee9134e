// Choosing the next token from logits, laying out prompts and results, and a model's modes while it
// generates.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <optional>
#include <tuple>

namespace tidegate::models {

/// Draws one token a row from logits `[B, vocab]`. temperature 0: the likeliest token. Otherwise
/// softmax(logits / temperature), cut to the top_k likeliest tokens, then to the fewest whose
/// probabilities sum to top_p.
class Sampler {
 public:
  Sampler(double temperature, std::optional<int64_t> top_k, std::optional<double> top_p,
          std::optional<int64_t> seed, at::Device device);

  /// logits `[B, vocab]` -> int64 `[B]`.
  at::Tensor operator()(at::Tensor logits);

 private:
  double temperature_;
  std::optional<int64_t> top_k_;
  std::optional<double> top_p_;
  std::optional<at::Generator> generator_;
};

/// Rows of ids `[B, T]` cut to `lengths` `[B]` and laid end to end: `[1, sum]`, and their bounds
/// `[B+1]`. Reads the lengths on the host; throws c10::ValueError unless minimum <= length <= T.
std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& ids, const at::Tensor& lengths,
                                        int64_t minimum = 0);

/// Each row's prompt, then its row of `tokens`, then `fill`: `[B, T + n]`. lengths may be
/// undefined.
at::Tensor append(const at::Tensor& ids, const at::Tensor& lengths, const at::Tensor& tokens,
                  int64_t fill);

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
