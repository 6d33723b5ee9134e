#pragma once

// o of every chunk from the state before it; and dv, which is the same scan backwards with other
// names: keys for queries and queries for keys, do for v, D for S.
//
// A block of threads has a chunk of one head and a tile of 32 or 64 columns of V. It holds their
// states, transposed, and takes 16 tokens at a time:
//
//   prepare    lanes of four tokens (lane_tokens.cuh): q~ and k~, with the decays from the
//              sub-chunk's start and to its end, and the scores of pairs of tokens
//   multiply   q~ S, in parts that warps make of some channels each
//   finish     o = the sum of the parts + scores v, pairs s <= t alone; S = total S + k~^T v
//
// Scores, between token s and a later t, are dyadic: pairs of a lane's four tokens multiply their
// decays up; those of neighbouring groups of four, and of halves of eight, are products of factors
// with the decays to and from the boundary between them.

#include "kernels/gla/cuda/fp32_chunks/tile_products.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

struct ChunkOutputs {
  GlaParams params = {};
  HeadSeries values = {};          // v or do
  HeadSeries out = {};             // o or dv
  TimeTiles chunks = {};
  const float* states = nullptr;   // [chunk index, H, K, V]: S before or D after a chunk
  // Where the chunks are whole sequences: [N, H, K, V]; null means zero, and not asked for.
  bool whole = false;
  const float* initial = nullptr;
  float* final = nullptr;
};

/// The scores of a lane's channels, summed over them: all pairs of the 16 tokens whose product this
/// lane makes.
struct LaneScores {
  // Pairs t >= s of its own four tokens, t by t; 2 x 4 pairs of the group of four beside it with its
  // own; 4 x 4 pairs of a group of the other half with its own.
  static constexpr int kOwn = 10, kFours = 8, kEights = 16, kAll = kOwn + kFours + kEights;
  float sums[kAll] = {};

  /// Which group of the other half this lane makes pairs with: 3, 2, 0, 1.
  static __device__ int other_half(int group) { return group < 2 ? 3 - group : group - 2; }

  /// By all lanes of a warp: query and key with the decays within the group, and next to it.
  __device__ void add(const LaneTokens& tokens, const LaneDecays& decays, int group) {
    add_own(tokens);
    float query[kLaneTokens], key[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      query[i] = tokens.query[i] * decays.from_start(i);
      key[i] = tokens.key[i] * decays.to_end(i);
    }
    add_fours(query, key, group);
    // To and from the middle: past the group between, for the first and the last.
    const float past = group == 0 ? decays.total(1) : group == 3 ? decays.total(2) : 1.0f;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      query[i] *= past;
      key[i] *= past;
    }
    add_eights(query, key, group);
  }

  /// Adds up over the lanes of a warp that have the same group, and stores [s][t] of their pairs.
  __device__ void store(float* part, int group) {
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      for (int distance = kGroups; distance < 32; distance *= 2) {
        sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
      }
    }
    if (lane_index() >= kGroups) {
      return;
    }
    int at = 0;
    const int own = group * kLaneTokens, beside = group / 2 * 8;
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
#pragma unroll
      for (int s = 0; s <= t; ++s) {
        part[(own + s) * kStride + own + t] = sums[at++];
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int s = 0; s < kLaneTokens; ++s) {
        part[(beside + s) * kStride + beside + 4 + group % 2 * 2 + t] = sums[at++];
      }
    }
    const int other = other_half(group) * kLaneTokens;
    const int later = group < 2 ? other : own, earlier = group < 2 ? own : other;
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
#pragma unroll
      for (int s = 0; s < kLaneTokens; ++s) {
        part[(earlier + s) * kStride + later + t] = sums[at++];
      }
    }
  }

  static constexpr int kStride = kTokens + 4, kSize = kTokens * kStride;

 private:
  __device__ void add_own(const LaneTokens& tokens) {
    int at = 0;
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
#pragma unroll
      for (int s = 0; s <= t; ++s) {
        float decay = 1.0f;
#pragma unroll
        for (int u = s + 1; u <= t; ++u) {
          decay *= tokens.decay[u];
        }
        sums[at] = fmaf(tokens.query[t], tokens.key[s] * decay, sums[at]);
        ++at;
      }
    }
  }

  /// The lane of the earlier group makes the pairs of the later one's first two tokens, the lane of
  /// the later group those of its last two.
  __device__ void add_fours(const float (&query)[kLaneTokens], const float (&key)[kLaneTokens],
                            int group) {
    const bool earlier = group % 2 == 0;
    float other[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      other[i] = __shfl_xor_sync(~0u, earlier ? key[i] : query[i], 1);
    }
    int at = kOwn;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float q = earlier ? other[t] : query[2 + t];
#pragma unroll
      for (int s = 0; s < kLaneTokens; ++s) {
        sums[at] = fmaf(q, earlier ? key[s] : other[s], sums[at]);
        ++at;
      }
    }
  }

  __device__ void add_eights(const float (&query)[kLaneTokens], const float (&key)[kLaneTokens],
                             int group) {
    const bool earlier = group < 2;
    float other[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      other[i] = of_group(earlier ? key[i] : query[i], other_half(group));
    }
    int at = kOwn + kFours;
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
#pragma unroll
      for (int s = 0; s < kLaneTokens; ++s) {
        sums[at] = fmaf(earlier ? other[t] : query[t], earlier ? key[s] : other[s], sums[at]);
        ++at;
      }
    }
  }
};

