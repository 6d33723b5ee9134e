// tidegate._cpp: the C++ modules for Python; python/tidegate/cpp.py makes torch.nn.Modules of them.
//
// pybind11 is the one in torch's include folder: another version has other internals, and does not
// know torch's types.
#include <torch/csrc/Exceptions.h>
#include <torch/python.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tidegate/models/causal_lm.h"
#include "tidegate/models/classifiers.h"
#include "tidegate/models/safetensors.h"
#include "tidegate/nn/attention.h"
#include "tidegate/nn/forgetting_attention.h"
#include "tidegate/nn/gated_linear_attention.h"
#include "tidegate/nn/gated_linear_rnn.h"
#include "tidegate/nn/gated_rnn.h"
#include "tidegate/nn/glu.h"
#include "tidegate/nn/hgru.h"
#include "tidegate/nn/hgru2.h"
#include "tidegate/nn/lower_bounds.h"
#include "tidegate/nn/lru.h"
#include "tidegate/nn/rwkv4.h"
#include "tidegate/optim/masters.h"
#include "tidegate/optim/muon.h"

namespace py = pybind11;

namespace {

using tidegate::models::LMConfig;
using tidegate::models::ModelState;
using tidegate::models::Output;
using tidegate::nn::Placement;
using torch::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDevice = std::optional<torch::Device>;
using OptionalDtype = std::optional<torch::ScalarType>;
using Release = py::call_guard<py::gil_scoped_release>;

// Errors as torch's own Python functions raise them: ValueError and the like, without a C++ trace.
void translate(std::exception_ptr error) {
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  }
}

// A module's class. torch has bound nn::Module itself, with the methods that all modules share, so
// they are inherited; torch::python::bind_module would compile them once more for every class.
template <typename Impl>
auto bind_module(py::module& m, const char* name) {
  return py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>>(m, name);
}

py::tuple to_tuple(const Output& output) {
  return py::make_tuple(output.logits, output.loss, output.state);
}

tidegate::models::Labels to_labels(const py::object& labels) {
  if (labels.is_none()) return {};
  if (py::isinstance<py::str>(labels)) return labels.cast<std::string>();
  return labels.cast<Tensor>();
}

// The defaults that Python sees are those of the C++ options, not a second list of them.
void bind_glu(py::module& m) {
  using tidegate::nn::GLUImpl;
  const auto make = [](int64_t dim, std::optional<int64_t> hidden, const std::string& activation,
                       bool bias, OptionalDevice device, OptionalDtype dtype) {
    return std::make_shared<GLUImpl>(tidegate::nn::GLUOptions(dim)
                                         .hidden(hidden)
                                         .activation(activation)
                                         .bias(bias)
                                         .device(device)
                                         .dtype(dtype));
  };
  const tidegate::nn::GLUOptions defaults(1);
  bind_module<GLUImpl>(m, "GLU")
      .def(py::init(make), py::arg("dim"), py::kw_only(), py::arg("hidden") = defaults.hidden(),
           py::arg("activation") = defaults.activation(), py::arg("bias") = defaults.bias(),
           py::arg("device") = defaults.device(), py::arg("dtype") = defaults.dtype())
      .def("reset_parameters", &GLUImpl::reset_parameters)
      .def("forward", &GLUImpl::forward, py::arg("x"), Release());
}

void bind_lower_bounds(py::module& m) {
  using tidegate::nn::LowerBoundsImpl;
  const auto make = [](int64_t layers, int64_t dim, const std::string& mode, OptionalDevice device,
                       OptionalDtype dtype) {
    return std::make_shared<LowerBoundsImpl>(
        tidegate::nn::LowerBoundsOptions(layers, dim).mode(mode).device(device).dtype(dtype));
  };
  const tidegate::nn::LowerBoundsOptions defaults(1, 1);
  bind_module<LowerBoundsImpl>(m, "LowerBounds")
      .def(py::init(make), py::arg("layers"), py::arg("dim"), py::kw_only(),
           py::arg("mode") = defaults.mode(), py::arg("device") = defaults.device(),
           py::arg("dtype") = defaults.dtype())
      .def("reset_parameters", &LowerBoundsImpl::reset_parameters)
      .def("forward", &LowerBoundsImpl::forward, Release());
}

