#pragma once

// Forgetting attention on host tensors: random inputs, the equations in float64 written out pair by
// pair, and how far results may be from them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/forgetting_attention.h"
#include "support/typed_series.h"

namespace tidegate::testing {

/// Which gates: log f near zero; logsigmoid of normal numbers; mixed; -1e4 at random places; zero;
/// strong in the first half of the heads, weak in the others.
enum class ForgetGates : uint8_t { kWeak, kStrong, kMixed, kResets, kNone, kByHead };

struct AttentionShape {
  DType dtype = DType::kBFloat16;
  int64_t batch = 1, queries = 1, keys = 1;  // Tq and Tk, of all sequences where they are packed
  int64_t heads = 1, key_heads = 1, head_dim = 64;
  int64_t window = 0;
  double prune = 0;
  bool deterministic = false;
  ForgetGates gates = ForgetGates::kStrong;
  std::vector<int32_t> query_offsets = {}, key_offsets = {};  // packed, if not empty
  int64_t gap = 0;  // elements between rows, and before the first
  uint32_t seed = 1;

  std::string name() const {
    return std::string(kernels::dtype_name(dtype)) + " B" + std::to_string(batch) + " Tq" +
           std::to_string(queries) + " Tk" + std::to_string(keys) + " Hq" + std::to_string(heads) +
           " Hkv" + std::to_string(key_heads) + " D" + std::to_string(head_dim) + " window " +
           std::to_string(window) + " gates " + std::to_string(static_cast<int>(gates)) +
           (deterministic ? " deterministic" : "") + (query_offsets.empty() ? "" : " packed");
  }
};

class AttentionProblem {
 public:
  explicit AttentionProblem(const AttentionShape& s)
      : shape(s),
        q(data(s.queries, s.heads)),
        k(data(s.keys, s.key_heads)),
        v(data(s.keys, s.key_heads)),
        log_f(DType::kFloat32, s.batch, s.keys, s.heads),
        d_o(data(s.queries, s.heads)),
        dlse(DType::kFloat32, s.batch, s.heads, s.queries),
        o(data(s.queries, s.heads)),
        lse(DType::kFloat32, s.batch, s.heads, s.queries),
        dq(data(s.queries, s.heads)),
        dk(data(s.keys, s.key_heads)),
        dv(data(s.keys, s.key_heads)),
        dlog_f(DType::kFloat32, s.batch, s.keys, s.heads) {
    std::mt19937 random(s.seed);
    std::normal_distribution<double> normal;
    for (TypedSeries* t : {&q, &k, &v, &d_o, &dlse}) {
      fill(t, [&] { return normal(random); });
    }
    int64_t at = 0;
    fill(&log_f, [&] {
      const bool first_half = 2 * (at++ % s.heads) < s.heads;
      const ForgetGates by_head = first_half ? ForgetGates::kStrong : ForgetGates::kWeak;
      return gate(s.gates == ForgetGates::kByHead ? by_head : s.gates, normal(random), random());
    });
  }

  kernels::attention::ForgettingAttentionBackwardParams params() {
    kernels::attention::ForgettingAttentionBackwardParams b;
    kernels::attention::ForgettingAttentionParams& p = b.forward;
    p.layout = layout(shape.queries, shape.query_offsets);
    p.key_layout = layout(shape.keys, shape.key_offsets);
    p.heads = shape.heads;
    p.key_heads = shape.key_heads;
    p.head_dim = shape.head_dim;
    p.channels = shape.heads * shape.head_dim;
    p.scale = scale();
    p.window = shape.window;
    p.prune = shape.prune;
    p.deterministic = shape.deterministic;
    p.q = heads_of(&q, shape.head_dim);
    p.k = heads_of(&k, shape.head_dim);
    p.v = heads_of(&v, shape.head_dim);
    p.log_f = heads_of(&log_f, 1);
    p.o = heads_of(&o, shape.head_dim);
    p.lse = lse.at(0, 0);
    b.d_o = heads_of(&d_o, shape.head_dim);
    b.dlse = dlse.at(0, 0);
    b.dq = heads_of(&dq, shape.head_dim);
    b.dk = heads_of(&dk, shape.head_dim);
    b.dv = heads_of(&dv, shape.head_dim);
    b.dlog_f = heads_of(&dlog_f, 1);
    return b;
  }

