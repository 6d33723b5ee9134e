#pragma once

// Naive reference of the scans, step by step from the equations of kernels/scan/scan.h, one channel
// after another. `Real` is double or long double for an oracle; float shows what the same maths
// costs in single precision, which is what a kernel's error is compared with.

#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

namespace tidegate::testing {

/// A sequence is `length` rows of the flattened [B * T] token axis from `first` on.
struct TokenRange {
  int64_t first = 0;
  int64_t length = 0;
};

struct ReferenceLayout {
  std::vector<TokenRange> sequences;
  int64_t tokens = 0;    // B * T
  int64_t channels = 0;  // D
  bool reverse = false;

  /// The row of a sequence's step, counted along the scan.
  int64_t token(const TokenRange& range, int64_t step) const {
    return reverse ? range.first + range.length - 1 - step : range.first + step;
  }
};

template <class Real>
using ComplexArray = std::vector<std::complex<Real>>;

/// Inputs and outputs are [tokens, D] or [N, D], complex throughout: real cases have zero imaginary
/// parts everywhere. Empty h0 and dh_final mean zero.
template <class Real>
struct LinearScanReference {
  using C = std::complex<Real>;
  ComplexArray<Real> h, h_final;
  ComplexArray<Real> dx, da, dh0;

  void forward(const ReferenceLayout& layout, const ComplexArray<Real>& x,
               const ComplexArray<Real>& a, const ComplexArray<Real>& h0) {
    const int64_t channels = layout.channels;
    h.assign(layout.tokens * channels, C(0));
    h_final.assign(layout.sequences.size() * channels, C(0));
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      for (int64_t d = 0; d < channels; ++d) {
        C state = h0.empty() ? C(0) : h0[n * channels + d];
        for (int64_t step = 0; step < layout.sequences[n].length; ++step) {
          const int64_t i = layout.token(layout.sequences[n], step) * channels + d;
          state = a[i] * state + x[i];
          h[i] = state;
        }
        h_final[n * channels + d] = state;
      }
    }
  }

  /// `states` is h as the kernel under test reads it: this one's own, or rounded to a dtype.
  void backward(const ReferenceLayout& layout, const ComplexArray<Real>& a,
                const ComplexArray<Real>& states, const ComplexArray<Real>& h0,
                const ComplexArray<Real>& dh, const ComplexArray<Real>& dh_final) {
    const int64_t channels = layout.channels;
    dx.assign(layout.tokens * channels, C(0));
    da.assign(layout.tokens * channels, C(0));
    dh0.assign(layout.sequences.size() * channels, C(0));
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      const TokenRange& range = layout.sequences[n];
      for (int64_t d = 0; d < channels; ++d) {
        C p = dh_final.empty() ? C(0) : dh_final[n * channels + d];
        for (int64_t step = range.length - 1; step >= 0; --step) {
          const int64_t i = layout.token(range, step) * channels + d;
          const C start = h0.empty() ? C(0) : h0[n * channels + d];
          const C before = step == 0 ? start : states[layout.token(range, step - 1) * channels + d];
          const C g = dh[i] + p;
          dx[i] = g;
          da[i] = g * std::conj(before);
          p = g * std::conj(a[i]);
        }
        dh0[n * channels + d] = p;
      }
    }
  }
};

/// h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) act(c_t). c, h and their like are complex
/// arrays; f, gamma, theta and their gradients are real.
template <class Real>
struct HgruReference {
  using C = std::complex<Real>;
  std::vector<Real> gamma, theta;  // [D]
  bool silu = true;
  ComplexArray<Real> h, h_final;
  ComplexArray<Real> dc, dh0;
  std::vector<Real> df;
  std::vector<Real> dgamma, dtheta;                  // [N, D], sums over time
  std::vector<Real> dgamma_squares, dtheta_squares;  // of their terms

