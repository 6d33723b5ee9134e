#include "src/models/decoder_rows.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "src/models/prompt_rows.h"
#include "src/nn/products.h"
#include "src/ops/gla.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

// Rows that are kept for the next generate() are at most this part of the device's memory.
constexpr int64_t kKeptPart = 16;
// Logits of a row are padded to so many.
constexpr int64_t kRowPack = 8;
// Caches grow by a quarter, and by so many tokens at least: nothing is copied, but steps are
// captured anew.
constexpr int64_t kLeastGrowth = 256;
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

const Tensor& head_weight(const CausalLMImpl& model) {
  return model.head ? model.head->weight : model.embedding->weight;
}

std::vector<std::pair<const void*, at::ScalarType>> places_of(const CausalLMImpl& model) {
  std::vector<std::pair<const void*, at::ScalarType>> places;
  for (const Tensor& t : model.parameters())
    places.emplace_back(t.const_data_ptr(), t.scalar_type());
  for (const Tensor& t : model.buffers()) places.emplace_back(t.const_data_ptr(), t.scalar_type());
  return places;
}

// How often the parameters of the lower bounds have been changed in place.
std::vector<int64_t> versions_of_bounds(const CausalLMImpl& model) {
  std::vector<int64_t> versions;
  if (model.lower_bounds.is_empty()) return versions;
  for (const Tensor& t : model.lower_bounds.ptr()->parameters()) {
    versions.push_back(t.is_inference() ? 0 : static_cast<int64_t>(t._version()));
  }
  return versions;
}

// A product of sizes, or the largest number where it has no place in 64 bits.
int64_t bounded_product(int64_t a, int64_t b) {
  return b > 0 && a > kLargest / b ? kLargest : a * b;
}

// Bytes of one row's states. The sizes of tensors have to fit 64 bits even where nothing is
// allocated, so that those of very many tokens are made from those of fewer.
int64_t row_bytes(const CausalLMImpl& model, int64_t capacity) {
  constexpr int64_t kTokens = int64_t{1} << 32;
  const int64_t bytes = RowStates::bytes_of(model, 1, std::min(capacity, kTokens));
  const bool grows = bytes > RowStates::bytes_of(model, 1, 1);
  return grows && capacity > kTokens ? bounded_product(bytes, capacity / kTokens) : bytes;
}

}  // namespace

DecoderRows::DecoderRows(CausalLMImpl& model, const RowsOptions& options)
    : model_(model),
      options_(options),
      device_(head_weight(model).device()),
      parameters_(places_of(model)),
      stream_(device_),
      states_(model, options.rows, options.capacity),
      sampled_(options.rows, *model.config.vocab_size, options.stops, options.window,
               options.log_probs, device_),
      lengths_(static_cast<size_t>(options.rows), 0) {
  refresh();
}

// The states' memory goes with them, so all work on it has to be done: of steps, and of whoever
// wrote or read rows.
DecoderRows::~DecoderRows() {
  try {
    stream_.follow_caller();
    stream_.wait();
    steps_.clear();
  } catch (const std::exception& error) {
    TORCH_WARN("generation: ", error.what());
  }
}

bool DecoderRows::fit(const CausalLMImpl& model, const RowsOptions& wanted) const {
  return &model == &model_ && wanted.rows == options_.rows && wanted.stops == options_.stops &&
         wanted.window == options_.window && wanted.log_probs == options_.log_probs &&
         wanted.row_by_row == options_.row_by_row &&
         (!keeps_tokens() || wanted.capacity <= capacity()) && places_of(model) == parameters_;
}

void DecoderRows::refresh() {
  const Unrecorded unrecorded;
  bounds_versions_ = versions_of_bounds(model_);
  const auto fresh = model_.gammas();
  bounds_.resize(fresh.size());
  for (size_t k = 0; k < fresh.size(); ++k) {
    if (!fresh[k]) continue;
    if (bounds_[k]) {
      bounds_[k]->copy_(*fresh[k]);
    } else {
      bounds_[k] = fresh[k]->detach().clone();
      stream_.uses(*bounds_[k]);
    }
  }
}

void DecoderRows::follow_training() {
  if (versions_of_bounds(model_) != bounds_versions_) refresh();
}

