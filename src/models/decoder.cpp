#include "tidegate/models/decoder.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "src/models/decoder_rows.h"
#include "src/models/prompt_rows.h"
#include "src/models/prompts.h"
#include "src/models/saved_state.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

constexpr const char* kAdd = "Decoder.add";
// Steps between two looks of the host, at most.
constexpr int64_t kDecoderWindow = 32;

int64_t seed_of(const SequenceOptions& options) {
  if (options.seed()) return *options.seed();
  if (options.temperature() == 0.0) return 0;
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong).item<int64_t>();
}

void check_sequence(const char* owner, const SequenceOptions& options, int64_t max_stop_ids) {
  check_sampling(owner, options.temperature(), options.top_k(), options.top_p(), options.min_p(),
                 options.repetition_penalty());
  TORCH_CHECK_VALUE(options.max_new_tokens().value_or(1) >= 1, owner,
                    ": max_new_tokens: expected an integer >= 1; got ",
                    options.max_new_tokens().value_or(1));
  const auto stops = static_cast<int64_t>(options.stop_ids().size());
  TORCH_CHECK_VALUE(stops <= max_stop_ids, owner, ": stop_ids: expected at most ", max_stop_ids,
                    ", the decoder's max_stop_ids; got ", stops);
}

RowSettings row_settings(const SequenceOptions& options) {
  RowSettings row = RowSettings::sampling_as(options);
  row.seed = seed_of(options);
  row.stream = options.stream();
  row.limit = options.max_new_tokens().value_or(std::numeric_limits<int64_t>::max());
  row.stops = options.stop_ids();
  return row;
}

// The prompt's ids on the host.
std::vector<int64_t> checked_prompt(const char* owner, const Tensor& prompt, int64_t vocab,
                                    bool can_be_empty) {
  const bool fits = prompt.defined() && prompt.dim() == 1 &&
                    (prompt.scalar_type() == at::kInt || prompt.scalar_type() == at::kLong);
  TORCH_CHECK_VALUE(
      fits, owner, ": prompt: expected int32 or int64 [length]; got ",
      prompt.defined() ? c10::str(prompt.scalar_type(), " ", nn::shape_text(prompt)) : "None");
  TORCH_CHECK_VALUE(can_be_empty || prompt.size(0) > 0, owner,
                    ": prompt: expected at least one token; got none");
  const Tensor host = prompt.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> ids(host.const_data_ptr<int64_t>(),
                           host.const_data_ptr<int64_t>() + host.numel());
  for (const int64_t id : ids) {
    TORCH_CHECK_VALUE(id >= 0 && id < vocab, owner, ": prompt: expected ids from 0 to below ",
                      "vocab_size=", vocab, "; got ", id);
  }
  return ids;
}

}  // namespace

/// Sequences that go on are rows 0 to active - 1.
struct Decoder::Batch {
  struct Row {
    int64_t slot;
    int64_t drawn;
    int64_t limit;
    std::vector<int64_t> stops;
    std::vector<int64_t> ids;  // what it has read
  };

  Batch(CausalLM given, const DecoderOptions& options);

  void check_room(int64_t count) const;
  bool has_limit() const { return options.invariant() && engine->keeps_tokens(); }
  void check_capacity(const char* owner, int64_t tokens) const;
  int64_t room() const;
  int64_t take_slot();
  size_t row_of(const char* owner, int64_t slot, bool must_go_on) const;
  void begin(const ReadPrompts& read, const std::vector<RowSettings>& settings,
             const std::vector<std::vector<int64_t>>& ids);
  Tensor seen_by(const std::vector<std::vector<int64_t>>& ids) const;
  void leave(size_t row);
  void collect(RowTokens tokens, std::vector<DecodedToken>* out);

  CausalLM model;
  const DecoderOptions options;
  Evaluating evaluating;
  std::optional<DecoderRows> engine;
  std::vector<Row> rows;
  std::vector<bool> is_taken;
  bool has_penalty = false;
  std::exception_ptr failure;  // of a step whose call had tokens to return
};

