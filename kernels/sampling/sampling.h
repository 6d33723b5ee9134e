#pragma once

// Drawing the next token of every sequence from its logits, and noting it: parameters and the CPU
// entry point. The CUDA entry point is in sampling_cuda.h.

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/parallel_for.h"

namespace tidegate::kernels::sampling {

/// What a row of `settings` says, in this order.
enum Setting : int {
  kTemperature,  // 0: the likeliest token
  kTopK,         // draw from so many of the likeliest; 0: from all
  kTopP,         // and from the fewest whose probabilities reach this; 1: from all
  kMinP,         // and from those at least so likely as this times the likeliest; 0: from all
  kPenalty,      // logits of tokens seen before are divided by this, negative ones multiplied; 1
  kSettings
};

/// What a row of `table` holds, in this order.
enum Column : int {
  kSeed,    // of the row's random numbers
  kStream,  // which of the sequences of one seed it is
  kDrawn,   // tokens drawn so far; the kernel counts
  kLimit,   // the row ends after so many
  kDone,    // whether it has ended; the kernel notes it
  kFill,    // the token of a row that has ended
  kColumns
};

/// For row b, with z = logits less their maximum, divided by the temperature,
///
///   keep(v)  = so many tokens are above z_v as top_k allows, so much probability as top_p does,
///              and exp(z_v) >= min_p
///   token    = argmax over keep of z_v - log E_v,   E_v = -log(1 - U_v),
///
/// U_v uniform in (0, 1) from a counter-based generator (Philox4x32-10) of seed, stream, drawn and
/// v alone: a row's tokens depend on its own logits and settings, on nothing else in the batch, and
/// on no number drawn before. So captured, eager, alone or in company, the tokens are the same.
/// Tokens that tie with the last one kept are kept, too. NaN counts as -inf.
struct SamplingParams {
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t stride = 0;  // elements from one row of logits to the next
  DType dtype = DType::kFloat32;
  const void* logits = nullptr;      // [rows, vocab]
  const double* settings = nullptr;  // [rows, kSettings]
  int64_t* table = nullptr;          // [rows, kColumns]
  int64_t stops_a_row = 0;
  const int64_t* stops = nullptr;  // [rows, stops_a_row]: tokens that end a row; -1: none
  uint8_t* seen = nullptr;         // [rows, vocab]: 1 where the row has the token; null: no penalty
  int64_t* ids = nullptr;          // [rows]: the tokens
  int64_t window = 0;
  int64_t* tokens = nullptr;  // [rows, window]: the tokens, column drawn % window; or null
  /// [rows, window] like tokens: the tokens' log-probabilities by the logits as they are; or null.
  float* log_probs = nullptr;
};

/// A row's bytes are read a few times, from the cache after the first.
void sample_cpu(const SamplingParams& params, const ParallelFor& parallel);

}  // namespace tidegate::kernels::sampling