void DecoderRows::begin(int64_t first, const Tensor& logits, const ModelState& state,
                        const std::vector<int64_t>& lengths,
                        const std::vector<RowSettings>& settings, const Tensor& seen) {
  const c10::DeviceGuard guard(device_);
  refresh();  // not every optimiser counts a parameter's versions
  keep_logits_of(logits);
  std::copy(lengths.begin(), lengths.end(), lengths_.begin() + first);
  if (const int64_t most = *std::max_element(lengths.begin(), lengths.end());
      keeps_tokens() && most > capacity()) {
    states_.grow(most + kLeastGrowth);
    forget_graphs();
  }
  states_.write(first, state);
  logits_.narrow(0, first, logits.size(0)).copy_(logits);
  sampled_.write(first, settings, seen);
  stream_.follow_caller();
}

// Rows may come with logits of several dtypes: of a prefix that a model in bf16 has saved, or read
// under autocast. The widest one is kept, with what the other rows have.
void DecoderRows::keep_logits_of(const Tensor& logits) {
  const at::ScalarType wanted = logits_.defined()
                                    ? at::promote_types(logits_.scalar_type(), logits.scalar_type())
                                    : logits.scalar_type();
  if (logits_.defined() && logits_.scalar_type() == wanted) return;
  forget_graphs();
  // Rows of whole packs of 16 bytes, for which libraries have faster products than for others.
  const int64_t vocab = logits.size(1), padded = (vocab + kRowPack - 1) / kRowPack * kRowPack;
  const Tensor wide = at::zeros({options_.rows, padded}, logits.options().dtype(wanted));
  const Tensor before = std::exchange(logits_, wide.narrow(1, 0, vocab));
  if (before.defined()) logits_.copy_(before);
  stream_.uses(logits_);
}

void DecoderRows::copy_row(int64_t from, int64_t to) {
  const c10::DeviceGuard guard(device_);
  states_.copy_row(from, to);
  logits_.select(0, to).copy_(logits_.select(0, from));
  sampled_.copy_row(from, to);
  stream_.follow_caller();
  lengths_[static_cast<size_t>(to)] = lengths_[static_cast<size_t>(from)];
}

std::pair<ModelState, Tensor> DecoderRows::read_row(int64_t row) const {
  std::pair<ModelState, Tensor> read{states_.read(row), logits_.narrow(0, row, 1).clone()};
  stream_.follow_caller();
  return read;
}

void DecoderRows::restart_row(int64_t row, const RowSettings& settings, const Tensor& seen) {
  const c10::DeviceGuard guard(device_);
  sampled_.write(row, {settings}, seen);
}

void DecoderRows::ask_for_penalties() {
  if (!sampled_.make_seen()) return;
  stream_.uses(sampled_.seen);
  forget_graphs();
}

// Graphs, and the memory that they work in, are given back once none of them runs any more.
void DecoderRows::forget_graphs() {
  if (!steps_.empty()) stream_.wait();
  steps_.clear();
}

// Room for `steps` more tokens in each of the first rows: an idle one begins anew; what nobody can
// see is dropped; memory grows.
void DecoderRows::make_room(int64_t count, int64_t steps, int64_t active) {
  if (!keeps_tokens()) return;
  for (int64_t row = active; row < count; ++row) {
    if (lengths_[static_cast<size_t>(row)] + steps <= capacity()) continue;
    states_.clear_row(row);
    lengths_[static_cast<size_t>(row)] = 0;
  }
  const auto longest = [&] {
    return *std::max_element(lengths_.begin(), lengths_.begin() + count) + steps;
  };
  if (longest() <= capacity()) return;
  int64_t most = 0;
  if (states_.drop_unreachable(count, &most)) {
    for (int64_t row = 0; row < count; ++row) {
      int64_t& length = lengths_[static_cast<size_t>(row)];
      length = std::min(length, most);
    }
  }
  // A window's worth stays free: to drop a token at every step would cost more than the step.
  if (const int64_t needed = longest(); needed > capacity() - options_.window) {
    states_.grow(std::max({needed, capacity() + capacity() / 4, capacity() + kLeastGrowth}));
    forget_graphs();
  }
}

