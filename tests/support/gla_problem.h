#pragma once

// Gated linear attention problems on the host: typed, strided, poisoned buffers with the params
// that point into them, and the comparison of what a kernel wrote with the reference.

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/gla/gla.h"
#include "support/gla_reference.h"
#include "support/gla_sub_chunk_reference.h"
#include "support/scan_problem.h"

namespace tidegate::testing {

using kernels::gla::GateKind;
using kernels::gla::InputActivation;

struct GlaShape : ScanShape {
  int64_t heads = 2;
  int64_t key_dim = 19;
  int64_t value_dim = 21;
  GateKind gate_kind = GateKind::kLogDecay;
  bool gate_per_head = false;
  InputActivation q_activation = InputActivation::kNone;  // logits only
  InputActivation v_activation = InputActivation::kNone;
  double scale = 0.5;

  bool logits() const { return gate_kind == GateKind::kLogit; }
  std::string full_name() const {
    return name() + " H" + std::to_string(heads) + " K" + std::to_string(key_dim) + " V" +
           std::to_string(value_dim) +
           (logits()        ? " logits"
            : gate_per_head ? " gate a head"
                            : "");
  }
};

class GlaProblem : public ScanProblem {
 public:
  TypedSeries q, k, v, gate, gamma, o, h0, h_final;
  TypedSeries d_o, dh_final, dq, dk, dv, dgate, dgamma_partial, dh0;

  explicit GlaProblem(const GlaShape& wanted) : ScanProblem(wanted), wanted_(wanted) {
    const int64_t heads = wanted_.heads;
    const int64_t keys = heads * wanted_.key_dim, values = heads * wanted_.value_dim;
    q = k = dq = dk = series(wanted_.dtype, keys);
    v = o = d_o = dv = series(wanted_.dtype, values);
    gate = dgate = series(wanted_.gate, wanted_.gate_per_head ? heads : keys);
    gamma = TypedSeries(real_state_dtype(), 1, 1, keys);
    dgamma_partial = states(keys);
    h0 = h_final = dh_final = dh0 = states(keys * wanted_.value_dim);
    for (TypedSeries* input : {&q, &k, &v, &d_o, &h0, &dh_final}) fill_normal(*input);
    fill_gates();
  }

  kernels::gla::GlaParams forward_params() {
    kernels::gla::GlaParams params;
    params.layout = layout();
    params.heads = wanted_.heads;
    params.key_dim = wanted_.key_dim;
    params.value_dim = wanted_.value_dim;
    params.channels = wanted_.heads * wanted_.key_dim;
    params.scale = wanted_.scale;
    params.gate_kind = wanted_.gate_kind;
    params.gate_per_head = wanted_.gate_per_head;
    if (wanted_.logits()) {
      params.q_activation = wanted_.q_activation;
      params.v_activation = wanted_.v_activation;
      if (wanted_.has_gamma) params.gamma = gamma.at(0, 0);
    } else {
      params.k = by_head(k);
    }
    params.q = by_head(q);
    params.v = by_head(v);
    params.gate = by_head(gate);
    params.o = by_head(o);
    if (wanted_.has_states) params.h0 = h0.at(0, 0);
    params.h_final = h_final.at(0, 0);
    return params;
  }

  kernels::gla::GlaBackwardParams backward_params() {
    kernels::gla::GlaBackwardParams params;
    params.forward = forward_params();
    params.forward.o = {};
    params.d_o = by_head(d_o);
    if (wanted_.has_states) params.dh_final = dh_final.at(0, 0);
    params.dq = by_head(dq);
    if (!wanted_.logits()) params.dk = by_head(dk);
    params.dv = by_head(dv);
    params.dgate = by_head(dgate);
    if (params.forward.gamma != nullptr) params.dgamma_partial = dgamma_partial.at(0, 0);
    params.dh0 = dh0.at(0, 0);
    return params;
  }

  /// Rows of partial sums of dgamma: as many as the plan of the backward pass says.
  void take_partials(int64_t rows) {
    dgamma_partial = TypedSeries(real_state_dtype(), 1, rows, wanted_.heads * wanted_.key_dim);
  }

