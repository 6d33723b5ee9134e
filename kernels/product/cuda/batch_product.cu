// The fused product for batches of up to 64 rows: too many for every block to have all of x.
//
// The blocks of a cluster share the inner channels of some channels of y: each has all rows of its
// part of x in shared memory, normed, and asks for its part of the weights, in a ring, before it
// waits for the kernel before. Two warpgroups multiply all 64 rows with half of the channels each
// (wgmma). The blocks' sums then meet: each block gets all parts of some of the rows, stored right
// into its shared memory, and makes y of them. What a norm sums over a row goes the same way before.
// The order of every sum depends on the numbers of channels alone.

#include <algorithm>

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/product/cuda/fused_rows.cuh"
#include "kernels/product/cuda/fused_tiles.cuh"
#include "kernels/product/cuda/narrow_products.cuh"
#include "kernels/product/product_cuda.h"

namespace tidegate::kernels::product {
namespace {

constexpr int kRows = 64;
constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroups = kThreads / kGroupThreads;
constexpr int kPanelBytes = kRows * kRowBytes;  // of a chunk of x
constexpr int kMostStages = 8;
// So much shared memory a block, that the next kernel's has room beside it.
constexpr int kWantedBytes = (228 << 10) / 2 - (2 << 10);
constexpr int kMostBlocks = 8;        // of a cluster

/// How a launch is cut. A tile is 16 rows of w.
struct BatchShape {
  int blocks = 0, log_blocks = 0;  // of a cluster
  int clusters = 0;
  int tiles = 0, least_tiles = 0;  // of all channels; of a cluster
  int tile_channels = 0;  // of y
  int chunks = 0;         // of all inner channels
  int columns = 0;        // of w's rows that a warpgroup multiplies at once
  int passes = 0;         // that a cluster takes at most
  int own_chunks = 0;     // of a block, at most
  int stages = 0;
  int x_bytes = 0, ring_bytes = 0, part_stride = 0, parts_bytes = 0;
  int main_bytes = 0;  // of all of these
  // Where the sums wait to be sent, and where those of the other blocks go, in shared memory.
  int staged_at = 0, parts_at = 0;
  bool is_aligned = false;  // four channels of y and of the residual lie as one access wants them
  // A row's factor is applied to the sums: then nothing waits for it before the products.
  bool scales_sums = false;

