#include "src/models/prompts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace tidegate::models {
namespace {

using torch::Tensor;

}  // namespace

// Mixers that keep tokens return a state only where one goes in.
std::optional<ModelState> PromptReader::empty_state(int64_t count, int64_t capacity) const {
  for (size_t k = 0; k < model_.blocks->size(); ++k) {
    if (model_.block(k).mixer().keeps_tokens()) return model_.init_state(count, capacity);
  }
  return std::nullopt;
}

ReadPrompts PromptReader::read_together(int64_t first, const std::vector<Tensor>& prompts) const {
  const auto count = static_cast<int64_t>(prompts.size());
  std::vector<int64_t> bounds{0};
  int64_t longest = 0;
  for (const Tensor& prompt : prompts) {
    bounds.push_back(bounds.back() + prompt.size(0));
    longest = std::max(longest, prompt.size(0));
  }
  auto state = empty_state(count, longest);
  if (bounds.back() == count * longest) {  // of one length: a batch
    const auto [x, after] = model_.run("CausalLM", model_.embed(at::stack(prompts)), state, {});
    return {first, model_.logits(x.select(1, -1)), after};
  }
  const Tensor offsets = at::tensor(bounds, at::kLong).to(prompts[0].device());
  const auto [x, after] =
      model_.run("CausalLM", model_.embed(at::cat(prompts).unsqueeze(0)), state, offsets);
  return {first, model_.logits(x.squeeze(0).index_select(0, offsets.slice(0, 1) - 1)), after};
}

ReadPrompts PromptReader::read_after(const Tensor& prompt, const ModelState& given) const {
  std::optional<ModelState> state = given.empty() ? empty_state(1, prompt.size(0)) : given;
  Tensor last;
  for (int64_t start = 0; start < prompt.size(0); start += chunk_) {
    const int64_t size = std::min(chunk_, prompt.size(0) - start);
    const Tensor ids = prompt.narrow(0, start, size).unsqueeze(0);
    auto [x, after] = model_.run("CausalLM", model_.embed(ids), state, {});
    last = x.select(1, -1);
    state = std::move(after);
  }
  return {0, model_.logits(last), *state};
}

void PromptReader::read(const std::vector<Tensor>& prompts,
                        const std::function<void(const ReadPrompts&)>& take) const {
  for (size_t next = 0; next < prompts.size();) {
    const size_t first = next;
    int64_t total = 0;
    const auto has_room = [&] { return !is_alone_ && total + prompts[next].size(0) <= chunk_; };
    while (next < prompts.size() && (next == first || has_room())) {
      total += prompts[next++].size(0);
    }
    if (total > chunk_) {
      ReadPrompts one = read_after(prompts[first], {});
      one.first = static_cast<int64_t>(first);
      take(one);
    } else {
      take(read_together(static_cast<int64_t>(first),
                         {prompts.begin() + first, prompts.begin() + next}));
    }
  }
}

}  // namespace tidegate::models
