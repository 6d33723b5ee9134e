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
// 12 KB a warp, 96 KB a block: three times what covers the memory's latency at its full speed, and
// two kernels of the chain have room on a multiprocessor.
constexpr int kStages = 6;
constexpr int kRowsOfMma = 8;  // of x: the columns of an mma's right operand

/// How a launch is divided into blocks, chunks and stages.
struct Shape {
  int blocks = 0;
  int chunks = 0;         // of the inner channels
  int tile_channels = 0;  // of y
  int stages = 0;         // of a warp's ring that are used
  int batch = 0;          // tiles whose sums the warps leave before they meet
  int x_stride = 0;       // bytes from a row of x to the next one in shared memory
  int ring_bytes = 0, x_bytes = 0, sums_bytes = 0;

  int shared_bytes() const { return ring_bytes + x_bytes + sums_bytes; }
};

/// What a launch may have beside the product and its norm. A kernel without it has fewer
/// instructions to read.
enum class With : uint8_t { kNothing, kMore, kGate };

/// Where a pack lies among rows of 128 bytes. Packs are permuted so that the packs of one column in
/// eight rows lie in different banks. For rows that begin at a multiple of 1024 bytes this is the
/// order of wgmma's panels (128-byte swizzle).
__device__ inline unsigned place_in_item(int row, int pack) {
  return static_cast<unsigned>(row * kRowBytes + ((pack ^ (row & 7)) * 16));
}

/// What is read of the rows of x, and what a norm makes of it: eight channels at a time. kGated:
/// whether there may be a gate; most products have none, and are spared the reading of its
/// instructions, which takes longer than what they do.
template <class E, bool kGated>
struct RowReader {
  using Math = GateMath<float, true>;
  using Row = Pack<E, kPack>;

  const FusedProductParams& p;

  __device__ explicit RowReader(const FusedProductParams& params) : p(params) {}

  __device__ int packs() const { return static_cast<int>(p.product.inner) / kPack; }

  // No __ldg: the kernel before may write the rows of x while this one runs.
  __device__ Row load(const void* from, int64_t stride, int row, int pack) const {
    const E* const at = static_cast<const E*>(from) + row * stride;
    return {*(reinterpret_cast<const typename Row::Bits*>(at) + pack)};
  }
  /// A pack of a parameter, which no kernel of the chain writes.
  __device__ Row constant(const void* from, int pack) const {
    if (from == nullptr) return {};
    return {__ldg(static_cast<const typename Row::Bits*>(from) + pack)};
  }

  /// The numbers that are normed: of x, or of x and its gate.
  __device__ void values(Row raw, int row, int pack, float (&u)[kPack]) const {
#pragma unroll
    for (int v = 0; v < kPack; ++v) u[v] = raw.get(v);
    if (kGated && p.gate != nullptr && p.gate_first) gate(row, pack, u);
  }
  __device__ void values(int row, int pack, float (&u)[kPack]) const {
    values(load(p.product.x, p.product.stride_x, row, pack), row, pack, u);
  }
  __device__ void gate(int row, int pack, float (&u)[kPack]) const {
    gate(load(p.gate, p.stride_gate, row, pack), u);
  }
  __device__ void gate(Row logits, float (&u)[kPack]) const {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] *= norm::activated<Math>(p.gate_activation, logits.get(v));
    }
  }

  /// u - mean becomes what is multiplied.
  __device__ void finish(int row, int pack, float (&u)[kPack], float factor, Row weight,
                         Row bias) const {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] = fmaf(u[v] * factor, p.norm_weight != nullptr ? weight.get(v) : 1.0f,
                  p.norm_bias != nullptr ? bias.get(v) : 0.0f);
    }
    if (kGated && p.gate != nullptr && !p.gate_first) gate(row, pack, u);
  }
};

/// The rows of x, normed, into shared memory. Eight warps share a row, or fewer each, so that up to
/// eight rows are on their way at once.
template <class E, bool kGated>
struct RowStager : RowReader<E, kGated> {
  using Reader = RowReader<E, kGated>;
  using Row = typename Reader::Row;
  using Reader::constant;
  using Reader::load;
  using Reader::p;
  using Reader::packs;
  using Reader::values;

  const Shape& shape;
  char* x;      // in shared memory
  float* sums;  // [rows side by side][kGroups]

  // The block stages `side_by_side` rows at once. Each has a group of `warps` warps; `row_group` is
  // the thread's group, and `thread` its number there.
  int warps, side_by_side, row_group, thread;

  __device__ RowStager(const FusedProductParams& p, const Shape& shape, char* x, float* sums)
      : Reader(p), shape(shape), x(x), sums(sums) {
    side_by_side = 1;
    while (side_by_side < p.product.rows && side_by_side < kWarps) side_by_side *= 2;
    warps = kWarps / side_by_side;
    row_group = static_cast<int>(threadIdx.x) / (32 * warps);
    thread = static_cast<int>(threadIdx.x) % (32 * warps);
  }

  /// How many packs a thread keeps in registers of a row that all warps share. Longer rows are read
  /// once more instead.
  static constexpr int kKept = 2;
  Row weights[kKept], biases[kKept];

