#include "src/models/row_states.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "src/models/device_work.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

// Addresses on the CPU are reserved as if all memory were one of so many rows'.
constexpr int64_t kIdleRows = 64;
constexpr int64_t kGrowing = -1;  // in place of a fixed capacity

int64_t bytes_in(const nn::MixerState& state) {
  int64_t total = 0;
  for (const Tensor& t : state) total += static_cast<int64_t>(t.nbytes());
  return total;
}

// Bytes of one token of all rows, where there is room for one.
int64_t token_bytes(const ModelState& state) {
  int64_t total = 0;
  for (const nn::MixerState& layer : state) {
    for (size_t i = 0; layer.size() > kRoomPlace && i < kCaches; ++i) {
      total += static_cast<int64_t>(layer[i].nbytes());
    }
  }
  return total;
}

}  // namespace

RowStates::RowStates(const CausalLMImpl& model, int64_t rows, int64_t capacity)
    : model_(model), state_(model.init_state(rows, 1)), capacity_(capacity) {
  // No more tokens than the device could hold if it held nothing else. On the CPU rows that nobody
  // uses take no memory, so that few rows may have all of it.
  int64_t bound = capacity;
  if (const int64_t each = token_bytes(state_); each > 0) {
    const at::Device device = state_.front().front().device();
    const int64_t idle = device.is_cpu() ? std::min(rows, kIdleRows) : 1;
    bound = std::max(bound, all_bytes(device).value_or(0) / each * idle);
  }
  caches_.resize(state_.size());
  std::vector<Tensor> lengths;
  for (size_t k = 0; k < state_.size(); ++k) {
    if (!keeps(k)) continue;
    keeps_tokens_ = true;
    for (size_t i = 0; i < kCaches; ++i) caches_[k].emplace_back(state_[k][i], bound);
    lengths.push_back(state_[k][kLengthsPlace]);
  }
  if (keeps_tokens_) {  // at one place, so that the host can look at all of them at once
    lengths_ = at::stack(lengths);
    int64_t own = 0;
    for (size_t k = 0; k < state_.size(); ++k) {
      if (keeps(k)) state_[k][kLengthsPlace] = lengths_.select(0, own++);
    }
  }
  grow_caches(capacity);
}

int64_t RowStates::bytes_of(const CausalLMImpl& model, int64_t rows, int64_t capacity) {
  int64_t total = 0;
  for (size_t k = 0; k < model.blocks->size(); ++k) {
    total += bytes_in(
        model.block(k).mixer().make_state(rows, at::Device(at::kMeta), std::nullopt, capacity));
  }
  return total;
}

ModelState RowStates::first(int64_t count) const {
  ModelState views(state_.size());
  for (size_t k = 0; k < state_.size(); ++k) {
    for (size_t i = 0; i < state_[k].size(); ++i) {
      const Tensor& whole = state_[k][i];
      views[k].push_back(i == kRoomPlace ? whole.clone() : whole.narrow(0, 0, count));
    }
  }
  return views;
}

ModelState RowStates::part(const ModelState& state, int64_t first, int64_t count) {
  ModelState views(state.size());
  for (size_t k = 0; k < state.size(); ++k) {
    for (size_t i = 0; i < state[k].size(); ++i) {
      views[k].push_back(i == kRoomPlace ? state[k][i] : state[k][i].narrow(0, first, count));
    }
  }
  return views;
}

void RowStates::allow_step(const ModelState& state) {
  for (const nn::MixerState& layer : state) {
    if (layer.size() > kRoomPlace) layer[kRoomPlace].data_ptr<int64_t>()[0] = 0;
  }
}

void RowStates::write(int64_t first, const ModelState& state) {
  for (size_t k = 0; k < state_.size(); ++k) {
    for (size_t i = 0; i < state_[k].size(); ++i) {
      if (i == kRoomPlace) continue;
      const Tensor& source = state[k][i];
      Tensor target = state_[k][i].narrow(0, first, source.size(0));
      if (keeps(k) && i < kCaches) {
        const int64_t held = std::min(source.size(1), capacity_);
        target.narrow(1, 0, held).copy_(source.narrow(1, 0, held));
      } else {
        target.copy_(source);
      }
    }
  }
}

ModelState RowStates::read(int64_t row) const {
  ModelState state(state_.size());
  for (size_t k = 0; k < state_.size(); ++k) {
    int64_t held = 0;
    if (keeps(k)) held = state_[k][kLengthsPlace].select(0, row).item<int64_t>();
    for (size_t i = 0; i < state_[k].size(); ++i) {
      if (i == kRoomPlace) {
        state[k].push_back(at::tensor({held, kGrowing}, at::kLong));
      } else {
        const Tensor one = state_[k][i].narrow(0, row, 1);
        state[k].push_back((keeps(k) && i < kCaches ? one.narrow(1, 0, held) : one).clone());
      }
    }
  }
  return state;
}

void RowStates::copy_row(int64_t from, int64_t to) {
  for (const nn::MixerState& layer : state_) {
    for (size_t i = 0; i < layer.size(); ++i) {
      if (i != kRoomPlace) layer[i].select(0, to).copy_(layer[i].select(0, from));
    }
  }
}

void RowStates::clear_row(int64_t row) {
  for (size_t k = 0; k < state_.size(); ++k) {
    if (!keeps(k)) continue;
    for (const size_t place : {kLengthsPlace, kSeenPlace}) state_[k][place].select(0, row).zero_();
  }
}

void RowStates::grow(int64_t capacity) {
  grow_caches(capacity);
  capacity_ = capacity;
}

void RowStates::grow_caches(int64_t capacity) {
  // All of them, or none where memory is out.
  std::vector<std::pair<GrowingCache*, Tensor>> before;
  try {
    for (std::vector<GrowingCache>& layer : caches_) {
      for (GrowingCache& cache : layer) {
        before.emplace_back(&cache, cache.tensor());
        cache.grow(capacity);
      }
    }
  } catch (...) {
    for (const auto& [cache, tensor] : before) cache->go_back_to(tensor);
    throw;
  }
  for (size_t k = 0; k < state_.size(); ++k) {
    if (!keeps(k)) continue;
    for (size_t i = 0; i < kCaches; ++i) state_[k][i] = caches_[k][i].tensor();
    state_[k][kRoomPlace].select(0, 1).fill_(capacity);
  }
}

bool RowStates::drop_unreachable(int64_t count, int64_t* most) {
  const ModelState views = first(count);
  bool drops = false;
  *most = 0;
  for (size_t k = 0; k < state_.size(); ++k) {
    if (!keeps(k)) continue;
    drops = model_.block(k).mixer().drop_unreachable(views[k]) || drops;
    const Tensor& lengths = views[k][kLengthsPlace];
    *most = std::max(*most, lengths.numel() > 0 ? lengths.max().item<int64_t>() : 0);
  }
  return drops;
}

int64_t RowStates::bytes() const {
  int64_t total = 0;
  for (size_t k = 0; k < state_.size(); ++k) {
    for (size_t i = keeps(k) ? kCaches : 0; i < state_[k].size(); ++i) {
      total += static_cast<int64_t>(state_[k][i].nbytes());
    }
    for (const GrowingCache& cache : caches_[k]) total += cache.bytes();
  }
  return total;
}

}  // namespace tidegate::models
