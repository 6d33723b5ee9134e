// Products of a step of decoding with what a layer does around them: src/nn/step_products.h.

#include "src/nn/products.h"
#include "src/nn/step_products.h"
#include "src/ops/gla.h"
#include "tidegate/models/causal_lm.h"
#include "tidegate/ops/glu.h"
#include "tidegate/ops/hgrn2.h"
#include "tidegate/ops/hgru.h"

#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <cstdlib>
#include <string>

namespace tidegate::nn {
namespace {

using torch::Tensor;

/// While it lives, steps are made of step products, or are not.
class Switched {
 public:
  explicit Switched(bool on) { setenv("TIDEGATE_STEP_PRODUCTS", on ? "1" : "0", 1); }
  ~Switched() { unsetenv("TIDEGATE_STEP_PRODUCTS"); }
  Switched(const Switched&) = delete;
  Switched& operator=(const Switched&) = delete;
};

/// Whether the device has them: it makes steps of more than sixteen rows of step products.
bool has_clusters() {
  const FewRowsGuard few_rows;
  return makes_step_products(at::empty({17, 8}, at::TensorOptions(at::kCUDA).dtype(at::kHalf)));
}

double distance(const Tensor& a, const Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
}

struct Around {
  const char* norm;
  const char* gate;  // "none", "before", "after"
  const char* glu;   // or null
  bool has_bias = false, has_residual = false, has_out = false;
};

constexpr Around kAll[] = {
    {"none", "none", nullptr},
    {"rms", "none", nullptr, true},
    {"layer", "after", nullptr, true, true, true},
    {"rms_no_weight", "before", "silu", true},
    {"rms", "after", "none", false, true, true},
    {"rms_no_weight", "none", nullptr, false, true},
};

/// The product by step_product() and by the ops it stands for, in one dtype and in double.
void expect_step_product(const Around& a, int64_t rows, int64_t inner, at::TensorOptions where) {
  const int64_t outer = 66, all = a.glu != nullptr ? 2 * outer : outer;
  const auto drawn = [&](at::IntArrayRef shape, double scale = 1) {
    return (scale * at::randn(shape, where.dtype(at::kFloat))).to(where.dtype());
  };
  const auto made_norm = [&](at::ScalarType dtype) {
    Norm norm(NormOptions(inner).kind(a.norm).device(where.device()).dtype(dtype));
    return norm;
  };
  const auto dtype = c10::typeMetaToScalarType(where.dtype());
  Norm norm = made_norm(dtype), wide_norm = made_norm(at::kDouble);
  for (const auto& [own, wide] :
       {std::pair{&norm->weight, &wide_norm->weight}, {&norm->bias, &wide_norm->bias}}) {
    if (!own->defined()) continue;
    own->copy_(drawn({inner}));
    wide->copy_(*own);
  }
  const Tensor x = drawn({rows, inner}), weight = drawn({all, inner}, 0.1);
  const Tensor gate = std::string(a.gate) == "none" ? Tensor() : drawn({rows, inner});
  const std::optional<Tensor> bias = a.has_bias ? std::optional(drawn({all})) : std::nullopt;
  const Tensor residual = a.has_residual ? drawn({rows, outer}) : Tensor();
  const bool is_first = std::string(a.gate) == "before";
  const char* const activation = is_first ? "sigmoid" : "silu";

  const auto by_ops = [&](Norm& by, at::ScalarType to) {
    const auto as = [&](const Tensor& t) { return t.defined() ? t.to(to) : t; };
    const Tensor u = by->forward_gated(as(x), as(gate), activation, is_first);
    Tensor y = at::linear(u, as(weight), bias ? std::optional(as(*bias)) : std::nullopt);
    if (a.glu != nullptr) y = tidegate::glu(y, a.glu);
    return residual.defined() ? as(residual) + y : y;
  };
  const Tensor exact = by_ops(wide_norm, at::kDouble);
  const double theirs = distance(by_ops(norm, dtype), exact);

  StepProduct around = {.norm = norm.get(), .gate = gate, .gate_activation = activation};
  around.gate_first = is_first;
  around.glu = a.glu;
  around.residual = residual;
  const Tensor memory = drawn({rows, outer + 3});
  if (a.has_out) around.out = memory.narrow(1, 0, outer);
  const Tensor beside = memory.narrow(1, outer, 3).clone();
  const Tensor y = step_product(x, weight, bias, around);
  if (a.has_out) {
    EXPECT_EQ(y.data_ptr(), memory.data_ptr());
    EXPECT_TRUE(at::equal(memory.narrow(1, outer, 3), beside));
  }
  EXPECT_EQ(y.scalar_type(), dtype);
  EXPECT_LE(distance(y, exact), 1.5 * theirs + 1e-6 * exact.norm().item<double>());
}

void expect_step_products(at::Device device) {
  torch::manual_seed(1);
  const torch::NoGradGuard no_grad;
  const auto where = at::TensorOptions(device);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t rows : {1, 3, 17}) {
      for (const int64_t inner : {64, 40, 13}) {
        for (const Around& a : kAll) {
          SCOPED_TRACE(std::string(at::toString(dtype)) + " " + std::to_string(rows) + "x" +
                       std::to_string(inner) + " norm " + a.norm + " gate " + a.gate);
          expect_step_product(a, rows, inner, where.dtype(dtype));
        }
      }
    }
  }
}

