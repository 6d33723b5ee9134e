// Drawing tokens on CUDA: one block has one row, or the blocks of a cluster share a row that is
// long, where the device has clusters: one multiprocessor would take longer to draw a token of
// 50,000 than it takes to read a layer's weights. Which tokens are kept follows from sums of
// integers, and sums in floating point are added up in a fixed order, so that every run gives the
// same bits.

#include <cfloat>

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/sampling/cuda/kept_tokens.cuh"
#include "kernels/sampling/cuda/row_blocks.cuh"
#include "kernels/sampling/draws.h"
#include "kernels/sampling/sampling_cuda.h"

namespace tidegate::kernels::sampling {
namespace {

constexpr int kMostBlocks = 8, kFewBlocks = 2;  // of a cluster
// Tokens that are worth a cluster: fewer take less time than its blocks need to meet.
constexpr int64_t kLongRow = 4096;

/// A row of logits. Threads take its tokens four at a time. Loops over them are kept rolled where
/// that costs nothing: a kernel that runs once a step spends its time on reading instructions.
template <class E>
struct Row {
  using Real = typename Register<E>::type;
  using Four = Pack<E, sizeof(E) <= 4 ? 4 : 2>;  // not used for 64-bit logits

  const E* logits;
  const uint8_t* seen;
  Real penalty;
  int64_t vocab;

  /// The logit, with the penalty of a token seen before; -inf for NaN.
  __device__ Real made(Real logit, int64_t v) const {
    if (seen != nullptr && seen[v] != 0) {
      logit = penalized(logit, penalty);
    }
    return logit == logit ? logit : lowest<Real>();
  }
  __device__ Real operator[](int64_t v) const { return made(widen(logits[v]), v); }

  /// Whether four logits lie as one access wants them.
  __device__ bool is_aligned() const {
    return reinterpret_cast<uintptr_t>(logits) % (4 * sizeof(E)) == 0;
  }
  /// Whether one access reads all four of a group.
  __device__ bool is_pack(int64_t group, bool aligned) const {
    return sizeof(E) <= 4 && aligned && 4 * group + 4 <= vocab;
  }
  /// The four logits of a group that is_pack(), as they lie in memory.
  __device__ Four pack(int64_t group) const {
    return {*reinterpret_cast<const typename Four::Bits*>(logits + 4 * group)};
  }
  /// Logits 4 * group to 4 * group + 3, -inf past the last one.
  __device__ void load(int64_t group, Real (&four)[4]) const {
    const int64_t first = 4 * group;
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = first + i < vocab ? (*this)[first + i] : lowest<Real>();
  }
};

/// Which tokens a thread takes: four neighbours at a time, `groups` times, the last ones of which
/// may not exist. Neighbouring threads have neighbouring fours; the thread's number i is token(i).
template <int kBlocks>
struct OwnTokens {
  int64_t first;
  int groups;

  __device__ OwnTokens(const RowBlocks<kBlocks>& blocks, int64_t vocab)
      : first(blocks.first()),
        groups(static_cast<int>((vocab + 4 * blocks.kStride - 1) / (4 * blocks.kStride))) {}
  __device__ int64_t group(int g) const { return first + g * RowBlocks<kBlocks>::kStride; }
  __device__ int64_t token(int i) const { return 4 * group(i / 4) + i % 4; }
  __device__ int count() const { return 4 * groups; }
};

/// The most likely token. What a thread reads stays in `kept`, its column of shared memory, where
/// that is not null: -inf for tokens that do not exist.
template <int kBlocks, class E>
__device__ Best<typename Register<E>::type> likeliest(RowBlocks<kBlocks>& blocks, const Row<E>& row,
                                                      float* kept) {
  using Real = typename Register<E>::type;
  const OwnTokens<kBlocks> own(blocks, row.vocab);
  const bool aligned = row.is_aligned();
  Real best = lowest<Real>();
  int at = 0;  // of the thread's tokens
  const auto take = [&](int i, Real number) {
    if (kept != nullptr) kept[i * kThreads] = static_cast<float>(number);
    if (number > best) {
      best = number;
      at = i;
    }
  };
  // Several packs are on their way at once: read one after another, each would wait for memory.
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int first = 0; first < own.groups; first += kAtOnce) {
    typename Row<E>::Four packs[kAtOnce] = {};
    bool is_pack[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      is_pack[j] = first + j < own.groups && row.is_pack(own.group(first + j), aligned);
      if (is_pack[j]) packs[j] = row.pack(own.group(first + j));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!is_pack[j]) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(E) <= 4) {
          take(4 * (first + j) + i, row.made(packs[j].get(i), own.token(4 * (first + j) + i)));
        }
      }
    }
