#pragma once

// Which tokens of a row top_k, top_p and min_p leave: the smallest key that is kept, found a byte
// of it at a time, by sums over the tokens of a row's blocks for each value of the byte. What
// decides are sums of integers, so that no order of addition matters.

#include <cmath>
#include <cstdint>

#include "kernels/common/cuda/gates.cuh"
#include "kernels/sampling/cuda/row_blocks.cuh"
#include "kernels/sampling/draws.h"

namespace tidegate::kernels::sampling {

constexpr int kDigits = 256;
// How many copies of a digit's sum there are: one a lane, each in a bank of its own.
constexpr int kCopies = 32;

/// Where the search ends within the 256 digits of a byte: the lowest digit that has weight and has
/// less than `target` above it.
struct Cut {
  uint32_t digit;
  unsigned long long above, target;
};

/// Finds the cut. The first warp calls this; its lane l looks at the digits from 255 - 8 l down.
/// target(sum of all weights): the weight above a kept digit is less than that.
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

/// mass_of() as the search sums it: exp(z) = exp(-drop) exp(z + drop), drop the whole quarters of
/// -z, which the first digit of a key counts. Sums of one first digit are sums of the second
/// factor, in so many bits that 32 hold the sum of any copy of a row's tokens: shared memory adds
/// 32 bits at once, and twice as many take twice as long. How many depends on the vocabulary alone.
struct Masses {
  int bits;

  __device__ explicit Masses(int64_t vocab) : bits(22) {
    while (bits > 0 && (vocab / kCopies + 4) >> (32 - bits) > 0) --bits;
  }
  /// A token's mass as an integer. Adding 2^23 leaves an integer in a float's last places, which is
  /// faster than a conversion.
  __device__ uint32_t of(float z, uint32_t key) const {
    constexpr float kOnes = 0x1p23f, kLog2e = 1.44269504f;
    const float digit = __uint_as_float(__float_as_uint(kOnes) | key >> 24);
    const float rest = z + fmaf(digit, -0.25f, 0.25f * (kOnes + 255.0f));
    const float mass = exp2_approx(fmaf(rest, kLog2e, static_cast<float>(bits)));
    return key == 0 ? 0u : __float_as_uint(__fadd_rz(mass, kOnes)) & 0x7fffffu;
  }
  /// factor() is what sums of a first digit are worth, exp(-drop); sum() is such a sum in units of
  /// 2^-40 of the likeliest token's mass.
  __device__ static unsigned long long factor(uint32_t first_digit) {
    const int quarters = 255 - static_cast<int>(first_digit);
    return static_cast<unsigned long long>(exp(-0.25 * quarters) * 0x1p63);
  }
  __device__ unsigned long long sum(unsigned long long masses, unsigned long long factor) const {
    return __umul64hi(masses << (41 - bits), factor);
  }
};

/// The sum of weights of each digit. Lanes that add to one bank wait for each other, so each lane
/// has a copy in a bank of its own.
struct DigitSums {
  static constexpr int kDigitThreads = kThreads / kDigits;  // that add up a digit's copies
  static constexpr int kPacks = kCopies / 4;                // of a digit, of one access each

  uint4 words[kDigits][kPacks];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kDigits * kPacks; i += kThreads) (&words[0][0])[i] = uint4{};
  }
  __device__ void add(uint32_t digit, uint32_t weight) {
    atomicAdd(&words[digit][0].x + threadIdx.x % kCopies, weight);
  }
  /// The sum of digit threadIdx.x / kDigitThreads, in each of its threads.
  __device__ unsigned long long sum() const {
    unsigned long long all = 0;
#pragma unroll
    for (int i = 0; i < kPacks / kDigitThreads; ++i) {
      const uint4 w =
          words[threadIdx.x / kDigitThreads][threadIdx.x % kDigitThreads + i * kDigitThreads];
      all += static_cast<unsigned long long>(w.x) + w.y + w.z + w.w;
    }
#pragma unroll
    for (int distance = 1; distance < kDigitThreads; distance *= 2) {
      all += __shfl_xor_sync(~0u, all, distance);
    }
    return all;
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

  Masses masses;

  __device__ uint32_t weight(float number, uint32_t key) const {
    return is_mass ? masses.of(number, key) : 1u;
  }
  __device__ unsigned long long factor(uint32_t first_digit) const {
    return is_mass ? Masses::factor(first_digit) : 1ull;
  }
  __device__ unsigned long long sum(unsigned long long weights, unsigned long long factor) const {
    return is_mass ? masses.sum(weights, factor) : weights;
  }
  __device__ unsigned long long target(unsigned long long all) const {
    return is_mass ? share_of(all, most) : static_cast<unsigned long long>(most);
  }
};

/// sum_over() and range_over() join the numbers that the blocks of a cluster have left in their
/// shared memory, in the blocks' order.
template <int kBlocks>
__device__ unsigned long long sum_over(const RowBlocks<kBlocks>&, const unsigned long long* mine) {
  const unsigned address = shared_address(mine);
  unsigned long long total = 0;
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) {
    total += load_remote<unsigned long long>(address_in_block(address, r));
  }
  return total;
}
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

/// The smallest z whose key is at least this.
__device__ inline float least_number(uint32_t key) {
  return key == 0 ? lowest<float>() : -0x1p-26f * __uint2float_rd(0u - key);
}

