// The mixers' states of the rows of a batch, at places that do not move while steps go on.
#pragma once

#include "tidegate/models/causal_lm.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "src/models/growing_cache.h"

namespace tidegate::models {

/// Where a tensor of a state that keeps tokens stands; the others have one row a sequence alone.
constexpr size_t kLengthsPlace = 3, kSeenPlace = 4, kRoomPlace = 7;
/// The tensors before this one have a place a token, `[rows, capacity, ...]`.
constexpr size_t kCaches = 3;

class RowStates {
 public:
  /// capacity: tokens of a sequence that there is room for, where layers keep tokens.
  RowStates(const CausalLMImpl& model, int64_t rows, int64_t capacity);

  /// How many bytes that takes; nothing is allocated.
  static int64_t bytes_of(const CausalLMImpl& model, int64_t rows, int64_t capacity);

  /// The first rows, views: what a step over them updates.
  ModelState first(int64_t count) const;
  /// Views of some of the rows that the views `state` have.
  static ModelState part(const ModelState& state, int64_t first, int64_t count);
  /// Says to layers that keep tokens that there is room for one more: they need not look.
  static void allow_step(const ModelState& state);

  /// Rows from `first` on become the sequences of `state`.
  void write(int64_t first, const ModelState& state);
  /// One row with memory of its own, which grows where it goes on.
  ModelState read(int64_t row) const;
  void copy_row(int64_t from, int64_t to);
  /// The row holds no tokens.
  void clear_row(int64_t row);

  /// Room for `capacity` tokens, where what is held is (GrowingCache). Views of before stay true,
  /// of as many tokens as they have. Throws c10::OutOfMemoryError.
  void grow(int64_t capacity);
  /// Drops what no token to come can see, where layers have a window or prune what they keep;
  /// whether there are such layers. `most`: tokens that a row still holds. Waits for the device.
  bool drop_unreachable(int64_t count, int64_t* most);

  /// Tokens that the rows hold, `[layers that keep tokens, rows]`: more than capacity() where a
  /// step found no room for one, which it drops (kernels/attention/append.h).
  const torch::Tensor& lengths() const { return lengths_; }

  bool keeps_tokens() const { return keeps_tokens_; }
  int64_t capacity() const { return capacity_; }
  int64_t bytes() const;
  const ModelState& all() const { return state_; }

 private:
  bool keeps(size_t layer) const { return state_[layer].size() > kRoomPlace; }

  void grow_caches(int64_t capacity);

  const CausalLMImpl& model_;
  ModelState state_;
  torch::Tensor lengths_;
  std::vector<std::vector<GrowingCache>> caches_;  // of the layers that keep tokens, kCaches each
  int64_t capacity_;
  bool keeps_tokens_ = false;
};

}  // namespace tidegate::models