  static constexpr int kOtherBytes = (2 * kMostBlocks + 2) * kRows * 4 + 64;
  int constant_bytes() const { return 2 * own_chunks * kRowBytes; }
  int shared_bytes() const {
    return 1024 + main_bytes + kOtherBytes + constant_bytes();
  }
  int most_tiles() const { return static_cast<int>(ceil_div(tiles, clusters)); }
};

BatchShape shape_of(const FusedProductParams& p, int blocks, int multiprocessors) {
  BatchShape s;
  s.blocks = blocks;
  while (1 << s.log_blocks < blocks) ++s.log_blocks;
  s.tile_channels = p.is_glu ? kTile / 2 : kTile;
  s.tiles = static_cast<int>(ceil_div(p.product.outer, int64_t{s.tile_channels}));
  s.chunks = static_cast<int>(ceil_div(p.product.inner, int64_t{kChunk}));
  const int at_once = std::max(1, multiprocessors / blocks);
  const int each = static_cast<int>(ceil_div(s.tiles, at_once));
  s.clusters = static_cast<int>(ceil_div(s.tiles, each));
  s.least_tiles = s.tiles / s.clusters;
  s.own_chunks = static_cast<int>(ceil_div(s.chunks, blocks));
  s.columns = 96;
  for (const int columns : {64, 48, 32}) {
    if (kGroups * columns >= each * kTile) s.columns = columns;
  }
  const int item = kGroups * s.columns * kRowBytes;
  s.passes = static_cast<int>(ceil_div(each * kTile, kGroups * s.columns));
  s.x_bytes = s.own_chunks * kPanelBytes;
  s.part_stride = std::min(each * kTile, kGroups * s.columns) + 4;
  s.parts_bytes = kRows * s.part_stride * 4;
  const int rest = kWantedBytes - s.shared_bytes() - s.x_bytes -
                   (s.passes > 1 ? 2 * s.parts_bytes : 0);  // main_bytes is zero so far
  s.stages = std::min(std::clamp(rest / item, 2, kMostStages), s.passes * s.own_chunks);
  s.ring_bytes = s.stages * item;
  // Where x and the weights were, once the block needs them no more; with several passes, it does.
  const int loaded = s.x_bytes + s.ring_bytes;
  s.staged_at = s.passes > 1 || loaded < s.parts_bytes ? loaded : 0;
  // There, too, once no block does, which they have to tell each other: where room is short.
  s.parts_at = std::max(loaded, s.staged_at + s.parts_bytes);
  s.main_bytes = s.parts_at + s.parts_bytes;
  if (s.staged_at == 0 && loaded >= 2 * s.parts_bytes && s.shared_bytes() > kWantedBytes) {
    s.parts_at = s.parts_bytes;
    s.main_bytes = loaded;
  }
  s.scales_sums = p.has_norm && p.norm_kind == norm::NormKind::kRms && p.norm_bias == nullptr &&
                  !(p.gate != nullptr && p.gate_first) && p.product.dtype == DType::kBFloat16;
  const auto in_fours = [](const void* data, int64_t stride) {
    return is_aligned(data, 8) && stride % 4 == 0;
  };
  s.is_aligned = p.product.outer % 4 == 0 && in_fours(p.product.y, p.product.stride_y) &&
                 (p.residual == nullptr || in_fours(p.residual, p.stride_residual));
  return s;
}

/// Bytes that a block moves; twice those between blocks, and those that are asked for late.
int64_t cost_of(const BatchShape& s) {
  const int64_t columns = int64_t{s.most_tiles()} * kTile;
  return s.own_chunks * int64_t{kRowBytes} * (columns + kRows) +
         2 * kRows * columns * 4 * (s.blocks - 1) / s.blocks +
         int64_t{s.passes * s.own_chunks - s.stages} * (s.ring_bytes / s.stages);
}

BatchShape shape_of(const FusedProductParams& p, const DeviceLimits& limits) {
  BatchShape best;
  for (const int blocks : {2, 4, 8}) {
    const BatchShape s = shape_of(p, blocks, limits.multiprocessors);
    if (s.shared_bytes() > limits.shared_bytes) continue;
    if (best.blocks == 0 || cost_of(s) < cost_of(best)) best = s;
  }
  return best;
}

/// A block's part of the work.
struct BatchWork {
  int rank, cluster;
  int first_tile, tiles;    // of the cluster
  int first_chunk, chunks;  // of the block
  int thread, warp, lane, group;

  __device__ explicit BatchWork(const BatchShape& s) {
    rank = cluster_rank();
    cluster = static_cast<int>(blockIdx.x) >> s.log_blocks;
    // As equal as it gets: the first ones have one more.
    const int more = s.tiles - s.least_tiles * s.clusters;
    first_tile = cluster * s.least_tiles + min(cluster, more);
    tiles = s.least_tiles + (cluster < more ? 1 : 0);
    first_chunk = s.chunks * rank >> s.log_blocks;
    chunks = (s.chunks * (rank + 1) >> s.log_blocks) - first_chunk;
    thread = static_cast<int>(threadIdx.x);
    warp = thread / 32;
    lane = thread % 32;
    group = thread / kGroupThreads;
  }
};

/// A warpgroup's ring of weights: its rows of a chunk, in panels of rows of 128 bytes.
template <class E, int kN, bool kMore>
struct BatchRing {
  static constexpr int kOwn = kN / 16;  // rows of a thread

  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  unsigned base;  // of the ring in shared memory
  int items;
  int pass = 0, chunk = 0, slot = 0, asked = 0;
  const E* rows[kOwn] = {};  // of the pass; null: none

  __device__ unsigned item(int at) const {
    return base + static_cast<unsigned>((at * kGroups + work.group) * kN * kRowBytes);
  }
  __device__ int row(int i) const { return i * 16 + work.thread % kGroupThreads / 8; }

