// gated_rnn_step: one token of gated_rnn, whose state it overwrites.

#include "src/ops/gated_rnn.h"
#include "src/ops/op.h"
#include "src/ops/results.h"
#include "tidegate/ops/gated_rnn.h"

namespace tidegate::ops {
namespace {

struct GatedRnnStep {
  static constexpr std::string_view kSchema =
      "gated_rnn_step(Tensor z, Tensor x, Tensor w_zh, Tensor(a!) state, "
      "Tensor? gamma=None) -> Tensor";
  static constexpr std::string_view kData = "x";
  static constexpr auto& kCasts = kGatedRnnCasts;

  const at::Tensor &z, &x, &w_zh;
  at::Tensor& state;
  const OptionalTensor& gamma;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

at::Tensor GatedRnnStep::meta() const {
  const Reference data{kOpName<GatedRnnStep>, "x", x};
  check_data_dtype(data, ComplexData::kRefused);
  check_rank(data, 2, "[B, D]");
  check_gate(data, "z", z);
  check_shape(data.op, "z", z, "[B, D]", {x.sym_size(0), x.sym_size(1)}, " like x");
  check_gated_rnn_matrix(data, w_zh);
  check_channel_parameter(data, "gamma", gamma, x.sym_size(1));
  check_step_state(data, state, "[B, D]", {x.sym_size(0), x.sym_size(1)});
  return new_like(x);
}

at::Tensor GatedRnnStep::kernel() const {
  at::Tensor h = meta();
  check_gated_rnn_values({kOpName<GatedRnnStep>, "x", x}, {}, gamma);
  const at::Tensor gate = z.unsqueeze(1), token = x.unsqueeze(1);
  struct {
    const at::Tensor& w_zh;
    OptionalTensor h0, cu_seqlens, gamma;
  } const recurrence{w_zh, state, std::nullopt, gamma};
  const GatedRnnInputs inputs(recurrence, x.scalar_type());
  run_gated_rnn(kOpName<GatedRnnStep>, gate, token, inputs, {h.unsqueeze(1), inputs.h0, {}});
  write_back(kOpName<GatedRnnStep>, inputs.h0, state);
  return h;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) { register_step<GatedRnnStep>(m); }

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor gated_rnn_step(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                          at::Tensor state, const std::optional<at::Tensor>& gamma) {
  return ops::call_public<ops::GatedRnnStep>(z, x, w_zh, state, gamma);
}

}  // namespace tidegate
