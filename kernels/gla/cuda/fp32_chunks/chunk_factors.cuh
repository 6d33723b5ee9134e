#pragma once

// What all chunks' kernels share of a sub-chunk of 16 tokens, of all chunks at once:
//
//   q~ = scale * activated q * decays from the sub-chunk's start to t: outputs read S by it, and
//        D takes do up by it
//   k~ = k * decays from after s to the sub-chunk's end: S takes v up by it, and dv reads D by it
//   scores = scale * sum over channels of activated q_t * k_s * decays from after s to t, s <= t
//   total = the product of all decays
//
// Scores are dyadic: pairs of a lane's four tokens multiply their decays up; those of neighbouring
// groups of four, and of halves of eight, are products of factors with the decays to and from the
// boundary between them.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/gla/cuda/fp32_chunks/lane_tokens.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

/// How many sub-chunks a chunk has: a power of two, up to four.
struct ChunkSize {
  int bits = 0;

  static ChunkSize of(int64_t tokens) {
    ChunkSize size;
    while (size.tokens() < tokens) ++size.bits;
    return size;
  }

  __host__ __device__ int sub_chunks() const { return 1 << bits; }
  __host__ __device__ int tokens() const { return kTokens << bits; }

  /// The chunk of a sub-chunk whose number counts over many chunks, and its place within that
  /// chunk.
  __device__ int chunk_of(int sub) const { return sub >> bits; }
  __device__ int place_of(int sub) const { return sub & (sub_chunks() - 1); }
  __device__ bool is_last(int sub) const { return place_of(sub) == sub_chunks() - 1; }
};

/// The factors of one sub-chunk and head.
struct SubChunkFactors {
  const float *query, *key;  // q~ and k~: [16][width]
  const float* total;        // [width]
  const float* scores;       // [s][t], 16 x 16; zero where s > t
};

/// Where they lie in the workspace. Channels past K, up to whole fours, are zeros with totals of
/// one.
struct ChunkFactors {
  float* data = nullptr;  // [chunk index][sub-chunk][H], each of them size() floats
  int64_t heads = 0;
  int width = 0;  // of rows: K in whole fours
  ChunkSize chunk = {};

  int64_t floats(int64_t chunks) const { return chunks * chunk.sub_chunks() * heads * size(); }
  __host__ __device__ int size() const { return (2 * kTokens + 1) * width + kTokens * kTokens; }

  /// `sub` counts from the start of the chunk with that index, and may lie in a later one.
  __device__ float* place(int64_t index, int sub, int64_t head) const {
    return data + (((index << chunk.bits) + sub) * heads + head) * size();
  }
  __device__ SubChunkFactors of(int64_t index, int sub, int64_t head) const {
    const float* query = place(index, sub, head);
    const float *key = query + kTokens * width, *total = key + kTokens * width;
    return {query, key, total, total + width};
  }
};

struct FactorWork {
  GlaParams params = {};
  TimeTiles chunks = {};
  ChunkFactors factors = {};
};

constexpr int kFactorThreads = 256;

__host__ __device__ constexpr int larger_half(int count) { return (count + 1) / 2; }