  __device__ void find_rows() {
    const int first = pass * kGroups * kN + work.group * kN;  // of the cluster's rows of w
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int tile = (first + row(i)) / kTile, within = row(i) % kTile;
      const int channel = (work.first_tile + tile) * s.tile_channels +
                          (p.is_glu ? within % (kTile / 2) : within);
      const bool exists = tile < work.tiles && channel < p.product.outer;
      const int64_t other = p.is_glu && within >= kTile / 2 ? p.product.outer : 0;
      rows[i] = exists ? weight_row<E, kMore>(p, channel + other) : nullptr;
    }
  }

  __device__ void ask() {
    if (asked < items) {
      if (chunk == 0) find_rows();
      const int pack = work.thread % 8;
      const int inner = (work.first_chunk + chunk) * kChunk + pack * kPack;
      const bool exists = inner < p.product.inner;
      const unsigned to = item(slot) + place_in_item(row(0), pack);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // Sixteen rows further the packs are permuted alike.
        if (rows[i] != nullptr) {
          copy_async_or_zero(to + static_cast<unsigned>(i * 16 * kRowBytes),
                             exists ? rows[i] + inner : rows[i], exists);
        }
      }
      ++asked;
      slot = slot + 1 == s.stages ? 0 : slot + 1;
      if (++chunk == work.chunks) {
        chunk = 0;
        ++pass;
      }
    }
    commit_copies();
  }
};

/// Waits for the oldest of `stages` groups of copies.
__device__ inline void wait_for_oldest(int stages) {
  switch (stages) {
    case 1:
      return wait_for_copies<0>();
    case 2:
      return wait_for_copies<1>();
    case 3:
      return wait_for_copies<2>();
    case 4:
      return wait_for_copies<3>();
    case 5:
      return wait_for_copies<4>();
    case 6:
      return wait_for_copies<5>();
    case 7:
      return wait_for_copies<6>();
    default:
      return wait_for_copies<kMostStages - 1>();
  }
}

/// The block's part of the rows of x, normed, into its panels. Eight lanes share a row's packs of a
/// chunk, and have two rows; a warp has eight. Loops are kept rolled: of code that runs once, it is
/// the reading of instructions that takes time.
template <class E, bool kGated>
struct BatchStager : RowReader<E, kGated> {
  using Reader = RowReader<E, kGated>;
  using Row = typename Reader::Row;
  using Reader::p;
  static constexpr int kOwn = 2;       // rows of a lane
  static constexpr int kInFlight = 4;  // chunks

  const BatchShape& s;
  const BatchWork& work;
  char* x;
  float *sums, *squares;    // [block][row], which the blocks fill
  float *factors, *means;   // [row]
  const char* constants;    // of the norm: [weight or bias][pack of the block's part]
  unsigned barrier;
  int first_row, pack;  // of the lane; of a chunk

  __device__ BatchStager(const FusedProductParams& params, const BatchShape& shape,
                         const BatchWork& own, char* panels, float* exchanged, char* constants,
                         unsigned barrier)
      : Reader(params),
        s(shape),
        work(own),
        x(panels),
        sums(exchanged),
        squares(sums + kMostBlocks * kRows),
        factors(squares + kMostBlocks * kRows),
        means(factors + kRows),
        constants(constants),
        barrier(barrier),
        first_row(own.warp * 8 + own.lane / 8 * kOwn),
        pack(own.lane % 8) {}

  __device__ int channels_pack(int chunk) const {
    return (work.first_chunk + chunk) * (kChunk / kPack) + pack;
  }
  __device__ bool exists(int i, int chunk) const {
    return first_row + i < p.product.rows && channels_pack(chunk) < this->packs();
  }
  __device__ uint4* place(int i, int chunk) const {
    return reinterpret_cast<uint4*>(x + chunk * kPanelBytes + place_in_item(first_row + i, pack));
  }