Decoder::Batch::Batch(CausalLM given, const DecoderOptions& wanted)
    : model(std::move(given)), options(wanted), evaluating(*model) {
  TORCH_CHECK_VALUE(options.max_batch() >= 1, "Decoder: max_batch: expected an integer >= 1; got ",
                    options.max_batch());
  TORCH_CHECK_VALUE(options.capacity() >= 1, "Decoder: capacity: expected an integer >= 1; got ",
                    options.capacity());
  TORCH_CHECK_VALUE(options.prompt_chunk() >= 1,
                    "Decoder: prompt_chunk: expected an integer >= 1; got ",
                    options.prompt_chunk());
  TORCH_CHECK_VALUE(options.max_stop_ids() >= 0,
                    "Decoder: max_stop_ids: expected an integer >= 0; got ",
                    options.max_stop_ids());
  RowsOptions asked;
  asked.rows = options.max_batch();
  asked.capacity = options.capacity();
  asked.window = kDecoderWindow;
  asked.stops = options.max_stop_ids();
  asked.log_probs = options.log_probs();
  asked.row_by_row = options.invariant();
  check_memory("Decoder", "max_batch", *model, asked);
  const Unrecorded unrecorded;
  engine.emplace(*model, asked);
  is_taken.resize(static_cast<size_t>(options.max_batch()), false);
}

void Decoder::Batch::check_room(int64_t count) const {
  const auto free = std::count(is_taken.begin(), is_taken.end(), false);
  TORCH_CHECK_VALUE(count <= free, kAdd, ": expected ", count, " free of the ", options.max_batch(),
                    " slots; got ", free, ": remove() ends a sequence");
}

// Throws where a sequence of so many tokens asks for more than a capacity that is a limit.
void Decoder::Batch::check_capacity(const char* owner, int64_t tokens) const {
  TORCH_CHECK_VALUE(
      !has_limit() || tokens <= options.capacity(), owner, ": capacity: expected at least ", tokens,
      " tokens a sequence, since invariant=True keeps it as it is; got ", options.capacity());
}

// Tokens that every sequence has room for.
int64_t Decoder::Batch::room() const {
  if (!has_limit()) return std::numeric_limits<int64_t>::max();
  size_t longest = 0;
  for (const Row& row : rows) longest = std::max(longest, row.ids.size());
  return options.capacity() - static_cast<int64_t>(longest);
}

int64_t Decoder::Batch::take_slot() {
  const auto found = std::find(is_taken.begin(), is_taken.end(), false);
  *found = true;
  return found - is_taken.begin();
}

size_t Decoder::Batch::row_of(const char* owner, int64_t slot, bool must_go_on) const {
  const bool is_used =
      slot >= 0 && slot < options.max_batch() && is_taken[static_cast<size_t>(slot)];
  TORCH_CHECK_VALUE(is_used, owner, ": slot: expected one that add() gave and remove() did not ",
                    "free; got ", slot);
  const auto found =
      std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.slot == slot; });
  TORCH_CHECK_VALUE(!must_go_on || found != rows.end(), owner,
                    ": slot: expected a sequence that goes on; got ", slot, ", which has ended");
  return static_cast<size_t>(found - rows.begin());
}

// The sequences that a pass over prompts has read become the next rows.
void Decoder::Batch::begin(const ReadPrompts& read, const std::vector<RowSettings>& settings,
                           const std::vector<std::vector<int64_t>>& ids) {
  for (const RowSettings& one : settings) has_penalty = has_penalty || one.penalty != 1.0;
  if (has_penalty) engine->ask_for_penalties();
  std::vector<int64_t> lengths;
  for (const auto& one : ids) lengths.push_back(static_cast<int64_t>(one.size()));
  engine->begin(static_cast<int64_t>(rows.size()), read.logits, read.state, lengths, settings,
                seen_by(ids));
  for (size_t i = 0; i < settings.size(); ++i) {
    rows.push_back({take_slot(), 0, settings[i].limit, settings[i].stops, ids[i]});
  }
}

// 1 where a sequence has a token, `[ids.size(), vocab]`; undefined where nobody has a penalty.
Tensor Decoder::Batch::seen_by(const std::vector<std::vector<int64_t>>& ids) const {
  if (!has_penalty) return {};
  const Tensor seen =
      at::zeros({static_cast<int64_t>(ids.size()), *model->config.vocab_size}, at::kByte);
  for (size_t i = 0; i < ids.size(); ++i) {
    seen.select(0, static_cast<int64_t>(i)).index_fill_(0, at::tensor(ids[i], at::kLong), 1);
  }
  return seen;
}

// The row is no more; the last one takes its place.
void Decoder::Batch::leave(size_t row) {
  const size_t last = rows.size() - 1;
  if (row != last) {
    engine->copy_row(static_cast<int64_t>(last), static_cast<int64_t>(row));
    rows[row] = std::move(rows[last]);
  }
  rows.pop_back();
}

