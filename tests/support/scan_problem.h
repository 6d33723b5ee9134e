#pragma once

// Scan problems on the host: typed, strided, poisoned buffers with the params that point into them,
// and the comparison of what a kernel wrote with the reference.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/scan/scan.h"
#include "support/scan_reference.h"
#include "support/typed_series.h"

namespace tidegate::testing {

using kernels::is_complex;
using kernels::state_dtype;
using kernels::scan::Activation;

enum class Gates {
  kRandom,
  kOpen,         // nothing is forgotten: f = 1e4, a = 1
  kShut,         // everything is: f = -1e4, a = 0
  kAlternating,  // from one step to the next
  kNearOne,      // gamma near 1, |a| and |lambda| near 1
  kZero,         // f = +-0 (a masked logit is often -0) and next to it
};

struct ScanShape {
  DType dtype = DType::kFloat32;
  DType gate = DType::kFloat32;
  int64_t batch = 2;
  int64_t time = 17;
  int64_t channels = 19;
  std::vector<int64_t> offsets = {};  // packed sequences; the batch is one then
  bool offsets_are_int64 = true;
  bool reverse = false;
  bool has_states = true;  // h0 and dh_final
  Gates gates = Gates::kRandom;
  int64_t gap = 0;    // elements between rows
  int64_t shift = 0;  // elements before the first
  unsigned seed = 7;
  bool turns = false;  // hgru, lru: complex numbers in halves
  // hgru
  bool has_gamma = true;
  Activation activation = Activation::kSilu;
  // linear_scan
  bool a_is_constant = false;

  std::string name() const {
    std::string text = std::string(kernels::dtype_name(dtype)) + " gate " +
                       kernels::dtype_name(gate) + " B" + std::to_string(batch) + " T" +
                       std::to_string(time) + " D" + std::to_string(channels) + " gates " +
                       std::to_string(static_cast<int>(gates));
    if (!offsets.empty()) text += " packed " + std::to_string(offsets.size() - 1);
    if (reverse) text += " reverse";
    if (turns) text += " theta";
    if (a_is_constant) text += " constant a";
    return text;
  }
};

/// Layout and buffers that both kinds of scan need.
class ScanProblem {
 public:
  explicit ScanProblem(ScanShape shape) : shape_(std::move(shape)), random_(shape_.seed) {
    reference_layout_.tokens = shape_.batch * shape_.time;
    reference_layout_.channels = shape_.channels;
    reference_layout_.reverse = shape_.reverse;
    if (shape_.offsets.empty()) {
      for (int64_t b = 0; b < shape_.batch; ++b) {
        reference_layout_.sequences.push_back({b * shape_.time, shape_.time});
      }
    }
    for (size_t n = 0; n + 1 < shape_.offsets.size(); ++n) {
      reference_layout_.sequences.push_back(
          {shape_.offsets[n], shape_.offsets[n + 1] - shape_.offsets[n]});
    }
    narrow_offsets_.assign(shape_.offsets.begin(), shape_.offsets.end());
  }

  const ScanShape& shape() const { return shape_; }
  const ReferenceLayout& reference_layout() const { return reference_layout_; }
  int64_t sequences() const { return static_cast<int64_t>(reference_layout_.sequences.size()); }

 protected:
  kernels::SequenceLayout layout() const {
    kernels::SequenceLayout layout;
    layout.batch = shape_.batch;
    layout.time = shape_.time;
    layout.sequences = sequences();
    layout.reverse = shape_.reverse;
    layout.offsets_are_int64 = shape_.offsets_are_int64;
    if (!shape_.offsets.empty()) {
      layout.offsets = shape_.offsets_are_int64 ? static_cast<const void*>(shape_.offsets.data())
                                                : narrow_offsets_.data();
    }
    return layout;
  }

  TypedSeries series(DType dtype, int64_t columns) const {
    return {dtype, shape_.batch, shape_.time, columns, shape_.gap, shape_.shift};
  }
  TypedSeries states(int64_t columns) const {
    return {state_dtype(shape_.dtype), sequences(), 1, columns};
  }
  TypedSeries channel_values() const { return {real_state_dtype(), 1, 1, shape_.channels}; }
  DType real_state_dtype() const { return state_dtype(shape_.dtype); }

