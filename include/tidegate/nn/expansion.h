// Parameter-efficient state expansions of HGRN1 (HGRN2's paper, section 3.1 and Table 2).
#pragma once

#include "tidegate/nn/module.h"

#include <optional>
#include <string>

namespace tidegate::nn {

struct StateExpansionOptions {
  StateExpansionOptions(std::string kind, int64_t dim, int64_t expand, int64_t parts)
      : kind_(std::move(kind)), dim_(dim), expand_(expand), parts_(parts) {}

  /// "naive", "lr", "glt", "glti", "krp" or "kp".
  TORCH_ARG(std::string, kind);
  /// d, n and P of StateExpansionImpl.
  TORCH_ARG(int64_t, dim);
  TORCH_ARG(int64_t, expand);
  TORCH_ARG(int64_t, parts);
  /// Rank of "lr". Unset: dim / (expand + 1), which makes its size about dim^2.
  TORCH_ARG(std::optional<int64_t>, rank) = std::nullopt;
  TORCH_ARG(bool, bias) = false;
  TIDEGATE_PLACEMENT_ARGS
};

/// Takes x from d to n * d channels, once for each of P quantities [HGRN2, arXiv 2404.07904,
/// Table 2]. For a quantity, with i one of n groups and j one of d channels (parameters, for all P,
/// with the sizes that Table 2 prints):
///
///     naive  y[i,j] = sum_k W[i,j,k] x[k]                    weight [P, n, d, d]
///     lr     y[i,j] = sum_r B[i,j,r] sum_k A[r,k] x[k]       down [P, r, d], up [P, n, d, r]
///     glt    y[i,j] = sum_e W[i,j,e] x[i,e], x as [n, d/n]   weight [P, n, d, d/n]
///     glti   y[m,j] = sum_i M[i,m] glt[i,j]                  weight, mix [P, n, n]
///     krp    y[i,j] = U[i,j] (W x)[j]                        weight [P, d, d], scale [P, n, d]
///     kp     y[i,j] = u[i] (W x)[j]                          weight [P, d, d], scale [P, n]
///
/// and a `bias` `[P, n, d]` where asked for. Table 2 has no W in krp; the parameter counts of
/// Table 3 have it. x `[..., d]` -> `[P, ..., n*d]`. Throws c10::ValueError for sizes that do not
/// fit.
class StateExpansionImpl : public Module<StateExpansionImpl> {
 public:
  explicit StateExpansionImpl(const StateExpansionOptions& options);

  void reset() override;
  /// In the order of the parameters above: weight, down, up uniform on +-1/sqrt(fan in), mix and
  /// scale normal (n^-1/2 and 1: ones would keep the groups alike for ever), bias uniform on
  /// +-1/sqrt(d).
  void reset_parameters();
  torch::Tensor forward(const torch::Tensor& x);

  StateExpansionOptions options;
  /// Undefined where the kind has none.
  torch::Tensor weight, down, up, mix, scale, bias;

 private:
  torch::Tensor expanded(const torch::Tensor& x) const;
};

TORCH_MODULE(StateExpansion);

}  // namespace tidegate::nn
