#pragma once

// o of every chunk from S before it; and dv from D after it, which is the same backwards:
//
//   o  = q~ S + sum over s <= t of scores(t, s) v_s       S = total S + k~^T v
//   dv = k~ D + sum over t >= s of scores(t, s) do_t      D = total D + q~^T do
//
// A block of threads has a chunk of one head, or a whole sequence, and a tile of 32 or 64 columns
// of V. It holds their states, transposed, and takes a sub-chunk of 16 tokens at a time, whose
// factors and values have been copied to shared memory during the one before:
//
//   multiply   q~ S in split-K partial sums, of some of the channels a warp
//   finish     the sum of these, scores times values, the next state

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/fp32_chunks/chunk_factors.cuh"
#include "kernels/gla/cuda/fp32_chunks/tile_products.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

struct ChunkOutputs {
  GlaParams params = {};
  HeadSeries values = {};  // v or do
  HeadSeries out = {};     // o or dv
  ChunkFactors factors = {};
  TimeTiles chunks = {};
  TimeTiles blocks = {};          // what a block of threads takes: chunks, or whole sequences
  const float* states = nullptr;  // of chunks: [chunk index, H, K, V], S before or D after them
  // Where a block takes a whole sequence: the state before and after it, [N, H, K, V] (null means
  // zero, and not asked for), and `kept`, which gets D after every chunk, [chunk index, H, K, V].
  bool whole = false;
  const float* initial = nullptr;
  float *final = nullptr, *kept = nullptr;
  // Whether the next kernel runs beside this one (its runs_beside). One that waits at its start is
  // not let begin early: its waiting blocks would only take places.
  bool next_runs_beside = false;
};

/// A sub-chunk in shared memory: rows of K channels, `stride` apart, but for scores and values.
struct OutputStage {
  float *query, *key, *total, *scores, *value;

  __host__ __device__ OutputStage(float* memory, int stride)
      : query(memory),
        key(query + kTokens * stride),
        total(key + kTokens * stride),
        scores(total + stride),
        value(scores + kTokens * kTokens) {}

  __host__ __device__ static int floats(int stride, int columns) {
    return (2 * kTokens + 1) * stride + kTokens * (kTokens + columns);
  }
};

/// A block's shared memory, in floats. kTiles: of 32 columns of V.
template <int kTiles>
struct OutputShared {
  static constexpr int kColumns = 32 * kTiles, kShares = kWarps / kTiles;
  int stride;               // of rows of K channels
  float *state, *partials;  // [columns] rows of K; split-K sums of the product, a warp each
  float* stages;            // two

  __host__ __device__ OutputShared(float* memory, int key_dim)
      : stride(padded_stride(key_dim)),
        state(memory),
        partials(state + kColumns * stride),
        stages(partials + kWarps * kPartialSize) {}

  __device__ OutputStage stage(int i) const {
    return {stages + i * OutputStage::floats(stride, kColumns), stride};
  }

  static int bytes(int key_dim) {
    const int stride = padded_stride(key_dim);
    return (kColumns * stride + kWarps * kPartialSize + 2 * OutputStage::floats(stride, kColumns)) *
           static_cast<int>(sizeof(float));
  }
};

/// A block's work. kAdjoint: dv.
template <int kTiles, bool kAdjoint>
class OutputTile {
 public:
  using Shared = OutputShared<kTiles>;
  static constexpr int kColumns = Shared::kColumns;

  __device__ OutputTile(const ChunkOutputs& w, float* memory)
      : w_(w),
        p_(w.params),
        shared_(memory, static_cast<int>(p_.key_dim)),
        key_dim_(static_cast<int>(p_.key_dim)),
        value_dim_(static_cast<int>(p_.value_dim)),
        width_(w.factors.width),
        tiles_((value_dim_ + kColumns - 1) / kColumns),
        first_column_(static_cast<int>(blockIdx.x) % tiles_ * kColumns),
        index_(static_cast<int>(blockIdx.x / tiles_ / p_.heads)),
        head_(blockIdx.x / tiles_ % p_.heads),
        block_(find_time_tile(w.blocks, index_)),
        first_chunk_(w.whole ? first_tile_index(w.chunks, static_cast<int>(block_.sequence.index))
                             : index_),
        inputs_(p_, block_.sequence, p_.layout.reverse, head_),
        values_(w.values, block_.sequence, p_.layout.reverse, head_),
        out_(w.out, block_.sequence, p_.layout.reverse, head_) {}

