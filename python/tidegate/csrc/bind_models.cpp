// Blocks, models and the GLU between mixers.
#include <string>

#include "bindings.h"
#include "tidegate/models/causal_lm.h"
#include "tidegate/models/classifiers.h"
#include "tidegate/nn/glu.h"

namespace tidegate::python {
namespace {

using models::LMConfig;
using models::ModelState;
using models::Output;
using nn::Placement;

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

template <typename Impl>
std::shared_ptr<Impl> make_model(const std::string& config, OptionalDevice device,
                                 OptionalDtype dtype) {
  return std::make_shared<Impl>(LMConfig::from_json(config), Placement{device, dtype});
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

}  // namespace

void bind_models(py::module& m) {
  bind_glu(m);
  bind_block(m);
  bind_causal_lm(m);
  bind_classifiers(m);
}

}  // namespace tidegate::python