  static Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }
  Real act(Real c) const { return silu ? c * sigmoid(c) : c; }
  Real act_slope(Real c) const { return silu ? sigmoid(c) * (1 + c * sigmoid(-c)) : Real(1); }
  C input(C c) const { return {act(c.real()), act(c.imag())}; }
  C turn(int64_t d) const { return {std::cos(theta[d]), std::sin(theta[d])}; }

  void forward(const ReferenceLayout& layout, const ComplexArray<Real>& c,
               const std::vector<Real>& f, const ComplexArray<Real>& h0) {
    const int64_t channels = layout.channels;
    h.assign(layout.tokens * channels, C(0));
    h_final.assign(layout.sequences.size() * channels, C(0));
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      for (int64_t d = 0; d < channels; ++d) {
        const C phase = turn(d);
        C state = h0.empty() ? C(0) : h0[n * channels + d];
        for (int64_t step = 0; step < layout.sequences[n].length; ++step) {
          const int64_t i = layout.token(layout.sequences[n], step) * channels + d;
          const Real lambda = gamma[d] + (1 - gamma[d]) * sigmoid(f[i]);
          state = lambda * phase * state + (1 - gamma[d]) * sigmoid(-f[i]) * input(c[i]);
          h[i] = state;
        }
        h_final[n * channels + d] = state;
      }
    }
  }

  void backward(const ReferenceLayout& layout, const ComplexArray<Real>& c,
                const std::vector<Real>& f, const ComplexArray<Real>& states,
                const ComplexArray<Real>& h0, const ComplexArray<Real>& dh,
                const ComplexArray<Real>& dh_final) {
    const int64_t channels = layout.channels;
    const int64_t count = static_cast<int64_t>(layout.sequences.size());
    dc.assign(layout.tokens * channels, C(0));
    df.assign(layout.tokens * channels, Real(0));
    dh0.assign(count * channels, C(0));
    for (auto* sums : {&dgamma, &dtheta, &dgamma_squares, &dtheta_squares}) {
      sums->assign(count * channels, Real(0));
    }
    for (int64_t n = 0; n < count; ++n) {
      const TokenRange& range = layout.sequences[n];
      for (int64_t d = 0; d < channels; ++d) {
        const C phase = turn(d);
        C p = dh_final.empty() ? C(0) : dh_final[n * channels + d];
        for (int64_t step = range.length - 1; step >= 0; --step) {
          const int64_t i = layout.token(range, step) * channels + d;
          const C start = h0.empty() ? C(0) : h0[n * channels + d];
          const C before = step == 0 ? start : states[layout.token(range, step - 1) * channels + d];
          p = step_back(n * channels + d, d, i, phase, c[i], f[i], before, dh[i] + p);
        }
        dh0[n * channels + d] = p;
      }
    }
  }

 private:
  static void add(Real term, Real& sum, Real& squares) {
    sum += term;
    squares += term * term;
  }

  /// One step's gradients from g = dL/dh_t; returns what flows on into h_{t-1}.
  C step_back(int64_t nd, int64_t d, int64_t i, C phase, C c, Real f, C before, C g) {
    const Real open = sigmoid(f);
    const Real shut = sigmoid(-f);
    const Real lambda = gamma[d] + (1 - gamma[d]) * open;
    const C turned = phase * before;
    const C du = (1 - gamma[d]) * shut * g;
    dc[i] = {du.real() * act_slope(c.real()), du.imag() * act_slope(c.imag())};
    const Real dlambda = (std::conj(g) * (turned - input(c))).real();
    df[i] = dlambda * (1 - gamma[d]) * open * shut;
    add(dlambda * shut, dgamma[nd], dgamma_squares[nd]);
    add((std::conj(g) * C(0, 1) * lambda * turned).real(), dtheta[nd], dtheta_squares[nd]);
    return lambda * std::conj(phase) * g;
  }
};

/// h_t = lambda h_{t-1} + gamma x_t, lambda = exp(-exp(nu_log) + i exp(theta_log)),
/// gamma = exp(gamma_log). x, h and their like are complex arrays.
template <class Real>
struct LruReference {
  using C = std::complex<Real>;
  std::vector<Real> nu_log, theta_log, gamma_log;  // [D]; theta_log is empty when real
  ComplexArray<Real> h, h_final;
  ComplexArray<Real> dx, dh0;
  std::vector<Real> dnu, dtheta, dgamma;                          // [D], sums over time
  std::vector<Real> dnu_squares, dtheta_squares, dgamma_squares;  // of their terms

