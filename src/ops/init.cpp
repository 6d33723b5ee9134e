// Initialisers of parameters: drawn in float32 on the CPU, then cast and copied.

#include "tidegate/ops/init.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "src/ops/checks.h"
#include "src/ops/registration.h"

namespace tidegate::ops {
namespace {

void check_initialised(const char* op, const at::Tensor& p) {
  TORCH_CHECK(p.is_floating_point(), op, ": p must be floating-point, got ",
              dtype_name(p.scalar_type()));
}

/// Fills `p` with what `draw` writes into an fp32 CPU tensor of its shape.
template <class Draw>
void fill_parameter(const char* op, at::Tensor& p, const Draw& draw) {
  check_initialised(op, p);
  if (p.is_meta()) {
    return;
  }
  at::Tensor values = at::empty(p.sizes(), at::TensorOptions(at::kCPU).dtype(at::kFloat));
  draw(values);
  p.copy_(values);
}

void uniform_kernel(at::Tensor& p, double low, double high) {
  TORCH_CHECK(low <= high, "init_uniform_: high must be at least low = ", low, ", got ", high);
  fill_parameter("init_uniform_", p, [=](at::Tensor& values) { values.uniform_(low, high); });
}

void normal_kernel(at::Tensor& p, double mean, double std) {
  TORCH_CHECK(std >= 0, "init_normal_: std must be at least 0, got ", std);
  fill_parameter("init_normal_", p, [=](at::Tensor& values) { values.normal_(mean, std); });
}

void constant_kernel(at::Tensor& p, double value) {
  fill_parameter("init_constant_", p, [=](at::Tensor& values) { values.fill_(value); });
}

// Each of the uniform numbers in `values` through `map`, in double.
template <class Map>
void transform_values(at::Tensor& values, const Map& map) {
  float* data = values.mutable_data_ptr<float>();
  std::transform(data, data + values.numel(), data,
                 [&](float u) { return static_cast<float>(map(static_cast<double>(u))); });
}

void chrono_kernel(at::Tensor& p, int64_t t_max) {
  TORCH_CHECK(t_max >= 2, "init_chrono_: t_max must be at least 2, got ", t_max);
  fill_parameter("init_chrono_", p, [=](at::Tensor& values) {
    values.uniform_(1.0, static_cast<double>(t_max - 1));
    transform_values(values, [](double u) { return std::log(u); });
  });
}

void gumbel_softmax_kernel(at::Tensor& p, int64_t d, double alpha, double tau) {
  TORCH_CHECK(d >= 2, "init_gumbel_softmax_: d must be at least 2, got ", d);
  TORCH_CHECK(tau > 0, "init_gumbel_softmax_: tau must be above 0, got ", tau);
  const double least = 1.0 / static_cast<double>(d);
  fill_parameter("init_gumbel_softmax_", p, [=](at::Tensor& values) {
    values.uniform_(least, 1.0 - least);
    transform_values(values,
                     [=](double u) { return (alpha + std::log(u) - std::log1p(-u)) / tau; });
  });
}

// Numbers uniform on (0, 1): they are multiples of 2^-24 below one, and zero, which has no
// logarithm, stands for what is half as small.
template <class Map>
void transform_open_uniform(at::Tensor& values, const Map& map) {
  values.uniform_(0.0, 1.0);
  transform_values(values, [&](double u) { return map(std::max(u, 0x1p-25)); });
}

void lru_nu_log_kernel(at::Tensor& p, double r_min, double r_max) {
  TORCH_CHECK(0 <= r_min && r_min <= r_max && r_max <= 1 && r_max > 0 && r_min < 1,
              "init_lru_nu_log_: expected 0 <= r_min <= r_max <= 1, not both 0 nor both 1, got ",
              r_min, " and ", r_max);
  const double least = r_min * r_min;
  const double span = r_max * r_max - least;
  fill_parameter("init_lru_nu_log_", p, [=](at::Tensor& values) {
    transform_open_uniform(values,
                           [=](double u) { return std::log(-0.5 * std::log(least + span * u)); });
  });
}

void lru_theta_log_kernel(at::Tensor& p, double max_phase) {
  TORCH_CHECK(max_phase > 0, "init_lru_theta_log_: max_phase must be above 0, got ", max_phase);
  fill_parameter("init_lru_theta_log_", p, [=](at::Tensor& values) {
    transform_open_uniform(values, [=](double u) { return std::log(max_phase * u); });
  });
}

void lru_gamma_log_kernel(at::Tensor& p, const at::Tensor& nu_log) {
  check_initialised("init_lru_gamma_log_", p);
  TORCH_CHECK(nu_log.is_floating_point() && nu_log.sizes() == p.sizes(),
              "init_lru_gamma_log_: nu_log must be floating-point and have shape ", p.sizes(),
              " like p, got ", dtype_name(nu_log.scalar_type()), " ", nu_log.sizes());
  fill_parameter("init_lru_gamma_log_", p, [&](at::Tensor& values) {
    values.copy_(nu_log);
    transform_values(values,
                     [](double nu) { return 0.5 * std::log(-std::expm1(-2.0 * std::exp(nu))); });
  });
}

void long_kernel(at::Tensor& p, double t_min, double t_max) {
  TORCH_CHECK(p.dim() == 1, "init_long_: p must have shape [H], got ", p.sym_sizes());
  TORCH_CHECK(t_min > 0 && t_max > 0, "init_long_: t_min and t_max must be above 0, got ", t_min,
              " and ", t_max);
  fill_parameter("init_long_", p, [=](at::Tensor& values) {
    float* b = values.mutable_data_ptr<float>();
    const int64_t heads = values.numel();
    for (int64_t h = 0; h < heads; ++h) {
      const double part = heads > 1 ? static_cast<double>(h) / static_cast<double>(heads - 1) : 0.0;
      const double span = t_min * std::pow(t_max / t_min, part);
      b[h] = static_cast<float>(-std::log(std::expm1(1.0 / span)));
    }
  });
}

void rope_theta_kernel(at::Tensor& p) {
  TORCH_CHECK(p.dim() == 1, "init_rope_theta_: p must have shape [D], got ", p.sym_sizes());
  fill_parameter("init_rope_theta_", p, [](at::Tensor& values) {
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
  define_init<&chrono_kernel>(m, "init_chrono_(Tensor(a!) p, int t_max) -> ()", "init_chrono_");
  define_init<&gumbel_softmax_kernel>(
      m, "init_gumbel_softmax_(Tensor(a!) p, int d, float alpha, float tau) -> ()",
      "init_gumbel_softmax_");
  define_init<&lru_nu_log_kernel>(
      m, "init_lru_nu_log_(Tensor(a!) p, float r_min, float r_max) -> ()", "init_lru_nu_log_");
  define_init<&lru_theta_log_kernel>(m, "init_lru_theta_log_(Tensor(a!) p, float max_phase) -> ()",
                                     "init_lru_theta_log_");
  define_init<&lru_gamma_log_kernel>(m, "init_lru_gamma_log_(Tensor(a!) p, Tensor nu_log) -> ()",
                                     "init_lru_gamma_log_");
  define_init<&long_kernel>(m, "init_long_(Tensor(a!) p, float t_min, float t_max) -> ()",
                            "init_long_");
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

void init_chrono_(at::Tensor p, int64_t t_max) {
  ops::check_given("init_chrono_", "p", p);
  ops::call_op<&ops::chrono_kernel>("tidegate::init_chrono_", p, t_max);
}

void init_gumbel_softmax_(at::Tensor p, int64_t d, double alpha, double tau) {
  ops::check_given("init_gumbel_softmax_", "p", p);
  ops::call_op<&ops::gumbel_softmax_kernel>("tidegate::init_gumbel_softmax_", p, d, alpha, tau);
}

void init_lru_nu_log_(at::Tensor p, double r_min, double r_max) {
  ops::check_given("init_lru_nu_log_", "p", p);
  ops::call_op<&ops::lru_nu_log_kernel>("tidegate::init_lru_nu_log_", p, r_min, r_max);
}

void init_lru_theta_log_(at::Tensor p, double max_phase) {
  ops::check_given("init_lru_theta_log_", "p", p);
  ops::call_op<&ops::lru_theta_log_kernel>("tidegate::init_lru_theta_log_", p, max_phase);
}

void init_lru_gamma_log_(at::Tensor p, const at::Tensor& nu_log) {
  ops::check_given("init_lru_gamma_log_", "p", p);
  ops::check_given("init_lru_gamma_log_", "nu_log", nu_log);
  ops::call_op<&ops::lru_gamma_log_kernel>("tidegate::init_lru_gamma_log_", p, nu_log);
}

void init_long_(at::Tensor p, double t_min, double t_max) {
  ops::check_given("init_long_", "p", p);
  ops::call_op<&ops::long_kernel>("tidegate::init_long_", p, t_min, t_max);
}

void init_rope_theta_(at::Tensor p) {
  ops::check_given("init_rope_theta_", "p", p);
  ops::call_op<&ops::rope_theta_kernel>("tidegate::init_rope_theta_", p);
}

}  // namespace tidegate
