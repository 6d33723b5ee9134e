#pragma once

// Between the driver (attention_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cpu_isa.h"

namespace tidegate::kernels::attention {

/// Queries and keys that are handled together.
constexpr int kQueryTile = 64;
constexpr int kKeyTile = 64;
/// Keys of one part of a step's cache.
constexpr int64_t kStepSplit = 1024;

/// Rows of scratch memory are filled up to a multiple of this many numbers.
constexpr int64_t kRowPadding = 16;
constexpr int64_t padded_row(int64_t width) {
  return (width + kRowPadding - 1) / kRowPadding * kRowPadding;
}

/// One query head of one sequence, and where its numbers lie.
struct AttentionHead {
  int64_t batch = 0;        // b, the row of the [B, T, ..] tensors
  int64_t head = 0;         // h
  int64_t key_head = 0;     // g, of its keys and values
  int64_t query_begin = 0;  // the sequence's first query
  int64_t queries = 0;
  int64_t key_begin = 0;  // the sequence's first key
  int64_t keys = 0;
  int64_t query_tile = 0;  // its first tile in arrays that have a number a tile
  int64_t key_tile = 0;
};

/// The workspace, and how its arrays are indexed. The heads' sequences lie next to each other in
/// time, as in the tensors.
struct AttentionWork {
  int64_t query_time = 0;   // Tq
  int64_t key_time = 0;     // Tk
  int64_t query_tiles = 0;  // of a head, over all sequences of a batch row
  int64_t key_tiles = 0;
  double* gate_sums = nullptr;    // [B, Hq, Tk]: c, from each sequence's first token on
  double* key_norms = nullptr;    // [B, Hkv, key tiles]: the largest |k| up to a tile's end
  int64_t* first_keys = nullptr;  // backward: [B, Hq, query tiles]: the first key of a tile
  void* delta = nullptr;          // backward: [B, Hq, Tq] state type: do . o - dlse
  double* row_sums = nullptr;     // backward: [B, Hq, Tq] of dS without the diagonal
  double* column_sums = nullptr;  // backward: [B, Hq, Tk]
  void* dq = nullptr;             // backward, 16-bit data: [B, Tq, Hq, D] state type
};

/// One piece of work: a head and, for most kernels, one tile of its queries or of its keys.
struct AttentionItem {
  AttentionHead head = {};
  int64_t tile = 0;
  void* scratch = nullptr;  // 64-byte aligned, attention_scratch() numbers of the state's type
};

/// One part of one head's cache.
struct StepItem {
  int64_t batch = 0;
  int64_t key_head = 0;
  int64_t begin = 0;  // keys
  int64_t end = 0;
  void* partial = nullptr;  // [group][step_partial()]: o, maximum, sum, total of the part's gates
  int64_t partial_stride = 0;
};

struct AttentionKernels {
  /// c of one head.
  void (*gate_sums)(const ForgettingAttentionParams&, const AttentionWork&, const AttentionHead&);
  /// The largest norms of one head of keys.
  void (*key_norms)(const ForgettingAttentionParams&, const AttentionWork&, const AttentionHead&);
  /// o and lse of a tile of queries.
  void (*forward)(const ForgettingAttentionParams&, const AttentionWork&, const AttentionItem&);
  /// Row terms and first keys of a tile of queries; row sums and dq start at zero.
  void (*prepare)(const ForgettingAttentionBackwardParams&, const AttentionWork&,
                  const AttentionItem&);
  /// dk, dv and column sums of a tile of keys, for all heads that share it. `item.head` is the
  /// first of them. Where `with_queries`, row sums and dq get this tile's part too.
  void (*backward_keys)(const ForgettingAttentionBackwardParams&, const AttentionWork&,
                        const AttentionItem&, bool with_queries);
  /// dq and row sums of a tile of queries: the same bits as by backward_keys, tile after tile.
  void (*backward_queries)(const ForgettingAttentionBackwardParams&, const AttentionWork&,
                           const AttentionItem&);
  /// dlog_f of one head, and its dq in q's dtype, when both sums are complete.
  void (*finish)(const ForgettingAttentionBackwardParams&, const AttentionWork&,
                 const AttentionHead&);
  /// The oldest key that pruning leaves of one head of keys, of [oldest, length).
  int64_t (*first_step_key)(const ForgettingAttentionStepParams&, int64_t batch, int64_t key_head,
                            int64_t oldest, int64_t length);
  void (*step)(const ForgettingAttentionStepParams&, const StepItem&);
  /// o of one query head from `parts` partial results, the oldest first.
  void (*combine_step)(const ForgettingAttentionStepParams&, int64_t batch, int64_t head,
                       const void* partials, int64_t stride, int64_t parts);
};

/// Scratch memory of any item, in numbers of the state's type.
constexpr int64_t attention_scratch(int64_t head_dim) {
  return 9 * kQueryTile * padded_row(head_dim) + 2 * kQueryTile * kKeyTile + 16 * kQueryTile +
         kQueryTile * kRowPadding;
}
constexpr int64_t step_partial(int64_t head_dim) { return padded_row(head_dim + 3); }

TIDEGATE_ISA_KERNELS(AttentionKernels, kAttentionKernels)

}  // namespace tidegate::kernels::attention