  __device__ void run() {
    if (!block_.exists() || (block_.tokens == 0 && !w_.whole)) {
      return;
    }
    const int subs = (block_.tokens + kTokens - 1) / kTokens;
    load_state(w_.whole ? w_.initial : w_.states);
    if (subs > 0) copy(place(0, subs), 0);
    for (int i = 0; i < subs; ++i) {
      const int sub = place(i, subs), stage = i % 2;
      wait_for_stage(stage);
      __syncthreads();
      if (kAdjoint && w_.kept != nullptr && (i == 0 || w_.factors.chunk.is_last(sub))) {
        store_state(w_.kept, first_chunk_ + w_.factors.chunk.chunk_of(sub));
      }
      if (i + 1 < subs) copy(place(i + 1, subs), 1 - stage);
      multiply(stage);
      __syncthreads();
      finish(sub, stage);
      if (i + 1 < subs || w_.final != nullptr) take_up(stage);
    }
    if (w_.final != nullptr) {
      commit_copies();  // of the state, where there was no sub-chunk
      wait_for_copies<0>();
      __syncthreads();
      store_state(w_.final, block_.sequence.index);
    }
  }

 private:
  /// The i-th sub-chunk in this direction's order.
  __device__ int place(int i, int subs) const { return kAdjoint ? subs - 1 - i : i; }
  __device__ int step(int sub) const { return block_.first + sub * kTokens; }
  __device__ int count(int sub) const { return sub_chunk_tokens(step(sub), block_.end()); }

  // ---- states: [columns of V][K], where device memory has [.., H, K, V] ----

  /// A warp has 4 rows of 8 neighbours each.
  template <class Visit>
  __device__ void for_each_element(Visit visit) const {
    const int lane = lane_index();
    for (int item = warp_index(); item < width_ / 4 * (kColumns / 8); item += kWarps) {
      const int k = item / (kColumns / 8) * 4 + lane / 8, v = item % (kColumns / 8) * 8 + lane % 8;
      visit(&shared_.state[v * shared_.stride + k], k < key_dim_ && first_column_ + v < value_dim_,
            int64_t{k} * value_dim_ + v);
    }
  }
  __device__ int64_t state_place(int64_t index) const {
    return (index * p_.heads + head_) * key_dim_ * value_dim_ + first_column_;
  }
  /// Copies, which the next group of copies has with it.
  __device__ void load_state(const float* from) const {
    const int64_t first = state_place(w_.whole ? block_.sequence.index : index_);
    for_each_element([&](float* element, bool exists, int64_t at) {
      if (exists && from != nullptr) {
        copy_async<4>(element, from + first + at);
      } else {
        *element = 0;
      }
    });
  }
  __device__ void store_state(float* to, int64_t index) const {
    const int64_t first = state_place(index);
    for_each_element([&](const float* element, bool exists, int64_t at) {
      if (exists) to[first + at] = *element;
    });
  }

  // ---- a sub-chunk's copies to shared memory ----

  __device__ void copy(int sub, int stage) const {
    const OutputStage to = shared_.stage(stage);
    const SubChunkFactors from = w_.factors.of(first_chunk_, sub, head_);
    const auto thread = static_cast<int>(threadIdx.x);
    // Rows lie one after another: those of q~ and of k~.
    const int fours = width_ / 4;
    int token = thread / fours, column = thread % fours;
    const int tokens_on = kThreads / fours, columns_on = kThreads % fours;
    while (token < 2 * kTokens) {
      float* const row = token < kTokens ? to.query : to.key;
      copy_async<16>(row + token % kTokens * shared_.stride + column * 4,
                     from.query + (token * fours + column) * 4);
      token += tokens_on;
      column += columns_on;
      if (column >= fours) {
        column -= fours;
        ++token;
      }
    }
    for (int i = thread; i < fours; i += kThreads) {
      copy_async<16>(to.total + i * 4, from.total + i * 4);
    }
    if (thread < kTokens * kTokens / 4) {
      copy_async<16>(to.scores + thread * 4, from.scores + thread * 4);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (value_exists(i, sub)) {
        copy_async<4>(to.value + value_at(i), value_address(i, sub));
      } else {
        to.value[value_at(i)] = 0;
      }
    }
    commit_copies();
  }

