#pragma once

// What a pass over the rows prepares before the tensor-core kernels run, and what pruning makes of
// it: which keys may be dropped from a row, and which heads a launch of the backward pass takes.

#include "kernels/attention/cuda/gate_scans.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

// ---- Bounds of scores, and the keys that may be dropped ----

/// Finds the keys' part of work.score_bounds, which is zero before; delta_kernel finds the
/// queries'.
cudaError_t find_key_norms(const TensorAttention& work, cudaStream_t stream);

/// Floats in an order of integers in which NaN is the largest and the integer 0 is below all, and
/// back.
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
/// exp(scale q_i . k_j + c_i - c_j - lse_i), and with that at most prune / keys for each key, all
/// that is dropped weighs at most prune. `score`: of scale q_i . k_j - lse_i, nowhere exceeded. NaN
/// drops nothing.
__device__ inline double largest_fall(const ForgettingAttentionParams& p, int keys, double score) {
  return score + log(static_cast<double>(keys)) - log(p.prune);
}

/// Whether a launch of the backward pass takes a head of keys of a sequence.
__device__ inline bool takes_head(const TensorAttention& w, int64_t sequence, int key_head) {
  if (w.head_range == HeadRange::kAll) {
    return true;
  }
  const ForgettingAttentionParams& p = w.params.forward;
  const int group = static_cast<int>(p.heads / p.key_heads);  // query heads that share a key head
  const int* const is_long = w.extents.is_long + sequence * p.heads + key_head * group;
  int any = 0;
  for (int i = 0; i < group; ++i) {
    any |= is_long[i];
  }
  return (any != 0) == (w.head_range == HeadRange::kLong);
}

// ---- The pass over the rows ----
//
// What a pass over the rows prepares for the tensor-core kernels: delta - dlse for the backward
// pass, bounds of scores for pruning. Eight lanes share a row; a block has some tokens of one head,
// and blocks of neighbouring heads follow each other, as the rows in memory do.

constexpr int kRowThreads = 256;
constexpr int kRowsAtOnce = 2;  // of a lane, whose loads are under way together
constexpr int kRowSteps = 4;
constexpr int kRowTokens = kRowThreads / 8 * kRowsAtOnce * kRowSteps;  // of a block

inline int64_t row_blocks(const SequenceLayout& layout, int64_t heads) {
  return layout.batch * heads * ((layout.time + kRowTokens - 1) / kRowTokens);
}

/// Where a block's rows are. Packed sequences are one here.
struct RowPlace {
  int64_t batch, head, first;
  Sequence all;
  int part;  // which of the eight lanes of a row

  __device__ RowPlace(int64_t time, int64_t all_heads, unsigned block) {
    const auto blocks_a_head = static_cast<unsigned>((time + kRowTokens - 1) / kRowTokens);
    const auto heads = static_cast<unsigned>(all_heads);
    head = block % heads;
    batch = block / heads / blocks_a_head;
    first = block / heads % blocks_a_head * kRowTokens + threadIdx.x / 8;
    all = {0, batch, 0, 0};
    part = static_cast<int>(threadIdx.x) % 8;
  }
  /// The token of one of a lane's rows.
  __device__ int64_t token(int step, int i) const {
    return first + (step * kRowsAtOnce + i) * (kRowThreads / 8);
  }
};

/// A lane's share of a row of up to 64 * kPieces elements.
template <class T, int kPieces>
struct RowPart {
  Pack<T, 8> x[kPieces];

  __device__ void load(const char* row, int pieces, int part) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = part + 8 * i;
      x[i].bits = piece < pieces ? __ldg(reinterpret_cast<const uint4*>(row) + piece) : uint4{};
    }
  }

  /// The product of whole rows, in all their lanes.
  __device__ float dot(const RowPart& y) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        sum = fmaf(x[i].get(e), y.x[i].get(e), sum);
      }
    }
    return warp_sum<8>(sum);
  }
};

/// Raises a head's maximum, which starts as zero, to a block's.
__device__ inline void raise_max(unsigned found, unsigned* head_max) {
  found = __reduce_max_sync(0xffffffffu, found);
  if (threadIdx.x % 32 == 0) {
    atomicMax(head_max, found);
  }
}

