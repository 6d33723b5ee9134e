#pragma once

#include <utility>

#include "support/scan_problem.h"

namespace tidegate::testing {

/// A linear_scan, forward and backward, with random inputs.
class LinearScanProblem : public ScanProblem {
 public:
  explicit LinearScanProblem(const ScanCase& config)
      : ScanProblem(config),
        x_(tokens(config.dtype, d())),
        h_(tokens(config.dtype, d())),
        dh_(tokens(config.dtype, d())),
        dx_(tokens(config.dtype, d())),
        a_(config.constant ? rows(gate(), 1, d()) : tokens(gate(), d())),
        da_(tokens(gate(), d())),
        h0_(states()),
        h_final_(states()),
        dh_final_(states()),
        dh0_(states()) {
    fill(x_, d(), [this] { return std::complex<double>(normal(), normal()); });
    fill(dh_, d(), [this] { return std::complex<double>(normal(), normal()); });
    fill(h0_, d(), [this] { return std::complex<double>(normal(), normal()); });
    fill(dh_final_, d(), [this] { return std::complex<double>(normal(), normal()); });
    fill(a_, d(), [this] { return decay(); });
  }

  /// Runs both kernels and returns h, the final state and all gradients.
  Gradients run() {
    kernels::LinearScanParams forward = params();
    forward.x = x_.series();
    forward.h_final = h_final_.device();
    plan_and_launch(
        &forward.plan, &forward.workspace,
        [&](ScanPlan* plan) { return kernels::linear_scan_forward_plan(forward, plan); }, &scratch_,
        [&] { return kernels::linear_scan_forward(forward, nullptr); });

    kernels::LinearScanBackwardParams backward;
    backward.forward = params();
    backward.forward.x = dx_.series();  // dtype and placement only
    backward.dh = dh_.series();
    backward.dh_final = or_null(dh_final_);
    backward.dx = dx_.series();
    backward.da = config_.constant ? kernels::TimeSeries{} : da_.series();
    backward.da.dtype = gate();
    backward.dh0 = dh0_.device();
    ScanPlan sizes;
    check_cuda(kernels::linear_scan_backward_plan(backward, &sizes), "plan");
    DeviceSeries partials = rows(config_.state(), sizes.partials, d());
    backward.da_partial = config_.constant ? partials.device() : nullptr;
    plan_and_launch(
        &backward.forward.plan, &backward.forward.workspace,
        [&](ScanPlan* plan) { return kernels::linear_scan_backward_plan(backward, plan); },
        &scratch_, [&] { return kernels::linear_scan_backward(backward, nullptr); });

    Gradients found = {
        {"h", values(h_)},
        {"h_final", values(h_final_)},
        {"dx", values(dx_)},
        {"da", config_.constant ? sum_rows<double>(values(partials), d()) : values(da_)},
        {"dh0", values(dh0_)}};
    for (DeviceSeries* written : {&h_, &dx_, &da_}) {
      written->buffer().download();
      EXPECT_TRUE(written->surroundings_untouched()) << config_.describe();
    }
    return found;
  }

  template <class Real>
  Gradients reference(bool round) {
    const auto a = cast<Real>(decays());
    const auto h0 = cast<Real>(or_nothing(values(h0_)));
    LinearScanReference<Real> r;
    r.forward(reference_, cast<Real>(values(x_)), a, h0);
    const Values h = round ? round_to(config_.dtype, widen(r.h)) : widen(r.h);
    r.backward(reference_, a, cast<Real>(h), h0, cast<Real>(values(dh_)),
               cast<Real>(or_nothing(values(dh_final_))));
    Values da = widen(r.da);
    if (config_.constant) {
      da = sum_rows<Real>(da, d());
    } else if (round) {
      da = round_to(gate(), da);
    }
    return {{"h", h},
            {"h_final", widen(r.h_final)},
            {"dx", round ? round_to(config_.dtype, widen(r.dx)) : widen(r.dx)},
            {"da", da},
            {"dh0", widen(r.dh0)}};
  }

  DType dtype_of(const std::string& name) const {
    const bool in_state = name == "h_final" || name == "dh0" || (name == "da" && config_.constant);
    return in_state ? config_.state() : name == "da" ? gate() : config_.dtype;
  }

 private:
  int64_t d() const { return config_.channels; }
  DType gate() const { return config_.wide_gate ? config_.state() : config_.dtype; }
  DeviceSeries states() const { return rows(config_.state(), config_.sequences(), d()); }

  kernels::LinearScanParams params() {
    kernels::LinearScanParams params;
    params.layout = layout();
    params.channels = d();
    params.a = a_.series();
    if (config_.constant) {
      params.a.stride_b = params.a.stride_t = 0;
    }
    params.a_is_constant = config_.constant;
    params.h = h_.series();
    params.h0 = or_null(h0_);
    params.time_split = config_.split;
    return params;
  }

  /// |a| <= 1, zeros and ones among them.
  std::complex<double> decay() {
    const double kind = uniform();
    const double size = kind < 0.1 ? 0 : kind < 0.2 ? 1 : uniform();
    if (is_complex(config_.dtype)) {
      return std::polar(size, 7 * uniform());
    }
    return uniform() < 0.2 ? -size : size;
  }

  Values values(DeviceSeries& tensor) {
    tensor.buffer().download();
    Values out;
    for (int64_t i = 0; i < tensor.size(); ++i) {
      out.push_back(tensor.at(i));
    }
    return out;
  }

  /// a at every token.
  Values decays() {
    const Values given = values(a_);
    Values out(reference_.tokens * d());
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = given[config_.constant ? i % d() : i];
    }
    return out;
  }

  DeviceSeries x_, h_, dh_, dx_, a_, da_, h0_, h_final_, dh_final_, dh0_;
  std::unique_ptr<DeviceBuffer> scratch_;
};

}  // namespace tidegate::testing
