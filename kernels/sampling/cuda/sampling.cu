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
// Of the sums a digit: warps that add to one would wait for each other.
constexpr int kCopies = 8;
constexpr int kMostBlocks = 8, kFewBlocks = 2;  // of a cluster
// Tokens that are worth a cluster: fewer take less time than its blocks need to meet.
constexpr int64_t kLongRow = 4096;

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

/// A row's numbers less their maximum, divided by the temperature. A block keeps those of its own
/// threads, each of which reads none but its own.
template <class E, int kBlocks>
struct Scaled {
  using Real = typename Register<E>::type;

  Row<E> row;
  Real most, temperature;
  float* kept;  // in shared memory, or null

  __device__ float made(int64_t v) const {
    return static_cast<float>((row[v] - most) / temperature);
  }
  __device__ void keep(const RowBlocks<kBlocks>& blocks) const {
    if (kept == nullptr) return;
    for_each(blocks, [&](int64_t v, int place) { kept[place] = made(v); });
    __syncwarp();
  }
  template <class Visit>
  __device__ void for_each(const RowBlocks<kBlocks>& blocks, Visit visit) const {
    int place = static_cast<int>(threadIdx.x);
    for (int64_t group = blocks.first(); 4 * group < row.vocab; group += blocks.kStride) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * group + i < row.vocab) visit(4 * group + i, place);
        place += kThreads;
      }
    }
  }
  __device__ float get(int64_t v, int place) const {
    return kept != nullptr ? kept[place] : made(v);
  }
};

template <int kBlocks, class E>
__device__ Best<typename Register<E>::type> likeliest(RowBlocks<kBlocks>& blocks,
                                                      const Row<E>& row) {
  using Real = typename Register<E>::type;
  Best<Real> best{lowest<Real>(), row.vocab - 1};
  for (int64_t v = blocks.first(); v < row.vocab; v += blocks.kStride) {
    best = better(best, Best<Real>{row[v], v});
  }
  return row_best(blocks, best);
}

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
  if (lane == last) {
    *cut = {have == 0 ? 0u : static_cast<uint32_t>(kept), have == 0 ? cut->above : kept_above,
            most};
  }
}

/// Sums of 64 bits a digit, in two words: shared memory adds up to 32 bits in one instruction.
struct DigitSums {
  unsigned low[kCopies][kDigits], high[kCopies][kDigits];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kCopies * kDigits; i += kThreads) {
      (&low[0][0])[i] = 0;
      (&high[0][0])[i] = 0;
    }
  }
  __device__ void add(uint32_t digit, unsigned long long weight) {
    const int copy = static_cast<int>(threadIdx.x / 32) % kCopies;
    const auto part = static_cast<unsigned>(weight);
    const unsigned before = atomicAdd(&low[copy][digit], part);
    const unsigned carry = before + part < before ? 1u : 0u;
    const unsigned more = static_cast<unsigned>(weight >> 32) + carry;
    if (more != 0) atomicAdd(&high[copy][digit], more);
  }
  __device__ unsigned long long sum(int digit) const {
    unsigned long long total = 0;
    for (int copy = 0; copy < kCopies; ++copy) {
      total += low[copy][digit] + (static_cast<unsigned long long>(high[copy][digit]) << 32);
    }
    return total;
  }
};

/// The smallest key among z, from `least` on, with less than target(sum of all weights) above it.
template <int kBlocks, class Numbers, class Weight, class Target>
__device__ uint32_t last_kept(const RowBlocks<kBlocks>& blocks, const Numbers& z, uint32_t least,
                              Weight weight, Target target) {
  __shared__ DigitSums sums;
  // By turns: a block that is ahead writes the next ones while others still read.
  __shared__ unsigned long long of_block[2][kDigits];
  __shared__ unsigned long long weights[kDigits];
  __shared__ Cut cut;
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    sums.clear();
    if (threadIdx.x == 0 && shift == 24) {
      cut = {0, 0, 0};
    }
    __syncthreads();
    z.for_each(blocks, [&](int64_t v, int place) {
      const float number = z.get(v, place);
      const uint32_t key = key_of(number);
      if (key >= least && (key & mask) == prefix) {
        const unsigned long long adds = weight(number);
        if (adds > 0) {
          sums.add((key >> shift) & 255u, adds);
        }
      }
    });
    __syncthreads();
    unsigned long long* const mine = of_block[shift / 8 % 2];
    if (threadIdx.x < kDigits) {
      (kBlocks > 1 ? mine : weights)[threadIdx.x] = sums.sum(static_cast<int>(threadIdx.x));
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
      }
      __syncthreads();
    }
    if (threadIdx.x < 32) {
      cut_digits(weights, shift == 24, target, &cut);
    }
    __syncthreads();
    prefix |= cut.digit << shift;
    mask |= 255u << shift;
  }
  return prefix;
}

