// hgru, lru_scan and linear_scan on the CPU and on CUDA, forward and backward, beside `copy_`
// moving as many bytes in the same harness (runner.h): copies and ops alternate, figures are
// medians. Timed are the ops themselves; for the backward the op that autograd calls. Results are
// checked first, against float64. On the CPU an op's results are new memory each time, as they are
// for its users, while a copy's are not: bench_kernels times the CPU kernels alone.
//
//   bench_ops --benchmark_filter=cuda [--benchmark_out=FILE]

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "benchmarks/ops/beside_copy.h"
#include "support/scan_reference.h"
#include "tidegate/ops/hgru.h"
#include "tidegate/ops/linear_scan.h"
#include "tidegate/ops/lru_scan.h"

namespace tidegate::testing {
namespace {

enum class ScanOp { kHgru, kLinearScan, kLru };

struct ScanWork : OpWork {
  ScanOp op = ScanOp::kHgru;
  bool turns = false;
  int64_t batch = 1;
  int64_t time = 1;
  int64_t channels = 1;

  int64_t width() const { return turns ? 2 * channels : channels; }
  /// Every tensor that must be read or written, once.
  int64_t bytes() const {
    const int64_t halves = turns ? 2 : 1;
    const int64_t hgru_rows = backward ? 4 * halves + 2 : 2 * halves + 1;
    const int64_t scan_rows = backward ? 5 : 3;
    const int64_t lru_rows = halves * (backward ? 4 : 2);
    const int64_t rows = op == ScanOp::kHgru  ? hgru_rows
                         : op == ScanOp::kLru ? lru_rows
                                              : scan_rows;
    return rows * batch * time * channels * element_bytes();
  }
  std::string name() const {
    const char* kNames[] = {"/hgru", "/linear_scan", "/lru_scan"};
    return "ops/" + device.str() + kNames[static_cast<int>(op)] +
           (backward ? "/backward" : "/forward") + (turns ? "/complex/" : "/real/") + dtype_name() +
           name_part('B', batch) + name_part('T', time) + name_part('D', channels);
  }
};

using HgruGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using HgruBackward = HgruGradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&, c10::string_view,
                                   bool, const OptionalTensor&);
using ScanGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using ScanBackward = ScanGradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                   const at::Tensor&, const OptionalTensor&, bool,
                                   const OptionalTensor&);
using LruBackward = HgruGradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                  const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                  const at::Tensor&, const OptionalTensor&, bool,
                                  const OptionalTensor&);

/// One set of inputs: c and f of hgru, x and a of linear_scan, x of lru_scan.
struct ScanInputs {
  at::Tensor data, gate, dh;
};

/// All inputs of a piece of work, its calls, and the check of their results.
class ScanOps {
 public:
  explicit ScanOps(const ScanWork& work) : work_(work) {
    const auto options = at::TensorOptions().device(work.device).dtype(work.dtype);
    const auto wide = options.dtype(at::kFloat);
    const auto draw = [&](int64_t columns) {
      return at::randn({work.batch, work.time, columns}, options);
    };
    for (int64_t i = 0; i < work.sets(work.bytes()); ++i) {
      ScanInputs set{draw(work.width()), draw(work.channels), draw(work.width())};
      if (work.op == ScanOp::kLinearScan) set.gate.sigmoid_();
      if (work.op == ScanOp::kLru) set.gate = at::Tensor();
      sets_.push_back(std::move(set));
    }
    gamma_ = at::rand({work.channels}, wide).mul_(0.9);
    if (work.turns) theta_ = at::rand({work.channels}, wide);
    if (work.op == ScanOp::kLru) {  // |lambda| from 0.9 to 0.9999
      nu_log_ = at::rand({work.channels}, wide).mul_(-7).add_(-2.25);
      gamma_.add_(0.01).log_();
      if (work.turns) theta_->add_(0.01).log_();
    }
  }

  std::vector<Call> calls() const {
    std::vector<Call> calls;
    for (const ScanInputs& set : sets_) {
      if (work_.backward) {
        calls.push_back([this, set, h = forward(set)] { return backward(set, h); });
      } else {
        calls.push_back([this, set] { return Results{forward(set)}; });
      }
    }
    return calls;
  }

