#pragma once

// A step of decoding of 16-bit data, on CUDA devices: what gla_forward chooses for one token of
// each sequence.

#include <cuda_runtime_api.h>

#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// Tokens that were read since a state was written: what has a step go on from a state that several
/// steps before have only read.
struct PendingTokens {
  static constexpr int kMost = 3;

  int count = 0;
  HeadSeries gate[kMost], v[kMost];  // the oldest first, of the step's dtypes
};

struct TokenStepOptions {
  /// No kernel that may still run writes the states, which are then read before the kernel before
  /// has ended.
  bool h0_is_settled = false;
  /// Goes with settled states, and where token_step_defers() says so: the state is h0 with these
  /// tokens. They are settled, too.
  PendingTokens pending = {};
};

/// One token of each sequence, 16-bit data, rows in packs.
bool token_step_takes(const GlaParams& params);

/// Whether there are so many states that to write them only in some steps, and to give the others'
/// tokens again, is faster: a state that is not written is half of the bytes. h_final is null in
/// the others. The results have the same bits.
[[nodiscard]] cudaError_t token_step_defers(const GlaParams& params, bool* defers);

[[nodiscard]] cudaError_t token_step(const GlaParams& params, const TokenStepOptions& options,
                                     cudaStream_t stream);

}  // namespace tidegate::kernels::gla