  std::vector<TypedSeries*> outputs() {
    std::vector<TypedSeries*> all = {&o, &h_final, &dq, &dv, &dgate, &dh0};
    if (!wanted_.logits()) all.push_back(&dk);
    if (wanted_.logits() && wanted_.has_gamma) all.push_back(&dgamma_partial);
    return all;
  }

  /// Holds every output against the reference.
  void check() {
    wanted_.dtype == DType::kFloat64 ? check_in<long double, double>() : check_in<double, float>();
  }

  /// Holds o and the final state against what sub-chunks with bf16 operands cost.
  void check_tensor_core_forward() const {
    const auto expected = reference<double>();
    GlaSubChunkReference baseline;
    take_inputs(&baseline);
    baseline.run_forward(reference_layout());
    const auto compare = [](const char* name, const auto& want, const auto& same,
                            const TypedSeries& got) {
      OutputCheck<double, float>(name, ComplexArray<double>(want.begin(), want.end()),
                                 ComplexArray<float>(same.begin(), same.end()), got, false);
    };
    compare("o", expected.o, baseline.o, o);
    compare("h_final", expected.h_final, baseline.h_final, h_final);
  }

  /// Holds the gradients against the equations, as products of bf16 operands may have them: sums
  /// of gates' gradients are judged by their terms, the rest by what they are.
  void check_tensor_core_backward() const {
    const auto expected = reference<double>();
    const auto near = [](const char* name, const TypedSeries& got, const std::vector<double>& want,
                         const std::vector<double>& squares = {}) {
      constexpr double kStep = 1.0 / 256;  // of bf16
      const double least = got.dtype() == DType::kFloat16 ? 0x1p-24 : 0x1p-126;
      const auto values = real_values<double>(got);
      ASSERT_EQ(values.size(), want.size()) << name;
      double error = 0, size = 0, largest = 0, largest_value = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        const double off = std::abs(values[i] - want[i]);
        const double square = squares.empty() ? want[i] * want[i] : squares[i];
        ASSERT_TRUE(std::isfinite(off)) << name << " " << i;
        error += off * off;
        size += square;
        largest = std::max(largest, off);
        largest_value = std::max(largest_value, std::sqrt(square));
      }
      const double count = static_cast<double>(want.size());
      EXPECT_LE(std::sqrt(error), 1.5 * kStep * std::sqrt(size) + least * std::sqrt(count)) << name;
      EXPECT_LE(largest, 4 * kStep * largest_value + least) << name;
    };
    near("dq", dq, expected.dq);
    if (!wanted_.logits()) near("dk", dk, expected.dk);
    near("dv", dv, expected.dv);
    near("dgate", dgate, expected.dgate, expected.dgate_squares);
    near("dh0", dh0, expected.dh0);
    if (wanted_.logits() && wanted_.has_gamma) {
      const std::vector<double> sum = sum_of_rows(expected.dgamma);
      std::vector<double> sizes(expected.dgamma_squares.size());
      std::transform(expected.dgamma_squares.begin(), expected.dgamma_squares.end(), sizes.begin(),
                     [](double square) { return std::sqrt(square); });
      sizes = sum_of_rows(sizes);
      for (double& size : sizes) size *= size;
      const TypedSeries got = sum_of_partials(DType::kFloat64);
      near("dgamma", got, sum, sizes);
    }
  }

 private:
  kernels::HeadSeries by_head(TypedSeries& series) const {
    const kernels::TimeSeries rows = series.series();
    return {rows.data, rows.stride_b, rows.stride_t, series.columns() / wanted_.heads, rows.dtype};
  }

  // Partial sums of dgamma have a row for each sequence, or for each chunk: what is meant is the
  // sum of all.

  template <class Real>
  std::vector<Real> sum_of_rows(const std::vector<Real>& rows) const {
    std::vector<Real> sum(dgamma_partial.columns());
    for (size_t i = 0; i < rows.size(); ++i) sum[i % sum.size()] += rows[i];
    return sum;
  }
  TypedSeries sum_of_partials(DType dtype) const {
    TypedSeries sum(dtype, 1, 1, dgamma_partial.columns());
    for (int64_t j = 0; j < dgamma_partial.columns(); ++j) {
      double of_rows = 0;
      for (int64_t i = 0; i < dgamma_partial.tokens(); ++i) {
        of_rows += dgamma_partial.get(i, j).real();
      }
      sum.set(0, j, of_rows);
    }
    return sum;
  }