  /// The largest relative error of the results on a few channels of the last batch row.
  double error(const Results& results) const {
    const ScanInputs& set = sets_.front();
    ReferenceLayout layout;
    layout.tokens = work_.time;
    layout.sequences = {{0, work_.time}};
    layout.channels = static_cast<int64_t>(sampled().size());
    const auto data = pick(set.data);
    const auto gate = set.gate.defined() ? pick(set.gate) : ComplexArray<double>();
    const auto dh = pick(set.dh);
    using Arrays = std::vector<ComplexArray<double>>;
    Arrays expected;
    if (work_.op == ScanOp::kLru) {
      LruReference<double> reference;
      for (int64_t channel : sampled()) {
        reference.nu_log.push_back(nu_log_[channel].item<double>());
        if (work_.turns) reference.theta_log.push_back((*theta_)[channel].item<double>());
        reference.gamma_log.push_back(gamma_[channel].item<double>());
      }
      reference.forward(layout, data, {});
      reference.backward(layout, data, reference.h, {}, dh, {});
      expected = Arrays{work_.backward ? reference.dx : reference.h};
    } else if (work_.op == ScanOp::kLinearScan) {
      LinearScanReference<double> reference;
      reference.forward(layout, data, gate, {});
      reference.backward(layout, gate, reference.h, {}, dh, {});
      expected = work_.backward ? Arrays{reference.dx, reference.da} : Arrays{reference.h};
    } else {
      HgruReference<double> reference;
      for (int64_t channel : sampled()) {
        reference.gamma.push_back(gamma_[channel].item<double>());
        reference.theta.push_back(work_.turns ? (*theta_)[channel].item<double>() : 0);
      }
      std::vector<double> logits;
      for (const auto& value : gate) logits.push_back(value.real());
      reference.forward(layout, data, logits, {});
      reference.backward(layout, data, logits, reference.h, {}, dh, {});
      const ComplexArray<double> df(reference.df.begin(), reference.df.end());
      expected = work_.backward ? Arrays{reference.dc, df} : Arrays{reference.h};
    }
    double worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      worst = std::max(worst, relative_error(pick(results[i]), expected[i]));
    }
    return worst;
  }

 private:
  at::Tensor forward(const ScanInputs& set) const {
    if (work_.op == ScanOp::kLru) return std::get<0>(lru_scan(set.data, nu_log_, theta_, gamma_));
    return work_.op == ScanOp::kLinearScan ? std::get<0>(linear_scan(set.data, set.gate))
                                           : std::get<0>(hgru(set.data, set.gate, gamma_, theta_));
  }

  Results backward(const ScanInputs& set, const at::Tensor& h) const {
    if (work_.op == ScanOp::kLru) {
      static const auto op = find_op<LruBackward>("tidegate::lru_scan_backward");
      auto [dx, dnu, dtheta, dgamma, dh0] =
          op.call(set.dh, {}, set.data, h, nu_log_, theta_, gamma_, {}, false, {});
      return {dx, dnu, dtheta, dgamma, dh0};
    }
    if (work_.op == ScanOp::kLinearScan) {
      static const auto op = find_op<ScanBackward>("tidegate::linear_scan_backward");
      auto [dx, da, dh0] = op.call(set.dh, {}, set.gate, h, {}, false, {});
      return {dx, da, dh0};
    }
    static const auto op = find_op<HgruBackward>("tidegate::hgru_backward");
    auto [dc, df, dgamma, dtheta, dh0] =
        op.call(set.dh, {}, set.data, set.gate, h, gamma_, theta_, {}, "silu", false, {});
    return {dc, df, dgamma, dtheta, dh0};
  }

  std::vector<int64_t> sampled() const {
    const int64_t last = work_.channels - 1;
    return {0, last / 3, 2 * last / 3, last};
  }

  /// The sampled channels of the last batch row, [T, n], complex where there are two halves.
  ComplexArray<double> pick(const at::Tensor& tensor) const {
    const at::Tensor row = tensor.select(0, work_.batch - 1);
    const bool halves = tensor.size(2) == 2 * work_.channels;
    std::vector<at::Tensor> real, imaginary;
    for (int64_t channel : sampled()) {
      real.push_back(row.select(1, channel));
      imaginary.push_back(halves ? row.select(1, channel + work_.channels)
                                 : at::zeros_like(real.back()));
    }
    const auto values = [](const std::vector<at::Tensor>& columns) {
      return at::stack(columns, 1).to(at::kCPU, at::kDouble).contiguous();
    };
    const at::Tensor re = values(real);
    const at::Tensor im = values(imaginary);
    ComplexArray<double> all;
    for (int64_t i = 0; i < re.numel(); ++i) {
      all.emplace_back(re.const_data_ptr<double>()[i], im.const_data_ptr<double>()[i]);
    }
    return all;
  }

  static double relative_error(const ComplexArray<double>& found,
                               const ComplexArray<double>& expected) {
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error += std::norm(found[i] - expected[i]);
      size += std::norm(expected[i]);
    }
    return std::sqrt(error / size);
  }

  ScanWork work_;
  std::vector<ScanInputs> sets_;
  at::Tensor gamma_;  // of lru_scan: its logarithm
  OptionalTensor theta_;
  at::Tensor nu_log_;
};

void register_both_ways(ScanWork work) {
  for (bool backward : {false, true}) {
    work.backward = backward;
    register_work<ScanOps>(work);
  }
}

void register_cpu() {
  ScanWork work;
  work.batch = 4;
  work.time = 2048;
  work.channels = 1024;
  register_both_ways(work);
  work.op = ScanOp::kLinearScan;
  register_both_ways(work);
  work.op = ScanOp::kHgru;
  work.channels = 512;
  work.turns = true;
  register_both_ways(work);
  work.op = ScanOp::kLru;
  register_both_ways(work);
}

void register_cuda() {
  ScanWork work;
  work.device = at::Device(at::kCUDA);
  const auto add = [&](ScanOp op, bool turns, at::ScalarType dtype, int64_t batch, int64_t time,
                       int64_t channels) {
    work.op = op;
    work.turns = turns;
    work.dtype = dtype;
    work.batch = batch;
    work.time = time;
    work.channels = channels;
    register_both_ways(work);
  };
  for (ScanOp op : {ScanOp::kHgru, ScanOp::kLinearScan, ScanOp::kLru}) {
    add(op, false, at::kBFloat16, 8, 2048, 2048);
    add(op, false, at::kBFloat16, 1, 131072, 1024);
    add(op, false, at::kBFloat16, 64, 1024, 512);
    add(op, false, at::kFloat, 8, 2048, 2048);
  }
  for (ScanOp op : {ScanOp::kHgru, ScanOp::kLru}) {
    add(op, true, at::kBFloat16, 8, 2048, 1024);
    add(op, true, at::kFloat, 8, 2048, 1024);
  }
  add(ScanOp::kLru, true, at::kBFloat16, 1, 65536, 1024);
}

}  // namespace

void register_scan_benchmarks(at::DeviceType device) {
  device == at::kCUDA ? register_cuda() : register_cpu();
}

}  // namespace tidegate::testing
