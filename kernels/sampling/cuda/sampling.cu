// Drawing tokens on CUDA: one block has one row. What decides the order of kept tokens are sums of
// integers, and what is summed in floating point goes in a fixed order: the same bits every time.

#include <cfloat>

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/sampling/draws.h"
#include "kernels/sampling/sampling_cuda.h"

namespace tidegate::kernels::sampling {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 256;

template <class Real>
__device__ Real lowest() {
  return -static_cast<Real>(INFINITY);
}

/// A token and what it scores.
template <class Real>
struct Best {
  Real score;
  int64_t token;
};

/// The one with the larger score; of equal ones the first token.
template <class Real>
__device__ Best<Real> better(Best<Real> a, Best<Real> b) {
  const bool is_b = b.score > a.score || (b.score == a.score && b.token < a.token);
  return is_b ? b : a;
}

/// The best over the block, which every thread gets.
template <class Real>
__device__ Best<Real> block_best(Best<Real> mine) {
  __shared__ Real scores[kWarps];
  __shared__ int64_t tokens[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    const Best<Real> other{__shfl_xor_sync(~0u, mine.score, distance),
                           __shfl_xor_sync(~0u, mine.token, distance)};
    mine = better(mine, other);
  }
  __syncthreads();  // the arrays' last readers are done
  if (threadIdx.x % 32 == 0) {
    scores[threadIdx.x / 32] = mine.score;
    tokens[threadIdx.x / 32] = mine.token;
  }
  __syncthreads();
  Best<Real> best{scores[0], tokens[0]};
  for (int warp = 1; warp < kWarps; ++warp) {
    best = better(best, Best<Real>{scores[warp], tokens[warp]});
  }
  return best;
}

/// The sum over the block, which every thread gets.
template <class Value>
__device__ Value block_sum(Value mine) {
  __shared__ Value sums[kWarps];
  mine = warp_sum(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = mine;
  }
  __syncthreads();
  Value sum = sums[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    sum += sums[warp];
  }
  return sum;
}

template <class E>
struct Row {
  using Real = typename Register<E>::type;

  const E* logits;
  const uint8_t* seen;
  Real penalty;
  int64_t vocab;

  /// NaN and what is below everything come as -inf.
  __device__ Real operator[](int64_t v) const {
    Real logit = widen(logits[v]);
    if (seen != nullptr && seen[v] != 0) {
      logit = penalized(logit, penalty);
    }
    return logit == logit ? logit : lowest<Real>();
  }
};

/// A row's numbers less their maximum, divided by the temperature.
template <class E>
struct Scaled {
  using Real = typename Register<E>::type;

  Row<E> row;
  Real most, temperature;

  __device__ float operator[](int64_t v) const {
    return static_cast<float>((row[v] - most) / temperature);
  }
};

template <class E>
__device__ Best<typename Register<E>::type> likeliest(const Row<E>& row) {
  using Real = typename Register<E>::type;
  Best<Real> best{lowest<Real>(), row.vocab - 1};
  for (int64_t v = threadIdx.x; v < row.vocab; v += kThreads) {
    best = better(best, Best<Real>{row[v], v});
  }
  return block_best(best);
}

/// Where the digits of a byte end: of those with weight the lowest with less than target above it.
struct Cut {
  uint32_t digit;
  unsigned long long above;
};

/// By the first warp, whose lane l looks at the digits from 255 - 8 l down.
__device__ void cut_digits(const unsigned long long* weights, unsigned long long above,
                           unsigned long long target, Cut* cut) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned long long own = 0;
  for (int i = 0; i < 8; ++i) {
    own += weights[255 - 8 * lane - i];
  }
  unsigned long long through = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned long long before = __shfl_up_sync(~0u, through, distance);
    through += lane >= distance ? before : 0ull;
  }
  unsigned long long before = above + through - own, kept_above = above;
  int kept = -1;
  for (int i = 0; i < 8; ++i) {
    const int digit = 255 - 8 * lane - i;
    if (weights[digit] > 0 && before < target) {
      kept = digit;
      kept_above = before;
    }
    before += weights[digit];
  }
  const unsigned have = __ballot_sync(~0u, kept >= 0);
  if (have != 0 && lane == 31 - __clz(static_cast<int>(have))) {
    *cut = {static_cast<uint32_t>(kept), kept_above};
  }
}