TEST(StepProducts, AreTheOpsTheyStandFor) { expect_step_products(at::kCPU); }

TEST(StepProducts, CudaAreTheOpsTheyStandFor) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  expect_step_products(at::kCUDA);
}

void expect_several(at::Device device) {
  const torch::NoGradGuard no_grad;
  const auto where = at::TensorOptions(device).dtype(at::kBFloat16);
  const Tensor x = at::randn({3, 64}, where), weight = at::randn({70, 64}, where);
  const auto part = [&](int64_t first, int64_t count) { return weight.narrow(0, first, count); };
  StepProduct around;
  around.more = {part(40, 24), part(64, 6)};
  const Tensor y = step_product(x, part(0, 40), std::nullopt, around);
  const Tensor exact = at::linear(x.to(at::kDouble), weight.to(at::kDouble));
  EXPECT_LE(distance(y, exact), 1.5 * distance(at::linear(x, weight), exact));
}

TEST(StepProducts, TakeSeveralWeights) {
  expect_several(at::kCPU);
  if (torch::cuda::is_available()) expect_several(at::kCUDA);
}

// ---- HGRN2's step with the product before it ----

/// o and the state after, by one launch and by the ops, against double.
void expect_token(int64_t rows, int64_t heads, int64_t dim, bool has_gamma, at::ScalarType dtype) {
  const int64_t width = heads * dim;
  const auto where = at::TensorOptions(at::kCUDA).dtype(dtype);
  torch::nn::Linear in_proj(torch::nn::LinearOptions(width, 3 * width).bias(has_gamma));
  in_proj->to(at::kCUDA, dtype);
  Norm norm(NormOptions(width).kind("rms").device(where.device()).dtype(dtype));
  norm->weight.copy_(at::randn({width}, where));
  const Tensor x = at::randn({rows, width}, where);
  const Tensor before = at::randn({rows, heads, dim, dim}, where.dtype(at::kFloat));
  const std::optional<Tensor> gamma =
      has_gamma ? std::optional(at::rand({heads, dim}, where.dtype(at::kFloat))) : std::nullopt;
  Tensor state = before.clone();
  const int64_t version = state._version();
  const Tensor o =
      hgrn2_token(x, in_proj, {.norm = norm.get()}, gamma, state, {0.25, "silu", "sigmoid"});
  ASSERT_TRUE(o.defined());
  EXPECT_EQ(state._version(), version + 1) << "autograd knows that the state was overwritten";
  const Tensor qfv = step_product(x, in_proj, {.norm = norm.get()});
  const auto by_op = [&](at::ScalarType to, Tensor own) {
    const auto parts = qfv.to(to).unflatten(-1, {3, heads, dim}).unbind(1);
    const auto bound = gamma ? std::optional(gamma->to(own.scalar_type())) : std::nullopt;
    return std::pair{
        hgrn2_step(parts[0], parts[1], parts[2], bound, own, 0.25, "silu", "sigmoid").flatten(1),
        own};
  };
  const auto [exact, exact_state] = by_op(at::kDouble, before.to(at::kDouble));
  const auto [theirs, their_state] = by_op(dtype, before.clone());
  EXPECT_LE(distance(o, exact), 1.5 * distance(theirs, exact));
  EXPECT_LE(distance(state, exact_state), 1.5 * distance(their_state, exact_state));
}

