// Mixers whose state is a vector (HGRU, the linear and the minimal gated RNNs, LRU, RWKV-4), and
// the lower bounds of their gates.
//
// The defaults that Python sees are those of the C++ options, not a second list of them.
#include <string>
#include <utility>

#include "bindings.h"
#include "tidegate/nn/gated_linear_rnn.h"
#include "tidegate/nn/gated_rnn.h"
#include "tidegate/nn/hgru.h"
#include "tidegate/nn/lower_bounds.h"
#include "tidegate/nn/lru.h"
#include "tidegate/nn/rwkv4.h"

namespace tidegate::python {
namespace {

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

}  // namespace

void bind_elementwise_mixers(py::module& m) {
  bind_lower_bounds(m);
  bind_hgru(m);
  bind_gated_linear_rnn(m);
  bind_lru(m);
  bind_slru(m);
  bind_rwkv4(m);
  bind_gated_rnn(m);
}

}  // namespace tidegate::python