  static constexpr int kValues = kTokens * kColumns / kThreads;
  __device__ int value_at(int i) const { return static_cast<int>(threadIdx.x) + i * kThreads; }
  __device__ bool value_exists(int i, int sub) const {
    return value_at(i) / kColumns < count(sub) &&
           first_column_ + value_at(i) % kColumns < value_dim_;
  }
  __device__ const float* value_address(int i, int sub) const {
    return values_.at(step(sub) + value_at(i) / kColumns, first_column_ + value_at(i) % kColumns);
  }

  /// Waits for this thread's copies to a stage, and activates its values.
  __device__ void wait_for_stage(int stage) const {
    wait_for_copies<0>();
    if (!kAdjoint && p_.v_activation != InputActivation::kNone) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        // What does not exist meets keys and scores of zero alone.
        float& v = shared_.stage(stage).value[value_at(i)];
        v = inputs_.value_of(v);
      }
    }
  }

  // ---- the products ----

  /// q~ S or k~ D: warps that share columns of V have some of the channels each.
  __device__ void multiply(int stage) const {
    const int tile = warp_index() / Shared::kShares;
    const ColumnShare share(width_, warp_index() % Shared::kShares, Shared::kShares);
    const OutputStage from = shared_.stage(stage);
    PartialProduct<4> product;
    product.add(kAdjoint ? from.key : from.query, shared_.state + tile * 32 * shared_.stride,
                shared_.stride, share.first, share.last);
    product.template store<kPartialStride>(shared_.partials + warp_index() * kPartialSize);
  }

  /// Outputs of 2 or 4 tokens a thread.
  __device__ void finish(int sub, int stage) const {
    constexpr int kOwn = kValues;
    const int column = static_cast<int>(threadIdx.x) % kColumns;
    const int token = static_cast<int>(threadIdx.x) / kColumns * kOwn;
    const float* partials = shared_.partials + column / 32 * Shared::kShares * kPartialSize;
    const OutputStage from = shared_.stage(stage);
    float sums[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sums[i] = sum_of_partials<Shared::kShares>(partials, token + i, column % 32);
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const float v = from.value[j * kColumns + column];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // Only pairs s <= t: a score of zero would still pass a NaN on.
        if (kAdjoint ? j >= token + i : j <= token + i) {
          const int at = kAdjoint ? (token + i) * kTokens + j : j * kTokens + token + i;
          sums[i] = fmaf(from.scores[at], v, sums[i]);
        }
      }
    }
    if (first_column_ + column >= value_dim_) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (token + i < count(sub)) {
        store(step(sub) + token + i, first_column_ + column, sums[i]);
      }
    }
  }

  __device__ void store(int step, int column, float x) const {
    if (kAdjoint && p_.v_activation != InputActivation::kNone) {
      x *= activation_slope<Inputs::Math>(p_.v_activation, inputs_.raw_value(step, column));
    }
    out_.store(step, column, x);
  }

  __device__ void take_up(int stage) const {
    const OutputStage from = shared_.stage(stage);
    update_state<8, DecayOf::kColumn>(shared_.state, shared_.state, from.total, from.value,
                                      kColumns, kAdjoint ? from.query : from.key, shared_.stride,
                                      kColumns, width_, static_cast<int>(threadIdx.x), kThreads);
  }

  const ChunkOutputs& w_;
  const GlaParams& p_;
  const Shared shared_;
  const int key_dim_, value_dim_;
  const int width_;  // channels, in whole fours
  const int tiles_, first_column_;
  const int index_;  // of the block's chunk or sequence
  const int64_t head_;
  const TimeTile block_;
  const int64_t first_chunk_;  // its index
  const Inputs inputs_;
  const FloatRows values_, out_;
};

template <int kTiles, bool kAdjoint>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_outputs_kernel(const __grid_constant__ ChunkOutputs w) {
  extern __shared__ __align__(16) float memory[];
  wait_for_kernels_before();
  if (w.next_runs_beside) let_next_kernel_begin();
  OutputTile<kTiles, kAdjoint>(w, memory).run();
}

}  // namespace tidegate::kernels::gla::fp32_chunks