void Decoder::Batch::collect(RowTokens tokens, std::vector<DecodedToken>* out) {
  const Tensor& ids = tokens.wait();
  const Tensor log_probs = options.log_probs() ? tokens.log_probs.wait() : Tensor();
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  std::vector<bool> has_ended(rows.size(), false);
  for (int64_t step = 0; step < tokens.steps; ++step) {
    for (size_t r = 0; r < rows.size(); ++r) {
      if (has_ended[r]) continue;
      Row& row = rows[r];
      const int64_t place = static_cast<int64_t>(r) * kDecoderWindow + row.drawn % kDecoderWindow;
      const bool stops = std::count(row.stops.begin(), row.stops.end(), id[place]) > 0;
      has_ended[r] = ++row.drawn >= row.limit || stops;
      row.ids.push_back(id[place]);
      const double log_prob = log_probs.defined() ? log_probs.const_data_ptr<float>()[place] : 0.0;
      out->push_back({row.slot, id[place], log_prob, has_ended[r]});
    }
  }
  for (size_t r = rows.size(); r-- > 0;) {
    if (has_ended[r]) leave(r);
  }
}

Decoder::Decoder(CausalLM model, const DecoderOptions& options)
    : batch_(std::make_unique<Batch>(std::move(model), options)) {}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

int64_t Decoder::active() const { return static_cast<int64_t>(batch_->rows.size()); }
int64_t Decoder::taken() const {
  return std::count(batch_->is_taken.begin(), batch_->is_taken.end(), true);
}
int64_t Decoder::max_batch() const { return batch_->options.max_batch(); }

int64_t Decoder::add(const Tensor& prompt, const SequenceOptions& options) {
  return add(std::vector<Tensor>{prompt}, {options}).front();
}

std::vector<int64_t> Decoder::add(const std::vector<Tensor>& prompts,
                                  const std::vector<SequenceOptions>& options) {
  Batch& b = *batch_;
  TORCH_CHECK_VALUE(options.size() == 1 || options.size() == prompts.size(), kAdd,
                    ": options: expected one, or one for each of the ", prompts.size(),
                    " prompts; got ", options.size());
  std::vector<std::vector<int64_t>> ids;
  for (const Tensor& prompt : prompts) {
    ids.push_back(checked_prompt(kAdd, prompt, *b.model->config.vocab_size, false));
    b.check_capacity(kAdd, prompt.size(0));
  }
  for (const SequenceOptions& one : options) {
    check_sequence(kAdd, one, b.options.max_stop_ids());
  }
  b.check_room(static_cast<int64_t>(prompts.size()));
  const Unrecorded unrecorded;
  const c10::DeviceGuard guard(b.engine->device());
  std::vector<Tensor> there;
  for (const Tensor& prompt : prompts) there.push_back(prompt.to(b.engine->device()));
  std::vector<int64_t> slots;
  const PromptReader reader(*b.model, b.options.prompt_chunk(), b.options.invariant());
  const auto begin = [&](const ReadPrompts& read) {
    std::vector<RowSettings> settings;
    std::vector<std::vector<int64_t>> mine;
    for (int64_t i = read.first; i < read.first + read.logits.size(0); ++i) {
      const auto place = static_cast<size_t>(i);
      settings.push_back(row_settings(options.size() == 1 ? options[0] : options[place]));
      mine.push_back(ids[place]);
    }
    b.begin(read, settings, mine);
    for (size_t r = b.rows.size() - mine.size(); r < b.rows.size(); ++r) {
      slots.push_back(b.rows[r].slot);
    }
  };
  try {
    reader.read(there, begin);
  } catch (...) {  // all of them, or none
    for (const int64_t slot : slots) remove(slot);
    throw;
  }
  return slots;
}

int64_t Decoder::load_prefix(const TensorMap& saved, const Tensor& prompt,
                             const SequenceOptions& options) {
  constexpr const char* kOwner = "Decoder.load_prefix";
  Batch& b = *batch_;
  const auto ids = checked_prompt(kOwner, prompt, *b.model->config.vocab_size, true);
  check_sequence(kOwner, options, b.options.max_stop_ids());
  b.check_room(1);
  const Unrecorded unrecorded;
  const c10::DeviceGuard guard(b.engine->device());
  SavedState before = unpack_state(kOwner, saved, *b.model, b.engine->device());
  before.tokens.insert(before.tokens.end(), ids.begin(), ids.end());
  b.check_capacity(kOwner, static_cast<int64_t>(before.tokens.size()));
  ReadPrompts read{0, before.logits, before.state};
  if (!ids.empty()) {
    read = PromptReader(*b.model, b.options.prompt_chunk())
               .read_after(prompt.to(b.engine->device()), before.state);
  }
  b.begin(read, {row_settings(options)}, {before.tokens});
  return b.rows.back().slot;
}