#pragma unroll 1
    for (int g = first; g < min(first + kAtOnce, own.groups); ++g) {
      if (row.is_pack(own.group(g), aligned)) continue;
      Real four[4];
      row.load(own.group(g), four);
#pragma unroll
      for (int i = 0; i < 4; ++i) take(4 * g + i, four[i]);
    }
  }
  return row_best(blocks, Best<Real>{best, min(own.token(at), row.vocab - 1)});
}

/// A row's numbers less their maximum, divided by the temperature, of the tokens of a thread: by
/// their number among these. kKept: the numbers stay in shared memory, once keep() has been called.
template <class E, int kBlocks, bool kKept>
struct Scaled {
  using Real = typename Register<E>::type;

  Row<E> row;
  OwnTokens<kBlocks> own;
  Real most, temperature;
  float* kept;
  float reciprocal = 1.0f / static_cast<float>(temperature);

  /// The quotient, correctly rounded: in fp32 by the rounded reciprocal and what its product leaves
  /// over (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).
  __device__ float scaled(Real number) const {
    const Real over = number - most;
    if constexpr (sizeof(Real) == 4) {
      const float near = over * reciprocal;
      return fabsf(near) <= FLT_MAX ? fmaf(fmaf(-near, temperature, over), reciprocal, near) : near;
    } else {
      return static_cast<float>(over / temperature);
    }
  }
  /// Scales the numbers that likeliest() has kept. likeliest() keeps floats, so logits of 64 bits
  /// are read again.
  __device__ void keep() const {
    if constexpr (kKept) {
#pragma unroll 2
      for (int i = 0; i < own.count(); ++i) {
        if constexpr (sizeof(Real) == 4) {
          kept[i * kThreads] = scaled(kept[i * kThreads]);
        } else if (const int64_t v = own.token(i); v < row.vocab) {
          kept[i * kThreads] = scaled(row[v]);
        }
      }
    }
  }
  __device__ float get(int i) const {
    if constexpr (kKept) return kept[i * kThreads];
    const int64_t v = own.token(i);
    return v < row.vocab ? scaled(row[v]) : lowest<float>();
  }
};

/// About gumbel(word), by the device's fast logarithms: at most kGumbelError off. Where U is small,
/// and 1 - U has lost its digits, -log(1 - U) comes from its series.
__device__ float near_gumbel(uint32_t word) {
  const float uniform = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  const float small = fmaf(0.5f * uniform, uniform, uniform);
  return -__logf(uniform < 0x1p-8f ? small : -__logf(1.0f - uniform));
}
// The fast logarithm of 1 - U, U >= 2^-8, and its argument are 2^-21 off at most, which is 2^-13 of
// the result; the series leaves out 2^-17.
constexpr float kGumbelError = 5e-4f;

/// No word above this has a Gumbel number as large as `wanted`, nor has near_gumbel() of it: that
/// is -log E, E >= U.
__device__ uint32_t largest_word(float wanted) {
  return __float2uint_ru(__expf(2 * kGumbelError - wanted) * 0x1p32f);
}

/// A thread's best token by near_gumbel(), and the score of its second best.
struct Leader {
  float score = lowest<float>(), next = lowest<float>();
  int at = 0;  // of the thread's tokens

  __device__ void take(float score_of, int i) {
    next = fmaxf(next, fminf(score, score_of));
    if (score_of > score) {
      score = score_of;
      at = i;
    }
  }
};

