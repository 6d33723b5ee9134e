// hgrn2, gated_linear_attention and a decoding step on the CPU and on CUDA, beside `copy_` of as
// many bytes: every tensor that must be read or written, once. hgrn2 reads three slices of one
// projection's result. Results are checked first, on a short sequence, against float64.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "benchmarks/ops/beside_copy.h"
#include "support/gla_reference.h"
#include "tidegate/ops/gated_linear_attention.h"
#include "tidegate/ops/hgrn2.h"

namespace tidegate::testing {
namespace {

enum class GlaOp : uint8_t { kHgrn2, kAttention, kStep };

struct GlaWork : OpWork {
  GlaOp op = GlaOp::kHgrn2;
  int64_t batch = 1;
  int64_t time = 1;
  int64_t heads = 1;
  int64_t key_dim = 128;
  int64_t value_dim = 128;

  int64_t rows() const { return batch * time * heads; }
  int64_t bytes() const {
    const int64_t keys = rows() * key_dim * element_bytes();
    const int64_t values = rows() * value_dim * element_bytes();
    // Forward q, f, v and o; backward q, f, v, do and dq, df, dv; and k and dk where they are
    // tensors.
    const int64_t of_keys = (op == GlaOp::kAttention ? 3 : 2) * (backward ? 2 : 1);
    const int64_t states = op == GlaOp::kStep ? 2 * rows() * key_dim * value_dim * 4 : 0;
    return of_keys * keys + (backward ? 3 : 2) * values + states;
  }
  std::string name() const {
    const char* ops[] = {"/hgrn2", "/gated_linear_attention", "/hgrn2_step"};
    return "ops/" + device.str() + ops[static_cast<int>(op)] +
           (backward ? "/backward/" : "/forward/") + dtype_name() + name_part('B', batch) +
           name_part('T', time) + name_part('H', heads) + name_part('K', key_dim) +
           name_part('V', value_dim);
  }
};

using GlaGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Hgrn2Backward = GlaGradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                   const OptionalTensor&, double, c10::string_view,
                                   c10::string_view, bool, const OptionalTensor&);
using GlaBackward = GlaGradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const OptionalTensor&, double, bool, const OptionalTensor&);

/// One set of inputs; `gate`: logits or log decays; `state` where it is a step.
struct GlaInputs {
  at::Tensor q, k, v, gate, d_o, state;
};

class GlaOps {
 public:
  explicit GlaOps(const GlaWork& work) : work_(work) {
    const auto wide = at::TensorOptions().device(work.device).dtype(at::kFloat);
    gamma_ = at::rand({work.heads, work.key_dim}, wide).mul_(0.9);
    for (int64_t i = 0; i < work.sets(work.bytes()); ++i) {
      sets_.push_back(draw(work.batch, work.time));
    }
  }

  std::vector<Call> calls() const {
    std::vector<Call> calls;
    for (const GlaInputs& set : sets_) {
      calls.push_back([this, set] { return run(set); });
    }
    return calls;
  }

  /// The largest relative error of the op's results, on a few sequences of 70 tokens.
  double error(const Results& /*first*/) const {
    constexpr int64_t kBatch = 2, kTime = 70;
    const bool step = work_.op == GlaOp::kStep;
    const GlaInputs set = draw(kBatch, step ? 1 : kTime);
    const GlaInputs before = {{}, {}, {}, {}, {}, step ? set.state.clone() : at::Tensor()};
    const Results results = run(set);
    GlaReference<double> reference;
    reference.heads = work_.heads;
    reference.key_dim = work_.key_dim;
    reference.value_dim = work_.value_dim;
    reference.logits = work_.op != GlaOp::kAttention;
    if (reference.logits) reference.q_activation = kernels::gla::InputActivation::kSilu;
    reference.q = values(set.q);
    reference.v = values(set.v);
    reference.gate = values(set.gate);
    reference.d_o = values(set.d_o);
    if (reference.logits) {
      reference.gamma = values(gamma_);
    } else {
      reference.k = values(set.k);
    }
    if (step) reference.h0 = values(before.state);
    ReferenceLayout layout;
    const int64_t time = set.q.numel() / (kBatch * work_.heads * work_.key_dim);
    layout.tokens = kBatch * time;
    for (int64_t n = 0; n < kBatch; ++n) layout.sequences.push_back({n * time, time});
    reference.run(layout);
    if (step) {
      return std::max(relative_error(results[0], reference.o),
                      relative_error(set.state, reference.h_final));
    }
    if (!work_.backward) return relative_error(results[0], reference.o);
    const double worst = std::max({relative_error(results[0], reference.dq),
                                   relative_error(results[1], reference.dv),
                                   relative_error(results[2], reference.dgate)});
    return reference.logits ? worst : std::max(worst, relative_error(results[3], reference.dk));
  }

