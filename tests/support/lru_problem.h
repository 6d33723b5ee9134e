#pragma once

// lru problems on the host, as scan_problem.h has them of the other scans.

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "support/scan_problem.h"

namespace tidegate::testing {

/// lru, forward and backward.
class LruProblem : public ScanProblem {
 public:
  TypedSeries x, h, nu_log, theta_log, gamma_log, h0, h_final;
  TypedSeries dh, dh_final, dx, dnu_partial, dtheta_partial, dgamma_partial, dh0;

  explicit LruProblem(const ScanShape& wanted) : ScanProblem(wanted) {
    const int64_t channels = shape().channels;
    const int64_t columns = shape().turns ? 2 * channels : channels;
    x = h = dh = dx = series(shape().dtype, columns);
    nu_log = theta_log = gamma_log = channel_values();
    h0 = h_final = dh_final = dh0 = states(columns);
    dnu_partial = dtheta_partial = dgamma_partial = states(channels);
    for (TypedSeries* input : {&x, &dh, &h0, &dh_final}) fill_normal(*input);
    fill_parameters();
  }

  kernels::scan::LruParams forward_params() {
    kernels::scan::LruParams params;
    params.layout = layout();
    params.channels = shape().channels;
    params.x = x.series();
    params.h = h.series();
    params.nu_log = nu_log.at(0, 0);
    if (shape().turns) params.theta_log = theta_log.at(0, 0);
    params.gamma_log = gamma_log.at(0, 0);
    if (shape().has_states) params.h0 = h0.at(0, 0);
    params.h_final = h_final.at(0, 0);
    return params;
  }

  kernels::scan::LruBackwardParams backward_params() {
    kernels::scan::LruBackwardParams params;
    params.forward = forward_params();
    params.dh = dh.series();
    if (shape().has_states) params.dh_final = dh_final.at(0, 0);
    params.dx = dx.series();
    params.dnu_log_partial = dnu_partial.at(0, 0);
    if (shape().turns) params.dtheta_log_partial = dtheta_partial.at(0, 0);
    params.dgamma_log_partial = dgamma_partial.at(0, 0);
    params.dh0 = dh0.at(0, 0);
    return params;
  }

  std::vector<TypedSeries*> outputs() {
    std::vector<TypedSeries*> all = {&h, &h_final, &dx, &dh0, &dnu_partial, &dgamma_partial};
    if (shape().turns) all.push_back(&dtheta_partial);
    return all;
  }

  void check() {
    shape().dtype == DType::kFloat64 ? check_in<long double, double>() : check_in<double, float>();
  }

 private:
  void fill_parameters() {
    for (int64_t j = 0; j < shape().channels; ++j) {
      double nu = uniform(-4, 1);
      if (shape().gates == Gates::kOpen) nu = -1e4;
      if (shape().gates == Gates::kShut) nu = 1e4;
      if (shape().gates == Gates::kAlternating) nu = j % 2 == 0 ? 1e4 : -1e4;
      if (shape().gates == Gates::kNearOne) nu = uniform(-16, -7);
      if (shape().gates == Gates::kZero) nu = 0;
      nu_log.set(0, j, nu);
      theta_log.set(0, j, std::log(uniform(1e-3, 6.2)));
      gamma_log.set(0, j, uniform(-2, 0));
    }
  }

  template <class Real>
  LruReference<Real> reference(bool own_states) const {
    LruReference<Real> result;
    const bool halves = shape().turns;
    result.nu_log = real_values<Real>(nu_log);
    if (halves) result.theta_log = real_values<Real>(theta_log);
    result.gamma_log = real_values<Real>(gamma_log);
    ComplexArray<Real> start, end;
    if (shape().has_states) start = complex_values<Real>(h0, halves);
    if (shape().has_states) end = complex_values<Real>(dh_final, halves);
    const auto inputs = complex_values<Real>(x, halves);
    result.forward(reference_layout(), inputs, start);
    result.backward(reference_layout(), inputs,
                    own_states ? result.h : complex_values<Real>(h, halves), start,
                    complex_values<Real>(dh, halves), end);
    return result;
  }

  template <class Oracle, class Peer>
  void check_in() const {
    const auto expected = reference<Oracle>(true);
    const auto peer = reference<Peer>(false);
    const bool halves = shape().turns;
    using Check = OutputCheck<Oracle, Peer>;
    const auto as_complex = [](const auto& values) {
      using Real = typename std::decay_t<decltype(values)>::value_type;
      return ComplexArray<Real>(values.begin(), values.end());
    };
    Check("h", expected.h, peer.h, h, halves);
    Check("h_final", expected.h_final, peer.h_final, h_final, halves);
    Check("dx", expected.dx, peer.dx, dx, halves);
    Check("dh0", expected.dh0, peer.dh0, dh0, halves);
    Check("dnu_log", as_complex(expected.dnu), as_complex(peer.dnu), sum_of_rows(dnu_partial),
          false, expected.dnu_squares);
    Check("dgamma_log", as_complex(expected.dgamma), as_complex(peer.dgamma),
          sum_of_rows(dgamma_partial), false, expected.dgamma_squares);
    if (halves) {
      Check("dtheta_log", as_complex(expected.dtheta), as_complex(peer.dtheta),
            sum_of_rows(dtheta_partial), false, expected.dtheta_squares);
    }
  }
};

}  // namespace tidegate::testing