  void fill_normal(TypedSeries& series) {
    for (int64_t i = 0; i < series.tokens(); ++i) {
      for (int64_t j = 0; j < series.columns(); ++j) {
        const double re = next_normal();
        series.set(i, j, {re, is_complex(series.dtype()) ? next_normal() : 0.0});
      }
    }
  }
  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }

 private:
  /// Drawn for the first few thousand, then repeated: large problems are slow to fill otherwise.
  double next_normal() {
    constexpr size_t kDrawn = 4999;
    if (normals_.size() < kDrawn) {
      normals_.push_back(std::normal_distribution<double>()(random_));
      return normals_.back();
    }
    return normals_[next_normal_++ % kDrawn];
  }

  ScanShape shape_;
  ReferenceLayout reference_layout_;
  std::vector<int32_t> narrow_offsets_;
  std::mt19937 random_;
  std::vector<double> normals_;
  size_t next_normal_ = 0;
};

/// The values of `series`; [Re | Im] rows become complex numbers where `halves`.
template <class Real>
ComplexArray<Real> complex_values(const TypedSeries& series, bool halves = false) {
  const int64_t columns = halves ? series.columns() / 2 : series.columns();
  ComplexArray<Real> values(series.tokens() * columns);
  for (int64_t i = 0; i < series.tokens(); ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      std::complex<double> value = series.get(i, j);
      if (halves) value = {value.real(), series.get(i, columns + j).real()};
      values[i * columns + j] = std::complex<Real>(value);
    }
  }
  return values;
}

template <class Real>
std::vector<Real> real_values(const TypedSeries& series) {
  std::vector<Real> values;
  for (const auto& value : complex_values<Real>(series)) values.push_back(value.real());
  return values;
}

/// [rows, columns] -> [columns], one row after another.
template <class T>
std::vector<T> sum_of_rows(const std::vector<T>& values, int64_t columns) {
  std::vector<T> sums(columns);
  for (size_t i = 0; i < values.size(); ++i) sums[i % columns] += values[i];
  return sums;
}

template <class Real>
std::vector<Real> squares_of(const ComplexArray<Real>& values) {
  std::vector<Real> squares;
  for (const auto& value : values) squares.push_back(std::norm(value));
  return squares;
}

/// What partial sums add up to: a kernel is free in how it divides them among rows.
inline TypedSeries sum_of_rows(const TypedSeries& partial) {
  TypedSeries sums(partial.dtype(), 1, 1, partial.columns());
  const auto values = sum_of_rows(complex_values<double>(partial), partial.columns());
  for (int64_t j = 0; j < partial.columns(); ++j) sums.set(0, j, values[j]);
  return sums;
}

/// Collects the errors of one output and judges them: in norm and at its largest, each may be twice
/// that of the same naive maths in the state's precision, rounded to the output's dtype, plus a
/// floor (see judge).
template <class Oracle, class Baseline>
class OutputCheck {
 public:
  /// For sums over time, `squares` are those of their terms: where the terms cancel, it is them
  /// that roundings are relative to, not the sum.
  OutputCheck(const char* name, const ComplexArray<Oracle>& expected,
              const ComplexArray<Baseline>& baseline, const TypedSeries& got, bool halves,
              const std::vector<Oracle>& squares = {})
      : name_(name), dtype_(got.dtype()) {
    const ComplexArray<double> values = complex_values<double>(got, halves);
    EXPECT_EQ(values.size(), expected.size()) << name;
    for (size_t i = 0; i < std::min(values.size(), expected.size()); ++i)
      add(expected[i], baseline[i], values[i], squares.empty() ? Oracle(0) : squares[i]);
    judge();
  }

 private:
  using Wide = std::complex<Oracle>;