std::shared_ptr<tidegate::nn::HGRUImpl> make_hgru(
    int64_t dim, std::optional<bool> complex, std::optional<std::string> theta,
    const std::string& input_gate, const std::string& forget_gate, bool output_gate, int64_t expand,
    std::optional<std::string> expansion, std::optional<int64_t> rank,
    std::optional<std::string> gate_init, std::optional<double> gumbel_gate, bool bidirectional,
    const std::string& preset, std::optional<bool> bias, std::optional<std::string> norm,
    double norm_eps, OptionalDevice device, OptionalDtype dtype) {
  return std::make_shared<tidegate::nn::HGRUImpl>(tidegate::nn::HGRUOptions(dim)
                                                      .complex(complex)
                                                      .theta(std::move(theta))
                                                      .input_gate(input_gate)
                                                      .forget_gate(forget_gate)
                                                      .output_gate(output_gate)
                                                      .expand(expand)
                                                      .expansion(std::move(expansion))
                                                      .rank(rank)
                                                      .gate_init(std::move(gate_init))
                                                      .gumbel_gate(gumbel_gate)
                                                      .bidirectional(bidirectional)
                                                      .preset(preset)
                                                      .bias(bias)
                                                      .norm(std::move(norm))
                                                      .norm_eps(norm_eps)
                                                      .device(device)
                                                      .dtype(dtype));
}

template <typename Impl>
std::shared_ptr<Impl> make_model(const std::string& config, OptionalDevice device,
                                 OptionalDtype dtype) {
  return std::make_shared<Impl>(LMConfig::from_json(config), Placement{device, dtype});
}

// The calls of a token mixer, with the state as C++ holds it.
template <typename Impl, typename Class>
void bind_mixer(Class& bound) {
  bound.def("reset_parameters", &Impl::reset_parameters)
      .def("init_state", &Impl::init_state, py::arg("batch"), py::kw_only(),
           py::arg("device") = py::none(), py::arg("dtype") = py::none(),
           py::arg("capacity") = py::none())
      .def("forward", &Impl::forward, py::arg("x"), py::arg("state") = py::none(), py::kw_only(),
           py::arg("gamma") = py::none(), py::arg("cu_seqlens") = py::none(), Release())
      .def("step", &Impl::step, py::arg("x"), py::arg("state"), py::arg("gamma") = py::none(),
           Release())
      .def_property_readonly("takes_gamma", &Impl::takes_gamma)
      .def_property_readonly("gamma_size", &Impl::gamma_size);
}

void bind_hgru(py::module& m) {
  using tidegate::nn::HGRUImpl;
  const tidegate::nn::HGRUOptions defaults(1);
  auto bound = bind_module<HGRUImpl>(m, "HGRU");
  bound
      .def(py::init(&make_hgru), py::arg("dim"), py::kw_only(),
           py::arg("complex") = defaults.complex(), py::arg("theta") = defaults.theta(),
           py::arg("input_gate") = defaults.input_gate(),
           py::arg("forget_gate") = defaults.forget_gate(),
           py::arg("output_gate") = defaults.output_gate(), py::arg("expand") = defaults.expand(),
           py::arg("expansion") = defaults.expansion(), py::arg("rank") = defaults.rank(),
           py::arg("gate_init") = defaults.gate_init(),
           py::arg("gumbel_gate") = defaults.gumbel_gate(),
           py::arg("bidirectional") = defaults.bidirectional(),
           py::arg("preset") = defaults.preset(), py::arg("bias") = defaults.bias(),
           py::arg("norm") = defaults.norm(), py::arg("norm_eps") = defaults.norm_eps(),
           py::arg("device") = defaults.device(), py::arg("dtype") = defaults.dtype())
      .def_property_readonly("channels", &HGRUImpl::channels)
      .def_property_readonly("state_size", &HGRUImpl::state_size);
  bind_mixer<HGRUImpl>(bound);
}

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

