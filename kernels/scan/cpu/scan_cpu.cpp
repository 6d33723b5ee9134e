// Drivers of the CPU scans: they divide sequences and channels among threads and hand each block
// to the code for this machine's instruction set.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/common/cpu_sequences.h"
#include "kernels/common/integers.h"
#include "kernels/scan/cpu/scan_kernels.h"
#include "kernels/scan/scan.h"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {
namespace {

constexpr int64_t kCacheLine = 64;
/// Below this many numbers a second thread costs more than it saves (a decoding step, for one).
constexpr int64_t kSerialWork = 1 << 14;
/// Outputs of this many bytes will not be found in a cache by whoever reads them next.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

const ScanKernels& active_kernels() { return TIDEGATE_ACTIVE_KERNELS(kScanKernels); }

/// How a scan divides into blocks of `width` channels.
struct BlockGrid {
  int64_t width = 1;
  int64_t blocks = 0;  // along the channels
  int64_t total = 0;   // blocks of all sequences
  bool sequences_first = false;
};

/// Rows as wide as possible, because the scan reads whole rows and prefetchers follow long ones
/// best; narrower ones where the threads could not share the work evenly otherwise. Sequences of
/// different lengths cannot be shared evenly, so each packed one is divided among all threads.
BlockGrid divide_work(const SequenceLayout& layout, int64_t channels, int64_t max_width,
                      int64_t width_quantum, int threads) {
  BlockGrid grid;
  if (channels == 0 || layout.sequences == 0) return grid;
  const int64_t at_most = ceil_div(channels, width_quantum);
  const bool packed = layout.offsets != nullptr;
  const int64_t sequences = packed ? 1 : layout.sequences;
  int64_t blocks = std::min(ceil_div(channels, max_width), at_most);
  const auto idle = [&](int64_t count) {
    const int64_t items = sequences * count;
    return ceil_div(items, threads) * threads - items;
  };
  while (blocks < at_most && idle(blocks) * 8 > sequences * blocks) ++blocks;
  grid.width = ceil_div(ceil_div(channels, blocks), width_quantum) * width_quantum;
  grid.blocks = ceil_div(channels, grid.width);
  grid.total = grid.blocks * layout.sequences;
  grid.sequences_first = packed;
  return grid;
}

ScanBlock block_at(const SequenceLayout& layout, const BlockGrid& grid, int64_t channels,
                   int64_t index) {
  ScanBlock block;
  const int64_t sequences = layout.sequences;
  const int64_t column = grid.sequences_first ? index / sequences : index % grid.blocks;
  block.sequence = grid.sequences_first ? index % sequences : index / grid.blocks;
  block.channel = column * grid.width;
  block.width = std::min(grid.width, channels - block.channel);
  const SequenceBounds bounds = sequence_bounds(layout, block.sequence);
  block.batch = bounds.batch;
  block.begin = bounds.begin;
  block.length = bounds.length;
  return block;
}

/// What the drivers need to know about one of a kernel's outputs.
struct Output {
  const TimeSeries* series;
  int64_t row_elements;  // a token's
};

/// Streaming stores need whole aligned vectors: every row, and every block and half within it,
/// begins at a cache line.
bool should_stream(const SequenceLayout& layout, std::initializer_list<Output> outputs) {
  for (const Output& output : outputs) {
    const int64_t size = element_size(output.series->dtype);
    const int64_t bytes = layout.batch * layout.time * output.row_elements * size;
    const int64_t stride_t = output.series->stride_t * size;
    const int64_t stride_b = output.series->stride_b * size;
    const int64_t address = reinterpret_cast<intptr_t>(output.series->data);
    if (bytes < kStreamBytes || output.row_elements * size / 2 % kCacheLine != 0 ||
        (stride_t | stride_b | address) % kCacheLine != 0) {
      return false;
    }
  }
  return true;
}

template <class Params>
void run_blocks(const SequenceLayout& layout, int64_t channels, int64_t row_numbers, DType dtype,
                bool stream, const ParallelFor& parallel, const Params& params,
                void (*kernel)(const Params&, const ScanBlock&)) {
  const bool serial = layout.batch * layout.time * row_numbers <= kSerialWork;
  const BlockGrid grid =
      divide_work(layout, channels, kMaxBlockRowBytes / element_size(state_dtype(dtype)),
                  kCacheLine / element_size(dtype), serial ? 1 : std::max(parallel.threads, 1));
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      ScanBlock block = block_at(layout, grid, channels, i);
      block.stream = stream;
      kernel(params, block);
    }
  };
  if (serial) {
    work(0, grid.total);
  } else if (grid.total > 0) {
    parallel.run(grid.total, work);
  }
}

int64_t hgru_row(const HgruParams& params) {
  return params.theta == nullptr ? params.channels : 2 * params.channels;
}

int64_t lru_row(const LruParams& params) {
  return params.theta_log == nullptr ? params.channels : 2 * params.channels;
}

