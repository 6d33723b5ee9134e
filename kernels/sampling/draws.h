#pragma once

// What CPU and CUDA compute alike of one token: random numbers, order, weight.

#include <cmath>
#include <cstdint>

#include "kernels/sampling/sampling.h"

#ifdef __CUDACC__
#define TIDEGATE_BOTH __host__ __device__ __forceinline__
#else
#define TIDEGATE_BOTH inline
#endif

namespace tidegate::kernels::sampling {

struct Philox4 {
  uint32_t word[4];
};

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
TIDEGATE_BOTH Philox4 philox(uint64_t key, Philox4 counter) {
  auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ low, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ high, static_cast<uint32_t>(a)}};
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return counter;
}

/// The random words of tokens 4 * group to 4 * group + 3.
TIDEGATE_BOTH Philox4 words_of(int64_t seed, int64_t stream, int64_t drawn, int64_t group) {
  return philox(
      static_cast<uint64_t>(seed),
      {{static_cast<uint32_t>(group), static_cast<uint32_t>(drawn),
        static_cast<uint32_t>(static_cast<uint64_t>(drawn) >> 32), static_cast<uint32_t>(stream)}});
}

/// -log E of an exponential E: a standard Gumbel number. From U near zero, where float has its
/// digits, come the small E, which decide.
TIDEGATE_BOTH float gumbel(uint32_t word) {
  const float uniform = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  return -logf(-log1pf(-uniform));
}

/// No Gumbel number is larger: that of the smallest E, 2^-33.
constexpr float kLargestGumbel = 22.9f;

/// z <= 0 as an integer whose digits spread: 2^-26 apart, those below -64 alike. The order of z but
/// for what is closer than that.
TIDEGATE_BOTH uint32_t key_of(float z) {
  if (!(z > -64.0f)) {
    return 0;
  }
  const float exact = z * -0x1p26f;  // below zero, in units of 2^-26
#ifdef __CUDA_ARCH__
  const uint32_t below = __float2uint_ru(exact);  // the same in one conversion
#else
  const auto below = static_cast<uint32_t>(ceilf(exact));
#endif
  return below == 0 ? 4294967295u : 0u - below;
}

/// exp(z) as an integer, so that sums do not depend on their order; 2^20 of them fit.
TIDEGATE_BOTH uint64_t mass_of(float z) {
  return z > -64.0f ? static_cast<uint64_t>(expf(z) * 0x1p40f) : 0;
}

/// The logit of a token that was seen before (Keskar et al., arXiv 1909.05858).
template <class Real>
TIDEGATE_BOTH Real penalized(Real logit, Real penalty) {
  return logit > 0 ? logit / penalty : logit * penalty;
}

/// The share `top_p` of a sum of masses: less than this may be above a token that is kept. One at
/// least, so that the likeliest always is.
TIDEGATE_BOTH uint64_t share_of(uint64_t total, double top_p) {
  const auto share = static_cast<uint64_t>(static_cast<double>(total) * top_p);
  return share > 0 ? share : 1;
}

/// What follows from row b's token, by one thread: the ring of tokens, whether the row has ended,
/// the count.
TIDEGATE_BOTH void note_token(const SamplingParams& p, int64_t b, int64_t token) {
  int64_t* const table = p.table + b * kColumns;
  if (p.ids != nullptr) {
    p.ids[b] = token;
  }
  if (p.tokens != nullptr) {
    p.tokens[b * p.window + table[kDrawn] % p.window] = token;
  }
  if (p.seen != nullptr) {
    p.seen[b * p.vocab + token] = 1;
  }
  bool ends = ++table[kDrawn] >= table[kLimit];
  for (int64_t s = 0; s < p.stops_a_row; ++s) {
    ends = ends || p.stops[b * p.stops_a_row + s] == token;
  }
  if (ends) {
    table[kDone] = 1;
  }
}

}  // namespace tidegate::kernels::sampling