void DecoderRows::advance(int64_t count, int64_t steps, int64_t active) {
  const c10::DeviceGuard guard(device_);
  make_room(count, steps, active);
  Steps& graphs = steps_[count];
  const ModelState& views = graphs.views;
  if (views.empty()) {
    graphs.views = states_.first(count);
    for (const nn::MixerState& layer : states_.all()) {
      for (const Tensor& t : layer) stream_.uses(t);
    }
    for (const Tensor* t : {&sampled_.ids, &sampled_.tokens}) stream_.uses(*t);
  }
  const bool use_graph = uses_cuda_graphs(device_);
  const OwnStream::Scope scope(stream_);
  const c10::InferenceMode inference;
  const nn::FewRowsGuard few_rows;
  follow_training();
  const ops::SettledStatesGuard settled;
  is_trusted_ = false;
  for (int64_t left = steps; left > 0;) {
    // As a power of two, so that few are made one by one.
    const int64_t several = ops::DeferredStates::kSteps;
    if (graphs.defers && left >= several) {
      graphs.several.run(stream_, use_graph, [&] { step_deferred(count, views, several); });
      left -= several;
      continue;
    }
    graphs.one.run(stream_, use_graph,
                   [&] { graphs.defers = step_deferred(count, views, /*steps=*/1); });
    --left;
  }
  is_trusted_ = true;
  for (int64_t row = 0; row < count; ++row) lengths_[static_cast<size_t>(row)] += steps;
}

bool DecoderRows::step_deferred(int64_t count, const ModelState& state, int64_t steps) {
  ops::DeferredStates deferred(steps);
  for (int64_t i = 0; i < steps; ++i) {
    step(count, state);
    deferred.next_round();
  }
  return deferred.is_wanted();
}

void DecoderRows::step(int64_t count, const ModelState& state) {
  sampled_.sample(logits_, count);
  const int64_t together = options_.row_by_row && device_.is_cpu() ? 1 : count;
  for (int64_t first = 0; first < count; first += together) {
    const ModelState rows = together == count ? state : RowStates::part(state, first, together);
    RowStates::allow_step(rows);
    model_.advance(sampled_.ids.narrow(0, first, together), rows, bounds_,
                   logits_.narrow(0, first, together));
  }
}

const Tensor& RowTokens::wait() {
  const Tensor& drawn = tokens.wait();
  if (const Tensor& held = lengths.wait(); held.defined()) {
    const auto most = held.max().item<int64_t>();
    TORCH_INTERNAL_ASSERT(most <= capacity, "generation: a layer's cache with room for ", capacity,
                          " tokens a sequence was given ", most);
  }
  return drawn;
}

RowTokens DecoderRows::fetch(int64_t count, int64_t steps) const {
  const c10::DeviceGuard guard(device_);
  RowTokens out{count,      steps,      HostCopy(sampled_.tokens.narrow(0, 0, count)),
                HostCopy(), HostCopy(), capacity()};
  if (keeps_tokens()) out.lengths = HostCopy(states_.lengths().narrow(1, 0, count));
  if (options_.log_probs) out.log_probs = HostCopy(sampled_.log_probs.narrow(0, 0, count));
  return out;
}

int64_t DecoderRows::bytes() const {
  const int64_t logits = logits_.defined() ? static_cast<int64_t>(logits_.nbytes()) : 0;
  return states_.bytes() + sampled_.bytes() + logits;
}

std::unique_ptr<DecoderRows> KeptRows::take(const CausalLMImpl& model, const RowsOptions& options) {
  std::unique_ptr<DecoderRows> rows;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    rows = std::move(rows_);
  }
  if (rows && rows->fit(model, options)) {
    rows->wait();  // for the steps behind the token that ended a generation
    rows->refresh();
    return rows;
  }
  return nullptr;
}

void KeptRows::put(std::unique_ptr<DecoderRows> rows) {
  const auto all = all_bytes(rows->device());
  if (!all || rows->bytes() > *all / kKeptPart) return;
  // Those of before are given up without the lock.
  const std::lock_guard<std::mutex> guard(lock_);
  std::swap(rows_, rows);
}

void check_memory(const char* owner, const char* rows_name, const CausalLMImpl& model,
                  const RowsOptions& wanted) {
  const auto free = free_bytes(head_weight(model).device());
  if (!free) return;
  const int64_t rows = wanted.rows;
  const auto check = [&](const char* name, int64_t row_bytes, int64_t given, const char* unit) {
    const int64_t needed = bounded_product(rows, row_bytes);
    TORCH_CHECK_VALUE(needed <= *free, owner, ": ", name, ": expected states of ", rows,
                      " sequences that fit the ", *free, " bytes that are free; got ", given, unit,
                      ", which need ", needed, needed == kLargest ? " or more" : "");
  };
  check(rows_name, RowStates::bytes_of(model, 1, 1), rows, "");
  check("max_stop_ids", bounded_product(wanted.stops, sizeof(int64_t)), wanted.stops,
        " ids a sequence");
  check("capacity", row_bytes(model, wanted.capacity), wanted.capacity, " tokens a sequence");
}

}  // namespace tidegate::models
