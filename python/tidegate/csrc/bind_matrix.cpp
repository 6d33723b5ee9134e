// Mixers with keys and values: those whose state is a matrix (HGRU2, gated linear attention), and
// attention.
//
// The defaults that Python sees are those of the C++ options, not a second list of them.
#include <string>
#include <utility>

#include "bindings.h"
#include "tidegate/nn/attention.h"
#include "tidegate/nn/forgetting_attention.h"
#include "tidegate/nn/gated_linear_attention.h"
#include "tidegate/nn/hgru2.h"

namespace tidegate::python {
namespace {

std::shared_ptr<tidegate::nn::HGRU2Impl> make_hgru2(
    int64_t dim, std::optional<int64_t> num_heads, std::optional<int64_t> expand_ratio,
    std::optional<std::string> gate_init, std::optional<double> gumbel_gate, bool bidirectional,
    const std::string& preset, std::optional<std::string> q_activation,
    std::optional<std::string> v_activation, std::optional<bool> bias,
    std::optional<std::string> norm, double norm_eps, OptionalDevice device, OptionalDtype dtype) {
  return std::make_shared<tidegate::nn::HGRU2Impl>(tidegate::nn::HGRU2Options(dim)
                                                       .num_heads(num_heads)
                                                       .expand_ratio(expand_ratio)
                                                       .gate_init(std::move(gate_init))
                                                       .gumbel_gate(gumbel_gate)
                                                       .bidirectional(bidirectional)
                                                       .preset(preset)
                                                       .q_activation(std::move(q_activation))
                                                       .v_activation(std::move(v_activation))
                                                       .bias(bias)
                                                       .norm(std::move(norm))
                                                       .norm_eps(norm_eps)
                                                       .device(device)
                                                       .dtype(dtype));
}

void bind_hgru2(py::module& m) {
  using tidegate::nn::HGRU2Impl;
  const tidegate::nn::HGRU2Options defaults(1);
  auto bound = bind_module<HGRU2Impl>(m, "HGRU2");
  bound.def(
      py::init(&make_hgru2), py::arg("dim"), py::arg("num_heads") = defaults.num_heads(),
      py::kw_only(), py::arg("expand_ratio") = defaults.expand_ratio(),
      py::arg("gate_init") = defaults.gate_init(), py::arg("gumbel_gate") = defaults.gumbel_gate(),
      py::arg("bidirectional") = defaults.bidirectional(), py::arg("preset") = defaults.preset(),
      py::arg("q_activation") = defaults.q_activation(),
      py::arg("v_activation") = defaults.v_activation(), py::arg("bias") = defaults.bias(),
      py::arg("norm") = defaults.norm(), py::arg("norm_eps") = defaults.norm_eps(),
      py::arg("device") = defaults.device(), py::arg("dtype") = defaults.dtype());
  bind_mixer<HGRU2Impl>(bound);
}

std::shared_ptr<tidegate::nn::GatedLinearAttentionImpl> make_gla(
    int64_t dim, int64_t num_heads, const std::string& gate, bool normalize,
    std::optional<std::string> feature_map, std::optional<int64_t> key_dim,
    std::optional<int64_t> value_dim, int64_t gate_rank, std::optional<double> gate_temperature,
    std::optional<std::string> gate_init, std::optional<double> gumbel_gate, bool lower_bound,
    bool output_gate, const std::string& norm, double norm_eps, OptionalDevice device,
    OptionalDtype dtype) {
  return std::make_shared<tidegate::nn::GatedLinearAttentionImpl>(
      tidegate::nn::GatedLinearAttentionOptions(dim)
          .num_heads(num_heads)
          .gate(gate)
          .normalize(normalize)
          .feature_map(std::move(feature_map))
          .key_dim(key_dim)
          .value_dim(value_dim)
          .gate_rank(gate_rank)
          .gate_temperature(gate_temperature)
          .gate_init(std::move(gate_init))
          .gumbel_gate(gumbel_gate)
          .lower_bound(lower_bound)
          .output_gate(output_gate)
          .norm(norm)
          .norm_eps(norm_eps)
          .device(device)
          .dtype(dtype));
}

void bind_gla(py::module& m) {
  using tidegate::nn::GatedLinearAttentionImpl;
  const tidegate::nn::GatedLinearAttentionOptions defaults(1);
  auto bound = bind_module<GatedLinearAttentionImpl>(m, "GatedLinearAttention");
  bound.def(
      py::init(&make_gla), py::arg("dim"), py::arg("num_heads") = defaults.num_heads(),
      py::kw_only(), py::arg("gate") = defaults.gate(), py::arg("normalize") = defaults.normalize(),
      py::arg("feature_map") = defaults.feature_map(), py::arg("key_dim") = defaults.key_dim(),
      py::arg("value_dim") = defaults.value_dim(), py::arg("gate_rank") = defaults.gate_rank(),
      py::arg("gate_temperature") = defaults.gate_temperature(),
      py::arg("gate_init") = defaults.gate_init(), py::arg("gumbel_gate") = defaults.gumbel_gate(),
      py::arg("lower_bound") = defaults.lower_bound(),
      py::arg("output_gate") = defaults.output_gate(), py::arg("norm") = defaults.norm(),
      py::arg("norm_eps") = defaults.norm_eps(), py::arg("device") = defaults.device(),
      py::arg("dtype") = defaults.dtype());
  bind_mixer<GatedLinearAttentionImpl>(bound);
}

// The options that Attention and ForgettingAttention both have.
struct AttentionSwitchArgs {
  int64_t dim;
  std::optional<int64_t> num_heads;
  std::string preset;
  std::optional<int64_t> num_kv_heads;
  std::optional<bool> qk_norm;
  bool qk_norm_shared;
  std::optional<bool> output_gate;
  std::string output_activation;
  std::optional<bool> output_norm, kv_shift;
  std::optional<double> rope;
  std::optional<int64_t> window;
  double norm_eps;
  std::optional<double> qk_norm_eps;
  OptionalDevice device;
  OptionalDtype dtype;

