#pragma once

// Cross-entropy of rows of logits, and the logits' gradient in their place: parameters and the CPU
// entry points. The CUDA entry points are in cross_entropy_cuda.h.

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/parallel_for.h"

namespace tidegate::kernels::loss {

/// With z a row of logits plus the bias, y its label, V the vocabulary and e the label smoothing,
///
///   lse  = log sum_j exp(z_j)
///   loss = lse - (1 - e) z_y - e / V sum_j z_j + z_loss lse^2
///   dz_j = g ((1 + 2 z_loss lse) exp(z_j - lse) - (1 - e) [j = y] - e / V)
///
/// "Real" is the state's type of `dtype`: float, or double for float64.
struct CrossEntropyParams {
  int64_t rows = 0;
  int64_t vocab = 0;    // V, the logits of a row
  int64_t columns = 0;  // at least V: those past V are never read, and zeros in the gradient
  int64_t stride = 0;   // elements from one row to the next: whole packs of 64
  DType dtype = DType::kFloat32;
  void* logits = nullptr;  // [rows, columns], aligned to 64 bytes; what the gradient is written to
  const void* bias = nullptr;       // [stride] Real, zeros past V; or null
  const int64_t* labels = nullptr;  // [rows]; one outside [0, V) makes its row NaN
  int64_t ignored = -100;           // rows with this label have no loss and a gradient of zero
  double label_smoothing = 0;
  double z_loss = 0;
  bool gradient = false;               // overwrite the logits by dz
  const void* row_gradient = nullptr;  // g: [rows] Real; null: one
  void* loss = nullptr;                // [rows] Real; or null
};

/// How the losses of all rows become one.
struct LossSumParams {
  int64_t rows = 0;
  DType dtype = DType::kFloat32;    // of the losses: float32 or float64
  const void* losses = nullptr;     // [rows]
  const int64_t* labels = nullptr;  // [rows]
  int64_t ignored = -100;
  bool mean = false;
  void* loss = nullptr;   // their sum times `scale`
  void* scale = nullptr;  // 1 / (rows that are not ignored, at least one) for the mean; 1
};

/// Rows are that many elements apart, or a multiple: every row then begins on a cache line, and
/// tensor-core products see leading dimensions of whole vectors.
constexpr int64_t kRowPack = 64;

/// What no kernel takes, as a sentence; null where nothing is wrong.
const char* cross_entropy_unsupported(const CrossEntropyParams& params);

/// float32 and float64. Reads every row once from memory, and where a gradient is asked for writes
/// it once: a row stays in the cache between its three passes.
void cross_entropy_cpu(const CrossEntropyParams& params, const ParallelFor& parallel);

/// Sums in double, in the order of the rows.
void loss_sum_cpu(const LossSumParams& params);

}  // namespace tidegate::kernels::loss
