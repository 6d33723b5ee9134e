#pragma once

// gated_rnn on raw pointers: inputs, what the kernels write, and the equations (kernels/rnn/rnn.h)
// once more, naively and in double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/rnn/rnn.h"

namespace tidegate::testing {

template <class Real>
class RnnProblem {
 public:
  using Row = std::vector<Real>;

  /// Sequences of these lengths: one after another in a batch of one, or rows of a batch. Bounds
  /// from zero to 0.9, or none.
  RnnProblem(const std::vector<int64_t>& lengths, bool packed, int64_t dim, unsigned seed,
             bool bounded = true)
      : dim_(dim), sequences_(static_cast<int64_t>(lengths.size())) {
    for (int64_t length : lengths) offsets_.push_back(offsets_.back() + length);
    const size_t tokens = static_cast<size_t>(offsets_.back() * dim);
    const size_t states = static_cast<size_t>(sequences_ * dim);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](size_t count, double scale) {
      Row row(count);
      for (Real& value : row) value = static_cast<Real>(scale * normal(random));
      return row;
    };
    z = draw(tokens, 2), x = draw(tokens, 1), dh = draw(tokens, 1);
    w = draw(static_cast<size_t>(dim * dim), 1 / std::sqrt(static_cast<double>(dim)));
    h0 = draw(states, 1), dh_final = draw(states, 1);
    gamma.resize(static_cast<size_t>(dim));
    for (int64_t i = 0; i < dim; ++i) {
      gamma[i] = bounded ? static_cast<Real>(0.9) * i / dim : Real(0);
    }
    const Real nan = std::numeric_limits<Real>::quiet_NaN();
    for (Row* row : {&h, &logits, &dz, &dx, &h_before}) row->assign(tokens, nan);
    for (Row* row : {&h_final, &dh0, &dgamma}) row->assign(states, nan);

    kernels::rnn::GatedRnnParams& forward = params_.forward;
    forward.layout.sequences = sequences_;
    forward.layout.batch = packed ? 1 : sequences_;
    forward.layout.time = packed ? offsets_.back() : lengths.front();
    forward.layout.offsets = packed ? offsets_.data() : nullptr;
    forward.layout.offsets_are_int64 = true;
    forward.channels = dim;
    forward.z = series(z), forward.x = series(x), forward.h = series(h),
    forward.logits = series(logits);
    forward.w = w.data(), forward.h0 = h0.data(), forward.h_final = h_final.data();
    if (bounded) forward.gamma = gamma.data(), params_.dgamma_partial = dgamma.data();
    params_.dh = series(dh), params_.dz = series(dz), params_.dx = series(dx);
    params_.h_before = series(h_before);
    params_.dh_final = dh_final.data(), params_.dh0 = dh0.data();
    forward.plan = kernels::rnn::gated_rnn_plan_cpu(forward);
    workspace_.resize(static_cast<size_t>(forward.plan.workspace_bytes) / 64 + 1);
    forward.workspace = workspace_.data();
  }
  RnnProblem(const RnnProblem&) = delete;
  RnnProblem& operator=(const RnnProblem&) = delete;

  const kernels::rnn::GatedRnnParams& forward() const { return params_.forward; }
  const kernels::rnn::GatedRnnBackwardParams& backward() const { return params_; }

  void run(const kernels::ParallelFor& parallel) const {
    kernels::rnn::gated_rnn_forward_cpu(forward(), parallel);
    kernels::rnn::gated_rnn_backward_cpu(backward(), parallel);
  }

  /// The largest relative error of a result of both passes; infinite where one is not a number.
  double error() const {
    std::vector<double> e_h(h.size()), e_logits(h.size()), e_dz(h.size()), e_dx(h.size());
    std::vector<double> e_before(h.size()), e_final(h_final.size()), e_dh0(h_final.size());
    std::vector<double> e_dgamma(h_final.size());
    for (int64_t n = 0; n < sequences_; ++n) {
      std::vector<double> state(h0.begin() + n * dim_, h0.begin() + (n + 1) * dim_);
      for (int64_t t = offsets_[n]; t < offsets_[n + 1]; ++t) {
        const std::vector<double> before = state;
        for (int64_t i = 0; i < dim_; ++i) {
          double logit = z[t * dim_ + i];
          for (int64_t k = 0; k < dim_; ++k) logit += w[i * dim_ + k] * before[k];
          const double shut = (1 - gamma[i]) / (1 + std::exp(logit));
          state[i] = (1 - shut) * before[i] + shut * x[t * dim_ + i];
          e_h[t * dim_ + i] = state[i], e_logits[t * dim_ + i] = logit;
          e_before[t * dim_ + i] = before[i];
        }
      }
      std::copy(state.begin(), state.end(), e_final.begin() + n * dim_);
      std::vector<double> carry(dh_final.begin() + n * dim_, dh_final.begin() + (n + 1) * dim_);
      for (int64_t t = offsets_[n + 1] - 1; t >= offsets_[n]; --t) {
        for (int64_t i = 0; i < dim_; ++i) {
          const int64_t at = t * dim_ + i;
          const double gate = 1 / (1 + std::exp(-e_logits[at])), part = 1 - gamma[i];
          const double grad = dh[at] + carry[i];
          const double to_gamma = grad * (e_before[at] - x[at]) * (1 - gate);
          e_dx[at] = part * (1 - gate) * grad;
          e_dz[at] = part * gate * to_gamma;
          e_dgamma[n * dim_ + i] += to_gamma;
          carry[i] = (gamma[i] + part * gate) * grad;
        }
        for (int64_t i = 0; i < dim_; ++i) {
          for (int64_t k = 0; k < dim_; ++k) carry[k] += w[i * dim_ + k] * e_dz[t * dim_ + i];
        }
      }
      std::copy(carry.begin(), carry.end(), e_dh0.begin() + n * dim_);
    }
    return std::max({distance(h, e_h), distance(logits, e_logits), distance(h_final, e_final),
                     distance(dz, e_dz), distance(dx, e_dx), distance(h_before, e_before),
                     distance(dh0, e_dh0),
                     forward().gamma == nullptr ? 0 : distance(dgamma, e_dgamma)});
  }

  Row z, x, w, gamma, h0, dh, dh_final;                   // read
  Row h, logits, h_final, dz, dx, h_before, dh0, dgamma;  // written

 private:
  kernels::TimeSeries series(Row& row) const {
    constexpr auto kDType =
        std::is_same_v<Real, double> ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
    return {row.data(), params_.forward.layout.time * dim_, dim_, kDType};
  }
  static double distance(const Row& found, const std::vector<double>& expected) {
    double error = 0, size = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      error += (found[i] - expected[i]) * (found[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    return error == 0 ? 0 : std::sqrt(error / size);
  }

  struct alignas(64) Line {
    char bytes[64];
  };
  int64_t dim_, sequences_;
  std::vector<int64_t> offsets_ = {0};
  std::vector<Line> workspace_;
  kernels::rnn::GatedRnnBackwardParams params_;
};

}  // namespace tidegate::testing
