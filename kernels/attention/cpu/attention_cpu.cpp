// Drivers of forgetting attention on the CPU: they divide sequences, heads and tiles among threads
// and hand each piece to the code for this machine's instruction set.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/attention/cpu/attention_kernels.h"
#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cpu_isa.h"
#include "kernels/common/cpu_scratch.h"
#include "kernels/common/cpu_sequences.h"
#include "kernels/common/integers.h"

namespace tidegate::kernels::attention {
namespace {

/// Below this many multiplications a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 16;

const AttentionKernels& active_kernels() { return TIDEGATE_ACTIVE_KERNELS(kAttentionKernels); }

// ---- Workspace ----

/// Tiles of a head over all sequences of a batch row: each may end in a tile that is not full.
int64_t tiles_of(const SequenceLayout& layout, int64_t tile) {
  return layout.time / tile + (layout.offsets == nullptr ? 1 : layout.sequences);
}

/// Hands out aligned arrays of a workspace; with null, only counts.
class Arrays {
 public:
  explicit Arrays(void* workspace) : base_(static_cast<std::byte*>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  std::byte* take_bytes(int64_t bytes) {
    std::byte* array = base_ == nullptr ? nullptr : base_ + used_;
    used_ += ceil_div(bytes, 64) * 64;
    return array;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

AttentionWork divide_workspace(const ForgettingAttentionParams& params, bool backward,
                               int64_t* bytes) {
  const SequenceLayout& queries = params.layout;
  const SequenceLayout& keys = params.key_layout;
  const int64_t query_rows = queries.batch * params.heads * queries.time;
  const int64_t key_rows = keys.batch * params.heads * keys.time;
  const DType state = state_dtype(params.q.dtype);
  AttentionWork work;
  work.query_time = queries.time;
  work.key_time = keys.time;
  work.query_tiles = tiles_of(queries, kQueryTile);
  work.key_tiles = tiles_of(keys, kKeyTile);
  Arrays arrays(params.workspace);
  work.gate_sums = arrays.take<double>(key_rows);
  if (params.prune > 0) {
    work.key_norms = arrays.take<double>(keys.batch * params.key_heads * work.key_tiles);
  }
  if (backward) {
    work.first_keys = arrays.take<int64_t>(queries.batch * params.heads * work.query_tiles);
    work.delta = arrays.take_bytes(query_rows * element_size(state));
    work.row_sums = arrays.take<double>(query_rows);
    work.column_sums = arrays.take<double>(key_rows);
    if (state != params.q.dtype) {
      work.dq = arrays.take_bytes(query_rows * params.head_dim * element_size(state));
    }
  }
  *bytes = arrays.used();
  return work;
}

ForgettingAttentionPlan plan_of(ForgettingAttentionParams params, bool backward) {
  params.workspace = nullptr;
  ForgettingAttentionPlan plan;
  divide_workspace(params, backward, &plan.workspace_bytes);
  return plan;
}

// ---- Pieces of work ----

/// The sequences of a call, and its pieces of work: (sequence, head), or (sequence, head, tile).
class Pieces {
 public:
  Pieces(const ForgettingAttentionParams& params, const ParallelFor& parallel)
      : params_(params), parallel_(parallel) {
    const int64_t pairs = params.layout.batch * params.layout.time * params.key_layout.time;
    threads_ = pairs * params.channels <= kSerialWork ? 1 : std::max(parallel.threads, 1);
    for (int64_t n = 0; n < params.layout.sequences; ++n) {
      const SequenceBounds queries = sequence_bounds(params.layout, n);
      const SequenceBounds keys = sequence_bounds(params.key_layout, n);
      AttentionHead head;
      head.batch = queries.batch;
      head.query_begin = queries.begin;
      head.queries = queries.length;
      head.key_begin = keys.begin;
      head.keys = keys.length;
      const bool packed = params.layout.offsets != nullptr;
      head.query_tile = packed ? queries.begin / kQueryTile + n : 0;
      head.key_tile = packed ? keys.begin / kKeyTile + n : 0;
      sequences_.push_back(head);
    }
  }

  int64_t threads() const { return threads_; }
  int64_t heads_of_keys() const {
    return static_cast<int64_t>(sequences_.size()) * params_.key_heads;
  }

  /// body(head) for every query head, or every head of keys, of every sequence.
  template <class Body>
  void each_head(int64_t heads, Body body) const {
    const auto sequences = static_cast<int64_t>(sequences_.size());
    run(sequences * heads, 0,
        [&](int64_t i, void*) { body(head_at(i % sequences, i / sequences, heads)); });
  }

  /// body(item) for every tile of queries of every query head, the longest rows first.
  template <class Body>
  void each_query_tile(Body body) const {
    each_tile(
        params_.heads, kQueryTile, [](const AttentionHead& h) { return h.queries; }, true, body);
  }
  /// body(item) for every tile of keys of every head of keys, the longest columns first.
  template <class Body>
  void each_key_tile(Body body) const {
    each_tile(
        params_.key_heads, kKeyTile, [](const AttentionHead& h) { return h.keys; }, false, body);
  }
  /// body(item) for every head of keys; the item's tile is the first one.
  template <class Body>
  void each_key_head(Body body) const {
    const auto sequences = static_cast<int64_t>(sequences_.size());
    run(sequences * params_.key_heads, attention_scratch(params_.head_dim),
        [&](int64_t i, void* scratch) {
          body(AttentionItem{head_at(i % sequences, i / sequences, params_.key_heads), 0, scratch});
        });
  }

 private:
  /// Head `index` of `heads`: query heads, or heads of keys with the first query head of each.
  AttentionHead head_at(int64_t sequence, int64_t index, int64_t heads) const {
    AttentionHead head = sequences_[static_cast<size_t>(sequence)];
    const int64_t group = params_.heads / params_.key_heads;
    head.head = heads == params_.heads ? index : index * group;
    head.key_head = head.head / group;
    return head;
  }

  template <class Length, class Body>
  void each_tile(int64_t heads, int64_t tile, Length length, bool last_first, Body body) const {
    std::vector<int64_t> ends;  // of each sequence's pieces
    int64_t total = 0;
    for (const AttentionHead& head : sequences_) {
      total += heads * ceil_div(length(head), tile);
      ends.push_back(total);
    }
    run(total, attention_scratch(params_.head_dim), [&](int64_t i, void* scratch) {
      const auto n = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      const int64_t before = n == 0 ? 0 : ends[static_cast<size_t>(n - 1)];
      const int64_t in_sequence = i - before;
      const int64_t tiles = ceil_div(length(sequences_[static_cast<size_t>(n)]), tile);
      const int64_t from_start = in_sequence / heads;
      body(AttentionItem{head_at(n, in_sequence % heads, heads),
                         last_first ? tiles - 1 - from_start : from_start, scratch});
    });
  }

  /// body(i, scratch) for i < total; every thread has scratch memory of its own and takes the next
  /// piece that is left. Which thread takes it changes nothing.
  template <class Body>
  void run(int64_t total, int64_t scratch_numbers, Body body) const {
    if (total == 0) return;
    const int64_t workers = std::min(threads_, total);
    const int64_t bytes =
        ceil_div(scratch_numbers * element_size(state_dtype(params_.q.dtype)), 4096) * 4096;
    const CpuScratch scratch(workers * bytes);
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        for (int64_t i = next++; i < total; i = next++) body(i, scratch.get() + worker * bytes);
      }
    };
    if (workers == 1) {
      work(0, 1);
    } else {
      parallel_.run(workers, work);
    }
  }

  const ForgettingAttentionParams& params_;
  const ParallelFor& parallel_;
  int64_t threads_ = 1;
  std::vector<AttentionHead> sequences_;
};

/// What both passes begin with.
void prepare_gates(const ForgettingAttentionParams& params, const AttentionWork& work,
                   const Pieces& pieces) {
  const AttentionKernels& kernels = active_kernels();
  pieces.each_head(params.heads,
                   [&](const AttentionHead& head) { kernels.gate_sums(params, work, head); });
  if (params.prune > 0) {
    pieces.each_head(params.key_heads,
                     [&](const AttentionHead& head) { kernels.key_norms(params, work, head); });
  }
}

}  // namespace

ForgettingAttentionPlan forgetting_attention_plan_cpu(const ForgettingAttentionParams& params) {
  return plan_of(params, false);
}
ForgettingAttentionPlan forgetting_attention_backward_plan_cpu(
    const ForgettingAttentionParams& params) {
  return plan_of(params, true);
}

void forgetting_attention_forward_cpu(const ForgettingAttentionParams& params,
                                      const ParallelFor& parallel) {
  int64_t bytes = 0;
  const AttentionWork work = divide_workspace(params, false, &bytes);
  const Pieces pieces(params, parallel);
  prepare_gates(params, work, pieces);
  const AttentionKernels& kernels = active_kernels();
  pieces.each_query_tile([&](const AttentionItem& item) { kernels.forward(params, work, item); });
}

void forgetting_attention_backward_cpu(const ForgettingAttentionBackwardParams& grads,
                                       const ParallelFor& parallel) {
  const ForgettingAttentionParams& params = grads.forward;
  int64_t bytes = 0;
  const AttentionWork work = divide_workspace(params, true, &bytes);
  const Pieces pieces(params, parallel);
  prepare_gates(params, work, pieces);
  const AttentionKernels& kernels = active_kernels();
  pieces.each_query_tile([&](const AttentionItem& item) { kernels.prepare(grads, work, item); });
  // All five products of a pair at once need a head's tiles in their order, one after the other.
  // Seven products in two passes, the same bits, where that would leave threads without work.
  const int64_t heads = pieces.heads_of_keys(), threads = pieces.threads();
  if (5 * ceil_div(heads, threads) * threads <= 7 * heads) {
    pieces.each_key_head([&](AttentionItem item) {
      for (; item.tile * kKeyTile < item.head.keys; ++item.tile) {
        kernels.backward_keys(grads, work, item, true);
      }
    });
  } else {
    pieces.each_key_tile(
        [&](const AttentionItem& item) { kernels.backward_keys(grads, work, item, false); });
    pieces.each_query_tile(
        [&](const AttentionItem& item) { kernels.backward_queries(grads, work, item); });
  }
  pieces.each_head(params.heads,
                   [&](const AttentionHead& head) { kernels.finish(grads, work, head); });
}

// ---- Decoding ----

ForgettingAttentionPlan forgetting_attention_step_plan_cpu(
    const ForgettingAttentionStepParams& params) {
  ForgettingAttentionPlan plan;
  plan.splits = std::max<int64_t>(ceil_div(params.capacity, kStepSplit), 1);
  const int64_t partials = params.layout.batch * params.heads * plan.splits *
                           step_partial(params.head_dim) *
                           element_size(state_dtype(params.q.dtype));
  plan.workspace_bytes = StepWorkspace(params, partials).bytes;
  return plan;
}

void forgetting_attention_step_cpu(const ForgettingAttentionStepParams& params,
                                   const ParallelFor& parallel) {
  const AttentionKernels& kernels = active_kernels();
  const int64_t splits = params.plan.splits, group = params.heads / params.key_heads;
  const int64_t stride = step_partial(params.head_dim);
  const int64_t bytes = element_size(state_dtype(params.q.dtype));
  auto* const first_keys = static_cast<int32_t*>(params.workspace);  // where keys are pruned
  auto* const partials =
      static_cast<std::byte*>(params.workspace) + StepWorkspace(params, 0).partials_at;
  const auto partial = [&](int64_t b, int64_t head, int64_t split) {
    return partials + ((b * params.heads + head) * splits + split) * stride * bytes;
  };
  const auto length_of = [&](int64_t b) {
    return std::clamp<int64_t>(params.lengths[b], 0, params.capacity);
  };
  const auto oldest_in_window = [&](int64_t b) {
    return params.window > 0 ? std::max<int64_t>(length_of(b) - params.window, 0) : 0;
  };
  // The parts of a head of keys of sequence b that hold what is read: [first, last).
  const auto parts = [&](int64_t b, int64_t key_head) {
    struct {
      int64_t length, oldest, first, last;
    } range;
    range.length = length_of(b);
    range.oldest =
        params.prune > 0 ? first_keys[b * params.key_heads + key_head] : oldest_in_window(b);
    range.first = range.oldest / kStepSplit;
    range.last = ceil_div(range.length, kStepSplit);
    return range;
  };
  const auto run = [&](int64_t total, int64_t numbers, const std::function<void(int64_t)>& body) {
    const auto all = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    };
    if (total * numbers <= kSerialWork || parallel.threads == 1) {
      all(0, total);
    } else {
      parallel.run(total, all);
    }
  };
  if (params.prune > 0) {
    run(params.layout.batch * params.key_heads, params.capacity * group, [&](int64_t i) {
      const int64_t b = i / params.key_heads, key_head = i % params.key_heads;
      first_keys[i] = static_cast<int32_t>(
          kernels.first_step_key(params, b, key_head, oldest_in_window(b), length_of(b)));
    });
  }
  run(params.layout.batch * params.key_heads * splits,
      std::min(params.capacity, kStepSplit) * group * params.head_dim, [&](int64_t i) {
        const int64_t split = i % splits, key_head = i / splits % params.key_heads;
        const int64_t b = i / splits / params.key_heads;
        const auto range = parts(b, key_head);
        if (split < range.first || split >= range.last) return;
        StepItem item;
        item.batch = b;
        item.key_head = key_head;
        item.begin = std::max(split * kStepSplit, range.oldest);
        item.end = std::min((split + 1) * kStepSplit, range.length);
        item.partial = partial(b, key_head * group, split);
        item.partial_stride = splits * stride;
        kernels.step(params, item);
      });
  run(params.layout.batch * params.heads, params.head_dim, [&](int64_t i) {
    const int64_t b = i / params.heads, head = i % params.heads;
    const auto range = parts(b, head / group);
    kernels.combine_step(params, b, head, partial(b, head, range.first), stride,
                         range.last - range.first);
  });
}

}  // namespace tidegate::kernels::attention