/// Calls launch.template operator()<T, kPieces>() for the data and head dimension of p.
template <class Launch>
cudaError_t with_row_kernels(const ForgettingAttentionParams& p, const Launch& launch) {
  return dispatch_16_bit(p.q.dtype, [&]<class T>() {
    return p.head_dim <= 128 ? launch.template operator()<T, 2>()
                             : launch.template operator()<T, 4>();
  });
}

/// The largest squared norm of every head's keys.
template <class T, int kPieces>
__global__ void __launch_bounds__(kRowThreads)
    key_norms_kernel(const __grid_constant__ TensorAttention w, unsigned* head_max) {
  const ForgettingAttentionParams& p = w.params.forward;
  const int64_t time = p.key_layout.time;
  const RowPlace at(time, p.key_heads, blockIdx.x);
  const int pieces = static_cast<int>(p.head_dim / 8);
  unsigned found = 0;
#pragma unroll
  for (int step = 0; step < kRowSteps; ++step) {
    RowPart<T, kPieces> k[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      k[i].load(row_address<2>(p.k, at.all, at.head, min(at.token(step, i), time - 1)), pieces,
                at.part);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      found = max(found, ordered(k[i].dot(k[i])));
    }
  }
  raise_max(found, head_max + at.batch * p.key_heads + at.head);
}

/// delta_minus_dlse = do . o - dlse; the first blocks scan chunks of gates. With kBounds, the
/// largest excess of every head's scores too: see ScoreBounds, whose keys' part key_norms_kernel
/// has filled.
template <class T, int kPieces, bool kBounds>
__global__ void __launch_bounds__(kRowThreads)
    delta_kernel(const __grid_constant__ TensorAttention w, unsigned* head_max,
                 const __grid_constant__ GateChunks<GateSumScan> gates) {
  static_assert(kRowThreads == kGateChunk);
  if (blockIdx.x < gates.blocks()) {
    gates.scan_chunk(blockIdx.x);
    return;
  }
  const ForgettingAttentionParams& p = w.params.forward;
  const int64_t time = p.layout.time;
  const RowPlace at(time, p.heads, blockIdx.x - gates.blocks());
  const int pieces = static_cast<int>(p.head_dim / 8);
  const int64_t row0 = (at.batch * p.heads + at.head) * time;
  const auto* const dlse = static_cast<const float*>(w.params.dlse);
  const float key = kBounds ? ScoreBounds::key(w, at.batch, at.head) : 0.0f;
  unsigned found = 0;
#pragma unroll
  for (int step = 0; step < kRowSteps; ++step) {
    RowPart<T, kPieces> o[kRowsAtOnce], d_o[kRowsAtOnce], q[kBounds ? kRowsAtOnce : 1];
    float lse[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t token = min(at.token(step, i), time - 1);
      o[i].load(row_address<2>(p.o, at.all, at.head, token), pieces, at.part);
      d_o[i].load(row_address<2>(w.params.d_o, at.all, at.head, token), pieces, at.part);
      if constexpr (kBounds) {
        q[i].load(row_address<2>(p.q, at.all, at.head, token), pieces, at.part);
      }
      lse[i] = static_cast<const float*>(p.lse)[row0 + token];
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t token = at.token(step, i);
      const float sum = o[i].dot(d_o[i]);
      const bool empty = lse[i] == -INFINITY;  // no key, and no lse to take a gradient of
      if (at.part == 0 && token < time) {
        w.delta_minus_dlse[row0 + token] =
            empty || dlse == nullptr ? sum : sum - dlse[row0 + token];
      }
      if constexpr (kBounds) {
        const float score = largest_score(p, q[i].dot(q[i]), key);
        found = max(found, ordered(empty ? -INFINITY : score - lse[i]));
      }
    }
  }
  if constexpr (kBounds) {
    raise_max(found, head_max + at.batch * p.heads + at.head);
  }
}

}  // namespace tidegate::kernels::attention