void bind_gated_linear_rnn(py::module& m) {
  using tidegate::nn::GatedLinearRNNImpl;
  const auto make = [](int64_t dim, const std::string& gate_init, std::optional<double> gumbel_gate,
                       bool lower_bound, OptionalDevice device, OptionalDtype dtype) {
    return std::make_shared<GatedLinearRNNImpl>(tidegate::nn::GatedLinearRNNOptions(dim)
                                                    .gate_init(gate_init)
                                                    .gumbel_gate(gumbel_gate)
                                                    .lower_bound(lower_bound)
                                                    .device(device)
                                                    .dtype(dtype));
  };
  const tidegate::nn::GatedLinearRNNOptions defaults(1);
  auto bound = bind_module<GatedLinearRNNImpl>(m, "GatedLinearRNN");
  bound.def(py::init(make), py::arg("dim"), py::kw_only(),
            py::arg("gate_init") = defaults.gate_init(),
            py::arg("gumbel_gate") = defaults.gumbel_gate(),
            py::arg("lower_bound") = defaults.lower_bound(), py::arg("device") = defaults.device(),
            py::arg("dtype") = defaults.dtype());
  bind_mixer<GatedLinearRNNImpl>(bound);
}

void bind_lru(py::module& m) {
  using tidegate::nn::LRUImpl;
  const auto make = [](int64_t dim, std::optional<int64_t> state, bool skip, double r_min,
                       double r_max, double max_phase, std::optional<std::string> gate,
                       std::optional<std::string> gate_init, std::optional<double> gumbel_gate,
                       bool lower_bound, OptionalDevice device, OptionalDtype dtype) {
    return std::make_shared<LRUImpl>(tidegate::nn::LRUOptions(dim)
                                         .state(state)
                                         .skip(skip)
                                         .r_min(r_min)
                                         .r_max(r_max)
                                         .max_phase(max_phase)
                                         .gate(std::move(gate))
                                         .gate_init(std::move(gate_init))
                                         .gumbel_gate(gumbel_gate)
                                         .lower_bound(lower_bound)
                                         .device(device)
                                         .dtype(dtype));
  };
  const tidegate::nn::LRUOptions defaults(1);
  auto bound = bind_module<LRUImpl>(m, "LRU");
  bound.def(py::init(make), py::arg("dim"), py::kw_only(), py::arg("state") = defaults.state(),
            py::arg("skip") = defaults.skip(), py::arg("r_min") = defaults.r_min(),
            py::arg("r_max") = defaults.r_max(), py::arg("max_phase") = defaults.max_phase(),
            py::arg("gate") = defaults.gate(), py::arg("gate_init") = defaults.gate_init(),
            py::arg("gumbel_gate") = defaults.gumbel_gate(),
            py::arg("lower_bound") = defaults.lower_bound(), py::arg("device") = defaults.device(),
            py::arg("dtype") = defaults.dtype());
  bind_mixer<LRUImpl>(bound);
}

void bind_slru(py::module& m) {
  using tidegate::nn::SLRUImpl;
  const auto make = [](int64_t dim, std::optional<int64_t> state, bool skip, double r_min,
                       double r_max, OptionalDevice device, OptionalDtype dtype) {
    return std::make_shared<SLRUImpl>(tidegate::nn::SLRUOptions(dim)
                                          .state(state)
                                          .skip(skip)
                                          .r_min(r_min)
                                          .r_max(r_max)
                                          .device(device)
                                          .dtype(dtype));
  };
  const tidegate::nn::SLRUOptions defaults(1);
  auto bound = bind_module<SLRUImpl>(m, "SLRU");
  bound.def(py::init(make), py::arg("dim"), py::kw_only(), py::arg("state") = defaults.state(),
            py::arg("skip") = defaults.skip(), py::arg("r_min") = defaults.r_min(),
            py::arg("r_max") = defaults.r_max(), py::arg("device") = defaults.device(),
            py::arg("dtype") = defaults.dtype());
  bind_mixer<SLRUImpl>(bound);
}

