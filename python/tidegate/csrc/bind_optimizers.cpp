// The optimisers, for tests of C++'s beside Python's.
#include <memory>

#include "bindings.h"
#include "tidegate/optim/masters.h"
#include "tidegate/optim/muon.h"

namespace tidegate::python {

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

}  // namespace tidegate::python