/// The smallest key that settings leave in.
template <int kBlocks, class Numbers>
__device__ uint32_t threshold(RowBlocks<kBlocks>& blocks, const Numbers& z, int64_t vocab,
                              const double* settings) {
  uint32_t least = 0;
  const double top_k = settings[kTopK], top_p = settings[kTopP], min_p = settings[kMinP];
  if (top_k >= 1 && top_k < static_cast<double>(vocab)) {
    least = last_kept(
        blocks, z, least, [](float) { return 1ull; },
        [&](unsigned long long) { return static_cast<unsigned long long>(top_k); });
  }
  if (top_p < 1) {
    least = last_kept(
        blocks, z, least, [](float number) -> unsigned long long { return mass_of(number); },
        [&](unsigned long long all) -> unsigned long long { return share_of(all, top_p); });
  }
  if (min_p > 0) {
    least = max(least, key_of(static_cast<float>(log(min_p))));
  }
  return least;
}

/// argmax of z + Gumbel numbers over the keys from `least`.
template <int kBlocks, class Numbers>
__device__ int64_t draw(RowBlocks<kBlocks>& blocks, const Numbers& z, int64_t top, uint32_t least,
                        const int64_t* table) {
  Best<float> best{lowest<float>(), top};
  int64_t known = -1;
  Philox4 words = {};
  z.for_each(blocks, [&](int64_t v, int place) {
    const float number = z.get(v, place);
    // No Gumbel number is larger: most tokens cannot be the best any more, and need none.
    if (key_of(number) < least || !(number > lowest<float>()) ||
        number + kLargestGumbel < best.score) {
      return;
    }
    if (v / 4 != known) {
      known = v / 4;
      words = words_of(table[kSeed], table[kStream], table[kDrawn], known);
    }
    best = better(best, Best<float>{number + gumbel(words.word[v % 4]), v});
  });
  return row_best(blocks, best).token;
}

template <int kBlocks, class E>
__device__ int64_t sampled(RowBlocks<kBlocks>& blocks, const Row<E>& row, const double* settings,
                           const int64_t* table, float* kept) {
  using Real = typename Register<E>::type;
  const Best<Real> top = likeliest(blocks, row);
  const double temperature = settings[kTemperature];
  if (temperature < FLT_MIN || isinf(top.score)) {
    return top.token;
  }
  const Scaled<E, kBlocks> z{row, top.score, static_cast<Real>(temperature), kept};
  z.keep(blocks);
  const uint32_t least = threshold(blocks, z, row.vocab, settings);
  return draw(blocks, z, top.token, least, table);
}

template <int kBlocks, class E>
__device__ float log_prob(RowBlocks<kBlocks>& blocks, const Row<E>& row, int64_t token) {
  using Real = typename Register<E>::type;
  const Real most = likeliest(blocks, row).score;
  Real sum = 0;
  for (int64_t v = blocks.first(); v < row.vocab; v += blocks.kStride) {
    sum += exp(row[v] - most);
  }
  return static_cast<float>(row[token] - most - log(row_sum(blocks, sum)));
}

template <class E, int kBlocks>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ SamplingParams p, bool keeps) {
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
    token = sampled(blocks, row, settings, table, keeps ? kept : nullptr);
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

/// In clusters of kBlocks, or by one block a row.
template <class E, int kBlocks>
cudaError_t launch_sample(const SamplingParams& p, cudaStream_t stream) {
  constexpr auto* kKernel = &sample_kernel<E, kBlocks>;
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  const int64_t groups = ceil_div(ceil_div(p.vocab, int64_t{4}), RowBlocks<kBlocks>::kStride);
  const int64_t wanted = groups * 4 * kThreads * static_cast<int64_t>(sizeof(float));
  constexpr int kOther = 28 << 10;  // what the kernel has besides
  const bool keeps = wanted + kOther <= limits.shared_bytes;
  const int bytes = keeps ? static_cast<int>(wanted) : 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(allow_shared_bytes<kKernel>(bytes));
  if (p.rows > std::numeric_limits<int>::max() / kBlocks) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(p.rows * kBlocks));
  if constexpr (kBlocks == 1) {
    return launch_in_chain<kKernel>(grid, dim3(kThreads), bytes, stream, p, keeps);
  } else {
    return launch_in_chain<kKernel, kBlocks>(grid, dim3(kThreads), bytes, stream, p, keeps);
  }
}

}  // namespace

cudaError_t sample_cuda(const SamplingParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  return dispatch_real(params.dtype, [&]<class E>() {
    bool can = false;
    TIDEGATE_RETURN_IF_CUDA_ERROR((can_cluster<&sample_kernel<E, kMostBlocks>>(&can)));
    // As many blocks as run at once: a multiprocessor holds one.
    if (can && params.vocab >= kLongRow && params.rows * kMostBlocks <= limits.multiprocessors) {
      return launch_sample<E, kMostBlocks>(params, stream);
    }
    if (can && params.vocab >= kLongRow && params.rows * kFewBlocks <= limits.multiprocessors) {
      return launch_sample<E, kFewBlocks>(params, stream);
    }
    return launch_sample<E, 1>(params, stream);
  });
}

}  // namespace tidegate::kernels::sampling