/// The scores of a lane's channels, summed over them: all pairs of the 16 tokens whose product this
/// lane makes.
struct LaneScores {
  // Pairs t >= s of its own four tokens, t by t; 2 x 4 pairs of the group of four beside it with
  // its own; 4 x 4 pairs of a group of the other half with its own.
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
    const float past = decays.to_middle(group);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      query[i] *= past;
      key[i] *= past;
    }
    add_eights(query, key, group);
  }

  /// Adds up over the eight lanes of a warp that have the same group, by a reduce-scatter, after
  /// which each lane has an eighth of the sums, and stores them where place_of() says.
  __device__ void store(float* to, int group) {
    int first = 0, last = kAll;
    constexpr int kHalf = larger_half(kAll), kQuarter = larger_half(kHalf);
    scatter_halves<kAll>(kGroups, &first, &last);
    scatter_halves<kHalf>(2 * kGroups, &first, &last);
    scatter_halves<kQuarter>(4 * kGroups, &first, &last);
#pragma unroll
    for (int i = 0; i < larger_half(kQuarter); ++i) {
      if (first + i < last) to[group * kAll + first + i] = sums[i];
    }
  }

  static constexpr int kSize = kGroups * kAll;

  /// Where store() puts the score of tokens s <= t: the group that makes the pair, and its place
  /// there.
  static __device__ int place_of(int s, int t) {
    const int of_s = s / kLaneTokens, of_t = t / kLaneTokens;  // groups
    const int i = s % kLaneTokens, j = t % kLaneTokens;
    if (of_s == of_t) {
      return of_s * kAll + j * (j + 1) / 2 + i;
    }
    if (of_s / 2 == of_t / 2) {
      return (j < 2 ? of_s : of_t) * kAll + kOwn + j % 2 * kLaneTokens + i;
    }
    return (other_half(of_s) == of_t ? of_s : of_t) * kAll + kOwn + kFours + j * kLaneTokens + i;
  }

 private:
  /// A step of the reduce-scatter: of kCount sums this lane keeps the first half, which is the
  /// larger one, or the second, and adds what the lane `distance` away has of it. (scatter_sums in
  /// common/cuda/warp.cuh has powers of two, and lanes that are far apart first.)
  template <int kCount>
  __device__ void scatter_halves(int distance, int* first, int* last) {
    constexpr int kKept = larger_half(kCount);
    const bool keeps_second = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float second = kKept + i < kCount ? sums[kKept + i] : 0.0f;
      const float mine = keeps_second ? second : sums[i];
      sums[i] = mine + __shfl_xor_sync(~0u, keeps_second ? sums[i] : second, distance);
    }
    *last = keeps_second ? *last : min(*last, *first + kKept);
    *first += keeps_second ? kKept : 0;
  }

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

/// A block of threads has a sub-chunk of one head, up to 64 channels at a time.
__global__ void __launch_bounds__(kFactorThreads, 3)
    chunk_factors_kernel(const __grid_constant__ FactorWork w) {
  __shared__ float partials[kFactorThreads / 32][LaneScores::kSize];
  wait_for_kernels_before();
  const GlaParams& p = w.params;
  const auto item = static_cast<int64_t>(blockIdx.x);
  const int64_t head = item % p.heads;
  const auto of_all = static_cast<int>(item / p.heads);
  const int index = w.factors.chunk.chunk_of(of_all), sub = w.factors.chunk.place_of(of_all);
  const TimeTile chunk = find_time_tile(w.chunks, index);
  const int count = sub_chunk_tokens(sub * kTokens, chunk.tokens);
  if (!chunk.exists() || count <= 0) {
    return;
  }
  const Inputs inputs(p, chunk.sequence, p.layout.reverse, head);
  const LanePlace lane;
  float* const to = w.factors.place(index, sub, head);
  const int width = w.factors.width, first = chunk.first + sub * kTokens;
  const auto key_dim = static_cast<int>(p.key_dim);
  LaneScores scores;
  for (int base = 0; base < width; base += static_cast<int>(blockDim.x) / kGroups) {
    const int channel = base + lane.channel;
    RawTokens raw;
    raw.load(inputs, channel < key_dim, channel, count, [first](int i) { return first + i; });
    const LaneTokens tokens = raw.tokens(inputs, p.gate_kind == GateKind::kLogit,
                                         inputs.bound(min(channel, key_dim - 1)));
    const LaneDecays decays(tokens.decay);
    const float total = total_decay(tokens.decay);
    scores.add(tokens, decays, lane.group);
    if (channel >= width) {
      continue;
    }
    const float before = decays.before(lane.group), after = decays.after(lane.group);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const int at = lane.token(i) * width + channel;
      to[at] = tokens.query[i] * (decays.from_start(i) * before);
      to[kTokens * width + at] = tokens.key[i] * (decays.to_end(i) * after);
    }
    if (lane.group == 0) {
      to[2 * kTokens * width + channel] = total;
    }
  }
  scores.store(partials[threadIdx.x / 32], lane.group);
  __syncthreads();
  for (int pair = static_cast<int>(threadIdx.x); pair < kTokens * kTokens;
       pair += static_cast<int>(blockDim.x)) {
    const int s = pair / kTokens, t = pair % kTokens;
    float sum = 0;
    if (s <= t) {  // nothing is stored elsewhere
      for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) {
        sum += partials[i][LaneScores::place_of(s, t)];
      }
    }
    to[(2 * kTokens + 1) * width + pair] = sum;
  }
}

}  // namespace tidegate::kernels::gla::fp32_chunks
