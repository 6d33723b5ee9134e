#pragma once

// Naive reference of gated linear attention, token by token from the equations of
// kernels/gla/gla.h. `Real` is double or long double for an oracle; float shows what the same maths
// costs in single precision, which is what a kernel's error is compared with.

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/gla/gla.h"
#include "support/scan_reference.h"

namespace tidegate::testing {

/// Inputs are [tokens, H, ..] and [N, H, K, V] as the params describe them, gates as given. Empty
/// k, gamma, h0 and dh_final mean none, or zero.
template <class Real>
struct GlaReference {
  using Array = std::vector<Real>;

  int64_t heads = 1, key_dim = 1, value_dim = 1;
  Real scale = 1;
  bool logits = false;
  bool gate_per_head = false;
  kernels::gla::InputActivation q_activation = kernels::gla::InputActivation::kNone;
  kernels::gla::InputActivation v_activation = kernels::gla::InputActivation::kNone;
  Array q, k, v, gate, gamma, h0, d_o, dh_final;

  Array o, h_final;                      // written by run()
  Array dq, dk, dv, dgate, dgamma, dh0;  // dgamma: [N, H, K]
  Array dgamma_squares, dgate_squares;   // (the sum of the sizes of their terms)^2

  void run(const ReferenceLayout& layout) {
    o.assign(layout.tokens * heads * value_dim, 0);
    dv = o;
    dq.assign(layout.tokens * heads * key_dim, 0);
    dk = dq;
    dgate.assign(layout.tokens * heads * gate_width(), 0);
    dgate_squares = dgate;
    h_final.assign(layout.sequences.size() * heads * key_dim * value_dim, 0);
    dh0 = h_final;
    dgamma.assign(layout.sequences.size() * heads * key_dim, 0);
    dgamma_squares = dgamma;
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      for (int64_t h = 0; h < heads; ++h) run_head(layout, static_cast<int64_t>(n), h);
    }
    for (Array* sizes : {&dgamma_squares, &dgate_squares}) {
      for (Real& size : *sizes) size *= size;
    }
  }

