// Drawing tokens on CUDA: one block has one row, or the blocks of a cluster share it, where it is
// long and the device has clusters: one multiprocessor would take longer to draw a token of 50,000
// than it takes to read a layer's weights. What decides the order of kept tokens are sums of
// integers, and what is summed in floating point goes in a fixed order: the same bits every time.

#include <cfloat>

#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/common/integers.h"
#include "kernels/sampling/cuda/row_blocks.cuh"
#include "kernels/sampling/draws.h"
#include "kernels/sampling/sampling_cuda.h"

namespace tidegate::kernels::sampling {
namespace {

constexpr int kDigits = 256;
// There are so many copies of the sums a digit: lanes that add to one would wait for each other.
constexpr int kCopies = 16;
// So many masses fit two words of a copy, each of which has half of their digits.
constexpr int kMassBits = 20, kMostOfCopy = 1 << (32 - kMassBits);
constexpr int kMostBlocks = 8, kFewBlocks = 2;  // of a cluster
// Tokens that are worth a cluster: fewer take less time than its blocks need to meet.
constexpr int64_t kLongRow = 4096;

/// A row of logits. Threads take its tokens four at a time. Loops over them are kept rolled where
/// that costs nothing: of a kernel that runs once a step, the reading of instructions is what takes
/// time.
template <class E>
struct Row {
  using Real = typename Register<E>::type;

  const E* logits;
  const uint8_t* seen;
  Real penalty;
  int64_t vocab;

  /// NaN and what is below everything come as -inf.
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
  /// Logits 4 * group to 4 * group + 3, -inf past the last one.
  __device__ void load(int64_t group, bool aligned, Real (&four)[4]) const {
    const int64_t first = 4 * group;
    if constexpr (sizeof(E) <= 4) {
      if (aligned && first + 4 <= vocab) {
        using Four = Pack<E, 4>;
        const Four pack{*reinterpret_cast<const typename Four::Bits*>(logits + first)};
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = made(pack.get(i), first + i);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = first + i < vocab ? (*this)[first + i] : lowest<Real>();
  }
};

/// Which tokens a thread takes: four neighbours at a time, `groups` times, the last ones of which
/// may not exist. Of four and four tokens in a row of threads: number i is token(i).
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
  Best<Real> best{lowest<Real>(), min(4 * own.first, row.vocab - 1)};
#pragma unroll 4
  for (int g = 0; g < own.groups; ++g) {
    Real four[4];
    row.load(own.group(g), aligned, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kept != nullptr) kept[(4 * g + i) * kThreads] = static_cast<float>(four[i]);
      if (four[i] > best.score) best = {four[i], 4 * own.group(g) + i};
    }
  }
  return row_best(blocks, best);
}

/// A row's numbers less their maximum, divided by the temperature, of the tokens of a thread: by
/// their number among these. kKept: in shared memory, once keep() has been called.
template <class E, int kBlocks, bool kKept>
struct Scaled {
  using Real = typename Register<E>::type;

  Row<E> row;
  OwnTokens<kBlocks> own;
  Real most, temperature;
  float* kept;

  __device__ float scaled(Real number) const {
    return static_cast<float>((number - most) / temperature);
  }
  /// Scales the numbers that likeliest() has kept. It keeps floats, so numbers of 64 bits are read
  /// again.
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

/// Where the digits of a byte end: of those with weight the lowest with less than target above it.
struct Cut {
  uint32_t digit;
  unsigned long long above, target;
};

/// By the first warp, whose lane l looks at the digits from 255 - 8 l down. `target` of the sum of
/// all weights: less than this may be above.
template <class Target>
__device__ void cut_digits(const unsigned long long* weights, bool is_first, Target target,
                           Cut* cut) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned long long mine[8], own = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    mine[i] = weights[255 - 8 * lane - i];
    own += mine[i];
  }
  unsigned long long through = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned long long before = __shfl_up_sync(~0u, through, distance);
    through += lane >= distance ? before : 0ull;
  }
  const unsigned long long all = __shfl_sync(~0u, through, 31);
  const unsigned long long most = is_first ? target(all) : cut->target;
  unsigned long long before = cut->above + through - own, kept_above = before;
  int kept = -1;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (mine[i] > 0 && before < most) {
      kept = 255 - 8 * lane - i;
      kept_above = before;
    }
    before += mine[i];
  }
  const unsigned have = __ballot_sync(~0u, kept >= 0);
  const int last = have == 0 ? 0 : 31 - __clz(static_cast<int>(have));
  __syncwarp();  // everyone has read the cut before
  if (lane == last) {
    *cut = {have == 0 ? 0u : static_cast<uint32_t>(kept), have == 0 ? cut->above : kept_above,
            most};
  }
}

