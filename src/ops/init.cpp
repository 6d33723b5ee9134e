// Initialisers of parameters: drawn in float32 on the CPU, then cast and copied.

#include "tidegate/ops/init.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "src/ops/checks.h"
#include "src/ops/registration.h"

namespace tidegate::ops {
namespace {

void check_parameter(const char* op, const at::Tensor& p) {
  TORCH_CHECK(p.is_floating_point(), op, ": p must be floating-point, got ",
              c10::getDtypeNames(p.scalar_type()).first);
}

/// Fills `p` with what `draw` writes into an fp32 CPU tensor of its shape.
template <class Draw>
void fill(const char* op, at::Tensor& p, const Draw& draw) {
  check_parameter(op, p);
  if (p.is_meta()) {
    return;
  }
  at::Tensor values = at::empty(p.sizes(), at::TensorOptions(at::kCPU).dtype(at::kFloat));
  draw(values);
  p.copy_(values);
}

void uniform_kernel(at::Tensor& p, double low, double high) {
  TORCH_CHECK(low <= high, "init_uniform_: high must be at least low = ", low, ", got ", high);
  fill("init_uniform_", p, [=](at::Tensor& values) { values.uniform_(low, high); });
}

void normal_kernel(at::Tensor& p, double mean, double std) {
  TORCH_CHECK(std >= 0, "init_normal_: std must be at least 0, got ", std);
  fill("init_normal_", p, [=](at::Tensor& values) { values.normal_(mean, std); });
}

void constant_kernel(at::Tensor& p, double value) {
  fill("init_constant_", p, [=](at::Tensor& values) { values.fill_(value); });
}

void rope_theta_kernel(at::Tensor& p) {
  TORCH_CHECK(p.dim() == 1, "init_rope_theta_: p must have shape [D], got ", p.sym_sizes());
  fill("init_rope_theta_", p, [](at::Tensor& values) {
    const auto d = static_cast<double>(values.numel());
    float* theta = values.mutable_data_ptr<float>();
    for (int64_t j = 0; j < values.numel(); ++j) {
      theta[j] = static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(j) / d));
    }
  });
}

template <auto* Kernel>
void define_init(torch::Library& m, const char* schema, const char* name) {
  define_op(m, schema);
  m.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, Kernel));
  register_unrecorded_in_place(m, name);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  define_init<&uniform_kernel>(m, "init_uniform_(Tensor(a!) p, float low, float high) -> ()",
                               "init_uniform_");
  define_init<&normal_kernel>(m, "init_normal_(Tensor(a!) p, float mean, float std) -> ()",
                              "init_normal_");
  define_init<&constant_kernel>(m, "init_constant_(Tensor(a!) p, float value) -> ()",
                                "init_constant_");
  define_init<&rope_theta_kernel>(m, "init_rope_theta_(Tensor(a!) p) -> ()", "init_rope_theta_");
}

}  // namespace tidegate::ops

namespace tidegate {

void init_uniform_(at::Tensor p, double low, double high) {
  ops::check_given("init_uniform_", "p", p);
  ops::call_op<&ops::uniform_kernel>("tidegate::init_uniform_", p, low, high);
}

void init_normal_(at::Tensor p, double mean, double std) {
  ops::check_given("init_normal_", "p", p);
  ops::call_op<&ops::normal_kernel>("tidegate::init_normal_", p, mean, std);
}

void init_constant_(at::Tensor p, double value) {
  ops::check_given("init_constant_", "p", p);
  ops::call_op<&ops::constant_kernel>("tidegate::init_constant_", p, value);
}

void init_rope_theta_(at::Tensor p) {
  ops::check_given("init_rope_theta_", "p", p);
  ops::call_op<&ops::rope_theta_kernel>("tidegate::init_rope_theta_", p);
}

}  // namespace tidegate
