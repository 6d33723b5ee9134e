#pragma once

// The states at the boundaries of chunks: S before each chunk, forward in time, and D = dL/dS after
// each chunk, backwards.
//
//   S = diag(total) S + k~^T v      D = diag(total) D + q~^T do      a sub-chunk at a time
//
// A block of threads has a tile of 32 x 64 of one head's state in registers, 4 x 4 a thread, and
// goes through a segment of a sequence. While it takes up a sub-chunk, the next one's inputs are on
// their way to its registers; two buffers in shared memory pass them on.

#include "kernels/gla/cuda/fp32_chunks/chunk_factors.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

constexpr int kStateThreads = 128, kStateRows = 32, kStateColumns = 64;
constexpr int kDirections = 2;  // S and D

struct StateScan {
  GlaParams params = {};
  HeadSeries d_o = {};                // backwards
  ChunkFactors factors = {};
  TimeTiles chunks = {};              // in which states are kept
  TimeTiles segments = {};            // whole chunks each; a sequence where time is not divided
  const void* initial[kDirections] = {};
  void* final[kDirections] = {};      // h_final and dh0; null: not asked for
  float* states[kDirections] = {};    // [chunk index, H, K, V]
  // Where time is divided, [segment index, H, K, V] and [segment index, H, K]. A first launch, of
  // maps, finds what a segment makes of zero, and the product of its decays; in the second a
  // segment starts from its place in segment_states.
  float* segment_states[kDirections] = {};
  float* segment_decays[kDirections] = {};
  bool divided = false, maps = false;

  __host__ __device__ int row_tiles() const { return static_cast<int>((params.key_dim + kStateRows - 1) / kStateRows); }
  __host__ __device__ int column_tiles() const {
    return static_cast<int>((params.value_dim + kStateColumns - 1) / kStateColumns);
  }
};

/// A sub-chunk in shared memory.
struct StateBuffer {
  float factor[kTokens][kStateRows];  // k~ or q~
  float value[kTokens][kStateColumns];
  float total[kStateRows];
};

/// One tile's way through a segment. kAdjoint: D.
template <bool kAdjoint>
class StateTile {
 public:
  __device__ StateTile(const StateScan& w, StateBuffer (&buffers)[2])
      : w_(w),
        p_(w.params),
        buffers_(buffers),
        column_tile_(static_cast<int>(blockIdx.x) % w.column_tiles()),
        row_tile_(static_cast<int>(blockIdx.x) / w.column_tiles() % w.row_tiles()),
        first_row_(row_tile_ * kStateRows),
        first_column_(column_tile_ * kStateColumns),
        index_(static_cast<int>(blockIdx.x / (w.column_tiles() * w.row_tiles()) / p_.heads)),
        head_(blockIdx.x / (w.column_tiles() * w.row_tiles()) % p_.heads),
        segment_(find_time_tile(w.segments, index_)),
        inputs_(p_, segment_.sequence, p_.layout.reverse, head_),
        d_o_(w.d_o, segment_.sequence, p_.layout.reverse, head_) {}

  __device__ void run() {
    if (!segment_.exists()) {
      return;
    }
    load_start();
    const bool ends_here = kAdjoint ? segment_.first == 0 : segment_.last();
    const bool needs_end = w_.maps || (ends_here && w_.final[kAdjoint] != nullptr);
    // The last chunk's end may be nobody's start.
    const int taken = needs_end ? chunks() : chunks() - 1;
    if (taken > 0) {
      load(chunk_at(0), sub_at(chunk_at(0), 0));
      pass_on(0);
    }
    int buffer = 0;
    for (int c = 0; c < chunks(); ++c) {
      const int chunk = chunk_at(c), subs = sub_chunks(chunk);
      if (!w_.maps) {
        store(w_.states[kAdjoint], chunk_index(chunk));
      }
      if (c >= taken) break;
      for (int i = 0; i < subs; ++i) {
        __syncthreads();
        const bool same = i + 1 < subs, last = c + 1 == taken && !same;
        const int next = same || last ? chunk : chunk_at(c + 1);
        if (!last) load(next, sub_at(next, same ? i + 1 : 0));
        take_up(buffers_[buffer]);
        buffer ^= 1;
        if (!last) pass_on(buffer);
      }
    }
    if (w_.maps) {
      store(w_.segment_states[kAdjoint], index_);
      store_decay();
    } else if (needs_end) {
      store(static_cast<float*>(w_.final[kAdjoint]), seq_index());
    }
  }

 private:
  __device__ int seq_index() const { return static_cast<int>(segment_.sequence.index); }
  __device__ int row(int i) const { return static_cast<int>(threadIdx.x) / 16 * 4 + i; }
  __device__ int column(int j) const { return static_cast<int>(threadIdx.x) % 16 * 4 + j; }

  // ---- where the sub-chunks lie, in the order in which this direction takes them ----