  void fill_gates() {
    for (int64_t i = 0; i < gate.tokens(); ++i) {
      for (int64_t j = 0; j < gate.columns(); ++j) {
        double logit = uniform(-5, 5);
        if (wanted_.gates == Gates::kOpen) logit = 1e4;
        if (wanted_.gates == Gates::kShut) logit = -1e4;
        if (wanted_.gates == Gates::kAlternating) logit = (i + j) % 2 == 0 ? 1e4 : -1e4;
        if (wanted_.gates == Gates::kNearOne) logit = 10 + uniform(0, 3);
        if (wanted_.gates == Gates::kZero) logit = (i + j) % 2 == 0 ? 0.0 : -0.0;
        gate.set(i, j, wanted_.logits() ? logit : -std::log1p(std::exp(-logit)));
        if (!wanted_.logits() && logit == -1e4) gate.set(i, j, -1e4);
      }
    }
    for (int64_t j = 0; j < gamma.columns(); ++j) gamma.set(0, j, uniform(0, 0.95));
  }

  template <class Real>
  void take_inputs(GlaReference<Real>* result) const {
    result->heads = wanted_.heads;
    result->key_dim = wanted_.key_dim;
    result->value_dim = wanted_.value_dim;
    result->scale = static_cast<Real>(wanted_.scale);
    result->logits = wanted_.logits();
    result->gate_per_head = wanted_.gate_per_head;
    if (wanted_.logits()) {
      result->q_activation = wanted_.q_activation;
      result->v_activation = wanted_.v_activation;
      if (wanted_.has_gamma) result->gamma = real_values<Real>(gamma);
    } else {
      result->k = real_values<Real>(k);
    }
    result->q = real_values<Real>(q);
    result->v = real_values<Real>(v);
    result->gate = real_values<Real>(gate);
    result->d_o = real_values<Real>(d_o);
    if (wanted_.has_states) result->h0 = real_values<Real>(h0);
    if (wanted_.has_states) result->dh_final = real_values<Real>(dh_final);
  }

  template <class Real>
  GlaReference<Real> reference() const {
    GlaReference<Real> result;
    take_inputs(&result);
    result.run(reference_layout());
    return result;
  }

  template <class Oracle, class Baseline>
  void check_in() const {
    const auto expected = reference<Oracle>();
    const auto baseline = reference<Baseline>();
    const auto compare = [](const char* name, const auto& want, const auto& same,
                            const TypedSeries& got, const std::vector<Oracle>& squares = {}) {
      OutputCheck<Oracle, Baseline>(name, ComplexArray<Oracle>(want.begin(), want.end()),
                                    ComplexArray<Baseline>(same.begin(), same.end()), got, false,
                                    squares);
    };
    compare("o", expected.o, baseline.o, o);
    compare("h_final", expected.h_final, baseline.h_final, h_final);
    compare("dq", expected.dq, baseline.dq, dq);
    if (!wanted_.logits()) compare("dk", expected.dk, baseline.dk, dk);
    compare("dv", expected.dv, baseline.dv, dv);
    compare("dgate", expected.dgate, baseline.dgate, dgate);
    compare("dh0", expected.dh0, baseline.dh0, dh0);
    if (wanted_.logits() && wanted_.has_gamma) {
      if (dgamma_partial.tokens() * dgamma_partial.columns() ==
          static_cast<int64_t>(expected.dgamma.size())) {
        compare("dgamma", expected.dgamma, baseline.dgamma, dgamma_partial,
                expected.dgamma_squares);
      } else {
        compare("dgamma", sum_of_rows(expected.dgamma), sum_of_rows(baseline.dgamma),
                sum_of_partials(real_state_dtype()), sum_of_rows(expected.dgamma_squares));
      }
    }
  }

  GlaShape wanted_;
};

}  // namespace tidegate::testing