void bind_gated_rnn(py::module& m) {
  using tidegate::nn::GatedRNNImpl;
  const auto make = [](int64_t dim, const std::string& gate_init, std::optional<double> gumbel_gate,
                       bool lower_bound, OptionalDevice device, OptionalDtype dtype) {
    return std::make_shared<GatedRNNImpl>(tidegate::nn::GatedRNNOptions(dim)
                                              .gate_init(gate_init)
                                              .gumbel_gate(gumbel_gate)
                                              .lower_bound(lower_bound)
                                              .device(device)
                                              .dtype(dtype));
  };
  const tidegate::nn::GatedRNNOptions defaults(1);
  auto bound = bind_module<GatedRNNImpl>(m, "GatedRNN");
  bound.def(py::init(make), py::arg("dim"), py::kw_only(),
            py::arg("gate_init") = defaults.gate_init(),
            py::arg("gumbel_gate") = defaults.gumbel_gate(),
            py::arg("lower_bound") = defaults.lower_bound(), py::arg("device") = defaults.device(),
            py::arg("dtype") = defaults.dtype());
  bind_mixer<GatedRNNImpl>(bound);
}

void bind_rwkv4(py::module& m) {
  using tidegate::nn::RWKV4Impl;
  const auto make = [](int64_t dim, bool time_shift, const std::string& decay_init, double depth,
                       OptionalDevice device, OptionalDtype dtype) {
    return std::make_shared<RWKV4Impl>(tidegate::nn::RWKV4Options(dim)
                                           .time_shift(time_shift)
                                           .decay_init(decay_init)
                                           .depth(depth)
                                           .device(device)
                                           .dtype(dtype));
  };
  const tidegate::nn::RWKV4Options defaults(1);
  auto bound = bind_module<RWKV4Impl>(m, "RWKV4");
  bound.def(py::init(make), py::arg("dim"), py::kw_only(),
            py::arg("time_shift") = defaults.time_shift(),
            py::arg("decay_init") = defaults.decay_init(), py::arg("depth") = defaults.depth(),
            py::arg("device") = defaults.device(), py::arg("dtype") = defaults.dtype());
  bind_mixer<RWKV4Impl>(bound);
}

// A model from the JSON of its configuration, with what all of them have.
template <typename Impl>
auto bind_model(py::module& m, const char* name) {
  return bind_module<Impl>(m, name)
      .def(py::init(&make_model<Impl>), py::arg("config"), py::kw_only(),
           py::arg("device") = py::none(), py::arg("dtype") = py::none())
      .def("reset_parameters", &Impl::reset_parameters)
      .def("config_json", [](const Impl& model) { return model.config.to_json(); });
}

template <typename Holder, typename Class>
void bind_files(Class& bound) {
  using Impl = typename Holder::Impl;
  bound.def_readwrite("recompute", &Impl::recompute)
      .def_readwrite("residual_dtype", &Impl::residual_dtype)
      .def(
          "save", [](const Impl& model, const std::string& folder) { model.save(folder); },
          py::arg("directory"))
      .def_static(
          "_load",
          [](const std::string& folder, OptionalDevice device) {
            return Holder::load(folder, device.value_or(torch::kCPU)).ptr();
          },
          py::arg("directory"), py::arg("device") = py::none());
}

void bind_block(py::module& m) {
  using tidegate::models::BlockImpl;
  bind_model<BlockImpl>(m, "Block")
      .def("forward", &BlockImpl::forward, py::arg("x"), py::arg("state"), py::kw_only(),
           py::arg("gamma") = py::none(), py::arg("cu_seqlens") = py::none(), Release())
      .def("step", &BlockImpl::step, py::arg("x"), py::arg("state"), py::arg("gamma") = py::none(),
           Release());
}