  __device__ int chunk_tokens(int chunk) const {
    return min(kChunk, segment_.tokens - chunk * kChunk);
  }
  __device__ int sub_chunks(int chunk) const {
    return (chunk_tokens(chunk) + kTokens - 1) / kTokens;
  }
  /// The i-th sub-chunk of a chunk, and the c-th chunk, in this direction's order.
  __device__ int sub_at(int chunk, int i) const {
    return kAdjoint ? sub_chunks(chunk) - 1 - i : i;
  }
  __device__ int chunk_at(int c) const { return kAdjoint ? chunks() - 1 - c : c; }
  __device__ int chunks() const { return (segment_.tokens + kChunk - 1) / kChunk; }
  __device__ int64_t chunk_index(int chunk) const {
    return first_tile_index(w_.chunks, seq_index()) + segment_.first / kChunk + chunk;
  }

  // ---- states in device memory: [.., H, K, V] ----

  __device__ int64_t place(int64_t index, int i) const {
    return ((index * p_.heads + head_) * p_.key_dim + first_row_ + row(i)) * p_.value_dim +
           first_column_;
  }
  __device__ bool exists(int i, int j) const {
    return first_row_ + row(i) < p_.key_dim && first_column_ + column(j) < p_.value_dim;
  }
  __device__ void load_start() {
    const float* from = w_.maps      ? nullptr
                        : w_.divided ? w_.segment_states[kAdjoint]
                                     : static_cast<const float*>(w_.initial[kAdjoint]);
    const int64_t index = w_.divided ? index_ : seq_index();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state_[i][j] = from != nullptr && exists(i, j) ? from[place(index, i) + column(j)] : 0.0f;
      }
    }
  }
  __device__ void store(float* to, int64_t index) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (exists(i, j)) to[place(index, i) + column(j)] = state_[i][j];
      }
    }
  }
  __device__ void store_decay() const {
    const int row = static_cast<int>(threadIdx.x);
    if (column_tile_ == 0 && row < kStateRows && first_row_ + row < p_.key_dim) {
      w_.segment_decays[kAdjoint][(int64_t{index_} * p_.heads + head_) * p_.key_dim + first_row_ +
                                  row] = decay_.hi + decay_.lo;
    }
  }

  // ---- inputs ----

  static constexpr int kValues = kTokens * kStateColumns / kStateThreads;

  /// Asks for the inputs of a sub-chunk of a chunk of the segment.
  __device__ void load(int chunk, int sub) {
    const int first = segment_.first + chunk * kChunk + sub * kTokens;
    const int count = sub_chunk_tokens(first, segment_.end());
    const SubChunkFactors from = w_.factors.of(chunk_index(chunk), sub, head_);
    const int row = first_row_ + static_cast<int>(threadIdx.x) % 8 * 4;
    if (row < w_.factors.width) {
      factors_ = *reinterpret_cast<const float4*>(
          (kAdjoint ? from.query : from.key) +
          static_cast<int>(threadIdx.x) / 8 * w_.factors.width + row);
    }
    const int own = first_row_ + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kStateRows && own < w_.factors.width) {
      total_ = from.total[own];
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStateThreads;
      const int token = at / kStateColumns, column = first_column_ + at % kStateColumns;
      const bool exists = token < count && column < p_.value_dim;
      values_[i] = !exists    ? 0.0f
                   : kAdjoint ? d_o_.load<float>(first + token, column)
                              : inputs_.raw_value(first + token, column);
    }
  }

  /// From registers to shared memory.
  __device__ void pass_on(int buffer) {
    StateBuffer& to = buffers_[buffer];
    *reinterpret_cast<float4*>(&to.factor[threadIdx.x / 8][threadIdx.x % 8 * 4]) = factors_;
    if (threadIdx.x < kStateRows) {
      to.total[threadIdx.x] = total_;
      decay_ = decay_ * total_;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStateThreads;
      to.value[at / kStateColumns][at % kStateColumns] =
          kAdjoint ? values_[i] : inputs_.value_of(values_[i]);
    }
  }

  __device__ void take_up(const StateBuffer& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float total = from.total[row(i)];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state_[i][j] *= total;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float4 x = *reinterpret_cast<const float4*>(&from.factor[t][row(0)]);
      const float4 y = *reinterpret_cast<const float4*>(&from.value[t][column(0)]);
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          state_[i][j] = fmaf(xs[i], ys[j], state_[i][j]);
        }
      }
    }
  }

  const StateScan& w_;
  const GlaParams& p_;
  StateBuffer (&buffers_)[2];
  const int column_tile_, row_tile_, first_row_, first_column_;
  const int index_;  // of the segment
  const int64_t head_;
  const TimeTile segment_;
  const Inputs inputs_;
  const FloatRows d_o_;
  float state_[4][4];
  float4 factors_ = {};
  float total_ = 1.0f, values_[kValues];
  Precise<float> decay_ = {1.0f, 0.0f};  // of the segment, a row in each of the first threads
};

/// blockIdx.y: the direction, of as many as there are; S alone in the forward pass.
__global__ void __launch_bounds__(kStateThreads, 6)
    chunk_states_kernel(const __grid_constant__ StateScan w) {
  __shared__ __align__(16) StateBuffer buffers[2];
  if (blockIdx.y == 0) {
    StateTile<false>(w, buffers).run();
  } else {
    StateTile<true>(w, buffers).run();
  }
}

}  // namespace tidegate::kernels::gla::fp32_chunks