 private:
  GlaInputs draw(int64_t batch, int64_t time) const {
    const auto options = at::TensorOptions().device(work_.device).dtype(work_.dtype);
    const int64_t heads = work_.heads, keys = work_.key_dim, columns = work_.value_dim;
    const std::vector<int64_t> shape =
        work_.op == GlaOp::kStep ? std::vector{batch} : std::vector{batch, time};
    const auto sized = [&](std::initializer_list<int64_t> more) {
      std::vector<int64_t> all = shape;
      all.insert(all.end(), more);
      return all;
    };
    GlaInputs set;
    const at::Tensor wide = at::randn(sized({heads * (2 * keys + columns)}), options);
    const auto slice = [&](int64_t begin, int64_t width) {
      return wide.narrow(-1, begin * heads, width * heads).unflatten(-1, {heads, width});
    };
    set.q = slice(0, keys);
    set.gate = slice(keys, keys);
    set.v = slice(2 * keys, columns);
    set.d_o = at::randn(sized({heads, columns}), options);
    if (work_.op == GlaOp::kStep) {
      set.state = at::randn({batch, heads, keys, columns}, options.dtype(at::kFloat));
    }
    if (work_.op == GlaOp::kAttention) {
      const at::Tensor logit = set.gate.to(at::kFloat);
      const at::Tensor open = gamma_.neg().add(1);
      set.k = (open * at::sigmoid(-logit)).to(work_.dtype);
      set.gate = (gamma_ + open * at::sigmoid(logit)).log().to(work_.dtype);
    }
    return set;
  }

  /// o; or dq, dv, dgate, and dk where there is one.
  Results run(const GlaInputs& set) const {
    if (work_.op == GlaOp::kStep) {
      return {hgrn2_step(set.q, set.gate, set.v, gamma_, set.state, 1.0, "silu")};
    }
    if (!work_.backward) {
      return {work_.op == GlaOp::kHgrn2
                  ? std::get<0>(hgrn2(set.q, set.gate, set.v, gamma_, {}, 1.0, "silu"))
                  : std::get<0>(gated_linear_attention(set.q, set.k, set.v, set.gate))};
    }
    if (work_.op == GlaOp::kHgrn2) {
      static const auto op = find_op<Hgrn2Backward>("tidegate::hgrn2_backward");
      auto [dq, df, dv, dgamma, dh0] =
          op.call(set.d_o, {}, set.q, set.gate, set.v, gamma_, {}, 1.0, "silu", "none", false, {});
      return {dq, dv, df};
    }
    static const auto op = find_op<GlaBackward>("tidegate::gated_linear_attention_backward");
    auto [dq, dk, dv, dlog_f, dh0] =
        op.call(set.d_o, {}, set.q, set.k, set.v, set.gate, {}, 1.0, false, {});
    return {dq, dv, dlog_f, dk};
  }

  static std::vector<double> values(const at::Tensor& tensor) {
    const at::Tensor wide = tensor.to(at::kCPU, at::kDouble).contiguous();
    const double* data = wide.const_data_ptr<double>();
    return {data, data + wide.numel()};
  }

  static double relative_error(const at::Tensor& found, const std::vector<double>& expected) {
    const std::vector<double> got = values(found);
    double error = 0, size = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error += (got[i] - expected[i]) * (got[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    return std::sqrt(error / size);
  }

  GlaWork work_;
  std::vector<GlaInputs> sets_;
  at::Tensor gamma_;
};

void register_shape(GlaWork work, int64_t batch, int64_t time, int64_t heads, int64_t dim) {
  work.batch = batch;
  work.time = time;
  work.heads = heads;
  work.key_dim = work.value_dim = dim;
  for (const GlaOp op : {GlaOp::kHgrn2, GlaOp::kAttention}) {
    work.op = op;
    for (const bool backward : {false, true}) {
      work.backward = backward;
      register_work<GlaOps>(work);
    }
  }
}

void register_step(GlaWork work, int64_t batch, int64_t heads) {
  work.op = GlaOp::kStep;
  work.batch = batch;
  work.heads = heads;
  register_work<GlaOps>(work);
}

}  // namespace

void register_gla_benchmarks(at::DeviceType device) {
  GlaWork work;
  work.device = at::Device(device);
  if (device == at::kCPU) {
    register_shape(work, 2, 1024, 4, 64);
    register_shape(work, 1, 1024, 4, 128);
    register_step(work, 8, 4);
    return;
  }
  work.dtype = at::kBFloat16;
  register_shape(work, 8, 4096, 16, 128);
  register_shape(work, 1, 65536, 12, 128);
  register_shape(work, 2, 4096, 16, 128);
  register_shape(work, 8, 4096, 32, 64);
  register_step(work, 256, 16);
}

}  // namespace tidegate::testing