TEST(StepProducts, CudaHgrn2TokenIsProductAndStep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  if (!has_clusters()) GTEST_SKIP() << "no clusters";
  torch::manual_seed(5);
  const torch::NoGradGuard no_grad;
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t rows : {1, 2}) {
      for (const int64_t dim : {64, 128}) expect_token(rows, 3, dim, rows == 2, dtype);
    }
    expect_token(1, 20, 128, true, dtype);  // more weights than the rings hold
  }
}

TEST(StepProducts, LeaveOtherHgrn2TokensToTheOps) {
  const torch::NoGradGuard no_grad;
  const auto token = [](int64_t rows, int64_t dim, at::TensorOptions where) {
    torch::nn::Linear in_proj(torch::nn::LinearOptions(2 * dim, 6 * dim).bias(false));
    in_proj->to(where.device(), c10::typeMetaToScalarType(where.dtype()));
    return hgrn2_token(at::randn({rows, 2 * dim}, where), in_proj, {}, std::nullopt,
                       at::zeros({rows, 2, dim, dim}, where.dtype(at::kFloat)),
                       {1.0, "silu", "none"});
  };
  EXPECT_FALSE(token(1, 64, at::kBFloat16).defined());
  if (!torch::cuda::is_available()) return;
  const auto cuda = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  EXPECT_FALSE(token(1, 32, cuda).defined());
  EXPECT_FALSE(token(3, 64, cuda).defined());
  EXPECT_FALSE(token(1, 64, cuda.dtype(at::kFloat)).defined());
}

/// Inside a whole step of a model, states may be read early; nothing else changes.
TEST(StepProducts, CudaSettledStatesGiveTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  torch::manual_seed(6);
  const torch::NoGradGuard no_grad;
  const auto where = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  for (const int64_t dim : {20, 128, 200}) {
    const Tensor q = at::randn({5, 3, dim}, where), f = at::randn({5, 3, dim}, where),
                 v = at::randn({5, 3, dim}, where);
    const Tensor before = at::randn({5, 3, dim, dim}, where.dtype(at::kFloat));
    const auto stepped = [&] {
      Tensor state = before.clone();
      std::vector<Tensor> all;
      for (int i = 0; i < 3; ++i) {
        all.push_back(hgrn2_step(q, f, v, std::nullopt, state, 0.5, "silu", "none"));
        torch::cuda::synchronize();  // what wrote the states has ended
      }
      all.push_back(state);
      return all;
    };
    const std::vector<Tensor> plain = stepped();
    const ops::SettledStatesGuard settled;
    const std::vector<Tensor> early = stepped();
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], early[i])) << dim;
  }
}

// ---- HGRN's step with the norm and gate after it ----

struct HgruCase {
  int64_t rows, channels;
  bool is_complex, has_gamma, gate_first;
  const char* norm;
  const char* gate;  // or null
};

