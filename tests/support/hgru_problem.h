#pragma once

#include <utility>

#include "support/scan_problem.h"

namespace tidegate::testing {

/// An hgru, forward and backward, with random inputs.
class HgruProblem : public ScanProblem {
 public:
  explicit HgruProblem(const ScanCase& config)
      : ScanProblem(config),
        c_(data()),
        h_(data()),
        dh_(data()),
        dc_(data()),
        f_(tokens(gate(), config.channels)),
        df_(tokens(gate(), config.channels)),
        h0_(states()),
        h_final_(states()),
        dh_final_(states()),
        dh0_(states()),
        gamma_(rows(config.state(), 1, config.channels)),
        theta_(rows(config.state(), 1, config.channels)) {
    const auto draw = [this] { return normal(); };
    fill(c_, width(), [this] { return 2 * normal(); });
    for (DeviceSeries* tensor : {&dh_, &h0_, &dh_final_}) {
      fill(*tensor, width(), draw);
    }
    fill(f_, config.channels, [this] { return logit(); });
    fill(gamma_, config.channels, [this] { return uniform() < 0.3 ? 0 : 0.999 * uniform(); });
    fill(theta_, config.channels, [this] { return 6.3 * uniform(); });
  }

  /// Runs both kernels and returns h, the final state and all gradients.
  Gradients run() {
    kernels::HgruParams forward = params();
    forward.h_final = h_final_.device();
    plan_and_launch(
        &forward.plan, &forward.workspace,
        [&](ScanPlan* plan) { return kernels::hgru_forward_plan(forward, plan); }, &scratch_,
        [&] { return kernels::hgru_forward(forward, nullptr); });

    kernels::HgruBackwardParams backward;
    backward.forward = params();
    backward.dh = dh_.series();
    backward.dh_final = or_null(dh_final_);
    backward.dc = dc_.series();
    backward.df = df_.series();
    backward.dh0 = dh0_.device();
    ScanPlan sizes;
    check_cuda(kernels::hgru_backward_plan(backward, &sizes), "plan");
    DeviceSeries dgamma = rows(config_.state(), sizes.partials, config_.channels);
    DeviceSeries dtheta = rows(config_.state(), sizes.partials, config_.channels);
    backward.dgamma_partial = config_.gamma ? dgamma.device() : nullptr;
    backward.dtheta_partial = config_.complex ? dtheta.device() : nullptr;
    plan_and_launch(
        &backward.forward.plan, &backward.forward.workspace,
        [&](ScanPlan* plan) { return kernels::hgru_backward_plan(backward, plan); }, &scratch_,
        [&] { return kernels::hgru_backward(backward, nullptr); });

    Gradients found = {{"h", values(h_)},
                       {"h_final", values(h_final_)},
                       {"dc", values(dc_)},
                       {"df", plain(df_)},
                       {"dh0", values(dh0_)}};
    if (config_.gamma) {
      found.emplace_back("dgamma", sum_rows<double>(plain(dgamma), config_.channels));
    }
    if (config_.complex) {
      found.emplace_back("dtheta", sum_rows<double>(plain(dtheta), config_.channels));
    }
    for (DeviceSeries* written : {&h_, &dc_, &df_}) {
      EXPECT_TRUE(written->surroundings_untouched()) << config_.describe();
    }
    return found;
  }

  template <class Real>
  Gradients reference(bool round) {
    HgruReference<Real> r;
    const std::vector<Real> zeros(config_.channels, 0);
    r.silu = config_.silu;
    r.gamma = config_.gamma ? reals<Real>(plain(gamma_)) : zeros;
    r.theta = config_.complex ? reals<Real>(plain(theta_)) : zeros;
    const auto c = cast<Real>(values(c_));
    const auto f = reals<Real>(plain(f_));
    const auto h0 = cast<Real>(or_nothing(values(h0_)));
    r.forward(reference_, c, f, h0);
    const Values h = round ? round_to(config_.dtype, widen(r.h)) : widen(r.h);
    r.backward(reference_, c, f, cast<Real>(h), h0, cast<Real>(values(dh_)),
               cast<Real>(or_nothing(values(dh_final_))));
    Gradients out = {{"h", h},
                     {"h_final", widen(r.h_final)},
                     {"dc", round ? round_to(config_.dtype, widen(r.dc)) : widen(r.dc)},
                     {"df", round ? round_to(gate(), widen(r.df)) : widen(r.df)},
                     {"dh0", widen(r.dh0)}};
    if (config_.gamma) {
      out.emplace_back("dgamma", sum_rows<Real>(widen(r.dgamma), config_.channels));
    }
    if (config_.complex) {
      out.emplace_back("dtheta", sum_rows<Real>(widen(r.dtheta), config_.channels));
    }
    return out;
  }

  DType dtype_of(const std::string& name) const {
    return name == "df" ? gate() : name == "h" || name == "dc" ? config_.dtype : config_.state();
  }

 private:
  int64_t width() const { return config_.channels * (config_.complex ? 2 : 1); }
  DType gate() const { return config_.wide_gate ? config_.state() : config_.dtype; }
  DeviceSeries data() const { return tokens(config_.dtype, width()); }
  DeviceSeries states() const { return rows(config_.state(), config_.sequences(), width()); }

  kernels::HgruParams params() {
    kernels::HgruParams params;
    params.layout = layout();
    params.channels = config_.channels;
    params.activation = config_.silu ? kernels::Activation::kSilu : kernels::Activation::kNone;
    params.c = c_.series();
    params.f = f_.series();
    params.h = h_.series();
    params.gamma = config_.gamma ? gamma_.device() : nullptr;
    params.theta = config_.complex ? theta_.device() : nullptr;
    params.h0 = or_null(h0_);
    params.time_split = config_.split;
    return params;
  }

  /// Mostly moderate, with gates that are shut, open, or far beyond what exp can hold.
  double logit() {
    const double kind = uniform();
    return kind < 0.05 ? -1e4 : kind < 0.1 ? 1e4 : kind < 0.2 ? 10 * normal() : 2 * normal();
  }

  /// [rows, D] complex numbers of a [Re | Im] tensor, or of a real one.
  Values values(DeviceSeries& tensor) {
    if (!config_.complex) {
      return plain(tensor);
    }
    tensor.buffer().download();
    const int64_t d = config_.channels;
    Values out;
    for (int64_t i = 0; i < tensor.size() / 2; ++i) {
      out.emplace_back(tensor.get(i / d, i % d).real(), tensor.get(i / d, d + i % d).real());
    }
    return out;
  }

  static Values plain(DeviceSeries& tensor) {
    tensor.buffer().download();
    Values out;
    for (int64_t i = 0; i < tensor.size(); ++i) {
      out.push_back(tensor.at(i));
    }
    return out;
  }

  DeviceSeries c_, h_, dh_, dc_, f_, df_, h0_, h_final_, dh_final_, dh0_, gamma_, theta_;
  std::unique_ptr<DeviceBuffer> scratch_;
};

}  // namespace tidegate::testing
