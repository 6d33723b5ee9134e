#pragma once

// wkv4 problems on the host: typed, strided, poisoned buffers with the params that point into them,
// and a naive reference in double precision to hold the results against. Keys reach from -80 to 80,
// which double precision needs no running maximum for.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/scan/wkv4.h"
#include "support/typed_series.h"

namespace tidegate::testing {

enum class Keys { kNormal, kWide, kFalling, kHigh, kTurning, kOutliersFirst };

struct Wkv4Shape {
  DType dtype = DType::kFloat32;
  int64_t batch = 2;
  int64_t time = 17;
  int64_t channels = 19;
  std::vector<int64_t> offsets = {};  // packed sequences; the batch is one then
  bool has_states = true;             // the entering one, and the gradient of the final one
  bool saves = true;                  // and runs the backward pass
  Keys keys = Keys::kNormal;
  int64_t gap = 0;    // elements between rows
  int64_t shift = 0;  // elements before the first
  unsigned seed = 7;

  std::string name() const {
    return std::string(kernels::dtype_name(dtype)) + " B" + std::to_string(batch) + " T" +
           std::to_string(time) + " D" + std::to_string(channels) + " N" +
           std::to_string(offsets.empty() ? batch : static_cast<int64_t>(offsets.size()) - 1) +
           " keys " + std::to_string(static_cast<int>(keys)) + (has_states ? " states" : "");
  }
};

/// One channel of one sequence: values and gradients as the equations have them.
struct Wkv4Reference {
  std::vector<double> o, dk, dv;
  std::vector<double> dk_size;  // of the terms, whose roundings do not cancel as they do
  double mean = 0, log = 0;     // of the final state: y / z and the logarithm of z
  double dy = 0, dz = 0;        // of the state that enters, not scaled
  double dw = 0, du = 0;
  double dw_size = 0, du_size = 0;  // sums of the terms' magnitudes

  /// y and z not scaled; the loss reads d_mean * mean + d_log * log beside grad_o * o.
  Wkv4Reference(double w, double u, const std::vector<double>& k, const std::vector<double>& v,
                const std::vector<double>& grad_o, double y, double z, double d_mean,
                double d_log) {
    const size_t n = k.size();
    std::vector<double> ys(n), zs(n);
    for (size_t t = 0; t < n; ++t) {
      ys[t] = y, zs[t] = z;
      const double bonus = std::exp(u + k[t]);
      o.push_back((y + bonus * v[t]) / (z + bonus));
      y = std::exp(-w) * y + std::exp(k[t]) * v[t];
      z = std::exp(-w) * z + std::exp(k[t]);
    }
    mean = y / z, log = std::log(z);
    dy = d_mean / z, dz = (d_log - d_mean * mean) / z;
    dk.resize(n), dv.resize(n), dk_size.resize(n);
    for (size_t t = n; t-- > 0;) {
      const double token = std::exp(k[t]), bonus = std::exp(u + k[t]), decay = std::exp(-w);
      const double g = grad_o[t] / (zs[t] + bonus);
      const double by_bonus = g * bonus * (v[t] - o[t]);
      dv[t] = g * bonus + token * dy;
      dk[t] = by_bonus + token * (v[t] * dy + dz);
      const double bonus_size = std::fabs(g * bonus) * (std::fabs(v[t]) + std::fabs(o[t]));
      dk_size[t] = bonus_size + token * (std::fabs(v[t] * dy) + std::fabs(dz));
      du += by_bonus, du_size += bonus_size;
      dw -= decay * (dy * ys[t] + dz * zs[t]);
      dw_size += decay * (std::fabs(dy * ys[t]) + std::fabs(dz * zs[t]));
      dy = decay * dy + g;
      dz = decay * dz - g * o[t];
    }
  }
};

class Wkv4Problem {
 public:
  explicit Wkv4Problem(const Wkv4Shape& shape)
      : shape_(shape), wide_(kernels::state_dtype(shape.dtype)), random_(shape.seed) {
    const int64_t d = shape.channels;
    for (TypedSeries* data : {&k, &v, &o, &grad_o, &dk, &dv}) {
      *data = {shape.dtype, shape.batch, shape.time, d, shape.gap, shape.shift};
    }
    for (TypedSeries* values : {&w, &u}) *values = {wide_, 1, 1, d};
    for (TypedSeries* states : {&state, &final_state, &dfinal, &dstate}) {
      *states = {wide_, sequences(), 1, 3 * d};
    }
    saved = {wide_, shape.batch, kernels::scan::wkv4_saved_rows(shape.time), 3 * d};
    dw_partial = du_partial = {wide_, 1, std::max<int64_t>(sequences(), 1), d};
    fill();
  }

  const Wkv4Shape& shape() const { return shape_; }
  int64_t sequences() const {
    return shape_.offsets.empty() ? shape_.batch : static_cast<int64_t>(shape_.offsets.size()) - 1;
  }
  std::vector<TypedSeries*> outputs() { return {&o, &final_state, &dk, &dv, &dstate}; }