/// Sums of masses a digit, in two words each, since shared memory adds up to 32 bits at once: half
/// of a mass's digits each, or, where many masses could overflow these, 64 bits with a carry. Lanes
/// that add to one word wait for each other, so neighbours have words of their own, in other banks.
struct DigitSums {
  unsigned low[kDigits][kCopies], high[kDigits][kCopies];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kCopies * kDigits; i += kThreads) {
      (&low[0][0])[i] = 0;
      (&high[0][0])[i] = 0;
    }
  }
  __device__ void add(uint32_t digit, unsigned long long weight, bool are_many) {
    const int copy = static_cast<int>(threadIdx.x) % kCopies;
    if (!are_many) {
      atomicAdd(&low[digit][copy], static_cast<unsigned>(weight) & ((1u << kMassBits) - 1));
      const auto more = static_cast<unsigned>(weight >> kMassBits);
      if (more != 0) atomicAdd(&high[digit][copy], more);
      return;
    }
    const auto part = static_cast<unsigned>(weight);
    const unsigned before = atomicAdd(&low[digit][copy], part);
    const unsigned carry = before + part < before ? 1u : 0u;
    const unsigned more = static_cast<unsigned>(weight >> 32) + carry;
    if (more != 0) atomicAdd(&high[digit][copy], more);
  }
  __device__ unsigned long long sum(int digit, bool are_many) const {
    unsigned long long total = 0;
#pragma unroll 4
    for (int copy = 0; copy < kCopies; ++copy) {
      total += low[digit][copy] +
               (static_cast<unsigned long long>(high[digit][copy]) << (are_many ? 32 : kMassBits));
    }
    return total;
  }
};

/// The smallest and the largest key with a digit: where these are one, no further digit decides.
struct KeyRange {
  uint32_t least, most;
};

/// What a search for the last token that is kept counts, and how much of it may be above.
struct Share {
  bool is_mass;  // masses; otherwise tokens
  double most;   // the part of all mass; so many tokens

  __device__ unsigned long long weight(float number) const {
    return is_mass ? mass_of(number) : 1ull;
  }
  __device__ unsigned long long target(unsigned long long all) const {
    return is_mass ? share_of(all, most) : static_cast<unsigned long long>(most);
  }
};

/// Over the blocks of the cluster.
template <int kBlocks>
__device__ KeyRange range_over(const RowBlocks<kBlocks>&, const KeyRange* mine) {
  const unsigned least = shared_address(&mine->least), most = shared_address(&mine->most);
  KeyRange all = {~0u, 0u};
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) {
    all.least = min(all.least, load_remote<uint32_t>(address_in_block(least, r)));
    all.most = max(all.most, load_remote<uint32_t>(address_in_block(most, r)));
  }
  return all;
}

/// The smallest key among z, from `least` on, with less than the share's target above it.
template <int kBlocks, class Numbers>
__device__ uint32_t last_kept(const RowBlocks<kBlocks>& blocks, const Numbers& z, uint32_t least,
                              Share share) {
  __shared__ DigitSums sums;
  // By turns: a block that is ahead writes the next ones while others still read.
  __shared__ unsigned long long of_block[2][kDigits];
  __shared__ unsigned long long weights[kDigits];
  __shared__ KeyRange ranges[kDigits], all_ranges[kDigits];
  __shared__ Cut cut;
  // Logits of 16 bits differ by more than the second digit does: the others are rarely needed.
  constexpr int kRangeShift = 16;
  uint32_t prefix = 0, mask = 0;
  const bool are_many = z.own.count() * (kThreads / kCopies) >= kMostOfCopy;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    sums.clear();
    if (threadIdx.x == 0 && shift == 24) {
      cut = {0, 0, 0};
    }
    const bool has_ranges = shift == kRangeShift;
    if (has_ranges && threadIdx.x < kDigits) ranges[threadIdx.x] = {~0u, 0u};
    __syncthreads();
#pragma unroll 2
    for (int i = 0; i < z.own.count(); ++i) {
      const float number = z.get(i);
      const uint32_t key = key_of(number);
      if (key >= least && (key & mask) == prefix) {
        const uint32_t digit = (key >> shift) & 255u;
        sums.add(digit, share.weight(number), are_many);
        if (has_ranges) {
          atomicMin(&ranges[digit].least, key);
          atomicMax(&ranges[digit].most, key);
        }
      }
    }
    __syncthreads();
    unsigned long long* const mine = of_block[shift / 8 % 2];
    if (threadIdx.x < kDigits) {
      (kBlocks > 1 ? mine : weights)[threadIdx.x] =
          sums.sum(static_cast<int>(threadIdx.x), are_many);
    }
    blocks.sync();
    if constexpr (kBlocks > 1) {
      if (threadIdx.x < kDigits) {
        const unsigned address = shared_address(mine + threadIdx.x);
        unsigned long long total = 0;
#pragma unroll
        for (int r = 0; r < kBlocks; ++r) {
          total += load_remote<unsigned long long>(address_in_block(address, r));
        }
        weights[threadIdx.x] = total;
        if (has_ranges) all_ranges[threadIdx.x] = range_over(blocks, &ranges[threadIdx.x]);
      }
      __syncthreads();
    }
    if (threadIdx.x < 32) {
      cut_digits(
          weights, shift == 24, [&](unsigned long long all) { return share.target(all); }, &cut);
    }
    __syncthreads();
    prefix |= cut.digit << shift;
    mask |= 255u << shift;
    if (has_ranges) {
      const KeyRange found = (kBlocks > 1 ? all_ranges : ranges)[cut.digit];
      if (found.least == found.most) return found.least;
    }
  }
  return prefix;
}

