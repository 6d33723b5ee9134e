#pragma once

// What a launch of the tensor-core kernels is told, and where a block of threads finds its part.

#include "kernels/attention/forgetting_attention.h"
#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/time_tiles.cuh"

namespace tidegate::kernels::attention {

/// Heads that a launch of the backward pass takes. Near: where pruning leaves a key few queries.
enum class PrunedHeads : uint8_t { kAll, kNear, kFar };

/// Which queries pruning leaves to the keys: of every kKeys keys of a sequence and every query
/// head, the first query that sees none of them; and of every sequence and query head, whether keys
/// have few queries each on average. See key_reach.cuh.
struct KeyReach {
  static constexpr int kKeys = 64;
  TimeTiles keys = {};
  int* ends = nullptr;      // [keys.count, Hq]
  int* near = nullptr;      // [sequences, Hq], 0 or 1
  unsigned* far = nullptr;  // zero before: whether any are not; how many of their tiles are taken
};

struct TensorAttention {
  ForgettingAttentionBackwardParams params = {};  // the forward pass: its part
  TimeTiles tiles = {};                           // the blocks' own: of queries or of keys
  int together = 1;                               // heads: see heads_together
  TimeTiles query_tiles = {};                     // backward: those of dq_sums
  const double* gate_sums = nullptr;              // c: [B, Hq, Tk]
  const unsigned* score_bounds = nullptr;         // where keys are pruned: see ScoreBounds
  KeyReach reach = {};                            // backward, where keys are pruned
  PrunedHeads heads = PrunedHeads::kAll;          // backward: near ones and others have own tiles
  float* row_terms = nullptr;                     // backward: delta - dlse, [B, Hq, Tq]
  float* row_sums = nullptr;                      // backward: of dS, [B, Hq, Tq]
  float* column_sums = nullptr;                   // backward: of dS, [B, Hq, Tk]
  float* dq_sums = nullptr;                       // backward: dq in float, tile by tile
};

/// How many heads' tiles are taken side by side, where `resident` blocks run at once: as many as
/// let them all start with tiles that have as much to do. Packed sequences: one.
inline int heads_together(const TimeTiles& tiles, int64_t resident) {
  return tiles.layout.offsets != nullptr
             ? 1
             : static_cast<int>(std::max<int64_t>(1, resident / tiles.per_sequence));
}

/// The block's tile and head. Of `together` heads of a batch row or of several, all have their
/// first tile taken, then all their second; with last_first (of queries, the last has most keys)
/// from the last tile on. Then follow as many more heads. So the tiles with most to do are never
/// the last to be taken, and neighbouring blocks share keys and values, or queries.
struct TileAndHead {
  TimeTile cut;
  int64_t slot;
  int head;

  __device__ TileAndHead(const TimeTiles& tiles, int64_t all_heads, int together, unsigned block,
                         bool last_first) {
    const auto heads = static_cast<unsigned>(all_heads);
    const unsigned run = tiles.layout.offsets == nullptr ? static_cast<unsigned>(tiles.per_sequence)
                                                         : static_cast<unsigned>(tiles.count);
    const unsigned all = static_cast<unsigned>(tiles.count) / run * heads;
    const unsigned first = block / (run * together) * together;
    const unsigned within = block - first * run;
    const unsigned side_by_side = min(static_cast<unsigned>(together), all - first);
    const unsigned at = within / side_by_side, rest = first + within % side_by_side;
    slot = rest / heads * run + (last_first ? run - 1 - at : at);
    head = static_cast<int>(rest % heads);
    cut = find_time_tile(tiles, static_cast<int>(slot));
  }
};

/// Which pairs of queries and keys count.
struct PairMask {
  int window;  // 0: none

  __device__ bool sees(int position, int key) const {
    return key <= position && (window == 0 || key > position - window);
  }
  /// The same for a row, of keys counted from `key`: those in (oldest, newest].
  struct Row {
    int oldest, newest;
    __device__ bool sees(int key) const { return key <= newest && key > oldest; }
  };
  __device__ Row row(int position, int key) const {
    const int newest = position - key;
    return {window == 0 ? -(1 << 30) : newest - window, newest};
  }
};

/// Two floats of shared memory, read where this stands and not kept: edge tiles are rare, and the
/// registers that they would take are missed by all tiles.
__device__ inline float2 read_pair(const float* p) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(p))));
  return x;
}

/// Bytes of row `row` (from the sequence's start) of a head.
__device__ inline char* row_address(const HeadSeries& t, const Sequence& s, int64_t head,
                                    int64_t row) {
  return static_cast<char*>(t.data) +
         (s.batch * t.stride_b + (s.start + row) * t.stride_t + head * t.stride_h) * 2;
}
/// From one row to the next; see forgetting_attention_unsupported.
__device__ inline int row_bytes(const HeadSeries& t) { return static_cast<int>(t.stride_t) * 2; }