/// Writes the rows of LruRow, in double until they are rounded.
template <class R>
void fill_lru_rows(const LruParams& params) {
  const int64_t channels = params.channels;
  const auto* nu_log = static_cast<const R*>(params.nu_log);
  const auto* theta_log = static_cast<const R*>(params.theta_log);
  const auto* gamma_log = static_cast<const R*>(params.gamma_log);
  auto* rows = static_cast<R*>(params.workspace);
  // Returns what the rounding took away.
  const auto set_rounded = [&](LruRow row, int64_t d, double value) {
    rows[row * channels + d] = static_cast<R>(value);
    return value - static_cast<double>(static_cast<R>(value));
  };
  for (int64_t d = 0; d < channels; ++d) {
    const double nu = std::exp(static_cast<double>(nu_log[d]));
    const double theta = theta_log == nullptr ? 0 : std::exp(static_cast<double>(theta_log[d]));
    const double modulus = std::exp(-nu);
    set_rounded(kLruDecayReRest, d, set_rounded(kLruDecayRe, d, modulus * std::cos(theta)));
    set_rounded(kLruDecayImRest, d, set_rounded(kLruDecayIm, d, modulus * std::sin(theta)));
    set_rounded(kLruGamma, d, std::exp(static_cast<double>(gamma_log[d])));
    // It is used as nu * lambda, which is zero there; infinity times zero would be NaN.
    set_rounded(kLruNu, d, modulus == 0 ? 0 : nu);
    set_rounded(kLruTheta, d, theta);
  }
}

void fill_lru_rows(const LruParams& params) {
  if (state_dtype(params.x.dtype) == DType::kFloat64) {
    fill_lru_rows<double>(params);
  } else {
    fill_lru_rows<float>(params);
  }
}

}  // namespace

ScanPlan linear_scan_plan_cpu(const LinearScanParams& params) {
  ScanPlan plan;
  plan.partials = params.layout.sequences;
  return plan;
}

ScanPlan hgru_plan_cpu(const HgruParams& params) {
  ScanPlan plan;
  plan.partials = params.layout.sequences;
  return plan;
}

ScanPlan lru_plan_cpu(const LruParams& params) {
  ScanPlan plan;
  plan.partials = params.layout.sequences;
  plan.workspace_bytes = kLruRows * params.channels * element_size(state_dtype(params.x.dtype));
  return plan;
}

void linear_scan_forward_cpu(const LinearScanParams& params, const ParallelFor& parallel) {
  const bool stream = should_stream(params.layout, {{&params.h, params.channels}});
  run_blocks(params.layout, params.channels, params.channels, params.x.dtype, stream, parallel,
             params, active_kernels().linear_scan_forward);
}

void linear_scan_backward_cpu(const LinearScanBackwardParams& params, const ParallelFor& parallel) {
  const LinearScanParams& forward = params.forward;
  const Output dx = {&params.dx, forward.channels};
  const Output da = {&params.da, forward.channels};
  const bool stream = should_stream(forward.layout, {dx, forward.a_is_constant ? dx : da});
  run_blocks(forward.layout, forward.channels, forward.channels, params.dh.dtype, stream, parallel,
             params, active_kernels().linear_scan_backward);
}

void hgru_forward_cpu(const HgruParams& params, const ParallelFor& parallel) {
  const bool stream = should_stream(params.layout, {{&params.h, hgru_row(params)}});
  run_blocks(params.layout, params.channels, hgru_row(params), params.c.dtype, stream, parallel,
             params, active_kernels().hgru_forward);
}

void hgru_backward_cpu(const HgruBackwardParams& params, const ParallelFor& parallel) {
  const HgruParams& forward = params.forward;
  const bool stream = should_stream(
      forward.layout, {{&params.dc, hgru_row(forward)}, {&params.df, forward.channels}});
  run_blocks(forward.layout, forward.channels, hgru_row(forward), forward.c.dtype, stream, parallel,
             params, active_kernels().hgru_backward);
}

void lru_forward_cpu(const LruParams& params, const ParallelFor& parallel) {
  fill_lru_rows(params);
  const bool stream = should_stream(params.layout, {{&params.h, lru_row(params)}});
  run_blocks(params.layout, params.channels, lru_row(params), params.x.dtype, stream, parallel,
             params, active_kernels().lru_forward);
}

void lru_backward_cpu(const LruBackwardParams& params, const ParallelFor& parallel) {
  const LruParams& forward = params.forward;
  fill_lru_rows(forward);
  const bool stream = should_stream(forward.layout, {{&params.dx, lru_row(forward)}});
  run_blocks(forward.layout, forward.channels, lru_row(forward), forward.x.dtype, stream, parallel,
             params, active_kernels().lru_backward);
}

ScanPlan wkv4_plan_cpu(const Wkv4Params& params) {
  ScanPlan plan;
  plan.partials = params.layout.sequences;
  return plan;
}

void wkv4_forward_cpu(const Wkv4Params& params, const ParallelFor& parallel) {
  const bool stream = should_stream(params.layout, {{&params.o, params.channels}});
  run_blocks(params.layout, params.channels, params.channels, params.k.dtype, stream, parallel,
             params, active_kernels().wkv4_forward);
}

void wkv4_backward_cpu(const Wkv4BackwardParams& params, const ParallelFor& parallel) {
  const Wkv4Params& forward = params.forward;
  const bool stream = should_stream(
      forward.layout, {{&params.dk, forward.channels}, {&params.dv, forward.channels}});
  run_blocks(forward.layout, forward.channels, forward.channels, forward.k.dtype, stream, parallel,
             params, active_kernels().wkv4_backward);
}

}  // namespace tidegate::kernels::scan