  /// What no kernel writes.
  __device__ void load_constants(char* to) const {
    if (!p.has_norm) return;
    const int count = work.chunks * (kChunk / kPack), first = work.first_chunk * (kChunk / kPack);
    for (int at = work.thread; at < 2 * count; at += kThreads) {
      const void* const from = at < count ? p.norm_weight : p.norm_bias;
      const int pack = first + (at < count ? at : at - count);
      const bool exists = from != nullptr && pack < this->packs();
      reinterpret_cast<uint4*>(to)[at] = this->constant(exists ? from : nullptr, pack).bits;
    }
  }
  __device__ Row constant_at(int kind, int chunk) const {
    const int count = work.chunks * (kChunk / kPack);
    return {reinterpret_cast<const uint4*>(constants)[kind * count + chunk * (kChunk / kPack) + pack]};
  }

  __device__ static void add_squares(const float (&u)[kPack], float mean, float& sum) {
    float odd = 0.0f;
#pragma unroll
    for (int v = 0; v < kPack; v += 2) {
      sum = fmaf(u[v] - mean, u[v] - mean, sum);
      odd = fmaf(u[v + 1] - mean, u[v + 1] - mean, odd);
    }
    sum += odd;
  }

  /// As they are; zeros where there is nothing. Adds up their squares.
  __device__ void copy(float (&square)[kOwn]) const {
#pragma unroll 1
    for (int first = 0; first < work.chunks; first += kInFlight) {
      Row raw[kInFlight][kOwn];
#pragma unroll
      for (int c = 0; c < kInFlight; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          raw[c][i] = {};
          if (first + c < work.chunks && exists(i, first + c)) {
            raw[c][i] =
                this->load(p.product.x, p.product.stride_x, first_row + i, channels_pack(first + c));
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kInFlight; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (first + c >= work.chunks) continue;
          *place(i, first + c) = raw[c][i].bits;
          float u[kPack];
#pragma unroll
          for (int v = 0; v < kPack; ++v) u[v] = raw[c][i].get(v);
          add_squares(u, 0.0f, square[i]);
        }
      }
    }
  }