  std::vector<TypedSeries*> inputs() { return {&q, &k, &v, &log_f, &d_o, &dlse}; }
  std::vector<TypedSeries*> outputs() { return {&o, &lse, &dq, &dk, &dv, &dlog_f}; }

  /// Norm errors of 16-bit data: products of rounded operands, and one rounding at the end; of fp32
  /// data a few roundings. The gates' gradients are sums of many roundings, most of which cancel.
  void check(bool backward = true) {
    SCOPED_TRACE(shape.name());
    const Results ref = reference();
    const double step = shape.dtype == DType::kBFloat16  ? 1.0 / 256
                        : shape.dtype == DType::kFloat16 ? 1.0 / 2048
                                                         : 4e-6;
    expect_near("o", o, ref.o, step + 2 * shape.prune);
    expect_near("lse", lse, ref.lse, 3e-6 + shape.prune);
    for (TypedSeries* t : outputs()) {
      EXPECT_TRUE(t->surroundings_untouched());
    }
    if (!backward) return;
    // At their smallest, gradients that are zero but for rounding are held against what cancelled.
    const double floor = 1e-3 * norm(ref.dv) * step;
    const double slack = 1.5 * step + 4 * shape.prune;
    expect_near("dv", dv, ref.dv, slack);
    expect_near("dq", dq, ref.dq, slack, floor);
    expect_near("dk", dk, ref.dk, slack, floor);
    expect_near("dlog_f", dlog_f, ref.dlog_f, slack, floor);
  }

  AttentionShape shape;
  TypedSeries q, k, v, log_f, d_o, dlse, o, lse, dq, dk, dv, dlog_f;

 private:
  using Values = std::vector<double>;
  struct Results {
    Values o, lse, dq, dk, dv, dlog_f;
  };

  TypedSeries data(int64_t time, int64_t heads) const {
    return {shape.dtype, shape.batch, time, heads * shape.head_dim, shape.gap, shape.gap};
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(shape.head_dim)); }

  template <class Draw>
  static void fill(TypedSeries* t, const Draw& draw) {
    for (int64_t i = 0; i < t->tokens(); ++i) {
      for (int64_t j = 0; j < t->columns(); ++j) {
        t->set(i, j, draw());
      }
    }
  }
  static double gate(ForgetGates gates, double z, uint32_t draw) {
    switch (gates) {
      case ForgetGates::kWeak:
        return -1e-3 * std::fabs(z);
      case ForgetGates::kStrong:
        return -std::log1p(std::exp(-z));
      case ForgetGates::kMixed:
        return draw % 4 == 0 ? -5 * std::fabs(z) : -1e-4 * std::fabs(z);
      case ForgetGates::kResets:
        return draw % 8 == 0 ? -1e4 : -0.05 * std::fabs(z);
      default:
        return 0;
    }
  }

  kernels::SequenceLayout layout(int64_t time, const std::vector<int32_t>& offsets) const {
    if (offsets.empty()) {
      return {.batch = shape.batch, .time = time, .sequences = shape.batch};
    }
    return {.batch = 1,
            .time = time,
            .sequences = static_cast<int64_t>(offsets.size()) - 1,
            .offsets = offsets.data()};
  }
  static kernels::HeadSeries heads_of(TypedSeries* t, int64_t stride) {
    const kernels::TimeSeries s = t->series();
    return {s.data, s.stride_b, s.stride_t, stride, s.dtype};
  }