/// The smallest key that settings leave in.
template <int kBlocks, class Numbers>
__device__ uint32_t threshold(RowBlocks<kBlocks>& blocks, const Numbers& z, int64_t vocab,
                              const double* settings) {
  uint32_t least = 0;
  const double top_k = settings[kTopK], top_p = settings[kTopP], min_p = settings[kMinP];
#pragma unroll 1  // so that the search is there once
  for (const bool is_mass : {false, true}) {
    const bool is_asked = is_mass ? top_p < 1 : top_k >= 1 && top_k < static_cast<double>(vocab);
    if (is_asked) least = last_kept(blocks, z, least, Share{is_mass, is_mass ? top_p : top_k});
  }
  if (min_p > 0) {
    least = max(least, key_of(static_cast<float>(log(min_p))));
  }
  return least;
}

/// No less than the Gumbel number of a word, which is -log E with E >= U, and U at least the power
/// of two below it.
__device__ float above_gumbel(uint32_t word) {
  constexpr float kLog2 = 0.69315f, kRounding = 1e-3f;
  return fmaf(kLog2, static_cast<float>(__clz(static_cast<int>(word)) + 1), kRounding);
}

/// argmax of z + Gumbel numbers over the keys from `least`. Most tokens cannot be the best any more
/// of those that the warp has seen, and need no number, or not its logarithms.
template <int kBlocks, class Numbers>
__device__ int64_t draw(RowBlocks<kBlocks>& blocks, const Numbers& z, int64_t top, uint32_t least,
                        const int64_t* table) {
  Best<float> best{lowest<float>(), top};
  const int64_t seed = table[kSeed], stream = table[kStream], drawn = table[kDrawn];
#pragma unroll 1
  for (int g = 0; g < z.own.groups; ++g) {
    const float bar = warp_max(best.score);
    const int64_t group = z.own.group(g);
    // Which of the four may win is found out first, so that a warp makes random words once a group.
    float number[4];
    bool may_win[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      number[i] = z.get(4 * g + i);
      may_win[i] = number[i] > lowest<float>() && !(number[i] + kLargestGumbel < bar) &&
                   key_of(number[i]) >= least;
      any = any || may_win[i];
    }
    if (!any) continue;
    const Philox4 words = words_of(seed, stream, drawn, group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      may_win[i] = may_win[i] && !(number[i] + above_gumbel(words.word[i]) < bar);
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      // Registers have no index.
      const bool may =
          i < 2 ? (i == 0 ? may_win[0] : may_win[1]) : (i == 2 ? may_win[2] : may_win[3]);
      if (!may) continue;
      const float own = i < 2 ? (i == 0 ? number[0] : number[1]) : (i == 2 ? number[2] : number[3]);
      const uint32_t word = i < 2 ? (i == 0 ? words.word[0] : words.word[1])
                                  : (i == 2 ? words.word[2] : words.word[3]);
      best = better(best, Best<float>{own + gumbel(word), 4 * group + i});
    }
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

/// kKept: the row's numbers fit the blocks' shared memory.
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
    const Row<E> row{logits, seen, static_cast<Real>(settings[kPenalty]), p.vocab};
    token = sampled<kKept>(blocks, row, settings, table, kept);
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

/// What a block has beside its numbers.
constexpr int kOtherBytes = 48 << 10;

/// Shared memory for the numbers of one of so many blocks.
int64_t kept_bytes(int64_t vocab, int blocks) {
  return ceil_div(ceil_div(vocab, int64_t{4}), int64_t{blocks} * kThreads) * 4 * kThreads *
         static_cast<int64_t>(sizeof(float));
}

/// In clusters of kBlocks, or by one block a row.
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
    // As many blocks as run at once: a multiprocessor holds one.
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