  kernels::scan::Wkv4Params forward_params() {
    kernels::scan::Wkv4Params params;
    params.layout.batch = shape_.batch;
    params.layout.time = shape_.time;
    params.layout.sequences = sequences();
    params.layout.offsets = shape_.offsets.empty() ? nullptr : shape_.offsets.data();
    params.layout.offsets_are_int64 = true;
    params.channels = shape_.channels;
    params.k = k.series();
    params.v = v.series();
    params.o = o.series();
    params.w = w.at(0, 0);
    params.u = u.at(0, 0);
    params.state = shape_.has_states ? state.at(0, 0) : nullptr;
    params.final_state = final_state.at(0, 0);
    params.saved = shape_.saves ? saved.at(0, 0) : nullptr;
    return params;
  }
  kernels::scan::Wkv4BackwardParams backward_params() {
    kernels::scan::Wkv4BackwardParams params;
    params.forward = forward_params();
    params.grad_o = grad_o.series();
    params.dfinal_state = shape_.has_states ? dfinal.at(0, 0) : nullptr;
    params.dk = dk.series();
    params.dv = dv.series();
    params.dw_partial = dw_partial.at(0, 0);
    params.du_partial = du_partial.at(0, 0);
    params.dstate = dstate.at(0, 0);
    return params;
  }