  static Values values(const TypedSeries& t) {
    Values x;
    x.reserve(t.tokens() * t.columns());
    for (int64_t i = 0; i < t.tokens(); ++i) {
      for (int64_t j = 0; j < t.columns(); ++j) x.push_back(t.get(i, j).real());
    }
    return x;
  }
  static double norm(const Values& x) {
    double sum = 0;
    for (const double e : x) sum += e * e;
    return std::sqrt(sum);
  }
  static void expect_near(const char* what, const TypedSeries& x, const Values& ref, double bound,
                          double floor = 1e-6) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < x.tokens() * x.columns(); ++i) {
      const double value = x.get(i / x.columns(), i % x.columns()).real();
      if (value == ref[i]) continue;  // infinities too
      error += (value - ref[i]) * (value - ref[i]);
      size += ref[i] * ref[i];
    }
    EXPECT_LE(std::sqrt(error), bound * std::sqrt(size) + floor) << what;
  }

  Results reference() const {
    const int64_t dim = shape.head_dim, heads = shape.heads;
    const int64_t group = heads / shape.key_heads;
    Results r = {Values(q.tokens() * q.columns()), Values(lse.tokens() * lse.columns(), -INFINITY),
                 Values(q.tokens() * q.columns()), Values(k.tokens() * k.columns()),
                 Values(k.tokens() * k.columns()), Values(log_f.tokens() * heads)};
    const Values qs = values(q), ks = values(k), vs = values(v), dos = values(d_o);
    const bool packed = !shape.query_offsets.empty();
    const int64_t sequences = packed ? shape.query_offsets.size() - 1 : shape.batch;
    for (int64_t n = 0; n < sequences; ++n) {
      const int64_t q0 = packed ? shape.query_offsets[n] : n * shape.queries;
      const int64_t k0 = packed ? shape.key_offsets[n] : n * shape.keys;
      const int64_t nq = packed ? shape.query_offsets[n + 1] - q0 : shape.queries;
      const int64_t nk = packed ? shape.key_offsets[n + 1] - k0 : shape.keys;
      for (int64_t h = 0; h < heads; ++h) {
        const auto key_at = [&](int64_t j) {
          return ((k0 + j) * shape.key_heads + h / group) * dim;
        };
        Values c(nk, 0.0), falls(nk, 0.0);
        for (int64_t j = 1; j < nk; ++j) c[j] = c[j - 1] + log_f.get(k0 + j, h).real();
        for (int64_t i = 0; i < nq; ++i) {
          const int64_t p = i + nk - nq, query = ((q0 + i) * heads + h) * dim;
          const int64_t first = shape.window == 0 ? 0 : std::max<int64_t>(0, p - shape.window + 1);
          if (p < 0) continue;
          Values s(p + 1, -INFINITY);
          double largest = -INFINITY, sum = 0;
          for (int64_t j = first; j <= p; ++j) {
            double dot = 0;
            for (int64_t d = 0; d < dim; ++d) dot += qs[query + d] * ks[key_at(j) + d];
            s[j] = scale() * dot + c[p] - c[j];
            largest = std::max(largest, s[j]);
          }
          for (int64_t j = first; j <= p; ++j) sum += std::exp(s[j] - largest);
          const double log_sum = largest + std::log(sum);
          const int64_t lse_at =
              packed ? h * shape.queries + q0 + i : (n * heads + h) * shape.queries + i;
          r.lse[lse_at] = log_sum;
          Values out(dim, 0.0);
          for (int64_t j = first; j <= p; ++j) {
            const double weight = std::exp(s[j] - log_sum);
            for (int64_t d = 0; d < dim; ++d) out[d] += weight * vs[key_at(j) + d];
          }
          double delta = -dlse.get(lse_at / shape.queries, lse_at % shape.queries).real();
          for (int64_t d = 0; d < dim; ++d) {
            r.o[query + d] = out[d];
            delta += out[d] * dos[query + d];
          }
          for (int64_t j = first; j <= p; ++j) {
            const double weight = std::exp(s[j] - log_sum);
            double dp = 0;
            for (int64_t d = 0; d < dim; ++d) dp += dos[query + d] * vs[key_at(j) + d];
            const double ds = weight * (dp - delta);
            falls[p] += ds;
            falls[j] -= ds;
            for (int64_t d = 0; d < dim; ++d) {
              r.dq[query + d] += scale() * ds * ks[key_at(j) + d];
              r.dk[key_at(j) + d] += scale() * ds * qs[query + d];
              r.dv[key_at(j) + d] += weight * dos[query + d];
            }
          }
        }
        double sum = 0;
        for (int64_t u = nk - 1; u > 0; --u) {
          sum += falls[u];
          r.dlog_f[(k0 + u) * heads + h] = sum;
        }
      }
    }
    return r;
  }
};

}  // namespace tidegate::testing
