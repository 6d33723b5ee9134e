// A generate() in progress.
#pragma once

#include "tidegate/models/causal_lm.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "src/models/decoder_rows.h"
#include "src/models/prompt_rows.h"

namespace tidegate::models {

/// Continues prompts, a few tokens at every advance(), for callers that look in between. The next
/// tokens are begun before those before have arrived: the device does not wait for the host.
class Generation {
 public:
  /// Reads the prompts ids `[B, T]`. Throws c10::ValueError for what does not fit.
  Generation(CausalLMImpl& model, const torch::Tensor& ids, const GenerateOptions& options);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  /// Goes on; false once every row has ended, or has all its tokens.
  bool advance();
  /// The new tokens so far, `[B, n]`, on the device of ids.
  torch::Tensor tokens() const;

 private:
  void launch();
  void collect();

  CausalLMImpl& model_;
  const torch::Tensor ids_;
  const GenerateOptions options_;
  std::optional<Evaluating> evaluating_;
  std::unique_ptr<DecoderRows> rows_;
  std::deque<RowTokens> pending_;
  torch::Tensor new_ids_;  // `[B, max_new_tokens]` on the host
  int64_t launched_ = 0, arrived_ = 0;
  bool is_done_ = false;
};

}  // namespace tidegate::models