  /// visit(i, chunk, u) of each of the lane's packs, as they are normed.
  template <class Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (!exists(i, chunk)) continue;
        float u[kPack];
        this->values(Row{*place(i, chunk)}, first_row + i, channels_pack(chunk), u);
        visit(i, chunk, u);
      }
    }
  }

  /// The sum over its lanes of row lane / 4 % 2 of a lane's two.
  __device__ float summed(float (&values)[kOwn]) const {
    scatter_sums<kOwn, 4>(values, work.lane);
    return values[0];
  }

  /// To the block that makes y of the row, or to all of them.
  __device__ void exchange(float* at, float mine) const {
    if (work.lane % 4 != 0) return;
    const int row = first_row + work.lane / 4 % 2;
    if (row >= p.product.rows) return;
    const unsigned to = shared_address(at + work.rank * kRows + row);
    const int first = s.scales_sums ? row * s.blocks / kRows : 0;
    const int end = s.scales_sums ? first + 1 : s.blocks;
#pragma unroll 1
    for (int rank = first; rank < end; ++rank) {
      store_remote(address_in_block(to, rank), mine, address_in_block(barrier, rank));
    }
  }

  /// Which bytes of a block the others fill; `own_rows`: of y that it makes.
  __device__ static unsigned exchanged_bytes(const FusedProductParams& p, const BatchShape& s,
                                             int own_rows) {
    const int rows = s.scales_sums ? own_rows : static_cast<int>(p.product.rows);
    return static_cast<unsigned>((rows << s.log_blocks) *
                                 (p.norm_kind == norm::NormKind::kLayer ? 8 : 4));
  }

  /// Channels of a block's part.
  __device__ float width(int rank) const {
    const int inner = static_cast<int>(p.product.inner);
    const int begin = (s.chunks * rank >> s.log_blocks) * kChunk;
    const int end = (s.chunks * (rank + 1) >> s.log_blocks) * kChunk;
    return static_cast<float>(min(end, inner) - min(begin, inner));
  }

  /// The block's own sums, to all blocks. `square`: that of x itself.
  __device__ void sum_rows(float (&square)[kOwn]) const {
    const bool is_layer = p.norm_kind == norm::NormKind::kLayer;
    if (is_layer || (kGated && p.gate != nullptr && p.gate_first)) {
      float mean[kOwn] = {};
      if (is_layer) {  // the squares about the part's own mean
        float sum[kOwn] = {};
        for_each([&](int i, int, const float(&u)[kPack]) {
          sum[i] += ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
        });
        const float part = width(work.rank), own = part > 0 ? summed(sum) / part : 0.0f;
        exchange(sums, own);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) mean[i] = __shfl_sync(~0u, own, work.lane / 8 * 8 + 4 * i);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) square[i] = 0.0f;
      for_each([&](int i, int, const float(&u)[kPack]) { add_squares(u, mean[i], square[i]); });
    }
    exchange(squares, summed(square));
  }

  /// Of the parts of all blocks, in their order; of all rows, or of the block's own.
  __device__ void find_factors() const {
    const int row = work.thread;
    if (row >= p.product.rows) return;
    if (s.scales_sums && row * s.blocks / kRows != work.rank) return;
    const auto channels = static_cast<float>(p.product.inner);
    float mean = 0.0f, square = 0.0f;
    if (p.norm_kind == norm::NormKind::kLayer) {
#pragma unroll 1
      for (int rank = 0; rank < s.blocks; ++rank) {
        mean = fmaf(width(rank), sums[rank * kRows + row], mean);
      }
      mean /= channels;
#pragma unroll 1
      for (int rank = 0; rank < s.blocks; ++rank) {
        const float off = sums[rank * kRows + row] - mean;
        square = fmaf(width(rank), off * off, square);
      }
    }
#pragma unroll 2
    for (int rank = 0; rank < s.blocks; ++rank) square += squares[rank * kRows + row];
    factors[row] = rsqrtf(square / channels + static_cast<float>(p.eps));
    means[row] = mean;
  }

  __device__ void norm() const {
    for_each([&](int i, int chunk, float(&u)[kPack]) {
      const float mean = means[first_row + i];
#pragma unroll
      for (int v = 0; v < kPack; ++v) u[v] -= mean;
      this->finish(first_row + i, channels_pack(chunk), u, factors[first_row + i],
                   constant_at(0, chunk), constant_at(1, chunk));
      norm::store_eight(reinterpret_cast<E*>(place(i, chunk)), u);
    });
  }

  /// With what a norm multiplies but the row's factor.
  __device__ void weigh() const {
    if (p.norm_weight == nullptr && !(kGated && p.gate != nullptr)) return;
    for_each([&](int i, int chunk, float(&u)[kPack]) {
      this->finish(first_row + i, channels_pack(chunk), u, 1.0f, constant_at(0, chunk), Row{});
      norm::store_eight(reinterpret_cast<E*>(place(i, chunk)), u);
    });
  }

  __device__ void run() const {
    float square[kOwn] = {};
    copy(square);
    if (!p.has_norm) return;
    sum_rows(square);
    if (s.scales_sums) {
      weigh();
      return;
    }
    wait_for_bytes(barrier, 0);
    find_factors();
    __syncthreads();
    norm();
  }
};

/// Makes y of the rows whose sums the block gets, four channels of a row at a time.
template <class E>
struct BatchOutput {
  const FusedProductParams& p;
  const BatchShape& s;
  const BatchWork& work;
  int rows, first_row;     // of the block, that exist
  int channel0, channels;  // of y, of the pass
  int fours;               // of a row

  static constexpr int kVec = 4;
  using Four = Pack<E, kVec>;

  __device__ BatchOutput(const FusedProductParams& params, const BatchShape& shape,
                         const BatchWork& own, int first_tile, int tiles)
      : p(params), s(shape), work(own) {
    const int each = kRows >> s.log_blocks;
    first_row = work.rank * each;
    rows = max(0, min(each, static_cast<int>(p.product.rows) - first_row));
    channel0 = (work.first_tile + first_tile) * s.tile_channels;
    channels = min(tiles * s.tile_channels, static_cast<int>(p.product.outer) - channel0);
    fours = (channels + kVec - 1) / kVec;
  }

