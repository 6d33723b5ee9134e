#include "src/models/generation.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "src/models/prompts.h"
#include "src/models/sampling.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

constexpr const char* kGenerate = "CausalLM.generate";
// Tokens between two looks of the host, which may be steps in vain after the last row has ended.
constexpr int64_t kTokensAtOnce = 16;
// Tokens of a pass over the prompts: enough to fill any device, and a bound on its memory.
constexpr int64_t kPromptChunk = 32768;
// Rows of caches are made in multiples of this, so that a next call finds its own again.
constexpr int64_t kCapacityStep = 256;
// New ids for which there is memory on every machine.
constexpr int64_t kFewIds = int64_t{1} << 20;

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Throws where there is no memory for so many new ids of each row. The system is asked only where
// they are many, since it takes its time to say.
void check_new_ids(int64_t rows, int64_t count) {
  if (rows == 0 || count <= kFewIds / rows) return;
  const auto free = free_bytes(at::kCPU);
  TORCH_CHECK_VALUE(!free || count <= *free / static_cast<int64_t>(sizeof(int64_t)) / rows,
                    kGenerate, ": max_new_tokens: expected ids of ", rows,
                    " sequences that fit the ", free.value_or(0), " bytes that are free; got ",
                    count);
}

// Rows of ids, each as long as it is.
std::vector<Tensor> rows_of(const Tensor& ids, const std::vector<int64_t>& lengths) {
  std::vector<Tensor> rows;
  for (size_t b = 0; b < lengths.size(); ++b) {
    rows.push_back(ids.select(0, static_cast<int64_t>(b)).narrow(0, 0, lengths[b]));
  }
  return rows;
}

// A seed from torch's default generator.
int64_t drawn_seed() {
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong).item<int64_t>();
}

std::vector<RowSettings> settings_of(const GenerateOptions& options, int64_t rows) {
  RowSettings one = RowSettings::sampling_as(options);
  one.limit = options.max_new_tokens();
  one.fill = options.eos().value_or(0);
  one.seed = options.seed() ? *options.seed() : one.temperature > 0 ? drawn_seed() : 0;
  if (options.eos()) one.stops = {*options.eos()};
  std::vector<RowSettings> all(static_cast<size_t>(rows), one);
  for (int64_t b = 0; b < rows; ++b) all[static_cast<size_t>(b)].stream = b;
  return all;
}

}  // namespace

Generation::Generation(CausalLMImpl& model, const Tensor& ids, const GenerateOptions& options)
    : model_(model), ids_(ids), options_(options) {
  const Unrecorded unrecorded;
  check_ids(kGenerate, ids, model.config.vocab_size);
  const int64_t count = options.max_new_tokens(), batch = ids.size(0);
  const int64_t vocab = *model.config.vocab_size;
  TORCH_CHECK_VALUE(count >= 0, kGenerate, ": max_new_tokens: expected an integer >= 0; got ",
                    count);
  check_sampling(kGenerate, options.temperature(), options.top_k(), options.top_p(),
                 options.min_p(), options.repetition_penalty());
  TORCH_CHECK_VALUE(!options.eos() || (*options.eos() >= 0 && *options.eos() < vocab), kGenerate,
                    ": eos: expected an id from 0 to below vocab_size=", vocab, "; got ",
                    options.eos().value_or(0));
  const std::vector<int64_t> lengths = host_lengths(ids, options.lengths(), /*minimum=*/1);
  TORCH_CHECK_VALUE(ids.size(1) > 0,
                    "CausalLM.prefill: ids: expected at least one token; got none");
  check_new_ids(batch, count);
  new_ids_ = at::zeros({batch, count}, at::kLong);
  is_done_ = count == 0 || batch == 0;
  if (is_done_) return;
  evaluating_.emplace(model);
  const c10::DeviceGuard guard(ids.device());
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  RowsOptions wanted;
  wanted.rows = batch;
  wanted.window = kTokensAtOnce;
  wanted.capacity = rounded_up(longest + count, kCapacityStep);
  rows_ = model.kept_->take(model, wanted);
  if (!rows_) {
    check_memory(kGenerate, "ids", model, wanted);
    rows_ = std::make_unique<DecoderRows>(model, wanted);
  }
  const std::vector<RowSettings> settings = settings_of(options, batch);
  const bool has_penalty = options.repetition_penalty() != 1.0;
  if (has_penalty) rows_->ask_for_penalties();
  const std::vector<Tensor> prompts = rows_of(ids, lengths);
  PromptReader(model, kPromptChunk).read(prompts, [&](const ReadPrompts& read) {
    const auto first = static_cast<size_t>(read.first);
    const auto end = first + static_cast<size_t>(read.logits.size(0));
    Tensor seen;
    if (has_penalty) {
      seen = at::zeros(read.logits.sizes(), read.logits.options().dtype(at::kByte));
      for (size_t b = first; b < end; ++b) {
        seen.select(0, static_cast<int64_t>(b - first)).index_fill_(0, prompts[b].to(at::kLong), 1);
      }
    }
    rows_->begin(read.first, read.logits, read.state,
                 {lengths.begin() + first, lengths.begin() + end},
                 {settings.begin() + first, settings.begin() + end}, seen);
  });
}

Generation::~Generation() {
  // Rows that an error has stopped are not trusted again.
  if (is_done_ && rows_ && pending_.empty()) model_.kept_->put(std::move(rows_));
}

void Generation::launch() {
  // The CPU waits for nothing by looking at every token.
  const int64_t at_once = ids_.is_cpu() && options_.eos() ? 1 : kTokensAtOnce;
  const int64_t steps = std::min(at_once, options_.max_new_tokens() - launched_);
  rows_->advance(ids_.size(0), steps, ids_.size(0));
  pending_.push_back(rows_->fetch(ids_.size(0), steps));
  launched_ += steps;
}

// The oldest tokens on their way. Every row has drawn as many, so that they are side by side.
void Generation::collect() {
  RowTokens next = std::move(pending_.front());
  pending_.pop_front();
  const int64_t column = arrived_ % kTokensAtOnce;
  new_ids_.narrow(1, arrived_, next.steps).copy_(next.wait().narrow(1, column, next.steps));
  arrived_ += next.steps;
}

bool Generation::advance() {
  if (is_done_) return false;
  const Unrecorded unrecorded;
  if (launched_ < options_.max_new_tokens()) launch();
  const bool is_ahead = pending_.size() > 1 || ids_.is_cpu();
  if (is_ahead || launched_ == options_.max_new_tokens()) collect();
  if (options_.eos()) {
    const Tensor ends = (new_ids_.narrow(1, 0, arrived_) == *options_.eos());
    if (ends.any(1).all().item<bool>()) {
      // The first of each row's ends; the last of these is where generation ends.
      arrived_ = ends.to(at::kByte).argmax(1).max().item<int64_t>() + 1;
      is_done_ = true;
    }
  }
  is_done_ = is_done_ || arrived_ == options_.max_new_tokens();
  if (is_done_) {
    pending_.clear();
    evaluating_.reset();
  }
  return !is_done_;
}

Tensor Generation::tokens() const { return new_ids_.narrow(1, 0, arrived_).to(ids_.device()); }

}  // namespace tidegate::models
