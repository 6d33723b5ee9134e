// Linear layers whose weight stacks several matrices, for optimisers that take matrices as a whole.
#pragma once

#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tidegate::nn {

/// A linear layer whose weight stacks matrices, one below the other (a mixer's input projections,
/// GLU's gate and value): torch::nn::Linear otherwise. A module of your own that stacks makes its
/// projection one of these, for optim::Muon to take the matrices one by one.
class StackedLinearImpl : public torch::nn::LinearImpl {
 public:
  /// rows: of each matrix.
  StackedLinearImpl(int64_t in_features, std::vector<int64_t> rows, bool bias = true);

  const std::vector<int64_t>& stacked_rows() const { return rows_; }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 protected:
  /// A layer without rows, which draws nothing; whoever derives gives it its weight.
  StackedLinearImpl(const torch::nn::LinearOptions& empty, std::vector<int64_t> rows);

 private:
  std::vector<int64_t> rows_;
};

/// The rows of each matrix that a layer's weight stacks; one matrix where nothing was said.
std::vector<int64_t> stacked_rows(const torch::nn::LinearImpl& linear);

}  // namespace tidegate::nn