  /// What a thread makes, one after another.
  struct Place {
    int row, channel;
  };
  /// Below 2^12 items, of rows of below 2^7.
  __device__ Place place(int item, unsigned inverse) const {
    const int row = static_cast<int>(static_cast<unsigned>(item) * inverse >> 20);
    return {row, (item - row * fours) * kVec};
  }
  __device__ unsigned inverse() const {
    const auto count = static_cast<unsigned>(max(1, fours));
    return ((1u << 20) + count - 1) / count;
  }

  __device__ Four residual_at(Place at) const {
    const E* const from = static_cast<const E*>(p.residual) +
                          (first_row + at.row) * p.stride_residual + channel0 + at.channel;
    if (s.is_aligned) return {*reinterpret_cast<const typename Four::Bits*>(from)};
    E four[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      four[v] = at.channel + v < channels ? from[v] : narrow<E>(0.0f);
    }
    return pack_elements(four);
  }

  /// The sums of four columns, rounded.
  __device__ void sum(const float* parts, int row, int column, float factor, const E* bias, int count,
                      float (&total)[kVec]) const {
    const float* from = parts + row * s.part_stride + column;
    const int step = (kRows >> s.log_blocks) * s.part_stride;
    total[0] = total[1] = total[2] = total[3] = 0.0f;
#pragma unroll 2
    for (int rank = 0; rank < s.blocks; ++rank, from += step) {
      const float4 part = *reinterpret_cast<const float4*>(from);
      total[0] += part.x;
      total[1] += part.y;
      total[2] += part.z;
      total[3] += part.w;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] *= factor;
    if (bias != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) total[v] += v < count ? widen(bias[v]) : 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) total[v] = widen(narrow<E>(total[v]));
  }

  __device__ void make(const float* parts, Place at, float factor, Four residual) const {
    const int64_t channel = channel0 + at.channel;
    const int count = channels - at.channel;
    const E* const bias =
        p.product.bias == nullptr ? nullptr : static_cast<const E*>(p.product.bias) + channel;
    const int column =
        p.is_glu ? at.channel / (kTile / 2) * kTile + at.channel % (kTile / 2) : at.channel;
    float y[kVec];
    sum(parts, at.row, column, factor, bias, count, y);
    if (p.is_glu) {
      using Math = GateMath<float, true>;
      float value[kVec];
      sum(parts, at.row, column + kTile / 2, factor,
          bias == nullptr ? nullptr : bias + p.product.outer, count, value);
#pragma unroll
      for (int v = 0; v < kVec; ++v) y[v] = norm::activated<Math>(p.activation, y[v]) * value[v];
    }
    if (p.residual != nullptr) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) y[v] = residual.get(v) + widen(narrow<E>(y[v]));
    }
    E* const to = static_cast<E*>(p.product.y) + (first_row + at.row) * p.product.stride_y + channel;
    if (s.is_aligned) {
      *reinterpret_cast<typename Four::Bits*>(to) = pack<E, kVec>(y).bits;
      return;
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      if (v < count) to[v] = narrow<E>(y[v]);
    }
  }

  /// `wait()` between asking for the first residual and the sums. `factors`: of rows, where they
  /// scale the sums.
  template <class Wait>
  __device__ void run(const float* parts, const float* factors, Wait wait) const {
    const unsigned over = inverse();
    const int items = rows * fours;
    Four residual = {};
    if (p.residual != nullptr && work.thread < items) {
      residual = residual_at(place(work.thread, over));
    }
    wait();
#pragma unroll 1
    for (int item = work.thread; item < items; item += kThreads) {
      const Place at = place(item, over);
      if (p.residual != nullptr && item != work.thread) residual = residual_at(at);
      make(parts, at, s.scales_sums ? factors[first_row + at.row] : 1.0f, residual);
    }
  }
};

/// Leaves a warp's sums of a pass where they are sent from: [row][column].
template <int kN>
__device__ void leave_sums(const float (&d)[kN / 8][4], const BatchShape& s, const BatchWork& work,
                           int columns, float* staged) {
  const int row = work.warp % 4 * 16 + work.lane / 4, first = work.group * kN;
  float* const to = staged + row * s.part_stride + first + work.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    if (first + 8 * j < columns) {
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[j][0], d[j][1]);
      *reinterpret_cast<float2*>(to + 8 * s.part_stride + 8 * j) = make_float2(d[j][2], d[j][3]);
    }
  }
}