/// A block's shared memory, in floats. kTiles: of 32 columns of V.
template <int kTiles>
struct OutputShared {
  static constexpr int kColumns = 32 * kTiles, kShares = kWarps / kTiles;
  int stride;                        // of rows of K channels
  float *state, *query, *key;        // [columns], [tokens], [tokens] rows of K
  float *total, *value;              // [K]; [tokens][columns]
  float *parts, *score_parts, *scores;  // of q~ S; of the scores, a warp each; [s][t]

  __host__ __device__ OutputShared(float* memory, int key_dim) : stride(padded_stride(key_dim)) {
    const auto take = [&memory](int count) {
      float* part = memory;
      memory += count;
      return part;
    };
    state = take(kColumns * stride);
    query = take(kTokens * stride);
    key = take(kTokens * stride);
    total = take(stride);
    value = take(kTokens * kColumns);
    parts = take(kWarps * kPartSize);
    score_parts = take(kWarps * LaneScores::kSize);
    scores = take(LaneScores::kSize);
    floats_ = memory;
  }

  static int bytes(int key_dim) {
    float* const none = nullptr;
    return static_cast<int>((OutputShared(none, key_dim).floats_ - none) * sizeof(float));
  }

 private:
  float* floats_;
};

/// A block's work. kValueGradient: dv.
template <int kTiles, bool kValueGradient>
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
        width_(rounded_to_fours(key_dim_)),
        tiles_((value_dim_ + kColumns - 1) / kColumns),
        first_column_(static_cast<int>(blockIdx.x) % tiles_ * kColumns),
        index_(static_cast<int>(blockIdx.x / tiles_ / p_.heads)),
        head_(blockIdx.x / tiles_ % p_.heads),
        chunk_(find_time_tile(w.chunks, index_)),
        inputs_(p_, chunk_.sequence, p_.layout.reverse, head_),
        values_(w.values, chunk_.sequence, p_.layout.reverse, head_),
        out_(w.out, chunk_.sequence, p_.layout.reverse, head_) {}

  __device__ void run() {
    if (!chunk_.exists() || (chunk_.tokens == 0 && !w_.whole)) {
      return;
    }
    const bool has_final = w_.final != nullptr;
    load_state(w_.whole ? w_.initial : w_.states);
    for (int first = 0; first < chunk_.tokens; first += kTokens) {
      const int count = sub_chunk_tokens(first, chunk_.tokens);
      prepare(first, count);
      __syncthreads();
      multiply();
      sum_scores();
      __syncthreads();
      finish(first, count);
      if (first + kTokens < chunk_.tokens || has_final) {
        update_state<8, DecayOf::kColumn>(shared_.state, shared_.state, shared_.total,
                                          shared_.value, kColumns, shared_.key, shared_.stride,
                                          kColumns, width_, static_cast<int>(threadIdx.x),
                                          kThreads);
      }
      __syncthreads();
    }
    if (has_final) {
      store_state();
    }
  }

 private:
  /// The step of the scan that is the j-th one here.
  __device__ int step(int j) const {
    return kValueGradient ? chunk_.end() - 1 - j : chunk_.first + j;
  }

  // States are [columns of V][K], where device memory has [K][V]: a warp has 4 rows of 8 neighbours
  // each.
  template <class Visit>
  __device__ void for_each_element(Visit visit) const {
    const int lane = lane_index();
    for (int item = warp_index(); item < width_ / 4 * (kColumns / 8); item += kWarps) {
      const int k = item / (kColumns / 8) * 4 + lane / 8, v = item % (kColumns / 8) * 8 + lane % 8;
      visit(shared_.state[v * shared_.stride + k], k < key_dim_ && first_column_ + v < value_dim_,
            int64_t{k} * value_dim_ + v);
    }
  }
  __device__ int64_t state_place() const {
    const int64_t index = w_.whole ? chunk_.sequence.index : index_;
    return (index * p_.heads + head_) * key_dim_ * value_dim_ + first_column_;
  }
  __device__ void load_state(const float* from) const {
    for_each_element([&](float& element, bool exists, int64_t at) {
      element = exists && from != nullptr ? from[state_place() + at] : 0.0f;
    });
  }
  __device__ void store_state() const {
    for_each_element([&](float element, bool exists, int64_t at) {
      if (exists) w_.final[state_place() + at] = element;
    });
  }

  static constexpr int kValues = kTokens * kColumns / kThreads;

  /// Asks for this thread's values of the sub-chunk, and puts them into shared memory.
  __device__ void load_values(int first, int count, float (&values)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      const int token = at / kColumns, column = first_column_ + at % kColumns;
      const bool exists = token < count && column < value_dim_;
      const int at_step = step(first + token);
      values[i] = !exists          ? 0.0f
                  : kValueGradient ? values_.load<float>(at_step, column)
                                   : inputs_.raw_value(at_step, column);
    }
  }
  __device__ void store_values(const float (&values)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      shared_.value[static_cast<int>(threadIdx.x) + i * kThreads] =
          kValueGradient ? values[i] : inputs_.value_of(values[i]);
    }
  }

  /// A lane's tokens of a channel, as they are in memory; backwards also the gate of the token that
  /// was there before the first.
  struct Raw {
    RawTokens tokens;
    float gate_before = 0;
  };
  __device__ Raw load_tokens(int first, int count, int channel) const {
    const LanePlace lane;
    const bool exists = channel < key_dim_;
    Raw raw;
    raw.tokens.load<true, true>(inputs_, exists, channel, count,
                                [this, first](int token) { return step(first + token); });
    const int j = first + lane.token(0);
    if (kValueGradient && exists && j > 0 && lane.token(0) < count) {
      raw.gate_before = inputs_.raw_gate(step(j) + 1, channel);
    }
    return raw;
  }

  /// Backwards, keys and queries change places, and a state decays by the gate of the token that it
  /// comes from.
  __device__ LaneTokens make_tokens(const Raw& raw, int first, int channel) const {
    const float gamma = inputs_.bound(min(channel, key_dim_ - 1));
    LaneTokens tokens = raw.tokens.tokens(inputs_, gamma);
    if (!kValueGradient) {
      return tokens;
    }
    const bool begins = first + LanePlace().token(0) == 0;
    float decay = begins ? 1.0f : inputs_.gate_of(raw.gate_before, 0.0f, gamma).decay;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const float next = tokens.decay[i], query = tokens.query[i];
      tokens.decay[i] = raw.tokens.exists[i] ? decay : 1.0f;
      decay = next;
      tokens.query[i] = tokens.key[i];
      tokens.key[i] = query;
    }
    return tokens;
  }

  static constexpr int kChannels = kThreads / kGroups;

  __device__ void prepare(int first, int count) const {
    const LanePlace lane;
    LaneScores scores;
    float values[kValues];
    load_values(first, count, values);
    Raw raw = load_tokens(first, count, lane.channel);
    store_values(values);
    for (int base = 0; base < key_dim_; base += kChannels) {
      // A warp without channels has nothing to add.
      if (base + warp_index() * (32 / kGroups) >= width_) {
        break;
      }
      const int channel = base + lane.channel;
      const LaneTokens tokens = make_tokens(raw, first, channel);
      if (base + kChannels < key_dim_) {
        raw = load_tokens(first, count, channel + kChannels);
      }
      const LaneDecays decays(tokens.decay);
      scores.add(tokens, decays, lane.group);
      if (channel < width_) {
        store_factors(tokens, decays, channel);
      }
    }
    scores.store(shared_.score_parts + warp_index() * LaneScores::kSize, lane.group);
  }

  __device__ void store_factors(const LaneTokens& tokens, const LaneDecays& decays,
                                int channel) const {
    const LanePlace lane;
    const float before = decays.before(lane.group), after = decays.after(lane.group);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const int at = lane.token(i) * shared_.stride + channel;
      shared_.query[at] = tokens.query[i] * (decays.from_start(i) * before);
      shared_.key[at] = tokens.key[i] * (decays.to_end(i) * after);
    }
    if (lane.group == 0) {
      shared_.total[channel] = decays.all();
    }
  }

  /// q~ S: warps that share columns of V have some of the channels each.
  __device__ void multiply() const {
    const int tile = warp_index() / Shared::kShares;
    const ColumnShare share(width_, warp_index() % Shared::kShares, Shared::kShares);
    ProductPart<4> part;
    part.add(shared_.query, shared_.state + tile * 32 * shared_.stride, shared_.stride, share.first,
             share.last);
    part.store<kPartStride>(shared_.parts + warp_index() * kPartSize);
  }

  __device__ void sum_scores() const {
    const int s = static_cast<int>(threadIdx.x) / kTokens, t = static_cast<int>(threadIdx.x) % kTokens;
    const int at = s * LaneScores::kStride + t;
    float sum = 0;
    if (s <= t) {  // nothing is stored elsewhere
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        sum += shared_.score_parts[i * LaneScores::kSize + at];
      }
    }
    shared_.scores[at] = sum;
  }

  /// Outputs of 2 or 4 tokens a thread.
  __device__ void finish(int first, int count) const {
    constexpr int kOwn = kTokens * kColumns / kThreads;
    const int column = static_cast<int>(threadIdx.x) % kColumns;
    const int token = static_cast<int>(threadIdx.x) / kColumns * kOwn;
    const float* parts = shared_.parts + column / 32 * Shared::kShares * kPartSize;
    float sums[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sums[i] = sum_of_parts<Shared::kShares>(parts, token + i, column % 32);
    }
#pragma unroll
    for (int s = 0; s < kTokens; ++s) {
      const float v = shared_.value[s * kColumns + column];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (s <= token + i) {
          sums[i] = fmaf(shared_.scores[s * LaneScores::kStride + token + i], v, sums[i]);
        }
      }
    }
    if (first_column_ + column >= value_dim_) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (token + i < count) {
        store(step(first + token + i), first_column_ + column, sums[i]);
      }
    }
  }

  __device__ void store(int step, int column, float x) const {
    if (kValueGradient && p_.v_activation != InputActivation::kNone) {
      x *= activation_slope<Inputs::Math>(p_.v_activation, inputs_.raw_value(step, column));
    }
    out_.store(step, column, x);
  }

  const ChunkOutputs& w_;
  const GlaParams& p_;
  const Shared shared_;
  const int key_dim_, value_dim_;
  const int width_;  // channels, in whole fours
  const int tiles_, first_column_;
  const int index_;  // of the chunk
  const int64_t head_;
  const TimeTile chunk_;
  const Inputs inputs_;
  const FloatRows values_, out_;
};

template <int kTiles, bool kValueGradient>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_outputs_kernel(const __grid_constant__ ChunkOutputs w) {
  extern __shared__ __align__(16) float memory[];
  OutputTile<kTiles, kValueGradient>(w, memory).run();
}

}  // namespace tidegate::kernels::gla::fp32_chunks