  Wide as_stored(std::complex<Baseline> value) const {
    const std::complex<double> wide(value);
    if (is_complex(dtype_)) return Wide(rounded(dtype_, wide));
    return {static_cast<Oracle>(rounded(dtype_, wide.real()).real()),
            static_cast<Oracle>(rounded(dtype_, wide.imag()).real())};
  }
  void add(Wide expected, std::complex<Baseline> baseline, std::complex<double> got, Oracle terms) {
    const Oracle error = std::abs(Wide(got) - expected);
    const Oracle square = std::max(std::norm(expected), terms);
    const Oracle baseline_error = std::abs(as_stored(baseline) - expected);
    finite_ = finite_ && std::isfinite(error);
    largest_ = std::max(largest_, error);
    largest_of_baseline_ = std::max(largest_of_baseline_, baseline_error);
    largest_value_ = std::max(largest_value_, std::sqrt(square));
    squares_ += error * error;
    squares_of_baseline_ += baseline_error * baseline_error;
    squares_of_values_ += square;
  }
  void judge() const {
    EXPECT_TRUE(finite_) << name_ << " has a NaN or infinity";
    const Oracle unit = std::numeric_limits<Baseline>::epsilon();
    // Products of gradients that underflow are zero in one order and subnormal in another.
    const Oracle tiny = std::numeric_limits<Baseline>::min() * 1e3;
    // Where a handful of numbers decide, the baseline may have rounded none of them: four units of
    // one number are allowed beside it. Over many numbers luck averages out, and two units remain.
    const Oracle one_number = 2 * unit * largest_value_;
    EXPECT_LE(largest_, 2 * largest_of_baseline_ + 2 * one_number + tiny) << name_;
    EXPECT_LE(std::sqrt(squares_), 2 * std::sqrt(squares_of_baseline_) + one_number +
                                       2 * unit * std::sqrt(squares_of_values_) + tiny)
        << name_;
  }

  const char* name_;
  DType dtype_;
  bool finite_ = true;
  Oracle largest_ = 0, largest_of_baseline_ = 0, largest_value_ = 0;
  Oracle squares_ = 0, squares_of_baseline_ = 0, squares_of_values_ = 0;
};

/// linear_scan, forward and backward.
class LinearScanProblem : public ScanProblem {
 public:
  TypedSeries x, a, h, h0, h_final, dh, dh_final, dx, da, da_partial, dh0;

  explicit LinearScanProblem(const ScanShape& wanted) : ScanProblem(wanted) {
    const int64_t channels = shape().channels;
    x = dh = h = dx = series(shape().dtype, channels);
    a = shape().a_is_constant ? TypedSeries(shape().gate, 1, 1, channels)
                              : series(shape().gate, channels);
    da = series(shape().gate, channels);
    h0 = h_final = dh_final = da_partial = dh0 = states(channels);
    for (TypedSeries* input : {&x, &dh, &h0, &dh_final}) fill_normal(*input);
    fill_decays();
  }

  kernels::scan::LinearScanParams forward_params() {
    kernels::scan::LinearScanParams params;
    params.layout = layout();
    params.channels = shape().channels;
    params.x = x.series();
    params.a = a.series();
    if (shape().a_is_constant) params.a.stride_b = params.a.stride_t = 0;
    params.a_is_constant = shape().a_is_constant;
    params.h = h.series();
    if (shape().has_states) params.h0 = h0.at(0, 0);
    params.h_final = h_final.at(0, 0);
    return params;
  }

  kernels::scan::LinearScanBackwardParams backward_params() {
    kernels::scan::LinearScanBackwardParams params;
    params.forward = forward_params();
    params.forward.x = {};
    params.dh = dh.series();
    if (shape().has_states) params.dh_final = dh_final.at(0, 0);
    params.dx = dx.series();
    if (shape().a_is_constant) {
      params.da_partial = da_partial.at(0, 0);
    } else {
      params.da = da.series();
    }
    params.dh0 = dh0.at(0, 0);
    return params;
  }

  std::vector<TypedSeries*> outputs() {
    if (shape().a_is_constant) return {&h, &h_final, &dx, &da_partial, &dh0};
    return {&h, &h_final, &dx, &da, &dh0};
  }

  /// Holds every output against the reference.
  void check() {
    const bool wide =
        state_dtype(shape().dtype) == DType::kFloat64 || shape().dtype == DType::kComplex128;
    wide ? check_in<long double, double>() : check_in<double, float>();
  }

