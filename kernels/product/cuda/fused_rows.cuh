#pragma once

// How a fused product is cut, and its prologue: the rows of x, normed, into shared memory.

#include <cstdint>

#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/norm/cuda/row_tile.cuh"
#include "kernels/product/product.h"

namespace tidegate::kernels::product {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 16;   // channels: the rows of an mma's left operand
constexpr int kChunk = 64;  // inner channels of a warp at a time: whole lines of 128 bytes
constexpr int kPack = 8;    // elements of 16 bytes
constexpr int kRowBytes = kChunk * 2;
constexpr int kItemBytes = kTile * kRowBytes;
// Of a warp's ring. 12 KB a warp, 96 KB a block: three times what covers the memory's latency at
// its full speed, and two kernels of the chain have room on a multiprocessor; fewer where rows of x
// take the room.
constexpr int kManyStages = 6, kFewStages = 3;
constexpr int kColumns = 8;  // rows of x: columns of an mma's right operand

/// How a launch is cut.
struct Shape {
  int blocks = 0;
  int channels = 0, longer = 0;  // of y a block, and how many blocks have one more
  int chunks = 0;                // of the inner channels
  int tile_channels = 0;         // of y
  int most_stages = 0;           // of a warp's ring
  int stages = 0;                // that are used
  int batch = 0;                 // tiles whose sums the warps leave before they meet
  int x_stride = 0;              // bytes from a row of x to the next one in shared memory
  int ring_bytes = 0, x_bytes = 0, sums_bytes = 0;

  int shared_bytes() const { return ring_bytes + x_bytes + sums_bytes; }
};

/// The rows of x, normed, into shared memory. Eight warps share a row, or fewer each, so that up to
/// eight rows are on their way at once.
template <class E>
struct RowStager {
  using Math = GateMath<float, true>;
  using Row = Pack<E, kPack>;

  const FusedProductParams& p;
  const Shape& shape;
  char* x;        // in shared memory
  float* sums;    // [2][kWarps][kGroups]
  float inverse;  // 1 / inner
  int turn = 0;

  int warps, side_by_side, team, thread;  // of a row; rows; which of them; in the team

  __device__ RowStager(const FusedProductParams& p, const Shape& shape, char* x, float* sums)
      : p(p), shape(shape), x(x), sums(sums) {
    inverse = 1.0f / static_cast<float>(p.product.inner);
    side_by_side = 1;
    while (side_by_side < p.product.rows && side_by_side < kWarps) side_by_side *= 2;
    warps = kWarps / side_by_side;
    team = static_cast<int>(threadIdx.x) / (32 * warps);
    thread = static_cast<int>(threadIdx.x) % (32 * warps);
  }

  __device__ int packs() const { return static_cast<int>(p.product.inner) / kPack; }

  // No __ldg: the kernel before may write them while this one runs.
  __device__ Row load(const void* from, int64_t stride, int row, int pack) const {
    const E* const at = static_cast<const E*>(from) + row * stride;
    return {*(reinterpret_cast<const typename Row::Bits*>(at) + pack)};
  }
  /// So many packs of a row a thread keeps in registers; longer rows are read once more.
  static constexpr int kKept = 4;
  Row weights[kKept];

  __device__ bool is_kept() const { return packs() <= kKept * 32 * warps; }

  /// Reads what no kernel writes.
  __device__ void load_constants() {
    if (!p.has_norm || !is_kept()) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int pack = thread + i * 32 * warps;
      const bool exists = pack < packs();
      weights[i] = constant(p.norm_weight, exists ? pack : 0);
    }
  }
  __device__ Row constant(const void* from, int pack) const {
    if (from == nullptr) return {};
    return {__ldg(static_cast<const typename Row::Bits*>(from) + pack)};
  }

  __device__ uint4* place(int row, int pack) const {
    return reinterpret_cast<uint4*>(x + row * shape.x_stride) + pack;
  }

