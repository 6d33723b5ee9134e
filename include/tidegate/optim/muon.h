// Muon: momentum whose matrices are orthogonalised before they are applied; and the parameters of a
// model that it takes.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tidegate/optim/adamw.h"

namespace tidegate::optim {

/// Replaces the singular values of each matrix of `[N, rows, columns]` by values near one: five
/// Newton-Schulz iterations; float32 in and out, bf16 between on CUDA and on CPUs that multiply it
/// faster.
torch::Tensor orthogonalize(const torch::Tensor& matrices);

/// Learning rate, momentum and decoupled weight decay.
struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 0.02) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// The moving mean of a parameter's gradients.
struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(torch::Tensor, momentum);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Muon for weight matrices [K. Jordan et al., 2024], with Nesterov momentum and decoupled weight
/// decay: the bits of a step are those of `tidegate train --optimizer muon`. A matrix moves by
/// lr * sqrt(max(1, rows / columns)) times the orthogonalised momentum. Matrices stacked in one
/// parameter are orthogonalised one by one, and all matrices of a shape at once.
class Muon : public torch::optim::Optimizer {
 public:
  /// parameters: matrices. splits: for each of them, the row counts of the matrices stacked in it.
  /// Throws c10::ValueError where they do not add up to the parameter's rows.
  Muon(std::vector<torch::Tensor> parameters, std::vector<std::vector<int64_t>> splits,
       MuonOptions options = {});
  /// groups: of matrices, with options of their own or else these. splits: for each matrix, in the
  /// order of the groups. A group that add_param_group() adds has one matrix a parameter.
  Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups,
       std::vector<std::vector<int64_t>> splits, MuonOptions options = {});

  /// Adds a group, with options of its own or else the optimizer's. Newer versions of torch keep
  /// the options of a group for their own optimizers alone.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// One step for every parameter that has a gradient; throws c10::Error for a sparse one.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  const std::vector<std::vector<int64_t>>& splits() const { return splits_; }

 private:
  template <typename Self, typename Archive>
  static void serialize(Self& self, Archive& archive);

  /// A group's matrices that have gradients, and the rows of those stacked in each.
  struct Given;
  std::vector<Given> given_matrices() const;
  void step_group(const Given& given, const MuonOptions& options);

  std::vector<std::vector<int64_t>> splits_;  // of all groups' parameters, one after another
};

/// The trainable parameters of a model in up to two groups for AdamW: one that decays by
/// `options.weight_decay()`, one that does not. decay: "matrices", only tensors with two or more
/// axes inside the layers decay, and no biases, norms, phases, lower bounds or embeddings; or
/// "all". A tied parameter counts once.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(
    const torch::nn::Module& model, const torch::optim::AdamWOptions& options,
    const std::string& decay = "matrices");

/// Two optimisers that step as one: Muon for the matrices of a model's linear layers and of torch's
/// own RNNs, but for the child "head"; AdamW for everything else, in `parameter_groups`.
///
///     tidegate::optim::MuonAdamW optimizer(*model, MuonOptions(0.02), AdamWOptions(1e-3));
class MuonAdamW {
 public:
  /// Throws c10::ValueError for a model without linear layers, or without other parameters.
  MuonAdamW(const torch::nn::Module& model, const MuonOptions& muon_options,
            const torch::optim::AdamWOptions& adamw_options, const std::string& decay = "matrices");

  void step();
  void zero_grad(bool set_to_none = true);
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  Muon muon;
  AdamW adamw;
};

}  // namespace tidegate::optim
