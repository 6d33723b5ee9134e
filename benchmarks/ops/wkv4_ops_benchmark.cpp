// wkv4 on the CPU and on CUDA beside `copy_` of as many bytes: k and v in, o out; backward k, v and
// the gradient of o in, dk and dv out. (Uncounted: the states that training keeps, 1.5 bytes an
// element.) Keys are uniform on +-2, rates are RWKV-4's initial ones. Results are
// checked first against float64.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <tidegate/ops/wkv4.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/ops/beside_copy.h"

namespace tidegate::testing {
namespace {

struct Wkv4Work : OpWork {
  int64_t batch = 1;
  int64_t time = 1;
  int64_t channels = 1;

  int64_t bytes() const { return (backward ? 5 : 3) * batch * time * channels * element_bytes(); }
  std::string name() const {
    return "ops/" + device.str() + "/wkv4" + (backward ? "/backward/" : "/forward/") +
           dtype_name() + name_part('B', batch) + name_part('T', time) + name_part('D', channels);
  }
};

using Saving = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                              const at::Tensor&, const at::Tensor&,
                                                              const OptionalTensor&,
                                                              const OptionalTensor&);
using Wkv4Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&,
    const at::Tensor&, const OptionalTensor&);

class Wkv4Ops {
 public:
  explicit Wkv4Ops(const Wkv4Work& work) : work_(work) {
    const auto options = at::TensorOptions().device(work.device).dtype(work.dtype);
    const auto wide = options.dtype(at::kFloat);
    const auto draw = [&] { return at::randn({work.batch, work.time, work.channels}, options); };
    for (int64_t i = 0; i < work.sets(work.bytes()); ++i) {
      sets_.push_back({draw().uniform_(-2, 2), draw(), draw()});
    }
    w_ = (at::linspace(0, 1, work.channels, wide).pow(0.7) * 8 - 5).exp();
    u_ = at::rand({work.channels}, wide) - 1.7;
  }

  std::vector<Call> calls() const {
    static const auto saving = find_op<Saving>("tidegate::wkv4_saving");
    static const auto gradients = find_op<Wkv4Backward>("tidegate::wkv4_backward");
    std::vector<Call> calls;
    for (const Inputs& set : sets_) {
      if (!work_.backward) {
        calls.push_back([this, set] { return Results{std::get<0>(wkv4(w_, u_, set.k, set.v))}; });
        continue;
      }
      const auto [o, final_state, saved] = saving.call(w_, u_, set.k, set.v, {}, {});
      calls.push_back([this, set, last = final_state, states = saved] {
        auto [dw, du, dk, dv, dstate] =
            gradients.call(set.grad_o, {}, w_, u_, set.k, set.v, {}, last, states, {});
        return Results{dk, dv};
      });
    }
    return calls;
  }

  /// The largest relative error on a few channels of the last batch row.
  double error(const Results& results) const {
    std::vector<double> wrong(results.size()), size(results.size());
    for (const int64_t channel :
         {int64_t{0}, work_.channels / 3, 2 * work_.channels / 3, work_.channels - 1}) {
      const std::vector<std::vector<double>> exact = reference(channel);
      for (size_t i = 0; i < results.size(); ++i) {
        const std::vector<double> found = column(results[i], channel);
        for (size_t t = 0; t < found.size(); ++t) {
          wrong[i] += std::pow(found[t] - exact[i][t], 2);
          size[i] += std::pow(exact[i][t], 2);
        }
      }
    }
    double worst = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      worst = std::max(worst, std::sqrt(wrong[i] / size[i]));
    }
    return worst;
  }

 private:
  struct Inputs {
    at::Tensor k, v, grad_o;
  };

  std::vector<double> column(const at::Tensor& tensor, int64_t channel) const {
    const at::Tensor wide =
        tensor.select(0, work_.batch - 1).select(1, channel).to(at::kCPU, at::kDouble).contiguous();
    const double* data = wide.const_data_ptr<double>();
    return {data, data + wide.numel()};
  }

  /// One channel of the equations as they stand: o, or dk and dv.
  std::vector<std::vector<double>> reference(int64_t channel) const {
    const Inputs& set = sets_.front();
    const auto k = column(set.k, channel), v = column(set.v, channel);
    const auto grad_o = column(set.grad_o, channel);
    const double decay = std::exp(-w_[channel].item<double>()), u = u_[channel].item<double>();
    const size_t time = k.size();
    std::vector<double> o(time), z(time), dk(time), dv(time);
    double sum = 0, weights = 0;
    for (size_t t = 0; t < time; ++t) {
      const double bonus = std::exp(u + k[t]), token = std::exp(k[t]);
      z[t] = weights;
      o[t] = (sum + bonus * v[t]) / (weights + bonus);
      sum = decay * sum + token * v[t];
      weights = decay * weights + token;
    }
    double dsum = 0, dweights = 0;
    for (size_t t = time; t-- > 0;) {
      const double bonus = std::exp(u + k[t]), token = std::exp(k[t]);
      const double g = grad_o[t] / (z[t] + bonus);
      dv[t] = g * bonus + token * dsum;
      dk[t] = g * bonus * (v[t] - o[t]) + token * (v[t] * dsum + dweights);
      dsum = decay * dsum + g;
      dweights = decay * dweights - g * o[t];
    }
    if (work_.backward) return {dk, dv};
    return {o};
  }

  Wkv4Work work_;
  std::vector<Inputs> sets_;
  at::Tensor w_, u_;
};

void register_shape(Wkv4Work work, int64_t batch, int64_t time, int64_t channels) {
  work.batch = batch;
  work.time = time;
  work.channels = channels;
  for (const bool backward : {false, true}) {
    work.backward = backward;
    register_work<Wkv4Ops>(work);
  }
}

}  // namespace

void register_wkv4_benchmarks(at::DeviceType device) {
  Wkv4Work work;
  work.device = at::Device(device);
  if (device == at::kCPU) {
    register_shape(work, 4, 2048, 1024);
    return;
  }
  work.dtype = at::kBFloat16;
  register_shape(work, 8, 4096, 2048);
  register_shape(work, 8, 2048, 1024);
  register_shape(work, 1, 65536, 1024);
  work.dtype = at::kFloat;
  register_shape(work, 8, 2048, 1024);
}

}  // namespace tidegate::testing
