// tidegate._cpp: the C++ modules for Python; python/tidegate/cpp.py makes torch.nn.Modules of them.
#include "bindings.h"

#include <torch/csrc/Exceptions.h>

#include <map>
#include <string>

#include "tidegate/models/config.h"
#include "tidegate/models/safetensors.h"

namespace tidegate::python {
namespace {

using models::LMConfig;

// Errors as torch's own Python functions raise them: ValueError and the like, without a C++ trace.
void translate(std::exception_ptr error) {
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  }
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

}  // namespace tidegate::python

PYBIND11_MODULE(_cpp, m) {
  using namespace tidegate::python;
  m.doc() = "The C++ modules of tidegate; use them through tidegate.cpp.";
  py::register_local_exception_translator(translate);
  bind_elementwise_mixers(m);
  bind_matrix_mixers(m);
  bind_models(m);
  bind_optimizers(m);
  bind_functions(m);
}