int64_t Decoder::load_prefix(const std::string& path, const Tensor& prompt,
                             const SequenceOptions& options) {
  return load_prefix(load_safetensors(path), prompt, options);
}

int64_t Decoder::fork(int64_t slot, const SequenceOptions& options) {
  constexpr const char* kOwner = "Decoder.fork";
  Batch& b = *batch_;
  const auto from = static_cast<int64_t>(b.row_of(kOwner, slot, /*must_go_on=*/true));
  check_sequence(kOwner, options, b.options.max_stop_ids());
  b.check_room(1);
  const Unrecorded unrecorded;
  const RowSettings settings = row_settings(options);
  b.has_penalty = b.has_penalty || settings.penalty != 1.0;
  if (b.has_penalty) b.engine->ask_for_penalties();
  const auto to = static_cast<int64_t>(b.rows.size());
  const std::vector<int64_t> ids = b.rows[static_cast<size_t>(from)].ids;
  b.engine->copy_row(from, to);
  b.engine->restart_row(to, settings, b.seen_by({ids}));
  b.rows.push_back({b.take_slot(), 0, settings.limit, settings.stops, ids});
  return b.rows.back().slot;
}

std::map<int64_t, DecodedToken> Decoder::step() {
  std::map<int64_t, DecodedToken> by_slot;
  for (const DecodedToken& token : steps(1)) by_slot.emplace(token.slot, token);
  return by_slot;
}

std::vector<DecodedToken> Decoder::steps(int64_t count) {
  TORCH_CHECK_VALUE(count >= 1, "Decoder.steps: count: expected an integer >= 1; got ", count);
  Batch& b = *batch_;
  if (b.failure) std::rethrow_exception(std::exchange(b.failure, nullptr));
  for (const Batch::Row& row : b.rows) {
    const int64_t drawn = std::min(count, row.limit - row.drawn);
    b.check_capacity("Decoder.step", static_cast<int64_t>(row.ids.size()) + drawn);
  }
  const Unrecorded unrecorded;
  std::vector<DecodedToken> out;
  while (count > 0 && !b.rows.empty()) {
    // All rows make every step of a window, though one may end within it. Where capacity is a
    // limit, no step goes beyond what the longest row has room for.
    const int64_t now = std::min({count, kDecoderWindow, b.room()});
    const auto rows = static_cast<int64_t>(b.rows.size());
    try {
      // An invariant step takes all slots, so that a product has the same rows always; on the CPU
      // it takes them one by one, and those that are idle need not be.
      const bool all = b.options.invariant() && !b.engine->device().is_cpu();
      b.engine->advance(all ? max_batch() : rows, now, rows);
    } catch (...) {
      if (!b.engine->is_trusted()) b.rows.clear();
      if (out.empty()) throw;
      b.failure = std::current_exception();  // after these tokens, the next steps() says so
      break;
    }
    b.collect(b.engine->fetch(rows, now), &out);
    count -= now;
  }
  return out;
}

void Decoder::end(int64_t slot) {
  const size_t row = batch_->row_of("Decoder.end", slot, /*must_go_on=*/false);
  if (row < batch_->rows.size()) batch_->leave(row);
}

void Decoder::remove(int64_t slot) {
  Batch& b = *batch_;
  const size_t row = b.row_of("Decoder.remove", slot, /*must_go_on=*/false);
  if (row < b.rows.size()) b.leave(row);
  b.is_taken[static_cast<size_t>(slot)] = false;
}

TensorMap Decoder::save_prefix(int64_t slot) const {
  const Batch& b = *batch_;
  const auto row = static_cast<int64_t>(b.row_of("Decoder.save_prefix", slot, /*must_go_on=*/true));
  const Unrecorded unrecorded;
  const auto [state, logits] = b.engine->read_row(row);
  return pack_state({state, logits, b.rows[static_cast<size_t>(row)].ids}, b.model->config);
}

void Decoder::save_prefix(int64_t slot, const std::string& path) const {
  save_safetensors(save_prefix(slot), path);
}

}  // namespace tidegate::models