Tensor generate(tidegate::models::CausalLMImpl& model, const Tensor& ids, int64_t max_new_tokens,
                double temperature, std::optional<int64_t> top_k, std::optional<double> top_p,
                std::optional<int64_t> eos, std::optional<int64_t> seed,
                const OptionalTensor& lengths, std::optional<double> min_p,
                double repetition_penalty) {
  return model.generate(ids, tidegate::models::GenerateOptions(max_new_tokens)
                                 .temperature(temperature)
                                 .top_k(top_k)
                                 .top_p(top_p)
                                 .eos(eos)
                                 .seed(seed)
                                 .lengths(lengths.value_or(Tensor()))
                                 .min_p(min_p)
                                 .repetition_penalty(repetition_penalty));
}

void bind_causal_lm(py::module& m) {
  using tidegate::models::CausalLMImpl;
  const auto forward = [](CausalLMImpl& model, const Tensor& ids, const py::object& labels,
                          const std::optional<ModelState>& state, const OptionalTensor& cu_seqlens,
                          std::optional<bool> return_logits, double label_smoothing,
                          double z_loss) {
    return to_tuple(model.forward(ids, to_labels(labels), state, cu_seqlens,
                                  {return_logits, label_smoothing, z_loss}));
  };
  const tidegate::models::GenerateOptions defaults(0);
  auto bound = bind_model<CausalLMImpl>(m, "CausalLM");
  bound
      .def("forward", forward, py::arg("ids"), py::arg("labels") = py::none(), py::kw_only(),
           py::arg("state") = py::none(), py::arg("cu_seqlens") = py::none(),
           py::arg("return_logits") = py::none(), py::arg("label_smoothing") = 0.0,
           py::arg("z_loss") = 0.0)
      .def("logits_at", &CausalLMImpl::logits_at, py::arg("ids"), py::arg("positions"), Release())
      .def("init_state", &CausalLMImpl::init_state, py::arg("batch"), py::kw_only(),
           py::arg("capacity") = py::none())
      .def("step", &CausalLMImpl::step, py::arg("ids"), py::arg("state"), Release())
      .def("prefill", &CausalLMImpl::prefill, py::arg("ids"), py::arg("lengths") = py::none(),
           py::kw_only(), py::arg("capacity") = 0, Release())
      .def("generate", &generate, py::arg("ids"), py::arg("max_new_tokens"),
           py::arg("temperature") = defaults.temperature(), py::arg("top_k") = defaults.top_k(),
           py::arg("top_p") = defaults.top_p(), py::arg("eos") = defaults.eos(),
           py::arg("seed") = defaults.seed(), py::kw_only(), py::arg("lengths") = py::none(),
           py::arg("min_p") = defaults.min_p(),
           py::arg("repetition_penalty") = defaults.repetition_penalty(), Release());
  bind_files<tidegate::models::CausalLM>(bound);
}