  template <typename Options>
  Options options() const {
    return Options(dim)
        .num_heads(num_heads)
        .preset(preset)
        .num_kv_heads(num_kv_heads)
        .qk_norm(qk_norm)
        .qk_norm_shared(qk_norm_shared)
        .output_gate(output_gate)
        .output_activation(output_activation)
        .output_norm(output_norm)
        .kv_shift(kv_shift)
        .rope(rope)
        .window(window)
        .norm_eps(norm_eps)
        .qk_norm_eps(qk_norm_eps)
        .device(device)
        .dtype(dtype);
  }
};

std::shared_ptr<tidegate::nn::AttentionImpl> make_attention(
    int64_t dim, std::optional<int64_t> num_heads, const std::string& preset,
    std::optional<int64_t> num_kv_heads, std::optional<bool> qk_norm, bool qk_norm_shared,
    std::optional<bool> output_gate, const std::string& output_activation,
    std::optional<bool> output_norm, std::optional<bool> kv_shift, std::optional<double> rope,
    std::optional<int64_t> window, double norm_eps, std::optional<double> qk_norm_eps,
    OptionalDevice device, OptionalDtype dtype) {
  const AttentionSwitchArgs args{dim,         num_heads,      preset,      num_kv_heads,
                                 qk_norm,     qk_norm_shared, output_gate, output_activation,
                                 output_norm, kv_shift,       rope,        window,
                                 norm_eps,    qk_norm_eps,    device,      dtype};
  return std::make_shared<tidegate::nn::AttentionImpl>(
      args.options<tidegate::nn::AttentionOptions>());
}

void bind_attention(py::module& m) {
  using tidegate::nn::AttentionImpl;
  const tidegate::nn::AttentionOptions defaults(1);
  auto bound = bind_module<AttentionImpl>(m, "Attention");
  bound.def(
      py::init(&make_attention), py::arg("dim"), py::arg("num_heads") = defaults.num_heads(),
      py::kw_only(), py::arg("preset") = defaults.preset(),
      py::arg("num_kv_heads") = defaults.num_kv_heads(), py::arg("qk_norm") = defaults.qk_norm(),
      py::arg("qk_norm_shared") = defaults.qk_norm_shared(),
      py::arg("output_gate") = defaults.output_gate(),
      py::arg("output_activation") = defaults.output_activation(),
      py::arg("output_norm") = defaults.output_norm(), py::arg("kv_shift") = defaults.kv_shift(),
      py::arg("rope") = defaults.rope(), py::arg("window") = defaults.window(),
      py::arg("norm_eps") = defaults.norm_eps(), py::arg("qk_norm_eps") = defaults.qk_norm_eps(),
      py::arg("device") = defaults.device(), py::arg("dtype") = defaults.dtype());
  bind_mixer<AttentionImpl>(bound);
}

// "long:2:256" of ("long", 2, 256).
std::string to_gate_init(const py::object& given) {
  if (py::isinstance<py::str>(given)) return given.cast<std::string>();
  std::string text;
  for (const auto& part : given) {
    text += (text.empty() ? "" : ":") + py::str(part).cast<std::string>();
  }
  return text;
}

std::shared_ptr<tidegate::nn::ForgettingAttentionImpl> make_forgetting_attention(
    int64_t dim, std::optional<int64_t> num_heads, const std::string& preset,
    std::optional<int64_t> num_kv_heads, const std::string& gate, const py::object& gate_init,
    std::optional<double> gumbel_gate, bool lower_bound, std::optional<bool> qk_norm,
    bool qk_norm_shared, std::optional<bool> output_gate, const std::string& output_activation,
    std::optional<bool> output_norm, std::optional<bool> kv_shift, std::optional<double> rope,
    std::optional<int64_t> window, std::optional<double> prune, bool drop_pruned, double norm_eps,
    std::optional<double> qk_norm_eps, OptionalDevice device, OptionalDtype dtype) {
  using tidegate::nn::ForgettingAttentionOptions;
  const AttentionSwitchArgs args{dim,         num_heads,      preset,      num_kv_heads,
                                 qk_norm,     qk_norm_shared, output_gate, output_activation,
                                 output_norm, kv_shift,       rope,        window,
                                 norm_eps,    qk_norm_eps,    device,      dtype};
  return std::make_shared<tidegate::nn::ForgettingAttentionImpl>(
      args.options<ForgettingAttentionOptions>()
          .gate(gate)
          .gate_init(to_gate_init(gate_init))
          .gumbel_gate(gumbel_gate)
          .lower_bound(lower_bound)
          .prune(prune)
          .drop_pruned(drop_pruned));
}

void bind_forgetting_attention(py::module& m) {
  using tidegate::nn::ForgettingAttentionImpl;
  const tidegate::nn::ForgettingAttentionOptions defaults(1);
  auto bound = bind_module<ForgettingAttentionImpl>(m, "ForgettingAttention");
  bound.def(
      py::init(&make_forgetting_attention), py::arg("dim"),
      py::arg("num_heads") = defaults.num_heads(), py::kw_only(),
      py::arg("preset") = defaults.preset(), py::arg("num_kv_heads") = defaults.num_kv_heads(),
      py::arg("gate") = defaults.gate(), py::arg("gate_init") = defaults.gate_init(),
      py::arg("gumbel_gate") = defaults.gumbel_gate(),
      py::arg("lower_bound") = defaults.lower_bound(), py::arg("qk_norm") = defaults.qk_norm(),
      py::arg("qk_norm_shared") = defaults.qk_norm_shared(),
      py::arg("output_gate") = defaults.output_gate(),
      py::arg("output_activation") = defaults.output_activation(),
      py::arg("output_norm") = defaults.output_norm(), py::arg("kv_shift") = defaults.kv_shift(),
      py::arg("rope") = defaults.rope(), py::arg("window") = defaults.window(),
      py::arg("prune") = defaults.prune(), py::arg("drop_pruned") = defaults.drop_pruned(),
      py::arg("norm_eps") = defaults.norm_eps(), py::arg("qk_norm_eps") = defaults.qk_norm_eps(),
      py::arg("device") = defaults.device(), py::arg("dtype") = defaults.dtype());
  bind_mixer<ForgettingAttentionImpl>(bound);
}

}  // namespace

void bind_matrix_mixers(py::module& m) {
  bind_hgru2(m);
  bind_gla(m);
  bind_attention(m);
  bind_forgetting_attention(m);
}

}  // namespace tidegate::python
