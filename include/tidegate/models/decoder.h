// A running batch that sequences enter and leave at any step: what a server needs.
#pragma once

#include "tidegate/models/causal_lm.h"
#include "tidegate/models/safetensors.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tidegate::models {

/// What a Decoder has room for.
struct DecoderOptions {
  explicit DecoderOptions(int64_t max_batch) : max_batch_(max_batch) {}

  /// Sequences at a time: the decoder's slots.
  TORCH_ARG(int64_t, max_batch);
  /// Tokens of a sequence, prompt included, that layers which keep them have room for at first.
  /// Memory grows in place where more come, and the steps are captured anew.
  TORCH_ARG(int64_t, capacity) = 1024;
  /// Ids of a sequence that end it, at most.
  TORCH_ARG(int64_t, max_stop_ids) = 8;
  /// Tokens that are read at once of prompts: a bound on the memory that takes.
  TORCH_ARG(int64_t, prompt_chunk) = 8192;
  /// Whether tokens come with their log-probabilities.
  TORCH_ARG(bool, log_probs) = false;
  /// Whether a sequence's logits have the same bits whatever else is in the batch. Costs: a step
  /// always computes all slots (on the CPU its rows alone), prompts are read one by one,
  /// and capacity is a limit.
  TORCH_ARG(bool, invariant) = false;
};

/// How one sequence goes on. The numbers mean what GenerateOptions says.
struct SequenceOptions {
  TORCH_ARG(double, temperature) = 1.0;
  TORCH_ARG(std::optional<int64_t>, top_k) = std::nullopt;
  TORCH_ARG(std::optional<double>, top_p) = std::nullopt;
  TORCH_ARG(std::optional<double>, min_p) = std::nullopt;
  TORCH_ARG(double, repetition_penalty) = 1.0;
  /// A sequence's tokens depend on its prompt, its options and this alone, not on what else is in
  /// the batch (but for the rounding of products of other sizes). Unset: one from torch's default
  /// generator.
  TORCH_ARG(std::optional<int64_t>, seed) = std::nullopt;
  /// Which of several samples of one seed it is.
  TORCH_ARG(int64_t, stream) = 0;
  /// The sequence ends after so many tokens; unset: with a stop id alone.
  TORCH_ARG(std::optional<int64_t>, max_new_tokens) = std::nullopt;
  /// The sequence ends with any of these.
  TORCH_ARG(std::vector<int64_t>, stop_ids) = {};
};

/// A token of the sequence in `slot`, and whether it is its last.
struct DecodedToken {
  int64_t slot;
  int64_t token;
  double log_prob;  // by the logits as they are; zero without DecoderOptions::log_probs
  bool is_last;
};

/// A running batch of sequences, which enter by add() and leave by remove() at any step. A step
/// draws a token for every sequence and reads it; on a GPU it is one CUDA graph, captured for every
/// number of sequences that comes up (TIDEGATE_CUDA_GRAPHS=0: none). Work is that of the sequences
/// that go on. Not for several threads at a time.
///
/// Throws c10::ValueError for wrong arguments, before anything changes; for states of `max_batch`
/// sequences that need more memory than there is, before anything is allocated. Throws
/// c10::OutOfMemoryError where tokens come for which there is none; the sequences are as they were.
/// A step that fails within the model (memory for its products) leaves layers that have read a
/// token beside others that have not: the sequences that went on have ended then. Tokens of the
/// same call that were there before are returned, and the next step() throws.
class Decoder {
 public:
  /// The model is in evaluation mode for as long as the decoder lives.
  Decoder(CausalLM model, const DecoderOptions& options);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  /// Reads a prompt, int32 or int64 `[length]`, and returns the slot of its sequence.
  int64_t add(const torch::Tensor& prompt, const SequenceOptions& options = {});
  /// Several prompts, read together; options: one, or one a prompt.
  std::vector<int64_t> add(const std::vector<torch::Tensor>& prompts,
                           const std::vector<SequenceOptions>& options);
  /// Goes on from what save_prefix() gave or wrote of another sequence, with more prompt, which may
  /// be empty: the slot. What a model of another configuration wrote is refused; of one with other
  /// weights it is not, for nothing says so.
  int64_t load_prefix(const TensorMap& saved, const torch::Tensor& prompt,
                      const SequenceOptions& options = {});
  int64_t load_prefix(const std::string& path, const torch::Tensor& prompt,
                      const SequenceOptions& options = {});
  /// Another sequence that goes on from where the one in `slot` is: its state is copied.
  int64_t fork(int64_t slot, const SequenceOptions& options = {});

  /// Draws a token of every sequence that goes on: by slot.
  std::map<int64_t, DecodedToken> step();
  /// So many steps: their tokens in the order in which they were drawn; after a sequence's last
  /// token come no more of it. The host waits once, for all of them, so that a few steps at a time
  /// cost less than one by one.
  std::vector<DecodedToken> steps(int64_t count);

  /// Ends the sequence in `slot`, unless it has ended; the slot stays taken.
  void end(int64_t slot);
  /// Ends the sequence in `slot`, or only frees the slot where it has ended.
  void remove(int64_t slot);

  /// What the sequence in `slot`, which has not ended, has read, for load_prefix(): its state and
  /// logits, on the CPU, and the model's configuration as bytes of JSON ("config"). Right after
  /// add() it is the prompt's: a prefix cache of one safetensors file a prefix.
  TensorMap save_prefix(int64_t slot) const;
  void save_prefix(int64_t slot, const std::string& path) const;

  /// Sequences that go on, and those whose slots are taken.
  int64_t active() const;
  int64_t taken() const;
  int64_t max_batch() const;

 private:
  struct Batch;
  std::unique_ptr<Batch> batch_;
};

}  // namespace tidegate::models