 private:
  void fill_decays() {
    for (int64_t i = 0; i < a.tokens(); ++i) {
      for (int64_t j = 0; j < a.columns(); ++j) {
        double size = uniform(-1, 1);
        if (shape().gates == Gates::kOpen) size = 1;
        if (shape().gates == Gates::kShut) size = 0;
        if (shape().gates == Gates::kAlternating) size = (i + j) % 2;
        if (shape().gates == Gates::kNearOne) size = 1 - uniform(0, 1e-3);
        a.set(i, j, is_complex(a.dtype()) ? std::polar(std::fabs(size), uniform(-3, 3)) : size);
      }
    }
  }

  template <class Real>
  ComplexArray<Real> decays() const {
    ComplexArray<Real> values = complex_values<Real>(a);
    if (!shape().a_is_constant) return values;
    ComplexArray<Real> repeated;
    for (int64_t i = 0; i < x.tokens(); ++i) {
      repeated.insert(repeated.end(), values.begin(), values.end());
    }
    return repeated;
  }

  template <class Real>
  LinearScanReference<Real> reference(bool own_states) const {
    LinearScanReference<Real> result;
    ComplexArray<Real> start, end;
    if (shape().has_states) start = complex_values<Real>(h0);
    if (shape().has_states) end = complex_values<Real>(dh_final);
    result.forward(reference_layout(), complex_values<Real>(x), decays<Real>(), start);
    result.backward(reference_layout(), decays<Real>(),
                    own_states ? result.h : complex_values<Real>(h), start,
                    complex_values<Real>(dh), end);
    return result;
  }

  template <class Oracle, class Baseline>
  void check_in() const {
    const auto expected = reference<Oracle>(true);
    const auto baseline = reference<Baseline>(false);
    using Check = OutputCheck<Oracle, Baseline>;
    Check("h", expected.h, baseline.h, h, false);
    Check("h_final", expected.h_final, baseline.h_final, h_final, false);
    Check("dx", expected.dx, baseline.dx, dx, false);
    Check("dh0", expected.dh0, baseline.dh0, dh0, false);
    if (shape().a_is_constant) {
      const int64_t channels = shape().channels;
      Check("da", sum_of_rows(expected.da, channels), sum_of_rows(baseline.da, channels),
            sum_of_rows(da_partial), false, sum_of_rows(squares_of(expected.da), channels));
    } else {
      Check("da", expected.da, baseline.da, da, false);
    }
  }
};

/// hgru, forward and backward.
class HgruProblem : public ScanProblem {
 public:
  TypedSeries c, f, h, gamma, theta, h0, h_final;
  TypedSeries dh, dh_final, dc, df, dgamma_partial, dtheta_partial, dh0;

  explicit HgruProblem(const ScanShape& wanted) : ScanProblem(wanted) {
    const int64_t channels = shape().channels;
    const int64_t columns = shape().turns ? 2 * channels : channels;
    c = h = dh = dc = series(shape().dtype, columns);
    f = df = series(shape().gate, channels);
    gamma = theta = channel_values();
    h0 = h_final = dh_final = dh0 = states(columns);
    dgamma_partial = dtheta_partial = states(channels);
    for (TypedSeries* input : {&c, &dh, &h0, &dh_final}) fill_normal(*input);
    fill_gates();
  }

  kernels::scan::HgruParams forward_params() {
    kernels::scan::HgruParams params;
    params.layout = layout();
    params.channels = shape().channels;
    params.activation = shape().activation;
    params.c = c.series();
    params.f = f.series();
    params.h = h.series();
    if (shape().has_gamma) params.gamma = gamma.at(0, 0);
    if (shape().turns) params.theta = theta.at(0, 0);
    if (shape().has_states) params.h0 = h0.at(0, 0);
    params.h_final = h_final.at(0, 0);
    return params;
  }

