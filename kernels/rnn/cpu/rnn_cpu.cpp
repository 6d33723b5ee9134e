// Drivers of the gated RNN on the CPU: they pack the matrix, divide the sequences among threads and
// hand each block to the code for this machine's instruction set.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/common/cpu_isa.h"
#include "kernels/common/cpu_scratch.h"
#include "kernels/common/cpu_sequences.h"
#include "kernels/common/integers.h"
#include "kernels/rnn/cpu/rnn_kernels.h"
#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {
namespace {

/// Below this many multiplications a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 16;

const RnnKernels& active_kernels() { return TIDEGATE_ACTIVE_KERNELS(kRnnKernels); }

int64_t element_bytes(const GatedRnnParams& params) {
  return element_size(state_dtype(params.x.dtype));
}

/// Bytes of a row of D numbers of the state type, padded to whole panels.
int64_t row_bytes(const GatedRnnParams& params) {
  return ceil_div(params.channels * element_bytes(params), kMaxPanelBytes) * kMaxPanelBytes;
}

/// The sequences, the longest first: those of a block are then about as long as each other.
std::vector<RnnRow> sorted_rows(const SequenceLayout& layout) {
  std::vector<RnnRow> rows(static_cast<size_t>(layout.sequences));
  for (int64_t n = 0; n < layout.sequences; ++n) {
    const SequenceBounds bounds = sequence_bounds(layout, n);
    rows[static_cast<size_t>(n)] = {n, bounds.batch, bounds.begin, bounds.length};
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const RnnRow& a, const RnnRow& b) { return a.length > b.length; });
  return rows;
}

template <class Kernel>
void run_blocks(const GatedRnnParams& params, bool transposed, const ParallelFor& parallel,
                Kernel kernel) {
  const RnnKernels& kernels = active_kernels();
  const int64_t dim = params.channels;
  const std::vector<RnnRow> rows = sorted_rows(params.layout);
  const int64_t tokens = params.layout.batch * params.layout.time;
  const bool serial = (tokens + 1) * dim * dim <= kSerialWork;
  const int64_t threads = serial ? 1 : std::max(parallel.threads, 1);
  const auto run = [&](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
    threads == 1 ? body(0, n) : parallel.run(n, body);
  };
  if (tokens > 0) {
    run(row_bytes(params) / kMaxPanelBytes, [&](int64_t begin, int64_t end) {
      kernels.pack(params, transposed, begin, end, params.workspace);
    });
  }

  // Fewer sequences a block where threads would be idle otherwise.
  const int64_t sequences = params.layout.sequences;
  const int64_t each = std::clamp<int64_t>(ceil_div(sequences, threads), 1, kernels.rows);
  const int64_t blocks = ceil_div(sequences, each);
  run(blocks, [&](int64_t begin, int64_t end) {
    const int64_t bytes = kMaxRnnRows * row_bytes(params);
    const CpuScratch scratch(3 * bytes);
    RnnBlock block;
    block.panels = params.workspace;
    block.vectors = scratch.get();
    block.products = scratch.get() + bytes;
    block.sums = scratch.get() + 2 * bytes;
    block.stride = row_bytes(params) / element_bytes(params);
    for (int64_t i = begin; i < end; ++i) {
      block.count = static_cast<int>(std::min(each, sequences - i * each));
      std::copy_n(rows.begin() + i * each, block.count, block.rows);
      kernel(kernels, block);
    }
  });
}

}  // namespace

GatedRnnPlan gated_rnn_plan_cpu(const GatedRnnParams& params) {
  GatedRnnPlan plan;
  plan.workspace_bytes = row_bytes(params) * params.channels;
  plan.partials = params.layout.sequences;
  return plan;
}

void gated_rnn_forward_cpu(const GatedRnnParams& params, const ParallelFor& parallel) {
  run_blocks(
      params, /*transposed=*/true, parallel,
      [&](const RnnKernels& kernels, const RnnBlock& block) { kernels.forward(params, block); });
}

void gated_rnn_backward_cpu(const GatedRnnBackwardParams& params, const ParallelFor& parallel) {
  run_blocks(
      params.forward, /*transposed=*/false, parallel,
      [&](const RnnKernels& kernels, const RnnBlock& block) { kernels.backward(params, block); });
}

}  // namespace tidegate::kernels::rnn