  __device__ bool is_kept() const { return warps == kWarps && packs() <= kKept * kThreads; }

  /// Reads the norm's parameters, which no kernel of the chain writes, so that this may come before
  /// the wait for the kernel before.
  __device__ void load_constants() {
    if (!p.has_norm || !is_kept()) return;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int pack = thread + i * 32 * warps;
      const bool exists = pack < packs();
      weights[i] = constant(p.norm_weight, exists ? pack : 0);
      biases[i] = constant(p.norm_bias, exists ? pack : 0);
    }
  }

  __device__ uint4* place(int row, int pack) const {
    return reinterpret_cast<uint4*>(x + row * shape.x_stride) + pack;
  }

  /// A sum over a row is made of eight groups of packs, pack k in group k / 32 % 8, each added up
  /// lane by lane and then over the lanes. So the bits of the sum do not depend on how many warps
  /// share the row: a warp has one group, or several. All threads of the block call these
  /// functions.
  static constexpr int kGroups = 8;

  /// The sum over the row where all its warps share it: `mine` is a lane's sum over its own group.
  __device__ float sum_over_warps(float mine) const {
    static_assert(kWarps == kGroups);
    mine = warp_sum(mine);
    __syncthreads();  // for those who still read the sums before
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += sums[w];
    return sum;
  }
  /// The sum over the row's `count` packs: add(sum so far, pack) adds one pack.
  template <class Add>
  __device__ float sum_over_packs(int count, Add add) const {
    const int lane = thread % 32;
    __syncthreads();
    for (int group = thread / 32; group < kGroups; group += warps) {
      float mine = 0.0f;
#pragma unroll 4
      for (int pack = 32 * group + lane; pack < count; pack += 32 * kGroups) {
        mine = add(mine, pack);
      }
      mine = warp_sum(mine);
      if (lane == 0) sums[row_group * kGroups + group] = mine;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int group = 0; group < kGroups; ++group) sum += sums[row_group * kGroups + group];
    return sum;
  }

  /// u - mean becomes what is multiplied, which goes to its place.
  __device__ void finish(int row, int pack, float (&u)[kPack], float factor, Row weight,
                         Row bias) const {
    Reader::finish(row, pack, u, factor, weight, bias);
    norm::store_eight(reinterpret_cast<E*>(place(row, pack)), u);
  }

  /// A row that all threads keep in registers.
  __device__ void stage_kept(int row, bool exists) const {
    const float channels = static_cast<float>(p.product.inner);
    const int count = exists ? packs() : 0;
    float u[kKept][kPack] = {}, sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (const int pack = thread + i * 32 * warps; pack < count) values(row, pack, u[i]);
    }
    if (p.norm_kind == norm::NormKind::kLayer) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) sum += u[i][v];
      }
      const float mean = sum_over_warps(sum) / channels;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const bool is_there = thread + i * 32 * warps < count;
#pragma unroll
        for (int v = 0; v < kPack; ++v) u[i][v] = is_there ? u[i][v] - mean : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
#pragma unroll
      for (int v = 0; v < kPack; ++v) square = fmaf(u[i][v], u[i][v], square);
    }
    const float factor = rsqrtf(sum_over_warps(square) / channels + static_cast<float>(p.eps));
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (const int pack = thread + i * 32 * warps; pack < count) {
        finish(row, pack, u[i], factor, weights[i], biases[i]);
      }
    }
  }

  __device__ void stage_raw(int row) const {
#pragma unroll 8
    for (int pack = thread; pack < packs(); pack += 32 * warps) {
      *place(row, pack) = load(p.product.x, p.product.stride_x, row, pack).bits;
    }
  }

  __device__ void stage_long(int row, bool exists) const {
    const float channels = static_cast<float>(p.product.inner);
    const int count = exists ? packs() : 0;
    float mean = 0.0f;
    if (p.norm_kind == norm::NormKind::kLayer) {
      const float sum = sum_over_packs(count, [&](float before, int pack) {
        float u[kPack];
        values(row, pack, u);
#pragma unroll
        for (int v = 0; v < kPack; ++v) before += u[v];
        return before;
      });
      mean = sum / channels;
    }
    const float square = sum_over_packs(count, [&](float before, int pack) {
      float u[kPack];
      values(row, pack, u);
#pragma unroll
      for (int v = 0; v < kPack; ++v) before = fmaf(u[v] - mean, u[v] - mean, before);
      return before;
    });
    const float factor = rsqrtf(square / channels + static_cast<float>(p.eps));
    // The row is read again, from the first-level cache.
    for (int pack = thread; pack < count; pack += 32 * warps) {
      float u[kPack];
      values(row, pack, u);
#pragma unroll
      for (int v = 0; v < kPack; ++v) u[v] -= mean;
      finish(row, pack, u, factor, constant(p.norm_weight, pack), constant(p.norm_bias, pack));
    }
  }

  /// Stages all rows, and fills the rest of their last chunk with zeros.
  __device__ void run() const {
    const int rows = static_cast<int>(p.product.rows);
    for (int first = 0; first < rows; first += side_by_side) {
      const int row = first + row_group;
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
