#pragma once

// The states at the boundaries of chunks: S before each chunk, forward in time, and D after each
// chunk, backwards. D is dL/dS at the chunk's end e through what comes later only, the later tokens
// and the final state: diag(f_{e+1}) dS_{e+1}, where the dS_e of docs/ops has the output of token e
// as well.
//
//   S = diag(total) S + k~^T v      D = diag(total) D + q~^T do      a sub-chunk at a time
//
// A block of threads has a tile of 32 x 64, or 32 x 32, of one head's state in registers, 4 x 4 or
// 2 x 4 a thread, and goes through a segment of a sequence. While it takes up a sub-chunk, those of
// the next three are on their way to shared memory.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/fp32_chunks/chunk_factors.cuh"
#include "kernels/gla/cuda/fp32_chunks/tile_products.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

constexpr int kStateRows = 32;
constexpr int kDirections = 2;  // S and D

/// Columns of a tile: no more than a small head has, so that none of its threads is idle.
__host__ __device__ inline int state_columns(int64_t value_dim) {
  return value_dim <= 32 ? 32 : 64;
}

struct StateScan {
  GlaParams params = {};
  HeadSeries d_o = {};  // backwards
  ChunkFactors factors = {};
  TimeTiles chunks = {};    // in which states are kept
  TimeTiles segments = {};  // whole chunks each; a sequence where time is not divided
  const void* initial[kDirections] = {};
  void* final[kDirections] = {};    // h_final and dh0; null: not asked for
  float* states[kDirections] = {};  // [chunk index, H, K, V]
  // Where time is divided, [segment index, H, K, V] and [segment index, H, K]. A first launch, of
  // maps, finds what a segment makes of zero, and the product of its decays; in the second a
  // segment starts from its place in segment_states.
  float* segment_states[kDirections] = {};
  float* segment_decays[kDirections] = {};
  bool divided = false, maps = false;
  // Whether this is launched after outputs that let it begin when the factors are there: it needs
  // nothing of these, and waits for their end at its own.
  bool runs_beside = false;

  __host__ __device__ int row_tiles() const {
    return static_cast<int>((params.key_dim + kStateRows - 1) / kStateRows);
  }
  __host__ __device__ int column_tiles() const {
    const int columns = state_columns(params.value_dim);
    return (static_cast<int>(params.value_dim) + columns - 1) / columns;
  }
};

/// A sub-chunk in shared memory, of which there are four.
constexpr int kStateStages = 4;
template <int kColumns>
struct StateStage {
  float factor[kTokens][kStateRows];  // k~ or q~
  float value[kTokens][kColumns];
  float total[kStateRows];
};

/// Threads of a block, which have kRows rows and four columns each.
constexpr int state_threads(int rows, int columns) { return kStateRows / rows * (columns / 4); }

/// One tile's way through a segment. kAdjoint: D.
template <int kRows, int kColumns, bool kAdjoint>
class StateTile {
 public:
  using Stage = StateStage<kColumns>;

  __device__ StateTile(const StateScan& w, Stage (&stages)[kStateStages])
      : w_(w),
        p_(w.params),
        stages_(stages),
        column_tile_(static_cast<int>(blockIdx.x) % w.column_tiles()),
        row_tile_(static_cast<int>(blockIdx.x) / w.column_tiles() % w.row_tiles()),
        first_row_(row_tile_ * kStateRows),
        first_column_(column_tile_ * kColumns),
        index_(static_cast<int>(blockIdx.x / (w.column_tiles() * w.row_tiles()) / p_.heads)),
        head_(blockIdx.x / (w.column_tiles() * w.row_tiles()) % p_.heads),
        segment_(find_time_tile(w.segments, index_)),
        chunk_(w.factors.chunk),
        first_chunk_(first_tile_index(w.chunks, static_cast<int>(segment_.sequence.index)) +
                     chunk_.chunk_of(segment_.first / kTokens)),
        v_(p_.v, segment_.sequence, p_.layout.reverse, head_),
        d_o_(w.d_o, segment_.sequence, p_.layout.reverse, head_) {}

  __device__ void run() {
    if (!segment_.exists()) {
      return;
    }
    load_start();
    const bool ends_here = kAdjoint ? segment_.first == 0 : segment_.last();
    const bool needs_end = w_.maps || (ends_here && w_.final[kAdjoint] != nullptr);
    // The last chunk's end may be nobody's start.
    const int subs = (segment_.tokens + kTokens - 1) / kTokens;
    const int in_last = kAdjoint ? min(subs, chunk_.sub_chunks()) : chunk_.place_of(subs - 1) + 1;
    const int taken = needs_end || subs == 0 ? subs : subs - in_last;
    const auto place = [subs](int i) { return kAdjoint ? subs - 1 - i : i; };
    for (int i = 0; i < kStateStages - 1; ++i) {
      copy(place(i), i < taken, i);
    }
    for (int i = 0; i < taken; ++i) {
      Stage& stage = stages_[i % kStateStages];
      wait_for_stage(stage);
      __syncthreads();
      if (begins_chunk(place(i), i)) keep(chunk_.chunk_of(place(i)));
      copy(place(i + kStateStages - 1), i + kStateStages - 1 < taken,
           (i + kStateStages - 1) % kStateStages);
      take_up(stage);
    }
    if (taken < subs) keep(chunk_.chunk_of(place(taken)));
    if (w_.maps) {
      store(w_.segment_states[kAdjoint], index_);
      store_decay();
    } else if (needs_end) {
      store(static_cast<float*>(w_.final[kAdjoint]), seq_index());
    }
  }