  kernels::scan::HgruBackwardParams backward_params() {
    kernels::scan::HgruBackwardParams params;
    params.forward = forward_params();
    params.dh = dh.series();
    if (shape().has_states) params.dh_final = dh_final.at(0, 0);
    params.dc = dc.series();
    params.df = df.series();
    if (shape().has_gamma) params.dgamma_partial = dgamma_partial.at(0, 0);
    if (shape().turns) params.dtheta_partial = dtheta_partial.at(0, 0);
    params.dh0 = dh0.at(0, 0);
    return params;
  }

  std::vector<TypedSeries*> outputs() {
    std::vector<TypedSeries*> all = {&h, &h_final, &dc, &df, &dh0};
    if (shape().has_gamma) all.push_back(&dgamma_partial);
    if (shape().turns) all.push_back(&dtheta_partial);
    return all;
  }

  void check() {
    shape().dtype == DType::kFloat64 ? check_in<long double, double>() : check_in<double, float>();
  }

 private:
  void fill_gates() {
    constexpr double kNearZero[] = {0.0, -0.0, 1e-40, -1e-40, 1e-7, -1e-7};
    fill_normal(f);
    for (int64_t i = 0; i < f.tokens(); ++i) {
      for (int64_t j = 0; j < f.columns(); ++j) {
        if (shape().gates == Gates::kOpen) f.set(i, j, 1e4);
        if (shape().gates == Gates::kShut) f.set(i, j, -1e4);
        if (shape().gates == Gates::kAlternating) f.set(i, j, (i + j) % 2 == 0 ? 1e4 : -1e4);
        if (shape().gates == Gates::kZero) f.set(i, j, kNearZero[(i + j) % 6]);
      }
    }
    for (int64_t j = 0; j < shape().channels; ++j) {
      gamma.set(0, j, shape().gates == Gates::kNearOne ? 1 - uniform(0, 1e-4) : uniform(0, 1));
      theta.set(0, j, uniform(-3, 3));
    }
  }

  template <class Real>
  HgruReference<Real> reference(bool own_states) const {
    HgruReference<Real> result;
    const bool halves = shape().turns;
    result.silu = shape().activation == Activation::kSilu;
    result.gamma.assign(shape().channels, Real(0));
    result.theta.assign(shape().channels, Real(0));
    if (shape().has_gamma) result.gamma = real_values<Real>(gamma);
    if (halves) result.theta = real_values<Real>(theta);
    ComplexArray<Real> start, end;
    if (shape().has_states) start = complex_values<Real>(h0, halves);
    if (shape().has_states) end = complex_values<Real>(dh_final, halves);
    const auto inputs = complex_values<Real>(c, halves);
    const auto gates = real_values<Real>(f);
    result.forward(reference_layout(), inputs, gates, start);
    result.backward(reference_layout(), inputs, gates,
                    own_states ? result.h : complex_values<Real>(h, halves), start,
                    complex_values<Real>(dh, halves), end);
    return result;
  }

  template <class Oracle, class Baseline>
  void check_in() const {
    const auto expected = reference<Oracle>(true);
    const auto baseline = reference<Baseline>(false);
    const bool halves = shape().turns;
    using Check = OutputCheck<Oracle, Baseline>;
    const auto as_complex = [](const auto& values) {
      using Real = typename std::decay_t<decltype(values)>::value_type;
      return ComplexArray<Real>(values.begin(), values.end());
    };
    const auto sums = [&](const auto& values) {
      return sum_of_rows(as_complex(values), shape().channels);
    };
    Check("h", expected.h, baseline.h, h, halves);
    Check("h_final", expected.h_final, baseline.h_final, h_final, halves);
    Check("dc", expected.dc, baseline.dc, dc, halves);
    Check("df", as_complex(expected.df), as_complex(baseline.df), df, false);
    Check("dh0", expected.dh0, baseline.dh0, dh0, halves);
    if (shape().has_gamma) {
      Check("dgamma", sums(expected.dgamma), sums(baseline.dgamma), sum_of_rows(dgamma_partial),
            false, sum_of_rows(expected.dgamma_squares, shape().channels));
    }
    if (halves) {
      Check("dtheta", sums(expected.dtheta), sums(baseline.dtheta), sum_of_rows(dtheta_partial),
            false, sum_of_rows(expected.dtheta_squares, shape().channels));
    }
  }
};

}  // namespace tidegate::testing