/// One head's cumulative gates of a sequence.
class GateSums {
 public:
  __device__ GateSums(const TensorAttention& w, const Sequence& keys, int head)
      : sums_(w.gate_sums +
              (keys.batch * w.params.forward.heads + head) * w.params.forward.key_layout.time +
              keys.start),
        last_(keys.length - 1) {}

  /// Of the nearest token there is.
  __device__ double at(int position) const {
    return last_ < 0 ? 0.0 : sums_[max(0, min(position, last_))];
  }

  __device__ const double* data() const { return sums_; }

  /// The first of the tokens [0, end) whose sum is not above `bound`: c falls. The first one if
  /// that is NaN. All lanes of the warp call it, and look at 32 places at once.
  __device__ int first_not_above(double bound, int end, int lane) const {
    return first_past([&](double sum) { return sum > bound; }, end, lane);
  }
  /// The same, where a sum or bound that is NaN is passed.
  __device__ int first_known_not_above(double bound, int end, int lane) const {
    return first_past([&](double sum) { return !(sum <= bound); }, end, lane);
  }

 private:
  template <class Passed>
  __device__ int first_past(const Passed& passed, int end, int lane) const {
    int low = 0, count = end;  // the answer lies in [low, low + count]
    while (count > 0) {
      const int step = (count + 31) / 32;
      const int place = low + (lane + 1) * step - 1;
      const int past =
          __popc(__ballot_sync(0xffffffffu, place < low + count && passed(sums_[place])));
      const int end_of_range = low + count;
      low += past * step;
      count = min(step - 1, end_of_range - low);
    }
    return low;
  }

  const double* sums_;
  int last_;
};

/// c relative to a reference, in units of log2, as two floats whose sum keeps the digits of a
/// difference of neighbours however far both are from the reference.
struct SplitGate {
  float high, low;

  __device__ static SplitGate of(double relative) {
    const double scaled = relative * 1.4426950408889634074;
    const float high = static_cast<float>(scaled);
    return {high, static_cast<float>(scaled - static_cast<double>(high))};
  }
};

/// Floats in an order of integers in which NaN is the largest and zero is below all, and back.
__device__ inline unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x), sign = 0x80000000u;
  return x != x ? ~0u : bits < sign ? bits | sign : ~bits;
}
__device__ inline float from_ordered(unsigned x) {
  return __uint_as_float(x >= 0x80000000u ? x ^ 0x80000000u : ~x);
}

/// Bounds of scores, as ordered floats: a head's largest squared norm of a key, [B, Hkv]; then, in
/// the backward pass, the largest excess of scale |q_i| max|k| over lse_i of a head's queries,
/// [B, Hq].
struct ScoreBounds {
  static __device__ float key(const TensorAttention& w, int64_t batch, int64_t head) {
    const ForgettingAttentionParams& p = w.params.forward;
    return from_ordered(w.score_bounds[batch * p.key_heads + head / (p.heads / p.key_heads)]);
  }
  static __device__ float score(const TensorAttention& w, int64_t batch, int64_t head) {
    const ForgettingAttentionParams& p = w.params.forward;
    return from_ordered(w.score_bounds[p.layout.batch * p.key_heads + batch * p.heads + head]);
  }
};

/// scale |q| |k|, rounded up.
__device__ inline float largest_score(const ForgettingAttentionParams& p, float query_square,
                                      float key_square) {
  return 1.0001f * static_cast<float>(p.scale) * sqrtf(query_square) * sqrtf(key_square);
}

/// How far c may fall from a key to a query before the key may be dropped: its weight is
/// exp(s_ij + c_i - c_j - lse_i), and with that at most prune / keys for each key, all that is
/// dropped weighs at most prune. `score`: of s_ij - lse_i, nowhere exceeded. NaN drops nothing.
__device__ inline double largest_fall(const ForgettingAttentionParams& p, int keys, double score) {
  return score + log(static_cast<double>(keys)) - log(p.prune);
}

/// Whether a launch of the backward pass takes a head of keys of a sequence.
__device__ inline bool takes_head(const TensorAttention& w, int64_t sequence, int key_head) {
  if (w.heads == PrunedHeads::kAll) {
    return true;
  }
  const ForgettingAttentionParams& p = w.params.forward;
  const int group = static_cast<int>(p.heads / p.key_heads);
  const int* const near = w.reach.near + sequence * p.heads + key_head * group;
  int all = 1;
  for (int i = 0; i < group; ++i) {
    all &= near[i];
  }
  return (all != 0) == (w.heads == PrunedHeads::kNear);
}

}  // namespace tidegate::kernels::attention