 private:
  static constexpr int kThreads = state_threads(kRows, kColumns), kColumnThreads = kColumns / 4;
  static_assert(kThreads >= kTokens * kStateRows / 4, "one copy of factors a thread");

  __device__ int seq_index() const { return static_cast<int>(segment_.sequence.index); }
  __device__ int row(int i) const {
    return static_cast<int>(threadIdx.x) / kColumnThreads * kRows + i;
  }
  __device__ int column(int j) const {
    return static_cast<int>(threadIdx.x) % kColumnThreads * 4 + j;
  }

  // ---- sub-chunks, counted from the segment's start ----

  /// Whether this direction comes into a chunk by it, as its i-th one.
  __device__ bool begins_chunk(int sub, int i) const {
    return kAdjoint ? i == 0 || chunk_.is_last(sub) : chunk_.place_of(sub) == 0;
  }
  /// Stores the state in which this direction comes into a chunk.
  __device__ void keep(int chunk) const {
    if (!w_.maps) store(w_.states[kAdjoint], first_chunk_ + chunk);
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
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state_[i][j] = from != nullptr && exists(i, j) ? from[place(index, i) + column(j)] : 0.0f;
      }
    }
  }
  __device__ void store(float* to, int64_t index) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
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

  static constexpr int kValues = kTokens * kColumns / kThreads;

  /// Copies a sub-chunk's inputs to shared memory: a group of copies, empty where it does not
  /// exist.
  __device__ void copy(int sub, bool exists, int stage) const {
    if (exists) {
      copy_factors(sub, stages_[stage]);
      copy_values(segment_.first + sub * kTokens, stages_[stage]);
    }
    commit_copies();
  }

  __device__ void copy_factors(int sub, Stage& to) const {
    const SubChunkFactors from = w_.factors.of(first_chunk_, sub, head_);
    const int width = w_.factors.width;
    const int token = static_cast<int>(threadIdx.x) / 8,
              row = static_cast<int>(threadIdx.x) % 8 * 4;
    if (token < kTokens && first_row_ + row < width) {
      copy_async<16>(&to.factor[token][row],
                     (kAdjoint ? from.query : from.key) + token * width + first_row_ + row);
    }
    const auto own = static_cast<int>(threadIdx.x);
    if (own < kStateRows && first_row_ + own < width) {
      copy_async<4>(&to.total[own], from.total + first_row_ + own);
    }
  }

  __device__ void copy_values(int first, Stage& to) const {
    const int count = sub_chunk_tokens(first, segment_.end());
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int token = value_token(i), column = value_column(i);
      if (token < count && first_column_ + column < p_.value_dim) {
        copy_async<4>(&to.value[token][column],
                      (kAdjoint ? d_o_ : v_).at(first + token, first_column_ + column));
      } else {
        to.value[token][column] = 0;
      }
    }
  }
  __device__ int value_token(int i) const {
    return (static_cast<int>(threadIdx.x) + i * kThreads) / kColumns;
  }
  __device__ int value_column(int i) const { return static_cast<int>(threadIdx.x) % kColumns; }

  /// Waits for this thread's copies to the next stage, and activates its values.
  __device__ void wait_for_stage(Stage& stage) const {
    wait_for_copies<kStateStages - 2>();
    if (!kAdjoint && p_.v_activation != InputActivation::kNone) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        float& v = stage.value[value_token(i)][value_column(i)];
        v = activate<GateMath<float, false>>(p_.v_activation, v);
      }
    }
  }

  __device__ void take_up(const Stage& from) {
    if (w_.maps && threadIdx.x < kStateRows) {
      decay_ = decay_ * from.total[threadIdx.x];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float total = from.total[row(i)];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state_[i][j] *= total;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float xs[kRows], ys[4];
      load_rows(&from.factor[t][row(0)], xs);
      load_rows(&from.value[t][column(0)], ys);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          state_[i][j] = fmaf(xs[i], ys[j], state_[i][j]);
        }
      }
    }
  }

  const StateScan& w_;
  const GlaParams& p_;
  Stage (&stages_)[kStateStages];
  const int column_tile_, row_tile_, first_row_, first_column_;
  const int index_;  // of the segment
  const int64_t head_;
  const TimeTile segment_;
  const ChunkSize chunk_;
  const int64_t first_chunk_;  // its index
  const FloatRows v_, d_o_;
  float state_[kRows][4];
  Precise<float> decay_ = {1.0f, 0.0f};  // of the segment, a row in each of the first threads
};

/// blockIdx.y: the direction, of as many as there are; S alone in the forward pass.
template <int kRows, int kColumns>
__global__ void __launch_bounds__(state_threads(kRows, kColumns),
                                  state_threads(kRows, kColumns) == 128 ? 6 : 2)
    chunk_states_kernel(const __grid_constant__ StateScan w) {
  __shared__ __align__(16) StateStage<kColumns> stages[kStateStages];
  if (!w.runs_beside) wait_for_kernels_before();
  if (blockIdx.y == 0) {
    StateTile<kRows, kColumns, false>(w, stages).run();
  } else {
    StateTile<kRows, kColumns, true>(w, stages).run();
  }
  if (w.runs_beside) wait_for_kernels_before();
}

}  // namespace tidegate::kernels::gla::fp32_chunks
