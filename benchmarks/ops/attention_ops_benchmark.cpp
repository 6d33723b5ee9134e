// forgetting_attention on the CPU and on CUDA. It is bound by its products, not by memory: figures
// are floating-point operations a second, two a multiply-add, of the pairs of query and key that
// are seen (2 products forward, 5 backward); percent_of_copy says how far from memory it is.
// Results are checked first, on a short sequence, against float64.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <tidegate/ops/forgetting_attention.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/ops/beside_copy.h"

namespace tidegate::testing {
namespace {

struct AttentionWork : OpWork {
  int64_t batch = 1;
  int64_t time = 1;
  int64_t heads = 1;
  int64_t head_dim = 64;

  int64_t rows() const { return batch * time * heads; }
  /// The forward pass reads q, k, v and writes o and the rows' sums; the backward pass reads q, k,
  /// v, o, do and writes dq, dk, dv; both read the gates.
  int64_t bytes() const {
    const int64_t tensor = rows() * head_dim * element_bytes();
    return (backward ? 8 : 4) * tensor + (backward ? 3 : 2) * 4 * rows();
  }
  double operations() const {
    const double pairs = static_cast<double>(rows()) * static_cast<double>(time + 1) / 2;
    return 2 * pairs * static_cast<double>(head_dim) * (backward ? 5 : 2);
  }
  std::string name() const {
    return "ops/" + device.str() + "/forgetting_attention" +
           (backward ? "/backward/" : "/forward/") + dtype_name() + name_part('B', batch) +
           name_part('T', time) + name_part('H', heads) + name_part('D', head_dim);
  }
};

using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using AttentionBackward = AttentionGradients(const at::Tensor&, const OptionalTensor&,
                                             const at::Tensor&, const at::Tensor&,
                                             const at::Tensor&, const at::Tensor&,
                                             const at::Tensor&, const at::Tensor&,
                                             std::optional<double>, std::optional<int64_t>,
                                             const OptionalTensor&, const OptionalTensor&,
                                             std::optional<double>);

struct AttentionInputs {
  at::Tensor q, k, v, log_f, grad_o;
};

class AttentionOps {
 public:
  explicit AttentionOps(const AttentionWork& work) : work_(work) {
    for (int64_t i = 0; i < std::min<int64_t>(work.sets(work.bytes()), 4); ++i) {
      sets_.push_back(draw(work.batch, work.time));
    }
  }

  std::vector<Call> calls() const {
    std::vector<Call> calls;
    for (const AttentionInputs& set : sets_) {
      if (work_.backward) {
        const auto [o, lse] = forgetting_attention(set.q, set.k, set.v, set.log_f);
        calls.push_back([set, out = o, sums = lse] { return backward(set, out, sums); });
      } else {
        calls.push_back([set] {
          return Results{std::get<0>(forgetting_attention(set.q, set.k, set.v, set.log_f))};
        });
      }
    }
    return calls;
  }

  /// The largest relative error of the op's results, on sequences of 70 tokens.
  double error(const Results& /*first*/) const {
    const AttentionInputs set = draw(2, 70);
    const auto [o, lse] = forgetting_attention(set.q, set.k, set.v, set.log_f);
    const Results found = work_.backward ? backward(set, o, lse) : Results{o};
    const Results exact = reference(set);
    double worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const at::Tensor wide = found[i].to(at::kCPU, at::kDouble);
      const double wrong = (wide - exact[i]).norm().item<double>();
      worst = std::max(worst, wrong / exact[i].norm().item<double>());
    }
    return worst;
  }

 private:
  AttentionInputs draw(int64_t batch, int64_t time) const {
    const auto options = at::TensorOptions().device(work_.device).dtype(work_.dtype);
    const auto rows = [&] {
      return at::randn({batch, time, work_.heads, work_.head_dim}, options);
    };
    const at::Tensor logits = at::randn({batch, time, work_.heads}, options.dtype(at::kFloat));
    return {rows(), rows(), rows(), at::log_sigmoid(logits + 5), rows()};
  }

  static Results backward(const AttentionInputs& set, const at::Tensor& o, const at::Tensor& lse) {
    static const auto op = find_op<AttentionBackward>("tidegate::forgetting_attention_backward");
    auto [dq, dk, dv, dlog_f] =
        op.call(set.grad_o, {}, set.q, set.k, set.v, set.log_f, o, lse, {}, {}, {}, {}, {});
    return {dq, dk, dv, dlog_f};
  }

  /// o, or dq, dk, dv and dlog_f, from whole matrices of scores.
  Results reference(const AttentionInputs& set) const {
    const auto wide = [](const at::Tensor& x) {
      return x.to(at::kCPU, at::kDouble).requires_grad_();
    };
    const at::AutoGradMode recording(work_.backward);
    const std::vector<at::Tensor> leaves = {wide(set.q), wide(set.k), wide(set.v), wide(set.log_f)};
    const auto heads_first = [&](int i) { return leaves[i].transpose(1, 2); };
    const at::Tensor c = leaves[3].cumsum(1).transpose(1, 2);
    const at::Tensor later = at::ones({set.q.size(1), set.q.size(1)}, at::kBool).triu(1);
    const at::Tensor scores = (at::matmul(heads_first(0), heads_first(1).transpose(2, 3)) /
                                   std::sqrt(static_cast<double>(work_.head_dim)) +
                               (c.unsqueeze(-1) - c.unsqueeze(-2)))
                                  .masked_fill(later, -std::numeric_limits<double>::infinity());
    const at::Tensor o = at::matmul(scores.softmax(-1), heads_first(2)).transpose(1, 2);
    if (!work_.backward) return {o};
    return torch::autograd::grad({o}, leaves, {set.grad_o.to(at::kCPU, at::kDouble)});
  }

  AttentionWork work_;
  std::vector<AttentionInputs> sets_;
};

void with_operations(benchmark::State& state, const AttentionWork& work) {
  beside_copy<AttentionOps>(state, work);
  const auto rate = state.counters.find("GB/s");
  if (rate != state.counters.end()) {
    const double seconds = static_cast<double>(work.bytes()) * 1e-9 / rate->second;
    state.counters["TFLOP/s"] = work.operations() * 1e-12 / seconds;
  }
}

void register_shape(AttentionWork work, int64_t batch, int64_t time, int64_t heads,
                    int64_t head_dim) {
  work.batch = batch;
  work.time = time;
  work.heads = heads;
  work.head_dim = head_dim;
  for (const bool backward : {false, true}) {
    work.backward = backward;
    register_timed(work, with_operations);
  }
}

}  // namespace

void register_attention_benchmarks(at::DeviceType device) {
  AttentionWork work;
  work.device = at::Device(device);
  if (device == at::kCPU) {
    register_shape(work, 1, 1024, 4, 64);
    return;
  }
  work.dtype = at::kBFloat16;
  register_shape(work, 2, 16384, 16, 128);
  register_shape(work, 8, 4096, 16, 128);
  register_shape(work, 8, 4096, 16, 64);
}

}  // namespace tidegate::testing
