#pragma once

// The prologue of a batch's fused product: a block's part of the rows of x, and what a norm makes
// of it. See batch_product.cu.

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/product/cuda/batch_shape.cuh"

namespace tidegate::kernels::product {

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
  float *sums, *squares;   // [block][row], which the blocks fill
  float *factors, *means;  // [row]
  const char* constants;   // of the norm: [weight or bias][pack of the block's part]
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
        squares(sums + kMostClusterBlocks * kBatchRows),
        factors(squares + kMostClusterBlocks * kBatchRows),
        means(factors + kBatchRows),
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
    return {
        reinterpret_cast<const uint4*>(constants)[kind * count + chunk * (kChunk / kPack) + pack]};
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
            raw[c][i] = this->load(p.product.x, p.product.stride_x, first_row + i,
                                   channels_pack(first + c));
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
    const unsigned to = shared_address(at + work.rank * kBatchRows + row);
    const int first = s.scales_sums ? row * s.blocks / kBatchRows : 0;
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
        for_each([&](int i, int, const float (&u)[kPack]) {
          sum[i] += ((u[0] + u[1]) + (u[2] + u[3])) + ((u[4] + u[5]) + (u[6] + u[7]));
        });
        const float part = width(work.rank), own = part > 0 ? summed(sum) / part : 0.0f;
        exchange(sums, own);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) mean[i] = __shfl_sync(~0u, own, work.lane / 8 * 8 + 4 * i);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) square[i] = 0.0f;
      for_each([&](int i, int, const float (&u)[kPack]) { add_squares(u, mean[i], square[i]); });
    }
    exchange(squares, summed(square));
  }

  /// Of the parts of all blocks, in their order; of all rows, or of the block's own.
  __device__ void find_factors() const {
    const int row = work.thread;
    if (row >= p.product.rows) return;
    if (s.scales_sums && row * s.blocks / kBatchRows != work.rank) return;
    const auto channels = static_cast<float>(p.product.inner);
    float mean = 0.0f, square = 0.0f;
    if (p.norm_kind == norm::NormKind::kLayer) {
#pragma unroll 1
      for (int rank = 0; rank < s.blocks; ++rank) {
        mean = fmaf(width(rank), sums[rank * kBatchRows + row], mean);
      }
      mean /= channels;
#pragma unroll 1
      for (int rank = 0; rank < s.blocks; ++rank) {
        const float off = sums[rank * kBatchRows + row] - mean;
        square = fmaf(width(rank), off * off, square);
      }
    }
#pragma unroll 2
    for (int rank = 0; rank < s.blocks; ++rank) square += squares[rank * kBatchRows + row];
    factors[row] = rsqrtf(square / channels + static_cast<float>(p.eps));
    means[row] = mean;
  }

  __device__ void norm() const {
    for_each([&](int i, int chunk, float (&u)[kPack]) {
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
    for_each([&](int i, int chunk, float (&u)[kPack]) {
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

}  // namespace tidegate::kernels::product