/// cluster_sync() in its two halves.
__device__ inline void cluster_arrive() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if TIDEGATE_HOPPER_CODE
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Copies bytes of this block's shared memory into that of another one, whose barrier counts them.
__device__ inline void send(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
#if TIDEGATE_HOPPER_CODE
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

/// Sends each block the sums of its rows.
__device__ inline void send_sums(const FusedProductParams& p, const BatchShape& s,
                                 const BatchWork& work, unsigned staged, unsigned parts,
                                 unsigned barrier) {
  const int to = work.thread;
  if (to >= s.blocks) return;
  const int each = kRows >> s.log_blocks;
  const int rows = min(each, static_cast<int>(p.product.rows) - to * each);
  if (rows <= 0) return;
  const int block_bytes = each * s.part_stride * 4;
  send(address_in_block(parts + static_cast<unsigned>(work.rank * block_bytes), to),
       staged + static_cast<unsigned>(to * block_bytes),
       static_cast<unsigned>(rows * s.part_stride * 4), address_in_block(barrier, to));
}

template <class E, int kN, With kWith>
__global__ void __launch_bounds__(kThreads, 2)
    batch_product_kernel(const __grid_constant__ FusedProductParams p,
                         const __grid_constant__ BatchShape s) {
  extern __shared__ __align__(128) char dynamic[];
  let_next_kernel_begin();
  const BatchWork work(s);
  // Panels of wgmma begin at multiples of 1024 bytes.
  char* const shared = dynamic + ((1024u - (shared_address(dynamic) & 1023u)) & 1023u);
  char* const x = shared;
  float* const parts = reinterpret_cast<float*>(shared + s.parts_at);
  float* const exchanged =
      reinterpret_cast<float*>(shared + s.main_bytes);
  auto* const barriers = reinterpret_cast<uint64_t*>(exchanged + (2 * kMostBlocks + 2) * kRows);
  const unsigned row_barrier = shared_address(barriers), sum_barrier = shared_address(barriers + 1);
  constexpr int kColumns = kGroups * kN;  // of a pass
  const int passes = s.passes;
  const auto pass_tiles = [&](int pass) {
    return max(0, min(kColumns / kTile, work.tiles - pass * (kColumns / kTile)));
  };
  const int each = kRows >> s.log_blocks;
  const int own_rows = max(0, min(each, static_cast<int>(p.product.rows) - work.rank * each));
  const auto sum_bytes = static_cast<unsigned>((own_rows << s.log_blocks) * s.part_stride * 4);
  if (work.thread == 0) {
    mbarrier_init(barriers, 1);
    mbarrier_init(barriers + 1, 1);
    publish_barriers();
    if (p.has_norm) expect_bytes(row_barrier, BatchStager<E, false>::exchanged_bytes(p, s, own_rows));
    expect_bytes(sum_barrier, sum_bytes);
  }
  BatchRing<E, kN, kWith == With::kMore> ring{p, s, work, shared_address(shared + s.x_bytes),
                                              passes * work.chunks};
#pragma unroll 1
  for (int i = 0; i < s.stages; ++i) ring.ask();
  char* const constants = reinterpret_cast<char*>(barriers + 2);
  const BatchStager<E, kWith == With::kGate> stager(p, s, work, x, exchanged, constants,
                                                    row_barrier);
  stager.load_constants(constants);
  cluster_sync();  // all blocks run, and their barriers wait for bytes
  wait_for_kernels_before();
  stager.run();
  float* const staged = reinterpret_cast<float*>(shared + s.staged_at);
  // Mostly all weights are under way by now: then one barrier is enough.
  const bool is_all = ring.asked == ring.items;
  if (is_all) wait_for_copies<0>();
  hopper::fence_async_proxy();
  __syncthreads();

  const unsigned x_at = shared_address(x);
  int slot = 0;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    float d[kN / 8][4];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < work.chunks; ++c) {
      if (!is_all) {
        wait_for_oldest(s.stages);
        hopper::fence_async_proxy();
        hopper::named_barrier_sync(1 + work.group, kGroupThreads);
      }
      const auto a = hopper::Operand::rows_inner(x_at + static_cast<unsigned>(c * kPanelBytes));
      const auto b = hopper::Operand::rows_inner(ring.item(slot));
      hopper::fence_products();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        hopper::Product<E, kN>::shared(d, a.advance(32 * k), b.advance(32 * k), true);
      }
      hopper::commit_products();
      slot = slot + 1 == s.stages ? 0 : slot + 1;
      if (!is_all) {
        if (ring.asked < ring.items) {
          hopper::wait_for_products<0>();
          hopper::named_barrier_sync(1 + work.group, kGroupThreads);
        }
        ring.ask();
      }
    }
    const BatchOutput<E> output(p, s, work, pass * (kColumns / kTile), pass_tiles(pass));
    hopper::wait_for_products<0>();
    hopper::keep(d);
    // The blocks have read x and the weights, and the sums before, and wait for the next ones.
    if (pass > 0 && work.thread == 0) expect_bytes(sum_barrier, sum_bytes);
    const bool meets = pass > 0 || s.parts_at < s.x_bytes + s.ring_bytes;
    if (meets) cluster_arrive();
    if (pass == 0) {
      __syncthreads();
    } else {
      cluster_wait();
    }
    leave_sums<kN>(d, s, work, pass_tiles(pass) * kTile, staged);
    if (s.scales_sums && pass == 0) {
      wait_for_bytes(row_barrier, 0);
      stager.find_factors();
    }
    hopper::fence_async_proxy();
    __syncthreads();
    if (meets && pass == 0) cluster_wait();
    send_sums(p, s, work, shared_address(staged), shared_address(parts), sum_barrier);
    output.run(parts, stager.factors,
               [&] { wait_for_bytes(sum_barrier, static_cast<unsigned>(pass % 2)); });
  }
  wait_for_copies<0>();
}