  C lambda(int64_t d) const {
    const Real modulus = std::exp(-std::exp(nu_log[d]));
    return theta_log.empty() ? C(modulus) : std::polar(modulus, std::exp(theta_log[d]));
  }

  void forward(const ReferenceLayout& layout, const ComplexArray<Real>& x,
               const ComplexArray<Real>& h0) {
    const int64_t channels = layout.channels;
    h.assign(layout.tokens * channels, C(0));
    h_final.assign(layout.sequences.size() * channels, C(0));
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      for (int64_t d = 0; d < channels; ++d) {
        const C decay = lambda(d);
        const Real gamma = std::exp(gamma_log[d]);
        C state = h0.empty() ? C(0) : h0[n * channels + d];
        for (int64_t step = 0; step < layout.sequences[n].length; ++step) {
          const int64_t i = layout.token(layout.sequences[n], step) * channels + d;
          state = decay * state + gamma * x[i];
          h[i] = state;
        }
        h_final[n * channels + d] = state;
      }
    }
  }

  /// `states` is h as the kernel under test reads it: this one's own, or rounded to a dtype.
  void backward(const ReferenceLayout& layout, const ComplexArray<Real>& x,
                const ComplexArray<Real>& states, const ComplexArray<Real>& h0,
                const ComplexArray<Real>& dh, const ComplexArray<Real>& dh_final) {
    const int64_t channels = layout.channels;
    dx.assign(layout.tokens * channels, C(0));
    dh0.assign(layout.sequences.size() * channels, C(0));
    for (auto* sums : {&dnu, &dtheta, &dgamma, &dnu_squares, &dtheta_squares, &dgamma_squares}) {
      sums->assign(channels, Real(0));
    }
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      const TokenRange& range = layout.sequences[n];
      for (int64_t d = 0; d < channels; ++d) {
        const Channel channel = channel_of(d);
        C p = dh_final.empty() ? C(0) : dh_final[n * channels + d];
        for (int64_t step = range.length - 1; step >= 0; --step) {
          const int64_t i = layout.token(range, step) * channels + d;
          const C start = h0.empty() ? C(0) : h0[n * channels + d];
          const C before = step == 0 ? start : states[layout.token(range, step - 1) * channels + d];
          p = step_back(channel, d, i, x[i], before, dh[i] + p);
        }
        dh0[n * channels + d] = p;
      }
    }
  }

 private:
  static void add(Real term, Real& sum, Real& squares) {
    sum += term;
    squares += term * term;
  }

  /// What is the same for all steps of a channel.
  struct Channel {
    Real gamma, rate;  // rate: nu |lambda|
    C phase, turn, lambda;
  };
  Channel channel_of(int64_t d) const {
    const Real rate = std::exp(nu_log[d] - std::exp(nu_log[d]));  // finite throughout
    Channel channel{std::exp(gamma_log[d]), rate, C(1), C(0), lambda(d)};
    if (!theta_log.empty()) {
      channel.phase = std::polar(Real(1), std::exp(theta_log[d]));
      channel.turn = C(0, std::exp(theta_log[d])) * channel.lambda;
    }
    return channel;
  }

  /// One step's gradients from g = dL/dh_t; returns what flows on into h_{t-1}.
  C step_back(const Channel& channel, int64_t d, int64_t i, C x, C before, C g) {
    dx[i] = channel.gamma * g;
    const C shrunk = std::conj(g) * channel.rate * channel.phase * before;
    add(-shrunk.real(), dnu[d], dnu_squares[d]);
    add(channel.gamma * (std::conj(g) * x).real(), dgamma[d], dgamma_squares[d]);
    if (!theta_log.empty()) {
      const C turned = channel.turn * before;
      add((std::conj(g) * turned).real(), dtheta[d], dtheta_squares[d]);
    }
    return std::conj(channel.lambda) * g;
  }
};

}  // namespace tidegate::testing
