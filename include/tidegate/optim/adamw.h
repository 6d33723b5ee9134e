// AdamW that steps all parameters of a group in a few launches.
#pragma once

#include <torch/optim/adamw.h>

#include <unordered_map>
#include <vector>

namespace tidegate::optim {

/// torch::optim::AdamW with its options, states and files, whose step() is one fused pass over
/// weight, gradient and moments for all parameters of a device and dtype, where
/// torch::optim::AdamW launches a dozen kernels a parameter: on CUDA a kernel of tidegate's for
/// fp32 weights, elsewhere torch's own behind Python's `torch.optim.AdamW(fused=True)`. The bits of
/// a step are those of `tidegate train`.
///
///     tidegate::optim::AdamW optimizer(model->parameters(),
///                                      torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
///
/// Parameters are dense and floating-point, on the CPU or CUDA; step() throws c10::Error for a
/// sparse gradient. The host counts the steps, so that a CUDA graph cannot replay one. Cost: reads
/// four and writes three numbers a weight.
class AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;

  torch::Tensor step(LossClosure closure = nullptr) override;

  /// A step of fp32 masters, which are parameters here, by the gradients of their bf16 weights,
  /// which become the masters rounded, in one pass over memory and without wide copies of either
  /// (MasterWeights). Other parameters step by their own gradients.
  void step_masters(const std::vector<torch::Tensor>& masters,
                    const std::vector<torch::Tensor>& weights);
  /// Whether step_masters() takes these: masters in fp32, weights in bf16, each laid out as its
  /// master is, and no option of another kernel.
  bool fits_masters(const std::vector<torch::Tensor>& masters,
                    const std::vector<torch::Tensor>& weights) const;

 private:
  /// `weights`: by their masters' implementations.
  void step_groups(const std::unordered_map<const void*, torch::Tensor>& weights);
};

}  // namespace tidegate::optim