  /// What is normed.
  __device__ void values(int row, int pack, float (&u)[kPack]) const {
    const Row raw = load(p.product.x, p.product.stride_x, row, pack);
#pragma unroll
    for (int v = 0; v < kPack; ++v) u[v] = raw.get(v);
    if (p.gate != nullptr && p.gate_first) gate(row, pack, u);
  }
  __device__ void gate(int row, int pack, float (&u)[kPack]) const {
    const Row logits = load(p.gate, p.stride_gate, row, pack);
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] *= norm::activated<Math>(p.gate_activation, logits.get(v));
    }
  }

  /// A sum over a row: of eight groups of packs, pack k in group k / 32 % 8, each added up lane by
  /// lane and then over the lanes. So its bits do not depend on how many warps share the row.
  static constexpr int kGroups = 8;

  __device__ int warp() const { return thread / 32; }
  __device__ int lane() const { return thread % 32; }
  /// A warp's groups are warp(), and every warps-th from there on.
  __device__ void leave(int group, float sum) const {
    if (lane() == 0) sums[(turn * kWarps + team) * kGroups + group] = sum;
  }
  /// By all threads of the block, once every group's sum was left. By turns in two arrays: who
  /// still reads the sums before is not overtaken.
  __device__ float total() {
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      sum += sums[(turn * kWarps + team) * kGroups + group];
    }
    turn ^= 1;
    return sum;
  }
  /// The sum of add(sum so far, i) over the kept packs i, of which those `own` apart, the number of
  /// a warp's groups, are of one group.
  template <class Add>
  __device__ float sum_kept(Add add) {
    const int own = kGroups / warps;
    float mine[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      float before = 0.0f;
      if (i >= 1 && own == 1) before = mine[i - 1];
      if (i >= 2 && own == 2) before = mine[i - 2];
      mine[i] = add(before, i);
    }
    static_assert(kKept <= 4);  // four groups or more have a pack each
    if (own == 1) {
      leave(warp(), warp_sum(mine[kKept - 1]));
      return total();
    }
    // Side by side, not one after another.
#pragma unroll
    for (int i = 0; i < kKept; ++i) mine[i] = warp_sum(mine[i]);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i + own >= kKept) leave((warp() + i * warps) % kGroups, mine[i]);
    }
    for (int group = warp() + kKept * warps; group < kGroups; group += warps) leave(group, 0.0f);
    return total();
  }
  /// The sum of add(sum so far, pack) over the thread's `count` packs or less.
  template <class Add>
  __device__ float sum_long(int count, Add add) {
    for (int group = warp(); group < kGroups; group += warps) {
      float mine = 0.0f;
#pragma unroll 4
      for (int pack = 32 * group + lane(); pack < count; pack += 32 * kGroups) {
        mine = add(mine, pack);
      }
      leave(group, warp_sum(mine));
    }
    return total();
  }

  /// u - mean becomes y, which goes to its place.
  __device__ void finish(int row, int pack, float (&u)[kPack], float factor, Row weight,
                         Row bias) const {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] = fmaf(u[v] * factor, p.norm_weight != nullptr ? weight.get(v) : 1.0f,
                  p.norm_bias != nullptr ? bias.get(v) : 0.0f);
    }
    if (p.gate != nullptr && !p.gate_first) gate(row, pack, u);
    norm::store_eight(reinterpret_cast<E*>(place(row, pack)), u);
  }

  /// A row that its threads keep in registers.
  __device__ void stage_kept(int row, bool exists) {
    const int count = exists ? packs() : 0;
    float u[kKept][kPack] = {};
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (const int pack = thread + i * 32 * warps; pack < count) values(row, pack, u[i]);
    }
    if (p.norm_kind == norm::NormKind::kLayer) {
      const float mean = inverse * sum_kept([&](float sum, int i) { return add_up(sum, u[i]); });
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const bool is_there = thread + i * 32 * warps < count;
#pragma unroll
        for (int v = 0; v < kPack; ++v) u[i][v] = is_there ? u[i][v] - mean : 0.0f;
      }
    }
    const float square = sum_kept([&](float sum, int i) { return add_squares(sum, u[i], 0.0f); });
    const float factor = rsqrtf(square * inverse + static_cast<float>(p.eps));
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (const int pack = thread + i * 32 * warps; pack < count) {
        finish(row, pack, u[i], factor, weights[i], constant(p.norm_bias, pack));
      }
    }
  }

  __device__ static float add_up(float sum, const float (&u)[kPack]) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) sum += u[v];
    return sum;
  }
  __device__ static float add_squares(float sum, const float (&u)[kPack], float mean) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) sum = fmaf(u[v] - mean, u[v] - mean, sum);
    return sum;
  }

  __device__ void stage_raw(int row) const {
#pragma unroll 8
    for (int pack = thread; pack < packs(); pack += 32 * warps) {
      *place(row, pack) = load(p.product.x, p.product.stride_x, row, pack).bits;
    }
  }

  __device__ void stage_long(int row, bool exists) {
    const int count = exists ? packs() : 0;
    float mean = 0.0f;
    if (p.norm_kind == norm::NormKind::kLayer) {
      mean = inverse * sum_long(count, [&](float sum, int pack) {
               float u[kPack];
               values(row, pack, u);
               return add_up(sum, u);
             });
    }
    const float square = sum_long(count, [&](float sum, int pack) {
      float u[kPack];
      values(row, pack, u);
      return add_squares(sum, u, mean);
    });
    const float factor = rsqrtf(square * inverse + static_cast<float>(p.eps));
    // Read again, from the first-level cache.
    for (int pack = thread; pack < count; pack += 32 * warps) {
      float u[kPack];
      values(row, pack, u);
#pragma unroll
      for (int v = 0; v < kPack; ++v) u[v] -= mean;
      finish(row, pack, u, factor, constant(p.norm_weight, pack), constant(p.norm_bias, pack));
    }
  }

  /// The last chunk's rest is zero.
  __device__ void run() {
    const int rows = static_cast<int>(p.product.rows);
    for (int first = 0; first < rows; first += side_by_side) {
      const int row = first + team;
      const bool exists = row < rows;
      if (p.has_norm) {
        is_kept() ? stage_kept(row, exists) : stage_long(row, exists);
      } else if (exists) {
        stage_raw(row);
      }
      const int padded = shape.chunks * kChunk / kPack;
      for (int pack = packs() + thread; exists && pack < padded; pack += 32 * warps) {
        *place(row, pack) = uint4{};
      }
    }
    __syncthreads();
  }
};

}  // namespace tidegate::kernels::product