/// argmax of z + Gumbel numbers over the keys from `least` on. Fast logarithms tell which tokens
/// come near the block's best, mostly one: these get their exact numbers.
template <int kBlocks, class Numbers>
__device__ int64_t draw(RowBlocks<kBlocks>& blocks, const Numbers& z, int64_t top, uint32_t least,
                        const int64_t* table) {
  const int64_t seed = table[kSeed], stream = table[kStream], drawn = table[kDrawn];
  const float least_kept = fmaxf(least_number(least), -FLT_MAX);
  const auto is_kept = [&](float number) { return number >= least_kept; };
  Leader leader;
  float bar = lowest<float>();
#pragma unroll 1
  for (int g = 0; g < z.own.groups; ++g) {
    float number[4], most = lowest<float>();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      number[i] = z.get(4 * g + i);
      if (!is_kept(number[i])) number[i] = lowest<float>();
      most = fmaxf(most, number[i]);
    }
    // Nearly all groups are far below what the block's first ones have reached.
    if (!(most + kLargestGumbel < bar)) {
      const Philox4 words = words_of(seed, stream, drawn, z.own.group(g));
      const uint32_t limit = largest_word(bar - most);
      bool may_win = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) may_win = may_win || words.word[i] <= limit;
      if (may_win) {
#pragma unroll
        for (int i = 0; i < 4; ++i) leader.take(number[i] + near_gumbel(words.word[i]), 4 * g + i);
      }
    }
    // Both sides of the comparison may be off by kGumbelError.
    if (g == 0) bar = block_max(leader.score) - 2 * kGumbelError;
  }
  bar = block_max(leader.score) - 2 * kGumbelError;
  Best<float> best{lowest<float>(), top};
  const bool is_alone = leader.next < bar;
  const int first = is_alone ? leader.at : 0, end = is_alone ? first + 1 : z.own.count();
#pragma unroll 1
  for (int i = first; i < end && leader.score >= bar; ++i) {
    const float number = z.get(i);
    if (!is_kept(number)) continue;
    const Philox4 words = words_of(seed, stream, drawn, z.own.group(i / 4));
    // The words are selected, not indexed: an array that is indexed at run time leaves registers.
    const uint32_t low = i % 2 == 0 ? words.word[0] : words.word[1];
    const uint32_t high = i % 2 == 0 ? words.word[2] : words.word[3];
    best = better(best, Best<float>{number + gumbel(i % 4 < 2 ? low : high), z.own.token(i)});
  }
  return row_best(blocks, best).token;
}

template <bool kKept, int kBlocks, class E>
__device__ int64_t sampled(RowBlocks<kBlocks>& blocks, const Row<E>& row, const double* settings,
                           const int64_t* table, float* kept) {
  using Real = typename Register<E>::type;
  const Best<Real> top = likeliest(blocks, row, kKept ? kept + threadIdx.x : nullptr);
  const double temperature = settings[kTemperature];
  if (temperature < FLT_MIN || isinf(top.score)) {
    return top.token;
  }
  const Scaled<E, kBlocks, kKept> z{row, OwnTokens<kBlocks>(blocks, row.vocab), top.score,
                                    static_cast<Real>(temperature), kept + threadIdx.x};
  z.keep();
  const uint32_t least = threshold(blocks, z, row.vocab, settings);
  return draw(blocks, z, top.token, least, table);
}

template <int kBlocks, class E>
__device__ float log_prob(RowBlocks<kBlocks>& blocks, const Row<E>& row, int64_t token) {
  using Real = typename Register<E>::type;
  const Real most = likeliest(blocks, row, nullptr).score;
  Real sum = 0;
  for (int64_t v = blocks.first(); v < row.vocab; v += blocks.kStride) {
    sum += exp(row[v] - most);
  }
  return static_cast<float>(row[token] - most - log(row_sum(blocks, sum)));
}