/// y and the state after, by one launch and by the ops, against double.
void expect_hgru_token(const HgruCase& c, at::ScalarType dtype) {
  SCOPED_TRACE(std::string(c.norm) + " " + std::to_string(c.rows) + "x" +
               std::to_string(c.channels) + (c.is_complex ? " complex" : ""));
  const auto where = at::TensorOptions(at::kCUDA).dtype(dtype);
  const int64_t width = c.is_complex ? 2 * c.channels : c.channels;
  Norm norm(NormOptions(width).kind(c.norm).device(where.device()).dtype(dtype));
  for (Tensor& p : norm->parameters()) p.copy_(at::randn({width}, where));
  // Parts of one product, as a layer has them.
  const Tensor all = 2 * at::randn({c.rows, 2 * width + c.channels}, where);
  const Tensor x = all.narrow(1, 0, width), f = all.narrow(1, width, c.channels);
  const Tensor g = c.gate != nullptr ? all.narrow(1, width + c.channels, width) : Tensor();
  const auto fp32 = where.dtype(at::kFloat);
  const std::optional<Tensor> none;
  const auto gamma = c.has_gamma ? std::optional(at::rand({c.channels}, fp32)) : none;
  const auto theta = c.is_complex ? std::optional(3 * at::rand({c.channels}, fp32)) : none;
  const Tensor before = at::randn({c.rows, width}, fp32);
  const char* const gate = c.gate != nullptr ? c.gate : "silu";
  Tensor state = before.clone();
  const int64_t version = state._version();
  const Tensor y = hgru_token({x, f, gamma, theta, *norm, g, gate, c.gate_first}, state);
  ASSERT_TRUE(y.defined());
  EXPECT_EQ(y.scalar_type(), dtype);
  EXPECT_EQ(state._version(), version + 1) << "autograd knows that the state was overwritten";
  const auto by_ops = [&](at::ScalarType to, Tensor own) {
    const auto wide = [&](const std::optional<Tensor>& t) {
      return t ? std::optional(t->to(own.scalar_type())) : t;
    };
    Norm same(NormOptions(width).kind(c.norm).device(where.device()).dtype(to));
    const auto from = norm->named_parameters();
    for (auto& item : same->named_parameters()) item.value().copy_(from[item.key()]);
    const Tensor h = hgru_step(x.to(to), f.to(to), wide(gamma), wide(theta), own);
    return std::pair{same->forward_gated(h, g.defined() ? g.to(to) : g, gate, c.gate_first), own};
  };
  const auto [exact, exact_state] = by_ops(at::kDouble, before.to(at::kDouble));
  const auto [theirs, their_state] = by_ops(dtype, before.clone());
  EXPECT_LE(distance(y, exact), 1.5 * distance(theirs, exact));
  EXPECT_LE(distance(state, exact_state), 1.5 * distance(their_state, exact_state) +
                                              1e-6 * distance(exact_state, 0 * exact_state));
}

TEST(StepProducts, CudaHgruTokenIsStepAndNorm) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  torch::manual_seed(7);
  const torch::NoGradGuard no_grad;
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    expect_hgru_token({1, 1024, true, true, false, "rms_no_weight", "silu"}, dtype);
    expect_hgru_token({3, 1024, true, true, true, "layer", "sigmoid"}, dtype);
    expect_hgru_token({70, 132, false, false, false, "rms", "silu"}, dtype);
    expect_hgru_token({2, 4096, true, false, false, "layer", "silu"}, dtype);
    expect_hgru_token({5, 4, false, true, false, "rms", nullptr}, dtype);
  }
}

TEST(StepProducts, LeaveOtherHgruTokensToTheOps) {
  const torch::NoGradGuard no_grad;
  const auto token = [](int64_t channels, at::TensorOptions where) {
    Norm norm(NormOptions(channels).kind("rms_no_weight").device(where.device()));
    const Tensor x = at::randn({2, channels}, where), state = at::zeros({2, channels}, where);
    const std::optional<Tensor> none;
    return hgru_token({x, x, none, none, *norm, Tensor(), "silu", false}, state.to(at::kFloat));
  };
  EXPECT_FALSE(token(64, at::kBFloat16).defined());
  if (!torch::cuda::is_available()) return;
  const auto cuda = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  EXPECT_TRUE(token(64, cuda).defined());
  EXPECT_FALSE(token(63, cuda).defined());
  EXPECT_FALSE(token(8192, cuda).defined());
  EXPECT_FALSE(token(64, cuda.dtype(at::kFloat)).defined());
}

