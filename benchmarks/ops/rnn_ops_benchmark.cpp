// gated_rnn on the CPU and on CUDA beside `copy_` of as many bytes: z and x in, h out; backward the
// gradient of h, x and h in, dz and dx out. (Uncounted: the gate's logits, which training keeps,
// and what the product that makes the matrix's gradient reads.) A step waits for the one before, so
// the time that counts is a step's and not a byte's: what a copy takes is far away. Shapes are
// those of benchmarks/gated_rnn.py and cpu_loops.py. Results are checked first against float64.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <tidegate/ops/gated_rnn.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/ops/beside_copy.h"

namespace tidegate::testing {
namespace {

struct RnnWork : OpWork {
  int64_t batch = 1;
  int64_t time = 1;
  int64_t channels = 1;

  int64_t bytes() const { return (backward ? 5 : 3) * batch * time * channels * element_bytes(); }
  /// Memory does not bound a call. (Copies of small tensors stay in a cache, which flatters them.)
  int64_t sets(int64_t) const { return 2; }
  std::string name() const {
    return "ops/" + device.str() + "/gated_rnn" + (backward ? "/backward/" : "/forward/") +
           dtype_name() + name_part('B', batch) + name_part('T', time) + name_part('D', channels);
  }
};

using WithLogits = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&);
using RnnBackward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const OptionalTensor&, at::ScalarType,
    const OptionalTensor&, const OptionalTensor&);

class RnnOps {
 public:
  explicit RnnOps(const RnnWork& work) : work_(work) {
    const auto options = at::TensorOptions().device(work.device).dtype(work.dtype);
    const auto draw = [&] { return at::randn({work.batch, work.time, work.channels}, options); };
    for (int64_t i = 0; i < work.sets(work.bytes()); ++i) {
      sets_.push_back({draw(), draw(), draw()});
    }
    w_ = at::randn({work.channels, work.channels}, options) /
         std::sqrt(static_cast<double>(work.channels));
  }

  std::vector<Call> calls() const {
    static const auto with_logits = find_op<WithLogits>("tidegate::gated_rnn_with_logits");
    static const auto gradients = find_op<RnnBackward>("tidegate::gated_rnn_backward");
    std::vector<Call> calls;
    for (const Inputs& set : sets_) {
      if (!work_.backward) {
        calls.push_back([this, set] { return Results{std::get<0>(gated_rnn(set.z, set.x, w_))}; });
        continue;
      }
      const auto [h, h_final, logits] = with_logits.call(set.z, set.x, w_, {}, {}, {});
      calls.push_back([this, set, states = h, kept = logits] {
        auto [dz, dx, dw, dh0, dgamma] =
            gradients.call(set.dh, {}, set.x, w_, kept, states, {}, work_.dtype, {}, {});
        return Results{dz, dx, dw};
      });
    }
    return calls;
  }

  /// The largest relative error: of h, or of dz, dx and dW.
  double error(const Results& results) const {
    const Results exact = reference();
    double worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const at::Tensor wrong = results[i].to(at::kDouble) - exact[i];
      const double error = (wrong.norm() / exact[i].norm()).item<double>();
      worst = error > worst || std::isnan(error) ? error : worst;
    }
    return worst;
  }

 private:
  struct Inputs {
    at::Tensor z, x, dh;
  };

  /// The equations as they stand, in double precision, a token of all rows at a time.
  Results reference() const {
    const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kDouble); };
    const at::Tensor z = wide(sets_[0].z), x = wide(sets_[0].x), w = wide(w_);
    std::vector<at::Tensor> states = {at::zeros({work_.batch, work_.channels}, x.options())}, gates;
    for (int64_t t = 0; t < work_.time; ++t) {
      const at::Tensor before = states.back();
      gates.push_back(at::sigmoid(z.select(1, t) + at::mm(before, w.t())));
      states.push_back(gates.back() * before + (1 - gates.back()) * x.select(1, t));
    }
    if (!work_.backward) {
      return {at::stack(std::vector<at::Tensor>(states.begin() + 1, states.end()), 1)};
    }
    const at::Tensor dh = wide(sets_[0].dh);
    at::Tensor carry = at::zeros_like(states[0]), dw = at::zeros_like(w);
    std::vector<at::Tensor> dz(work_.time), dx(work_.time);
    for (int64_t t = work_.time; t-- > 0;) {
      const at::Tensor gate = gates[t], shut = 1 - gate, grad = dh.select(1, t) + carry;
      dx[t] = shut * grad;
      dz[t] = grad * (states[t] - x.select(1, t)) * gate * shut;
      carry = gate * grad + at::mm(dz[t], w);
      dw += at::mm(dz[t].t(), states[t]);
    }
    return {at::stack(dz, 1), at::stack(dx, 1), dw};
  }

  RnnWork work_;
  std::vector<Inputs> sets_;
  at::Tensor w_;
};

void register_shape(RnnWork work, int64_t batch, int64_t time, int64_t channels) {
  work.batch = batch;
  work.time = time;
  work.channels = channels;
  for (const bool backward : {false, true}) {
    work.backward = backward;
    register_work<RnnOps>(work);
  }
}

}  // namespace

void register_rnn_benchmarks(at::DeviceType device) {
  RnnWork work;
  work.device = at::Device(device);
  if (device == at::kCPU) {
    for (const int64_t channels : {64, 128, 256}) register_shape(work, 32, 256, channels);
    for (const int64_t channels : {128, 512}) register_shape(work, 16, 512, channels);
    return;
  }
  work.dtype = at::kBFloat16;
  for (const int64_t channels : {128, 256, 512, 1024}) register_shape(work, 64, 1024, channels);
  work.dtype = at::kFloat;
  for (const int64_t channels : {128, 512}) register_shape(work, 64, 1024, channels);
}

}  // namespace tidegate::testing