  /// After the forward pass: the gradient of the loss by the final state, at its own exponent.
  void fill_dfinal() {
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t j = 0; j < shape_.channels; ++j) {
        const double y = row(final_state, n, 0, j), z = row(final_state, n, 1, j);
        const double a = d_mean(n, j), b = d_log(n, j);
        dfinal.set(n, j, a / z);
        dfinal.set(n, shape_.channels + j, (b - a * y / z) / z);
        dfinal.set(n, 2 * shape_.channels + j, 0);
      }
    }
  }

  /// Norms of errors over norms of values.
  void check() {
    Norms of_o, of_final, of_dk, of_dv, of_dstate, of_dw, of_du;
    std::vector<double> dw(shape_.channels), du(dw), dw_size(dw), du_size(dw);
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t j = 0; j < shape_.channels; ++j) {
        const auto [begin, end] = bounds(n);
        const Wkv4Reference exact = reference(n, j);
        for (int64_t t = begin; t < end; ++t) {
          of_o.add(o.get(t, j).real(), exact.o[t - begin]);
          if (!shape_.saves) continue;
          of_dk.add(dk.get(t, j).real(), exact.dk[t - begin], exact.dk_size[t - begin]);
          of_dv.add(dv.get(t, j).real(), exact.dv[t - begin]);
        }
        if (shape_.has_states || end > begin) {
          const double z = row(final_state, n, 1, j);
          of_final.add(row(final_state, n, 0, j) / z, exact.mean);
          of_final.add(row(final_state, n, 2, j) + std::log(z), exact.log);
        }
        if (shape_.has_states && shape_.saves) {
          const double scale = std::exp(row(state, n, 2, j));
          of_dstate.add(row(dstate, n, 0, j), exact.dy * scale);
          of_dstate.add(row(dstate, n, 1, j), exact.dz * scale);
          EXPECT_EQ(row(dstate, n, 2, j), 0);
        }
        dw[j] += exact.dw, dw_size[j] += exact.dw_size;
        du[j] += exact.du, du_size[j] += exact.du_size;
      }
    }
    const double unit = wide_ == DType::kFloat64 ? 1e-12 : 4e-5;
    const double data = shape_.dtype == DType::kBFloat16  ? 4e-3
                        : shape_.dtype == DType::kFloat16 ? 6e-4
                                                          : unit;
    of_o.expect("o", data);
    of_final.expect("final state", unit);
    if (!shape_.saves) return;
    of_dk.expect("dk", data);
    of_dv.expect("dv", data);
    of_dstate.expect("dstate", 4 * unit);
    for (int64_t j = 0; j < shape_.channels; ++j) {
      of_dw.add(total(dw_partial, j), dw[j], dw_size[j]);
      of_du.add(total(du_partial, j), du[j], du_size[j]);
    }
    of_dw.expect("dw", unit);
    of_du.expect("du", unit);
  }

  TypedSeries k, v, o, w, u, state, final_state, saved;
  TypedSeries grad_o, dk, dv, dfinal, dstate, dw_partial, du_partial;

 private:
  struct Norms {
    double wrong = 0, size = 0;
    void add(double found, double exact, double scale) {
      wrong += (found - exact) * (found - exact);
      size += scale * scale;
    }
    void add(double found, double exact) { add(found, exact, exact); }
    void expect(const char* name, double tolerance) const {
      EXPECT_LE(std::sqrt(wrong), tolerance * std::sqrt(size) + 1e-30) << name;
    }
  };

  double row(const TypedSeries& states, int64_t n, int64_t i, int64_t j) const {
    return states.get(n, i * shape_.channels + j).real();
  }
  static double total(const TypedSeries& partial, int64_t j) {
    double sum = 0;
    for (int64_t i = 0; i < partial.tokens(); ++i) sum += partial.get(i, j).real();
    return sum;
  }
  std::pair<int64_t, int64_t> bounds(int64_t n) const {
    if (shape_.offsets.empty()) return {n * shape_.time, (n + 1) * shape_.time};
    return {shape_.offsets[n], shape_.offsets[n + 1]};
  }
  // The loss by the final state, the same whatever its exponent.
  double d_mean(int64_t n, int64_t j) const {
    return shape_.has_states ? std::cos(n + 3.0 * j) : 0;
  }
  double d_log(int64_t n, int64_t j) const { return shape_.has_states ? std::sin(n + 5.0 * j) : 0; }

  Wkv4Reference reference(int64_t n, int64_t j) const {
    const auto [begin, end] = bounds(n);
    std::vector<double> keys, values, grads;
    for (int64_t t = begin; t < end; ++t) {
      keys.push_back(k.get(t, j).real());
      values.push_back(v.get(t, j).real());
      grads.push_back(grad_o.get(t, j).real());
    }
    const double scale = shape_.has_states ? std::exp(row(state, n, 2, j)) : 0;
    const double y = shape_.has_states ? row(state, n, 0, j) * scale : 0;
    const double z = shape_.has_states ? row(state, n, 1, j) * scale : 0;
    return {w.get(0, j).real(), u.get(0, j).real(), keys, values, grads, y, z,
            d_mean(n, j),       d_log(n, j)};
  }

  double key(int64_t token) {
    const double noise = std::uniform_real_distribution<double>(0, 1)(random_);
    switch (shape_.keys) {
      case Keys::kWide:
        return 160 * noise - 80;
      case Keys::kFalling:
        return 80 - 160.0 * (token % shape_.time) / shape_.time + noise;
      case Keys::kHigh:
        return 80 - noise;
      case Keys::kTurning:
        return (token / 300 % 2 == 0 ? 79 : -79) + noise;
      case Keys::kOutliersFirst:
        if (token % shape_.time < 2) return 60 + noise;
        break;
      case Keys::kNormal:
        break;
    }
    return 2 * normal();
  }
  /// Drawn for the first few thousand, then repeated: large problems are slow to fill otherwise.
  double normal() {
    constexpr size_t kDrawn = 4999;  // prime, so that rows and channels differ
    if (normals_.size() < kDrawn) {
      normals_.push_back(std::normal_distribution<double>()(random_));
      return normals_.back();
    }
    return normals_[next_normal_++ % kDrawn];
  }

  void fill() {
    for (int64_t j = 0; j < shape_.channels; ++j) {
      w.set(0, j, std::pow(10.0, std::uniform_real_distribution<double>(-5, 1.3)(random_)));
      u.set(0, j, normal());
      for (int64_t t = 0; t < k.tokens(); ++t) {
        k.set(t, j, key(t));
        v.set(t, j, normal());
        grad_o.set(t, j, normal());
      }
      for (int64_t n = 0; n < sequences(); ++n) {
        state.set(n, j, normal());
        state.set(n, shape_.channels + j, std::fabs(normal()) + 0.2);
        state.set(n, 2 * shape_.channels + j, shape_.time > 0 ? std::round(key(0)) : 0);
      }
    }
  }

  Wkv4Shape shape_;
  DType wide_;
  std::mt19937 random_;
  std::vector<double> normals_;
  size_t next_normal_ = 0;
};

/// Every length and dtype, the other options taking turns.
template <class Check>
void for_each_wkv4_shape(int64_t longest, Check check) {
  int64_t count = 0;
  for (int64_t time : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 1000, 4097}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      if (time > longest) continue;
      Wkv4Shape shape;
      shape.dtype = dtype;
      shape.time = time;
      shape.batch = time > 1000 ? 1 : 2;
      shape.channels = std::vector<int64_t>{3, 19, 33, 64, 130}[count % 5];
      shape.gap = count % 4 == 3 ? 7 : count % 4 == 2 ? 64 : 0;
      shape.shift = count % 7 == 4 ? 1 : count % 7 == 3 ? 8 : 0;
      shape.has_states = count % 3 != 2 && time > 0;
      shape.saves = count % 11 != 10;
      shape.keys = static_cast<Keys>(count / 3 % 4);
      shape.seed = count + 1;
      check(shape);
      ++count;
      if (time < 8) continue;
      shape.batch = 1;
      shape.has_states = count % 2 == 0;
      shape.offsets = {0, 0, time / 3, time / 3, time - 1, time, time};
      check(shape);
    }
  }
}

}  // namespace tidegate::testing