/// For tests of C++'s optimisers beside Python's.
void bind_optimizers(py::module& m) {
  using tidegate::optim::MasterWeights;
  using tidegate::optim::MuonAdamW;
  using Module = std::shared_ptr<torch::nn::Module>;
  py::class_<MuonAdamW>(m, "MuonAdamW")
      .def(py::init([](const Module& model, double muon_lr, double lr, double weight_decay) {
             return std::make_unique<MuonAdamW>(
                 *model, tidegate::optim::MuonOptions(muon_lr).weight_decay(weight_decay),
                 torch::optim::AdamWOptions(lr).weight_decay(weight_decay).betas({0.9, 0.98}));
           }),
           py::arg("model"), py::arg("muon_lr"), py::arg("lr"), py::arg("weight_decay"))
      .def("step", &MuonAdamW::step)
      .def_property_readonly("splits", [](const MuonAdamW& o) { return o.muon.splits(); });
  py::class_<tidegate::optim::AdamW>(m, "AdamW")
      .def(py::init([](const Module& model, double lr, double weight_decay) {
             const auto options =
                 torch::optim::AdamWOptions(lr).weight_decay(weight_decay).betas({0.9, 0.98});
             return std::make_unique<tidegate::optim::AdamW>(
                 tidegate::optim::parameter_groups(*model, options), options);
           }),
           py::arg("model"), py::arg("lr"), py::arg("weight_decay"))
      .def("step", [](tidegate::optim::AdamW& optimizer) { optimizer.step(); });
  py::class_<MasterWeights>(m, "MasterWeights")
      .def(py::init([](const Module& model, MuonAdamW& optimizer) {
             return std::make_unique<MasterWeights>(*model, optimizer);
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(py::init([](const Module& model, tidegate::optim::AdamW& optimizer) {
             return std::make_unique<MasterWeights>(*model, optimizer);
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("clip_gradients", &MasterWeights::clip_gradients)
      .def("step", &MasterWeights::step);
}

void bind_classifiers(py::module& m) {
  using tidegate::models::ImageClassifierImpl;
  using tidegate::models::SequenceClassifierImpl;
  const auto classify = [](SequenceClassifierImpl& model, const Tensor& ids,
                           const OptionalTensor& labels, const OptionalTensor& lengths,
                           const OptionalTensor& cu_seqlens) {
    return to_tuple(model.forward(ids, labels, lengths, cu_seqlens));
  };
  auto sequences = bind_model<SequenceClassifierImpl>(m, "SequenceClassifier");
  sequences.def("forward", classify, py::arg("ids"), py::arg("labels") = py::none(), py::kw_only(),
                py::arg("lengths") = py::none(), py::arg("cu_seqlens") = py::none());
  bind_files<tidegate::models::SequenceClassifier>(sequences);
  const auto classify_images = [](ImageClassifierImpl& model, const Tensor& images,
                                  const OptionalTensor& labels) {
    return to_tuple(model.forward(images, labels));
  };
  auto images = bind_model<ImageClassifierImpl>(m, "ImageClassifier");
  images.def("forward", classify_images, py::arg("images"), py::arg("labels") = py::none());
  bind_files<tidegate::models::ImageClassifier>(images);
}

void bind_functions(py::module& m) {
  m.def("presets", [] {
    std::map<std::string, std::string> texts;
    for (const auto& [name, config] : tidegate::models::presets()) texts[name] = config.to_json();
    return texts;
  });
  m.def("default_config", [] { return LMConfig{}.to_json(); });
  m.def("mixers", &tidegate::models::mixers);
  m.def(
      "normalized_config",
      [](const std::string& text) { return LMConfig::from_json(text).to_json(); }, py::arg("text"));
  m.def(
      "load_safetensors",
      [](const std::string& path) { return tidegate::models::load_safetensors(path); },
      py::arg("path"));
  m.def(
      "save_safetensors",
      [](const tidegate::models::TensorMap& tensors, const std::string& path,
         const std::map<std::string, std::string>& metadata) {
        tidegate::models::save_safetensors(tensors, path, metadata);
      },
      py::arg("tensors"), py::arg("path"),
      py::arg("metadata") = std::map<std::string, std::string>());
}

}  // namespace

PYBIND11_MODULE(_cpp, m) {
  m.doc() = "The C++ modules of tidegate; use them through tidegate.cpp.";
  py::register_local_exception_translator(translate);
  bind_glu(m);
  bind_lower_bounds(m);
  bind_hgru(m);
  bind_hgru2(m);
  bind_gla(m);
  bind_attention(m);
  bind_forgetting_attention(m);
  bind_gated_linear_rnn(m);
  bind_lru(m);
  bind_slru(m);
  bind_rwkv4(m);
  bind_gated_rnn(m);
  bind_block(m);
  bind_causal_lm(m);
  bind_classifiers(m);
  bind_optimizers(m);
  bind_functions(m);
}