/// The smallest key among z with less than `target` of weight above it.
template <class Numbers, class Weight>
__device__ uint32_t last_kept(const Numbers& z, int64_t vocab, uint32_t least,
                              unsigned long long target, Weight weight) {
  __shared__ unsigned long long weights[kDigits];
  __shared__ Cut cut;
  uint32_t prefix = 0, mask = 0;
  unsigned long long above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < kDigits) {
      weights[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
      cut = {0, above};
    }
    __syncthreads();
    for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
      const float number = z[v];
      const uint32_t key = key_of(number);
      if (key >= least && (key & mask) == prefix) {
        const unsigned long long adds = weight(number);
        if (adds > 0) {
          atomicAdd(&weights[(key >> shift) & 255u], adds);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      cut_digits(weights, above, target, &cut);
    }
    __syncthreads();
    above = cut.above;
    prefix |= cut.digit << shift;
    mask |= 255u << shift;
  }
  return prefix;
}

/// The smallest key that settings leave in.
template <class Numbers>
__device__ uint32_t threshold(const Numbers& z, int64_t vocab, const double* settings) {
  uint32_t least = 0;
  const double top_k = settings[kTopK], top_p = settings[kTopP], min_p = settings[kMinP];
  if (top_k >= 1 && top_k < static_cast<double>(vocab)) {
    least = last_kept(z, vocab, least, static_cast<unsigned long long>(top_k),
                      [](float) { return 1ull; });
  }
  if (top_p < 1) {
    unsigned long long mine = 0;
    for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
      const float number = z[v];
      mine += key_of(number) >= least ? mass_of(number) : 0;
    }
    const unsigned long long target = share_of(block_sum(mine), top_p);
    least = last_kept(z, vocab, least, target,
                      [](float number) -> unsigned long long { return mass_of(number); });
  }
  if (min_p > 0) {
    least = max(least, key_of(static_cast<float>(log(min_p))));
  }
  return least;
}

/// argmax of z + Gumbel numbers over the keys from `least`.
template <class Numbers>
__device__ int64_t draw(const Numbers& z, int64_t vocab, int64_t top, uint32_t least,
                        const int64_t* table) {
  Best<float> best{lowest<float>(), top};
  for (int64_t group = threadIdx.x; 4 * group < vocab; group += kThreads) {
    const Philox4 words = words_of(table[kSeed], table[kStream], table[kDrawn], group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t v = 4 * group + i;
      if (v < vocab) {
        const float number = z[v];
        if (key_of(number) >= least && number > lowest<float>()) {
          best = better(best, Best<float>{number + gumbel(words.word[i]), v});
        }
      }
    }
  }
  return block_best(best).token;
}

template <class E>
__device__ int64_t sampled(const Row<E>& row, const double* settings, const int64_t* table) {
  using Real = typename Register<E>::type;
  const Best<Real> top = likeliest(row);
  const double temperature = settings[kTemperature];
  if (temperature < FLT_MIN || isinf(top.score)) {
    return top.token;
  }
  const Scaled<E> z{row, top.score, static_cast<Real>(temperature)};
  return draw(z, row.vocab, top.token, threshold(z, row.vocab, settings), table);
}

template <class E>
__device__ float log_prob(const Row<E>& row, int64_t token) {
  using Real = typename Register<E>::type;
  const Real most = likeliest(row).score;
  Real sum = 0;
  for (int64_t v = threadIdx.x; v < row.vocab; v += kThreads) {
    sum += exp(row[v] - most);
  }
  return static_cast<float>(row[token] - most - log(block_sum(sum)));
}

template <class E>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ SamplingParams p) {
  using Real = typename Register<E>::type;
  const auto b = static_cast<int64_t>(blockIdx.x);
  const double* const settings = p.settings + b * kSettings;
  const int64_t* const table = p.table + b * kColumns;
  const E* const logits = static_cast<const E*>(p.logits) + b * p.stride;
  const uint8_t* const seen = p.seen == nullptr ? nullptr : p.seen + b * p.vocab;
  int64_t token = table[kFill];
  float log_p = 0;
  if (table[kDone] == 0) {
    const Row<E> row{logits, seen, static_cast<Real>(settings[kPenalty]), p.vocab};
    token = sampled(row, settings, table);
    if (p.log_probs != nullptr) {
      log_p = log_prob(Row<E>{logits, nullptr, Real(1), p.vocab}, token);
    }
  }
  __syncthreads();  // everyone has read the table
  if (threadIdx.x == 0) {
    if (p.log_probs != nullptr) {
      p.log_probs[b * p.window + table[kDrawn] % p.window] = log_p;
    }
    note_token(p, b, token);
  }
}

}  // namespace

cudaError_t sample_cuda(const SamplingParams& params, cudaStream_t stream) {
  return dispatch_real(params.dtype, [&]<class E>() {
    return launch_unless_empty(&sample_kernel<E>, params.rows, dim3(kThreads), 0, stream, params);
  });
}

}  // namespace tidegate::kernels::sampling
