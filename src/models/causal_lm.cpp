#include "tidegate/models/causal_lm.h"
#include "tidegate/ops/init.h"
#include "tidegate/ops/linear_cross_entropy.h"

#include <cmath>
#include <utility>

#include "src/models/generation.h"
#include "src/models/inputs.h"
#include "src/models/prompt_rows.h"
#include "src/nn/common.h"
#include "src/nn/products.h"
#include "src/nn/step_products.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

LMConfig checked(const LMConfig& config) {
  config.validate();
  TORCH_CHECK_VALUE(config.vocab_size,
                    "CausalLM: vocab_size: expected a positive integer; got None");
  return config;
}

// dim^-1/2 where the embedding is scaled up by dim^1/2 and also is the head; 0.02 where it is not.
double embedding_std(const LMConfig& config) {
  return config.tied ? 1.0 / std::sqrt(static_cast<double>(config.dim)) : 0.02;
}

}  // namespace

Tensor Labels::resolve(const Tensor& ids, const std::optional<Tensor>& cu_seqlens,
                       int64_t vocab_size) const {
  if (!name_.empty()) {
    TORCH_CHECK_VALUE(name_ == "next", "CausalLM: labels: expected a tensor or 'next'; got '",
                      name_, "'");
    return next_labels(ids, cu_seqlens);
  }
  if (tensor_.defined()) {
    check_labels("CausalLM", tensor_, ids.sizes(), "the shape of ids", vocab_size);
    refuse_own_labels("CausalLM", ids, tensor_);
  }
  return tensor_;
}

Tensor next_labels(const Tensor& ids, const std::optional<Tensor>& cu_seqlens) {
  Tensor labels = at::full_like(ids, -100, ids.options().dtype(torch::kLong));
  const int64_t time = ids.size(1);
  if (time == 0) return labels;
  labels.narrow(1, 0, time - 1).copy_(ids.narrow(1, 1, time - 1));
  if (cu_seqlens && cu_seqlens->defined()) {
    // Where sequences before the first token are empty, their last position is taken modulo T: the
    // last one, which is ignored anyway.
    const Tensor last = cu_seqlens->slice(0, 1).to(ids.device(), torch::kLong) - 1;
    labels.index_fill_(1, last.remainder(time), -100);
  }
  return labels;
}

CausalLMImpl::CausalLMImpl(const LMConfig& config, const nn::Placement& placement)
    : Backbone(checked(config), placement),
      scale_(config.scale_embedding.value_or(config.tied)
                 ? std::sqrt(static_cast<double>(config.dim))
                 : 1.0),
      kept_(std::make_shared<KeptRows>()) {
  reset();
}

void CausalLMImpl::reset() {
  register_children(*this);
  for (size_t k = 0; k < blocks->size(); ++k) {
    TORCH_CHECK_VALUE(!block(k).mixer().is_bidirectional(),
                      "CausalLM: mixer_options: expected bidirectional=False: a causal model must "
                      "not see later tokens; got True");
  }
  embedding =
      register_module("embedding", nn::make_embedding(*config.vocab_size, config.dim, placement_));
  if (!config.tied) {
    head =
        register_module("head", nn::make_linear(config.dim, *config.vocab_size, false, placement_));
  }
  if (!nn::UndrawnGuard::is_active()) reset_parameters();
}

void CausalLMImpl::reset_parameters() {
  init_normal_(embedding->weight, 0.0, embedding_std(config));
  reset_children();
  if (head) init_normal_(head->weight, 0.0, 0.02);
  reset_matrices(*this);
}

Tensor CausalLMImpl::embed(const Tensor& ids) {
  const Tensor x = embedding->forward(ids);
  return scale_ == 1.0 ? x : x * scale_;
}

const Tensor& CausalLMImpl::head_weight() const { return head ? head->weight : embedding->weight; }

Tensor CausalLMImpl::logits(const Tensor& x) const {
  return nn::linear(x, head_weight(), std::nullopt);
}

Output CausalLMImpl::forward(const Tensor& ids, const Labels& labels,
                             const std::optional<ModelState>& state,
                             const std::optional<Tensor>& cu_seqlens, const LossOptions& options) {
  check_ids("CausalLM", ids, config.vocab_size);
  const Tensor targets = labels.resolve(ids, cu_seqlens, *config.vocab_size);
  const auto [x, next] = run("CausalLM", embed(ids), state, cu_seqlens);
  Tensor loss;
  if (targets.defined()) {
    const bool is_int = targets.scalar_type() == torch::kInt;
    loss = linear_cross_entropy(x, head_weight(), is_int ? targets : targets.to(torch::kLong), {},
                                -100, options.label_smoothing, options.z_loss);
  }
  const bool has_logits = options.return_logits.value_or(!targets.defined());
  return {has_logits ? logits(x) : Tensor(), loss, next};
}