// ---- HGRN's step in the product before it ----

struct HgruLayerProblem {
  static constexpr int64_t kDim = 136;
  int64_t channels, width;
  at::TensorOptions where, fp32;
  std::optional<Tensor> gamma, theta, none;
  torch::nn::Linear in_proj, out_proj;
  Norm before, norm;
  Tensor x, state;

  HgruLayerProblem(int64_t rows, int64_t channels, bool is_complex, const char* kind, bool has_bias)
      : channels(channels),
        width(is_complex ? 2 * channels : channels),
        where(at::TensorOptions(at::kCUDA).dtype(at::kBFloat16)),
        fp32(where.dtype(at::kFloat)),
        in_proj(torch::nn::LinearOptions(kDim, 2 * width + channels).bias(has_bias)),
        out_proj(torch::nn::LinearOptions(width, kDim).bias(has_bias)),
        before(NormOptions(kDim).kind(kind).device(where.device()).dtype(at::kBFloat16)),
        norm(NormOptions(width).kind(kind).device(where.device()).dtype(at::kBFloat16)) {
    in_proj->to(at::kCUDA, at::kBFloat16);
    out_proj->to(at::kCUDA, at::kBFloat16);
    for (Norm* n : {&before, &norm}) {
      for (Tensor& p : (*n)->parameters()) p.copy_(at::randn(p.sizes(), where));
    }
    gamma = at::rand({channels}, fp32);
    if (is_complex) theta = 3 * at::rand({channels}, fp32);
    x = at::randn({rows, kDim}, where);
    state = at::randn({rows, width}, fp32);
  }

  Tensor by_kernels(int64_t rows, Tensor own) {
    return hgru_layer_token({in_proj, out_proj, *before, gamma, theta, *norm, "silu", false},
                            x.narrow(0, 0, rows), own);
  }
  /// One op after another, rounded to `to`.
  std::pair<Tensor, Tensor> by_ops(at::ScalarType to, Tensor own) {
    const auto wide = [&](const std::optional<Tensor>& t) {
      return t ? std::optional(t->to(own.scalar_type())) : t;
    };
    const auto normed = [&](Norm& from, const Tensor& u, const Tensor& gate) {
      Norm same(NormOptions(u.size(1)).kind(from->options.kind()).device(where.device()).dtype(to));
      const auto weights = from->named_parameters();
      for (auto& item : same->named_parameters()) item.value().copy_(weights[item.key()]);
      return same->forward_gated(u, gate, "silu", false);
    };
    const auto product = [&](const torch::nn::Linear& linear, const Tensor& u) {
      return at::linear(u, linear->weight.to(to),
                        linear->bias.defined() ? std::optional(linear->bias.to(to)) : none);
    };
    const Tensor all = product(in_proj, normed(before, x.to(to), {}));
    const auto parts = all.split_with_sizes({width, channels, width}, 1);
    const Tensor h = hgru_step(parts[0], parts[1], wide(gamma), wide(theta), own);
    return {x.to(to) + product(out_proj, normed(norm, h, parts[2])), own};
  }
};