/// Calls count(number) for each number in [least, end), of which a thread has few. A thread first
/// finds out which numbers these are, as a warp takes as long to count one lane's as all lanes'.
template <class Numbers, class Count>
__device__ void count_few(const Numbers& z, float least, float end, Count count) {
#pragma unroll 1
  for (int first = 0; first < z.own.count(); first += 32) {
    unsigned counted = 0;
    const int numbers = min(32, z.own.count() - first);
#pragma unroll 4
    for (int i = 0; i < numbers; ++i) {
      const float number = z.get(first + i);
      counted |= (number >= least && number < end ? 1u : 0u) << i;
    }
#pragma unroll 1
    for (; counted != 0; counted &= counted - 1) {
      count(z.get(first + __ffs(static_cast<int>(counted)) - 1));
    }
  }
}

/// Counts the numbers whose key has `prefix` under `mask` and is at least `least`.
template <class Numbers, class Count>
__device__ __forceinline__ void count_with_prefix(const Numbers& z, uint32_t prefix, uint32_t mask,
                                                  uint32_t least, Count count) {
  const float from = least_number(max(prefix, least));
  if (mask == 0) {
#pragma unroll 2
    for (int i = 0; i < z.own.count(); ++i) {
      const float number = z.get(i);
      if (number >= from) count(number);
    }
  } else {
    const uint32_t after = prefix + ~mask + 1;
    count_few(z, from, after == 0 ? INFINITY : least_number(after), count);
  }
}

/// Finds each digit's weight over all blocks of the row, of which each has left its own sums in
/// `mine`, and the range of the digit's keys.
template <int kBlocks>
__device__ __forceinline__ void gather_digits(const RowBlocks<kBlocks>& blocks, const Share& share,
                                              unsigned long long factor, bool has_ranges,
                                              const unsigned long long* mine,
                                              const KeyRange* ranges, unsigned long long* weights,
                                              KeyRange* all_ranges) {
  if (threadIdx.x < kDigits) {
    unsigned long long total = mine[threadIdx.x];
    KeyRange range = ranges[threadIdx.x];
    if constexpr (kBlocks > 1) {
      total = sum_over(blocks, mine + threadIdx.x);
      if (has_ranges) range = range_over(blocks, &ranges[threadIdx.x]);
    }
    weights[threadIdx.x] = share.sum(total, factor);
    if (has_ranges) all_ranges[threadIdx.x] = range;
  }
}

/// The smallest key among z, from `least` on, with less than the share's target above it.
template <int kBlocks, class Numbers>
__device__ uint32_t last_kept(const RowBlocks<kBlocks>& blocks, const Numbers& z, uint32_t least,
                              Share share) {
  __shared__ DigitSums sums;
  // Two buffers by turns: a block that is ahead writes the next sums while others still read these.
  __shared__ unsigned long long of_block[2][kDigits];
  __shared__ unsigned long long weights[kDigits];
  __shared__ KeyRange ranges[kDigits], all_ranges[kDigits];
  __shared__ Cut cut;
  // Logits of 16 bits differ by more than the second digit does: the others are rarely needed.
  constexpr int kRangeShift = 16;
  uint32_t prefix = 0, mask = 0;
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
    const auto count = [&](float number) {
      const uint32_t key = key_of(number), digit = (key >> shift) & 255u;
      sums.add(digit, share.weight(number, key));
      if (has_ranges) {
        // Most digits have a single key, so that nothing changes after its first token.
        const KeyRange range = ranges[digit];
        if (key < range.least) atomicMin(&ranges[digit].least, key);
        if (key > range.most) atomicMax(&ranges[digit].most, key);
      }
    };
    count_with_prefix(z, prefix, mask, least, count);
    __syncthreads();
    unsigned long long* const mine = of_block[shift / 8 % 2];
    const unsigned long long sum = sums.sum();
    if (threadIdx.x % DigitSums::kDigitThreads == 0) {
      mine[threadIdx.x / DigitSums::kDigitThreads] = sum;
    }
    // The factor takes a while, and the blocks wait for each other anyway.
    const unsigned long long factor =
        share.factor(shift == 24 ? threadIdx.x % kDigits : prefix >> 24);
    blocks.sync();
    gather_digits(blocks, share, factor, has_ranges, mine, ranges, weights, all_ranges);
    __syncthreads();
    if (threadIdx.x < 32) {
      cut_digits(
          weights, shift == 24, [&](unsigned long long all) { return share.target(all); }, &cut);
    }
    __syncthreads();
    prefix |= cut.digit << shift;
    mask |= 255u << shift;
    if (has_ranges) {
      const KeyRange found = all_ranges[cut.digit];
      if (found.least == found.most) return found.least;
    }
  }
  return prefix;
}

/// The smallest key that top_k, top_p and min_p leave in.
template <int kBlocks, class Numbers>
__device__ uint32_t threshold(RowBlocks<kBlocks>& blocks, const Numbers& z, int64_t vocab,
                              const double* settings) {
  uint32_t least = 0;
  const double top_k = settings[kTopK], top_p = settings[kTopP], min_p = settings[kMinP];
#pragma unroll 1  // so that the search is there once
  for (const bool is_mass : {false, true}) {
    const bool is_asked = is_mass ? top_p < 1 : top_k >= 1 && top_k < static_cast<double>(vocab);
    if (is_asked)
      least = last_kept(blocks, z, least, Share{is_mass, is_mass ? top_p : top_k, Masses(vocab)});
  }
  if (min_p > 0) {
    least = max(least, key_of(static_cast<float>(log(min_p))));
  }
  return least;
}

}  // namespace tidegate::kernels::sampling
