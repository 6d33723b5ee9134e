// Weights in bf16 whose masters, in fp32, the optimiser has.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "tidegate/optim/muon.h"

namespace tidegate::optim {

/// An optimiser over fp32 copies of a model's weights, which this makes bf16: a step of 1e-3 is
/// less than bf16's spacing around most weights, so the masters take it, and the weights are the
/// masters rounded. Beside autocast over fp32 weights this saves the casts of every step and the
/// bf16 copies that the backward pass keeps of them. What `model.to(torch::kBFloat16)` leaves in
/// fp32 (lower bounds, phases) stays its own master.
///
///     tidegate::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
///     tidegate::optim::MasterWeights masters(*model, optimizer);
///     ...
///     loss.backward();
///     masters.clip_gradients(1.0);
///     masters.step();
///
/// tidegate's AdamW takes gradients, masters and weights in one pass over memory, without wide
/// copies; of another optimiser the gradients are widened before.
class MasterWeights {
 public:
  /// model: in fp32. optimizer: made for its parameters, outlives this, and has not stepped yet.
  /// Throws c10::ValueError where a parameter has 16 bits already, or the optimiser has stepped.
  MasterWeights(torch::nn::Module& model, torch::optim::Optimizer& optimizer);
  MasterWeights(torch::nn::Module& model, MuonAdamW& optimizer);

  /// Scales the gradients that the next step goes by down to a norm of `largest`, as
  /// torch::nn::utils::clip_grad_norm_ does; returns the one that they had, in fp32, on the device
  /// of one of them. An infinite `largest` only measures. Otherwise a norm that is NaN makes every
  /// gradient NaN, and one that is infinite makes them zero, or NaN where they were infinite. Where
  /// the step makes one pass, gradients are scaled where they are, by a factor in fp32, and so
  /// rounded to bf16 once more. Throws c10::ValueError for a `largest` that is NaN or negative.
  torch::Tensor clip_gradients(double largest);
  /// A step; no parameter has a gradient after it, nor those that are their own masters.
  void step();
  void zero_grad();

  /// Writes the states of the optimisers, and the masters.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads them back; the weights become the masters rounded.
  void load(torch::serialize::InputArchive& archive);

  const std::vector<torch::Tensor>& weights() const { return weights_; }
  const std::vector<torch::Tensor>& masters() const { return masters_; }

 private:
  MasterWeights(torch::nn::Module& model, std::vector<torch::optim::Optimizer*> optimizers);

  /// tidegate's AdamW, where it alone steps, in one pass.
  AdamW* one_pass() const;
  /// Moves the weights' gradients to the masters, in fp32.
  void take_gradients();
  void round_weights();

  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<torch::Tensor> weights_, masters_;
  std::vector<torch::Tensor> own_;  // parameters that stayed in fp32
};

}  // namespace tidegate::optim