/// Draws a token of each row. kKept: the row's numbers fit the blocks' shared memory.
template <class E, int kBlocks, bool kKept>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ SamplingParams p) {
  extern __shared__ float kept[];
  using Real = typename Register<E>::type;
  wait_for_kernels_before();
  const auto b = static_cast<int64_t>(blockIdx.x) / kBlocks;
  RowBlocks<kBlocks> blocks;
  const double* const settings = p.settings + b * kSettings;
  const int64_t* const table = p.table + b * kColumns;
  const E* const logits = static_cast<const E*>(p.logits) + b * p.stride;
  const uint8_t* const seen = p.seen == nullptr ? nullptr : p.seen + b * p.vocab;
  int64_t token = table[kFill];
  float log_p = 0;
  if (table[kDone] == 0) {
    // Settings and table are read now, as each read from memory takes as long as a part of the
    // search.
    __shared__ double own_settings[kSettings];
    __shared__ int64_t own_table[kColumns];
    if (threadIdx.x < kSettings) own_settings[threadIdx.x] = settings[threadIdx.x];
    if (threadIdx.x < kColumns) own_table[threadIdx.x] = table[threadIdx.x];
    const Row<E> row{logits, seen, static_cast<Real>(settings[kPenalty]), p.vocab};
    token = sampled<kKept>(blocks, row, own_settings, own_table, kept);
    if (p.log_probs != nullptr) {
      log_p = log_prob(blocks, Row<E>{logits, nullptr, Real(1), p.vocab}, token);
    }
  }
  blocks.sync();  // everyone has read the table, and other blocks' memory
  if (blocks.rank == 0 && threadIdx.x == 0) {
    if (p.log_probs != nullptr) {
      p.log_probs[b * p.window + table[kDrawn] % p.window] = log_p;
    }
    note_token(p, b, token);
  }
}

/// Shared memory of a block beside its numbers.
constexpr int kOtherBytes = 48 << 10;

/// Shared memory for the numbers of one block, where so many share a row.
int64_t kept_bytes(int64_t vocab, int blocks) {
  return ceil_div(ceil_div(vocab, int64_t{4}), int64_t{blocks} * kThreads) * 4 * kThreads *
         static_cast<int64_t>(sizeof(float));
}

/// Launches clusters of kBlocks, or one block a row.
template <class E, int kBlocks, bool kKept>
cudaError_t launch_sample(const SamplingParams& p, cudaStream_t stream) {
  constexpr auto* kKernel = &sample_kernel<E, kBlocks, kKept>;
  const int bytes = kKept ? static_cast<int>(kept_bytes(p.vocab, kBlocks)) : 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  if (p.rows > std::numeric_limits<int>::max() / kBlocks) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(p.rows * kBlocks));
  if constexpr (kBlocks == 1) {
    return launch_in_chain<kKernel>(grid, dim3(kThreads), bytes, stream, p);
  } else {
    return launch_in_chain<kKernel, kBlocks>(grid, dim3(kThreads), bytes, stream, p);
  }
}

}  // namespace

cudaError_t sample_cuda(const SamplingParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return dispatch_real(params.dtype, [&]<class E>() {
    bool can = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR((can_cluster<&sample_kernel<E, kMostBlocks, true>>(&can)));
    const bool is_long = can && params.vocab >= kLongRow;
    const auto keeps = [&](int blocks) {
      return kept_bytes(params.vocab, blocks) + kOtherBytes <= limits.shared_bytes;
    };
    // Whether all blocks run at once: a multiprocessor holds one.
    const auto run_at_once = [&](int blocks) {
      return params.rows * blocks <= limits.multiprocessors;
    };
    if (is_long && run_at_once(kMostBlocks) && keeps(kMostBlocks)) {
      return launch_sample<E, kMostBlocks, true>(params, stream);
    }
    if (is_long && run_at_once(kFewBlocks) && keeps(kFewBlocks)) {
      return launch_sample<E, kFewBlocks, true>(params, stream);
    }
    if (is_long && run_at_once(kFewBlocks)) {
      return launch_sample<E, kFewBlocks, false>(params, stream);
    }
    return keeps(1) ? launch_sample<E, 1, true>(params, stream)
                    : launch_sample<E, 1, false>(params, stream);
  });
}

}  // namespace tidegate::kernels::sampling