 protected:
  static Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }
  static Real activated(Real x, kernels::gla::InputActivation activation) {
    if (activation == kernels::gla::InputActivation::kNone) return x;
    return activation == kernels::gla::InputActivation::kSilu ? x * sigmoid(x) : sigmoid(x);
  }
  static Real slope(Real x, kernels::gla::InputActivation activation) {
    if (activation == kernels::gla::InputActivation::kNone) return 1;
    const Real s = sigmoid(x), other = sigmoid(-x);
    return activation == kernels::gla::InputActivation::kSilu ? s + x * s * other : s * other;
  }

  int64_t gate_width() const { return gate_per_head ? 1 : key_dim; }
  int64_t key_at(int64_t token, int64_t h, int64_t i) const {
    return (token * heads + h) * key_dim + i;
  }
  int64_t value_at(int64_t token, int64_t h, int64_t j) const {
    return (token * heads + h) * value_dim + j;
  }
  int64_t gate_at(int64_t token, int64_t h, int64_t i) const {
    return (token * heads + h) * gate_width() + (gate_per_head ? 0 : i);
  }
  Real bound(int64_t h, int64_t i) const { return gamma.empty() ? 0 : gamma[h * key_dim + i]; }
  Real decay(int64_t token, int64_t h, int64_t i) const {
    const Real x = gate[gate_at(token, h, i)];
    return logits ? bound(h, i) + (1 - bound(h, i)) * sigmoid(x) : std::exp(x);
  }
  Real key(int64_t token, int64_t h, int64_t i) const {
    if (!logits) return k[key_at(token, h, i)];
    return (1 - bound(h, i)) * sigmoid(-gate[gate_at(token, h, i)]);
  }
  Real query(int64_t token, int64_t h, int64_t i) const {
    return scale * activated(q[key_at(token, h, i)], q_activation);
  }
  Real value(int64_t token, int64_t h, int64_t j) const {
    return activated(v[value_at(token, h, j)], v_activation);
  }

 private:
  /// What a head of one token is made of: computed once, since each has an exponential and is used
  /// K or V times.
  struct Token {
    Array decay, key, query;  // [K]
    Array value;              // [V]
  };
  Token token_of(int64_t t, int64_t h) const {
    Token token{Array(key_dim), Array(key_dim), Array(key_dim), Array(value_dim)};
    for (int64_t i = 0; i < key_dim; ++i) {
      token.decay[i] = decay(t, h, i);
      token.key[i] = key(t, h, i);
      token.query[i] = query(t, h, i);
    }
    for (int64_t j = 0; j < value_dim; ++j) token.value[j] = value(t, h, j);
    return token;
  }

  void run_head(const ReferenceLayout& layout, int64_t n, int64_t h) {
    const TokenRange& range = layout.sequences[n];
    const int64_t size = key_dim * value_dim, first = (n * heads + h) * size;
    std::vector<Array> states(range.length + 1, Array(size, 0));  // before each token; the last
    if (!h0.empty()) states[0].assign(h0.begin() + first, h0.begin() + first + size);
    for (int64_t step = 0; step < range.length; ++step) {
      const int64_t t = layout.token(range, step);
      const Token token = token_of(t, h);
      for (int64_t i = 0; i < key_dim; ++i) {
        for (int64_t j = 0; j < value_dim; ++j) {
          const int64_t at = i * value_dim + j;
          const Real next = token.decay[i] * states[step][at] + token.key[i] * token.value[j];
          states[step + 1][at] = next;
          o[value_at(t, h, j)] += token.query[i] * next;
        }
      }
    }
    std::copy(states.back().begin(), states.back().end(), h_final.begin() + first);

    Array ds(size, 0);
    if (!dh_final.empty()) ds.assign(dh_final.begin() + first, dh_final.begin() + first + size);
    for (int64_t step = range.length - 1; step >= 0; --step) {
      const int64_t t = layout.token(range, step);
      const Token token = token_of(t, h);
      for (int64_t i = 0; i < key_dim; ++i) {
        Real of_q = 0, of_k = 0, of_f = 0;
        for (int64_t j = 0; j < value_dim; ++j) {
          const int64_t at = i * value_dim + j;
          const Real out = d_o[value_at(t, h, j)];
          ds[at] += token.query[i] * out;
          of_q += states[step + 1][at] * out;
          of_k += ds[at] * token.value[j];
          of_f += ds[at] * states[step][at];
          dv[value_at(t, h, j)] += ds[at] * token.key[i];
          ds[at] *= token.decay[i];
        }
        store(n, t, h, i, of_q, of_k, of_f);
      }
      for (int64_t j = 0; j < value_dim; ++j) {
        dv[value_at(t, h, j)] *= slope(v[value_at(t, h, j)], v_activation);
      }
    }
    std::copy(ds.begin(), ds.end(), dh0.begin() + first);
  }

  void store(int64_t n, int64_t t, int64_t h, int64_t i, Real of_q, Real of_k, Real of_f) {
    dq[key_at(t, h, i)] = scale * of_q * slope(q[key_at(t, h, i)], q_activation);
    if (!logits) {
      dk[key_at(t, h, i)] = of_k;
      dgate[gate_at(t, h, i)] += decay(t, h, i) * of_f;
      dgate_squares[gate_at(t, h, i)] += std::abs(decay(t, h, i) * of_f);
      return;
    }
    const Real x = gate[gate_at(t, h, i)];
    const Real of_gate = (1 - bound(h, i)) * sigmoid(x) * sigmoid(-x);
    dgate[gate_at(t, h, i)] = (of_f - of_k) * of_gate;
    dgate_squares[gate_at(t, h, i)] = (std::abs(of_f) + std::abs(of_k)) * of_gate;
    dgamma[(n * heads + h) * key_dim + i] += (of_f - of_k) * sigmoid(-x);
    dgamma_squares[(n * heads + h) * key_dim + i] += std::abs(of_f - of_k) * sigmoid(-x);
  }
};

}  // namespace tidegate::testing
