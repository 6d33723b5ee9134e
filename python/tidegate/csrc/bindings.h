// What the files of tidegate._cpp share: how a module's class is bound, and what each file binds.
//
// pybind11 is the one in torch's include folder: another version has other internals, and does not
// know torch's types.
#pragma once

#include <torch/python.h>

#include <memory>
#include <optional>

namespace tidegate::python {

namespace py = pybind11;

using torch::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDevice = std::optional<torch::Device>;
using OptionalDtype = std::optional<torch::ScalarType>;
using Release = py::call_guard<py::gil_scoped_release>;

void bind_elementwise_mixers(py::module& m);  // bind_elementwise.cpp: and the gates' lower bounds
void bind_matrix_mixers(py::module& m);       // bind_matrix.cpp
void bind_models(py::module& m);              // bind_models.cpp: and what models are made of
void bind_optimizers(py::module& m);          // bind_optimizers.cpp

// A module's class. torch has bound nn::Module itself, with the methods that all modules share, so
// they are inherited; torch::python::bind_module would compile them once more for every class.
template <typename Impl>
auto bind_module(py::module& m, const char* name) {
  return py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>>(m, name);
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

}  // namespace tidegate::python
