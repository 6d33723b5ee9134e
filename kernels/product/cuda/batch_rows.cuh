#pragma once

// The prologue of a batch's fused product: a block's part of the rows of x, and what a norm makes
// of it. See batch_product.cu.

#include "kernels/common/cuda/between_blocks.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/product/cuda/batch_shape.cuh"

namespace tidegate::kernels::product {

/// The block's part of the rows of x, normed, into its panels. Eight lanes share a row's packs of a
/// chunk, and have two rows; a warp has eight.
///
/// Where a norm's factor is applied to the sums, x is multiplied as it is, or times what the norm
/// multiplies besides, and blocks need not meet before the products; the squares that the factor is
/// made of are summed up meanwhile. Of other norms the blocks tell each other their sums, by stores
/// into each other's shared memory.
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
  // [block][row], which the blocks fill; squares of a factor that is applied to the sums: [row]
  float *sums, *squares;
  float *factors, *means;  // [row]
  const char* constants;   // of the norm: [weight or bias][pack of the block's part]
  unsigned barrier;
  int first_row, pack;  // of the lane; of a chunk
  // The norm's parameters for the lane's packs of the block's first chunk, read before x is there.
  const E* from[kOwn];
  unsigned to[kOwn];  // bytes into the panels

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
        pack(own.lane % 8) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first_row + i < p.product.rows ? first_row + i : 0;
      from[i] = static_cast<const E*>(p.product.x) + row * p.product.stride_x;
      from[i] += channels_pack(0) < this->packs() ? channels_pack(0) * kPack : 0;
      to[i] = place_in_item(first_row + i, pack);
    }
  }

  __device__ int channels_pack(int chunk) const {
    return (work.first_chunk + chunk) * (kChunk / kPack) + pack;
  }
  __device__ bool exists(int i, int chunk) const {
    return first_row + i < p.product.rows && channels_pack(chunk) < this->packs();
  }
  __device__ uint4* place(int i, int chunk) const {
    return reinterpret_cast<uint4*>(x + chunk * kPanelBytes + place_in_item(first_row + i, pack));
  }

  /// Reads the norm's parameters, which no kernel of the chain writes.
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

  /// Stages rows as they are, by asynchronous copies, with zeros where there is no row or channel.
  __device__ void copy() const {
    const unsigned panels = shared_address(x);
#pragma unroll kInFlight
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool is_there = exists(i, chunk);
        copy_async_or_zero(panels + to[i] + static_cast<unsigned>(chunk * kPanelBytes),
                           from[i] + (is_there ? chunk * kChunk : 0), is_there);
      }
    }
    commit_copies();
  }

  /// Stages what make(i, chunk, x, gate) makes of the rows in registers, and adds up the squares of
  /// x.
  template <class Make>
  __device__ void stage(float (&square)[kOwn], Make make) const {
#pragma unroll 1
    for (int first = 0; first < work.chunks; first += kInFlight) {
      Row raw[kInFlight][kOwn], gates[kInFlight][kOwn];
#pragma unroll
      for (int c = 0; c < kInFlight; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          raw[c][i] = gates[c][i] = {};
          if (first + c < work.chunks && exists(i, first + c)) {
            const int row = first_row + i, at = channels_pack(first + c);
            raw[c][i] = Reader::load(p.product.x, p.product.stride_x, row, at);
            if (kGated && s.scales_sums) {
              gates[c][i] = Reader::load(p.gate, p.stride_gate, row, at);
            }
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kInFlight; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (first + c >= work.chunks) continue;
          float u[kPack];
#pragma unroll
          for (int v = 0; v < kPack; ++v) u[v] = raw[c][i].get(v);
          add_squares(u, 0.0f, square[i]);
          *place(i, first + c) = make(first + c, raw[c][i], gates[c][i]);
        }
      }
    }
  }
  /// Multiplies by everything that the norm does except the row's factor.
  __device__ uint4 weighed(int chunk, Row raw, Row logits) const {
    const Row weight = constant_at(0, chunk);
    float u[kPack];
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      u[v] = raw.get(v) * (p.norm_weight != nullptr ? weight.get(v) : 1.0f);
    }
    if constexpr (kGated) this->gate(logits, u);
    return kernels::pack<E, kPack>(u).bits;
  }

  /// Calls visit(i, chunk, u) with each of the lane's packs of what is normed.
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

  /// The sum over the eight lanes of a row, for row lane / 4 % 2 of the two that each lane has.
  __device__ float summed(float (&values)[kOwn]) const {
    scatter_sums<kOwn, 4>(values, work.lane);
    return values[0];
  }

  /// Stores a number into the shared memory of every block of the cluster.
  __device__ void exchange(float* at, float mine) const {
    if (work.lane % 4 != 0) return;
    const int row = first_row + work.lane / 4 % 2;
    if (row >= p.product.rows) return;
    const unsigned to = shared_address(at + work.rank * kBatchRows + row);
#pragma unroll 1
    for (int rank = 0; rank < s.blocks; ++rank) {
      store_remote(address_in_block(to, rank), mine, address_in_block(barrier, rank));
    }
  }

  /// How many bytes of a block's shared memory the cluster's blocks fill.
  __device__ static unsigned exchanged_bytes(const FusedProductParams& p, const BatchShape& s) {
    return static_cast<unsigned>((static_cast<int>(p.product.rows) << s.log_blocks) *
                                 (p.norm_kind == norm::NormKind::kLayer ? 8 : 4));
  }

  /// The number of channels in a block's part of the rows.
  __device__ float width(int rank) const {
    const int inner = static_cast<int>(p.product.inner);
    const int begin = (s.chunks * rank >> s.log_blocks) * kChunk;
    const int end = (s.chunks * (rank + 1) >> s.log_blocks) * kChunk;
    return static_cast<float>(min(end, inner) - min(begin, inner));
  }

  /// Sends the block's own sums to all blocks. `square`: the squares of x itself.
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

  /// Finds the norm's mean and factor of each row from the sums that all blocks have left, which it
  /// adds in the blocks' order.
  __device__ void find_factors() const {
    const int row = work.thread;
    if (row >= p.product.rows) return;
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

  /// The block's share of the sums of row `thread` that an earlier kernel has left.
  __device__ float given_squares() const {
    const int parts = static_cast<int>(p.square_parts), row = work.thread;
    const int first = parts * work.rank >> s.log_blocks,
              end = parts * (work.rank + 1) >> s.log_blocks;
    float sum = 0.0f;
#pragma unroll 4
    for (int part = first; part < end && row < kBatchRows; ++part) {
      sum += p.squares[part * kBatchRows + row];
    }
    return sum;
  }

  /// Stages the rows. Afterwards the thread's copies may still be under way, and so may other
  /// threads' writes. `square` becomes what leave_squares() takes.
  __device__ void run(float (&square)[kOwn]) const {
    if (s.copies_x) {
      copy();
      if (p.squares != nullptr) square[0] = given_squares();
      return;
    }
    if (s.scales_sums) {
      return stage(square,
                   [&](int chunk, Row raw, Row logits) { return weighed(chunk, raw, logits); });
    }
    stage(square, [](int, Row raw, Row) { return raw.bits; });
    sum_rows(square);
    wait_for_bytes(barrier, 0);
    find_factors();
    __syncthreads();
    norm();
  }

  /// Where a factor is applied to the sums: the block's part of each row's squares, which others
  /// read once the blocks have met.
  __device__ void add_squares_of_copies(float (&square)[kOwn]) const {
    if (!s.scales_sums || !s.copies_x || p.squares != nullptr) return;
#pragma unroll kInFlight
    for (int chunk = 0; chunk < work.chunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const Row raw{*reinterpret_cast<const uint4*>(x + to[i] + chunk * kPanelBytes)};
        float u[kPack];
#pragma unroll
        for (int v = 0; v < kPack; ++v) u[v] = raw.get(v);
        add_squares(u, 0.0f, square[i]);
      }
    }
  }
  __device__ void leave_squares(float (&square)[kOwn]) const {
    if (!s.scales_sums) return;
    if (p.squares != nullptr) {
      if (work.thread < kBatchRows) squares[work.thread] = square[0];
      return;
    }
    const float mine = summed(square);
    if (work.lane % 4 == 0) squares[first_row + work.lane / 4 % 2] = mine;
  }
};

}  // namespace tidegate::kernels::product