TEST(StepProducts, CudaHgruLayerTokenIsItsOps) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  if (!has_clusters()) GTEST_SKIP() << "no clusters";
  torch::manual_seed(8);
  const torch::NoGradGuard no_grad;
  for (const auto& [rows, channels, is_complex, kind, has_bias] :
       {std::tuple{64, 1024, true, "rms_no_weight", false}, std::tuple{33, 80, true, "rms", true},
        std::tuple{7, 112, false, "rms", false}, std::tuple{6, 16, false, "rms_no_weight", true}}) {
    SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(channels));
    HgruLayerProblem p(rows, channels, is_complex, kind, has_bias);
    Tensor state = p.state.clone();
    const int64_t version = state._version();
    const Tensor y = p.by_kernels(rows, state);
    ASSERT_TRUE(y.defined());
    EXPECT_EQ(state._version(), version + 1) << "autograd knows that the state was overwritten";
    const auto [exact, exact_state] = p.by_ops(at::kDouble, p.state.to(at::kDouble));
    const auto [theirs, their_state] = p.by_ops(at::kBFloat16, p.state.clone());
    EXPECT_LE(distance(y, exact), 1.5 * distance(theirs, exact));
    EXPECT_LE(distance(state, exact_state), 1.5 * distance(their_state, exact_state));
    // The first six rows have the same bits alone.
    Tensor few = p.state.narrow(0, 0, 6).clone();
    EXPECT_TRUE(at::equal(p.by_kernels(6, few), y.narrow(0, 0, 6)));
    EXPECT_TRUE(at::equal(few, state.narrow(0, 0, 6)));
    EXPECT_FALSE(p.by_kernels(5, few).defined()) << "few rows are other kernels'";
  }
}

// ---- Steps that are made of them ----

models::CausalLM made_of(const std::string& mixer, int64_t dim, at::Device device,
                         at::ScalarType dtype) {
  torch::manual_seed(3);
  models::LMConfig config;
  config.mixer = mixer;
  config.vocab_size = 29;
  config.dim = dim;
  config.layers = 2;
  models::CausalLM model(config, Placement{device, dtype});
  const torch::NoGradGuard no_grad;
  for (Tensor& p : model->parameters()) p.add_(0.2 * at::randn_like(p));
  model->eval();
  return model;
}

/// The logits of a few steps, one after another.
Tensor stepped(models::CausalLM& model, const Tensor& ids, bool by_products) {
  const torch::NoGradGuard no_grad;
  const Switched switched(by_products);
  const models::ModelState state = model->init_state(ids.size(0), ids.size(1));
  std::vector<Tensor> logits;
  for (const Tensor& one : ids.unbind(1)) logits.push_back(model->step(one, state).clone());
  return at::stack(logits);
}

void expect_steps(at::Device device, at::ScalarType dtype, int64_t rows = 3, int64_t dim = 32) {
  for (const std::string& mixer : models::mixers()) {
    SCOPED_TRACE(mixer + " " + at::toString(dtype) + " " + std::to_string(rows));
    models::CausalLM model = made_of(mixer, dim, device, dtype),
                     wide = made_of(mixer, dim, at::kCPU, at::kDouble);
    const torch::NoGradGuard no_grad;
    const auto own = model->named_parameters();
    for (auto& item : wide->named_parameters()) item.value().copy_(own[item.key()]);
    const Tensor ids = at::randint(29, {rows, 6}, at::kLong);
    const Tensor exact = stepped(wide, ids, false);
    const Tensor there = ids.to(device);
    const auto error = [&](bool by_products) {
      return distance(stepped(model, there, by_products).cpu(), exact);
    };
    const double floor = 1e-5 * exact.norm().item<double>();
    EXPECT_LE(error(true), 1.5 * error(false) + floor);
  }
}

TEST(StepProducts, MakeTheStepsOfEveryMixer) {
  expect_steps(at::kCPU, at::kFloat);
  expect_steps(at::kCPU, at::kDouble);
}

TEST(StepProducts, CudaMakeTheStepsOfEveryMixer) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) expect_steps(at::kCUDA, dtype);
  expect_steps(at::kCUDA, at::kBFloat16, 3, 128);
  expect_steps(at::kCUDA, at::kBFloat16, 20);
}

}  // namespace
}  // namespace tidegate::nn
