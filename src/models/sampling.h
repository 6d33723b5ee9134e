// Drawing the next token of every row of a batch from its logits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tidegate::models {

/// How one sequence goes on, in numbers that were checked.
struct RowSettings {
  double temperature = 1.0;
  int64_t top_k = 0;  // 0: all
  double top_p = 1.0;
  double min_p = 0.0;
  double penalty = 1.0;
  int64_t seed = 0;
  int64_t stream = 0;
  int64_t limit = 0;  // tokens to draw
  int64_t fill = 0;   // the token of a row that has ended
  std::vector<int64_t> stops;

  /// What GenerateOptions and SequenceOptions alike say of how a token is drawn.
  template <class Options>
  static RowSettings sampling_as(const Options& options) {
    RowSettings row;
    row.temperature = options.temperature();
    row.top_k = options.top_k().value_or(0);
    row.top_p = options.top_p().value_or(1.0);
    row.min_p = options.min_p().value_or(0.0);
    row.penalty = options.repetition_penalty();
    return row;
  }
};

/// Throws c10::ValueError, beginning with `owner`, unless the numbers are in their ranges.
void check_sampling(const char* owner, double temperature, std::optional<int64_t> top_k,
                    std::optional<double> top_p, std::optional<double> min_p, double penalty);

/// What sampling reads and writes of a batch of rows, on the batch's device.
class SampledRows {
 public:
  SampledRows(int64_t rows, int64_t vocab, int64_t stops, int64_t window, bool log_probs,
              at::Device device);

  /// Draws a token for each of the first `count` rows from logits `[>= count, vocab]`: into ids,
  /// and into the column of tokens, and of log_probs, that the row's count of tokens says.
  void sample(const at::Tensor& logits, int64_t count);

  /// Rows from `first` on begin anew, each as its settings say. `seen`: 1 where the row has read a
  /// token, `[rows.size(), vocab]` uint8; undefined where no penalty is asked for.
  void write(int64_t first, const std::vector<RowSettings>& rows, const at::Tensor& seen);
  /// Row `to` becomes what row `from` is.
  void copy_row(int64_t from, int64_t to);
  /// Memory for `seen`; whether there was none before.
  bool make_seen();

  int64_t window() const { return tokens.size(1); }
  int64_t stops_a_row() const { return stops.size(1); }
  int64_t bytes() const;

  at::Tensor ids;        // `[rows]`: the tokens drawn last
  at::Tensor tokens;     // `[rows, window]`
  at::Tensor log_probs;  // the same, fp32; undefined where nobody asks for them
  at::Tensor seen;       // `[rows, vocab]` uint8; undefined where no row has a penalty

 private:
  int64_t vocab_;
  at::Tensor settings;  // `[rows, kSettings]` fp64
  at::Tensor table;     // `[rows, kColumns]`
  at::Tensor stops;     // `[rows, stops]`
};

}  // namespace tidegate::models