template <class E, int kN, With kWith>
cudaError_t launch(const FusedProductParams& p, const BatchShape& s, cudaStream_t stream) {
  constexpr auto* kKernel = &batch_product_kernel<E, kN, kWith>;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(s.shared_bytes()));
  const dim3 grid(static_cast<unsigned>(s.clusters * s.blocks));
  switch (s.blocks) {
    case 2:
      return launch_in_chain<kKernel, 2>(grid, dim3(kThreads), s.shared_bytes(), stream, p, s);
    case 4:
      return launch_in_chain<kKernel, 4>(grid, dim3(kThreads), s.shared_bytes(), stream, p, s);
    default:
      return launch_in_chain<kKernel, 8>(grid, dim3(kThreads), s.shared_bytes(), stream, p, s);
  }
}

}  // namespace

cudaError_t batch_product_runs(bool* runs) {
  return can_cluster<&batch_product_kernel<__nv_bfloat16, 32, With::kNothing>>(runs);
}

cudaError_t batch_product_fits(const FusedProductParams& p, bool* fits) {
  TIDEGATE_RETURN_IF_CUDA_ERROR(batch_product_runs(fits));
  if (!*fits) return cudaSuccess;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  *fits = shape_of(p, limits).blocks > 0;
  return cudaSuccess;
}

cudaError_t batch_product_cuda(const FusedProductParams& p, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const BatchShape s = shape_of(p, limits);
  return dispatch_16_bit(p.product.dtype, [&]<class E>() {
    const auto with = [&]<With kWith>() {
      switch (s.columns) {
        case 32:
          return launch<E, 32, kWith>(p, s, stream);
        case 48:
          return launch<E, 48, kWith>(p, s, stream);
        case 64:
          return launch<E, 64, kWith>(p, s, stream);
        default:
          return launch<E, 96, kWith>(p, s, stream);
      }
    };
    return p.gate != nullptr         ? with.template operator()<With::kGate>()
           : p.more[0].w != nullptr ? with.template operator()<With::kMore>()
                                    : with.template operator()<With::kNothing>();
  });
}

}  // namespace tidegate::kernels::product
