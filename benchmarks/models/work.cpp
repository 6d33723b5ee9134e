#include "benchmarks/models/work.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/autograd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <utility>
#include <variant>
#include <vector>

#include "benchmarks/models/measure.h"
#include "benchmarks/models/sizes.h"
#include "tidegate/ops/forgetting_attention.h"
#include "tidegate/optim/adamw.h"

namespace tidegate::benchmarks {
namespace {

using models::CausalLM;
using models::LMConfig;
using torch::Tensor;

// While one lives, ops that gain by it run in bf16; the weights stay what they are.
class Autocast {
 public:
  explicit Autocast(const Setup& setup)
      : type_(setup.device.type()),
        was_enabled_(at::autocast::is_autocast_enabled(type_)),
        dtype_(at::autocast::get_autocast_dtype(type_)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(type_, setup.is_bf16);
    at::autocast::set_autocast_dtype(type_, torch::kBFloat16);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, was_enabled_);
    at::autocast::set_autocast_dtype(type_, dtype_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType type_;
  bool was_enabled_;
  at::ScalarType dtype_;
};

Tensor random_ids(const LMConfig& config, const Setup& setup, int64_t context) {
  return at::randint(*config.vocab_size, {setup.batch(context), context},
                     at::TensorOptions(torch::kLong).device(setup.device));
}

// Times `work` once without counting it and then `steps` times, or as often as the setup's seconds
// allow. `work` marks its spans; returns them call by call.
std::vector<std::vector<double>> repeated(const Setup& setup, int64_t steps,
                                          const std::function<void(Stopwatch&)>& work) {
  const auto timed = [&] {
    Stopwatch watch(setup.device);
    watch.mark();
    work(watch);
    return watch.spans();
  };
  const auto begin = std::chrono::steady_clock::now();
  timed();
  std::vector<std::vector<double>> calls;
  const auto is_late = [&] {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    return passed.count() > setup.seconds;
  };
  while (static_cast<int64_t>(calls.size()) < steps && (calls.empty() || !is_late())) {
    calls.push_back(timed());
  }
  return calls;
}

double median_span(const std::vector<std::vector<double>>& calls, size_t span) {
  std::vector<double> values;
  for (const auto& call : calls) values.push_back(call[span]);
  return median(std::move(values));
}

double median_sum(const std::vector<std::vector<double>>& calls) {
  std::vector<double> values;
  for (const auto& call : calls) {
    double sum = 0;
    for (const double span : call) sum += span;
    values.push_back(sum);
  }
  return median(std::move(values));
}

// AdamW with decay on the matrices, as the papers' recipes have it.
optim::AdamW make_optimizer(CausalLM& model) {
  std::vector<Tensor> matrices, others;
  for (const Tensor& parameter : model->parameters()) {
    (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  }
  const auto options = [](double decay) {
    auto adamw = std::make_unique<torch::optim::AdamWOptions>(1e-3);
    adamw->betas({0.9, 0.95}).weight_decay(decay);
    return adamw;
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), options(0.1));
  groups.emplace_back(std::move(others), options(0.0));
  return optim::AdamW(std::move(groups));
}

// Seconds that a step takes at least: its products, of every weight with every token three times,
// and the optimiser, which reads and writes seven numbers a parameter.
double floor_of(const CausalLM& model, int64_t tokens, const Speeds& speeds) {
  double weights = 0, all = 0;
  for (const auto& item : model->named_parameters()) {
    const auto count = static_cast<double>(item.value().numel());
    all += count;
    const bool is_read_by_rows = model->head && item.key() == "embedding.weight";
    if (item.value().dim() == 2 && !is_read_by_rows) weights += count;
  }
  return 6 * weights * static_cast<double>(tokens) / speeds.operations + 28 * all / speeds.bytes;
}

int64_t bytes_of(const models::ModelState& state) {
  int64_t bytes = 0;
  for (const nn::MixerState& layer : state) {
    for (const Tensor& tensor : layer) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Which of torch's attentions these operands go to.
std::string backend_of(const std::vector<Tensor>& inputs) {
  const std::vector<std::string> names = {"math", "flash", "efficient", "cudnn", "overrideable"};
  const auto choice = static_cast<size_t>(
      at::_fused_sdp_choice(inputs[0].transpose(1, 2), inputs[1].transpose(1, 2),
                            inputs[2].transpose(1, 2), {}, 0.0, /*is_causal=*/true));
  return choice < names.size() ? names[choice] : std::to_string(choice);
}

double relative_error(const Tensor& given, const Tensor& expected) {
  const Tensor exact = expected.to(torch::kDouble);
  return ((given.to(torch::kDouble) - exact).norm() / exact.norm()).item<double>();
}

}  // namespace

CausalLM make_model(const LMConfig& config, const Setup& setup) {
  const torch::NoGradGuard no_grad;
  CausalLM model = [&] {
    const nn::UndrawnGuard undrawn;
    return CausalLM(config, nn::Placement{setup.device, std::nullopt});
  }();
  model->embedding->weight.normal_(0.0, 0.02);
  if (model->head) model->head->weight.normal_(0.0, 0.02);
  if (model->lower_bounds) model->lower_bounds->reset_parameters();
  model->norm->reset_parameters();
  model->block(0).reset_parameters();
  const auto named_tensors = [&](size_t layer) {
    auto tensors = model->block(layer).named_parameters();
    for (const auto& buffer : model->block(layer).named_buffers()) {
      tensors.insert(buffer.key(), buffer.value());
    }
    return tensors;
  };
  const auto drawn = named_tensors(0);
  for (size_t layer = 1; layer < model->blocks->size(); ++layer) {
    for (auto& item : named_tensors(layer)) item.value().copy_(drawn[item.key()]);
  }
  return model;
}

TrainResult measure_training(CausalLM& model, const Setup& setup, int64_t context,
                             const Speeds& speeds) {
  const PeakMemory peak(setup.device);
  TrainResult result;
  std::vector<Tensor> losses;
  {
    model->train();
    model->recompute = setup.recompute;
    if (setup.has_narrow_residual) model->residual_dtype = torch::kBFloat16;
    auto optimizer = make_optimizer(model);
    const Tensor ids = random_ids(model->config, setup, context);
    const auto step = [&](Stopwatch& watch) {
      Tensor loss;
      {
        const Autocast autocast(setup);
        loss = model->forward(ids, "next").loss;
      }
      watch.mark();
      loss.backward();
      watch.mark();
      optimizer.step();
      optimizer.zero_grad(/*set_to_none=*/true);
      watch.mark();
      losses.push_back(loss.detach());
    };
    const auto calls = repeated(setup, setup.steps, step);
    result.step = median_sum(calls);
    result.forward = median_span(calls, 0);
    result.backward = median_span(calls, 1);
    result.optimizer = median_span(calls, 2);
    result.steps = static_cast<int64_t>(calls.size());
    result.peak_bytes = peak.bytes();
    result.split = split_of(setup.device, result.step, [&] {
      Stopwatch watch(setup.device);
      step(watch);
    });
    losses.pop_back();  // not one of the timed steps
    result.floor = floor_of(model, ids.numel(), speeds);
    model->recompute = "none";
    model->residual_dtype = std::nullopt;
  }
  result.first_loss = losses.front().item<double>();
  result.last_loss = losses.back().item<double>();
  TORCH_CHECK(std::isfinite(result.first_loss) && std::isfinite(result.last_loss),
              "training: expected finite losses; got ", result.first_loss, " and, ",
              losses.size() - 1, " steps later, ", result.last_loss);
  return result;
}

DecodeResult measure_decoding(CausalLM& model, const Setup& setup, int64_t context) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const Tensor ids = random_ids(model->config, setup, context);

  DecodeResult result;
  Tensor expected;
  const auto prefills = repeated(setup, std::min<int64_t>(setup.steps, 3), [&](Stopwatch& watch) {
    expected = std::get<0>(model->prefill(ids, std::nullopt, setup.decode_tokens));
    watch.mark();
  });
  result.prefill = median_sum(prefills);
  // All but the last token at once, that one by a step, and room for a step that is not timed.
  auto [logits, state] = model->prefill(ids.slice(1, 0, -1), std::nullopt, setup.decode_tokens + 2);
  logits = model->step(ids.select(1, -1), state);
  result.error = relative_error(logits, expected);
  const double tolerance = setup.is_bf16 ? 0.1 : 1e-3;
  TORCH_CHECK(result.error < tolerance, "decoding: expected logits within ", tolerance,
              " of the parallel form's; got ", result.error);

  Tensor token = logits.argmax(-1);
  result.token = median_sum(repeated(setup, setup.decode_tokens, [&](Stopwatch& watch) {
    token = model->step(token, state).argmax(-1);
    watch.mark();
  }));
  result.state_bytes = bytes_of(state);
  return result;
}

AttentionResult measure_attention(const LMConfig& config, const Setup& setup, int64_t context) {
  const int64_t heads = heads_of(config), head_dim = config.dim / heads;
  const int64_t batch = setup.batch(context);
  const auto where =
      at::TensorOptions(setup.is_bf16 ? torch::kBFloat16 : torch::kFloat).device(setup.device);
  const bool is_gated = std::get<std::string>(config.mixer).rfind("fox", 0) == 0;
  const Tensor projected = at::randn({batch, context, 3 * config.dim}, where);
  std::vector<Tensor> inputs;
  for (const Tensor& part : projected.chunk(3, -1)) {
    inputs.push_back(part.unflatten(-1, {heads, head_dim}).detach().requires_grad_());
  }
  AttentionResult result{is_gated ? "forgetting_attention" : "sdpa " + backend_of(inputs), heads,
                         head_dim};
  std::function<Tensor()> attend;
  if (is_gated) {
    const Tensor logits = at::randn({batch, context, heads}, where.dtype(torch::kFloat));
    inputs.push_back(at::log_sigmoid(logits).requires_grad_());
    attend = [&] {
      return std::get<0>(forgetting_attention(inputs[0], inputs[1], inputs[2], inputs[3]));
    };
  } else {
    attend = [&] {
      return at::scaled_dot_product_attention(inputs[0].transpose(1, 2), inputs[1].transpose(1, 2),
                                              inputs[2].transpose(1, 2), {}, 0.0,
                                              /*is_causal=*/true)
          .transpose(1, 2);
    };
  }
  const Tensor gradient = at::randn({batch, context, heads, head_dim}, where);
  const auto calls = repeated(setup, 2 * setup.steps, [&](Stopwatch& watch) {
    const Tensor o = attend();
    watch.mark();
    torch::autograd::grad({o}, inputs, {gradient});
    watch.mark();
  });
  result.forward = median_span(calls, 0);
  result.backward = median_span(calls, 1);
  return result;
}

}  // namespace tidegate::benchmarks