Tensor CausalLMImpl::logits_at(const Tensor& ids, const Tensor& positions) {
  check_ids("CausalLM.logits_at", ids, config.vocab_size);
  check_positions("CausalLM.logits_at", positions, ids);
  const auto [x, state] = run("CausalLM", embed(ids), std::nullopt, std::nullopt);
  return logits(x.gather(1, positions.unsqueeze(-1).expand({-1, -1, x.size(-1)})));
}

ModelState CausalLMImpl::init_state(int64_t batch, std::optional<int64_t> capacity) const {
  ModelState state;
  for (size_t k = 0; k < blocks->size(); ++k) {
    state.push_back(block(k).mixer().make_state(batch, std::nullopt, std::nullopt, capacity));
  }
  return state;
}

Tensor CausalLMImpl::step(const Tensor& ids, const ModelState& state) {
  check_ids("CausalLM.step", ids, config.vocab_size, "B");
  TORCH_CHECK_VALUE(state.size() == blocks->size(),
                    "CausalLM.step: state: expected one state for each of the ", blocks->size(),
                    " layers; got ", state.size());
  // A cache without room is refused before the states of the layers below it move.
  for (size_t k = 0; k < blocks->size(); ++k) block(k).mixer().check_room(state[k], ids.size(0));
  return advance(ids, state, gammas());
}

Tensor CausalLMImpl::advance(const Tensor& ids, const ModelState& state,
                             const std::vector<std::optional<Tensor>>& bounds, const Tensor& out) {
  Tensor added, residual = as_residual(embed(ids));
  if (nn::makes_step_products(residual)) {
    for (size_t k = 0; k < blocks->size(); ++k) {
      residual = block(k).step_by_products(residual, state[k], bounds[k]);
    }
    return nn::step_product(residual, head_weight(), std::nullopt,
                            {.norm = norm.get(), .out = out});
  }
  for (size_t k = 0; k < blocks->size(); ++k) {
    std::tie(added, residual) = block(k).step_pair(added, residual, state[k], bounds[k]);
  }
  const Tensor x = std::get<0>(norm->forward_added(added, residual));
  return nn::step_product(x, head_weight(), std::nullopt, {.out = out});
}

std::tuple<Tensor, ModelState> CausalLMImpl::prefill(const Tensor& ids,
                                                     const std::optional<Tensor>& lengths,
                                                     int64_t capacity) {
  check_ids("CausalLM.prefill", ids, config.vocab_size);
  std::optional<ModelState> empty;
  for (size_t k = 0; k < blocks->size() && !empty; ++k) {
    if (block(k).mixer().keeps_tokens()) empty = init_state(ids.size(0), ids.size(1) + capacity);
  }
  if (!lengths || !lengths->defined()) {
    TORCH_CHECK_VALUE(ids.size(1) > 0,
                      "CausalLM.prefill: ids: expected at least one token; got none");
    const auto [x, state] = run("CausalLM", embed(ids), empty, std::nullopt);
    return {logits(x.select(1, -1)), state};
  }
  const auto [packed, cu_seqlens] = pack(ids, *lengths, /*minimum=*/1);
  const auto [x, state] = run("CausalLM", embed(packed), empty, cu_seqlens);
  return {logits(x.squeeze(0).index_select(0, cu_seqlens.slice(0, 1) - 1)), state};
}

Tensor CausalLMImpl::generate(const Tensor& ids, const GenerateOptions& options) {
  const torch::NoGradGuard no_grad;
  Generation generation(*this, ids, options);
  while (generation.advance()) {
  }
  return append(ids, options.lengths(), generation.tokens(), options.eos().value_or(0));
}

void CausalLMImpl::save(const std::string& directory) const {
  save_model("CausalLM", *this, config, directory);
}

CausalLM CausalLM::load(const std::string& directory, torch::Device device) {
  const LMConfig config = load_config("CausalLM", directory);
  const nn::UndrawnGuard undrawn;
  CausalLM model(config, nn::Placement{device, std::nullopt});
  load_weights(*model, directory, device);
  model->eval();
  return model;
}

}  // namespace tidegate::models
