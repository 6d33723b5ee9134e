// Drawing tokens on the CPU: a thread has whole rows.

#include <algorithm>
#include <cfloat>
#include <limits>
#include <vector>

#include "kernels/sampling/draws.h"
#include "kernels/sampling/sampling.h"

namespace tidegate::kernels::sampling {
namespace {

/// The rows' numbers less their maximum, divided by the temperature, between the passes over them.
std::vector<float>& scratch(int64_t size) {
  static thread_local std::vector<float> values;
  if (static_cast<int64_t>(values.size()) < size) {
    values.resize(static_cast<size_t>(size));
  }
  return values;
}

template <class Real>
struct Row {
  const Real* logits;
  const uint8_t* seen;
  Real penalty;
  int64_t vocab;

  /// NaN and what is below everything come as -inf.
  Real operator[](int64_t v) const {
    Real logit = logits[v];
    if (seen != nullptr && seen[v] != 0) {
      logit = penalized(logit, penalty);
    }
    return logit == logit ? logit : -std::numeric_limits<Real>::infinity();
  }
};

template <class Real>
int64_t likeliest(const Row<Real>& row) {
  int64_t best = 0;
  Real most = row[0];
  for (int64_t v = 1; v < row.vocab; ++v) {
    if (const Real logit = row[v]; logit > most) {
      most = logit;
      best = v;
    }
  }
  return best;
}

/// The smallest key among z with less than `target` of weight above it: by the digits of a byte,
/// from the highest. weight(z): what a token counts.
template <class Weight>
uint32_t last_kept(const float* z, int64_t vocab, uint32_t least, uint64_t target, Weight weight) {
  uint32_t prefix = 0, mask = 0;
  uint64_t above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t weights[256] = {};
    for (int64_t v = 0; v < vocab; ++v) {
      const uint32_t key = key_of(z[v]);
      if (key >= least && (key & mask) == prefix) {
        weights[(key >> shift) & 255u] += weight(z[v]);
      }
    }
    uint32_t kept = 0;
    uint64_t before = above;
    for (int digit = 255; digit >= 0; --digit) {
      if (weights[digit] > 0 && before < target) {
        kept = static_cast<uint32_t>(digit);
        above = before;
      }
      before += weights[digit];
    }
    prefix |= kept << shift;
    mask |= 255u << shift;
  }
  return prefix;
}

/// The smallest key that settings leave in.
uint32_t threshold(const float* z, int64_t vocab, const double* settings) {
  uint32_t least = 0;
  const double top_k = settings[kTopK], top_p = settings[kTopP], min_p = settings[kMinP];
  if (top_k >= 1 && top_k < static_cast<double>(vocab)) {
    least = last_kept(z, vocab, least, static_cast<uint64_t>(top_k), [](float) { return 1; });
  }
  if (top_p < 1) {
    uint64_t total = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      total += key_of(z[v]) >= least ? mass_of(z[v]) : 0;
    }
    least = last_kept(z, vocab, least, share_of(total, top_p), mass_of);
  }
  if (min_p > 0) {
    least = std::max(least, key_of(static_cast<float>(std::log(min_p))));
  }
  return least;
}

/// argmax of z + Gumbel numbers over the keys from `least`; where two are equal the first.
int64_t draw(const float* z, int64_t vocab, int64_t top, uint32_t least, const int64_t* table) {
  int64_t best = top;
  float most = -std::numeric_limits<float>::infinity();
  const auto try_group = [&](int64_t group) {
    const int64_t first = 4 * group, end = std::min(first + 4, vocab);
    float largest = z[first];
    for (int64_t v = first + 1; v < end; ++v) {
      largest = std::max(largest, z[v]);
    }
    if (largest + kLargestGumbel < most || key_of(largest) < least) {
      return;
    }
    const Philox4 words = words_of(table[kSeed], table[kStream], table[kDrawn], group);
    for (int64_t v = first; v < end; ++v) {
      if (key_of(z[v]) < least || std::isinf(z[v])) {
        continue;
      }
      const float score = z[v] + gumbel(words.word[v - first]);
      if (score > most || (score == most && v < best)) {
        most = score;
        best = v;
      }
    }
  };
  // The likeliest first: most groups cannot reach it, and need no random numbers.
  try_group(top / 4);
  for (int64_t group = 0; 4 * group < vocab; ++group) {
    if (group != top / 4) {
      try_group(group);
    }
  }
  return best;
}

template <class Real>
float log_prob(const Row<Real>& row, int64_t token) {
  Real most = -std::numeric_limits<Real>::infinity();
  for (int64_t v = 0; v < row.vocab; ++v) {
    most = std::max(most, row[v]);
  }
  Real sum = 0;
  for (int64_t v = 0; v < row.vocab; ++v) {
    sum += std::exp(row[v] - most);
  }
  return static_cast<float>(row[token] - most - std::log(sum));
}

template <class Real>
int64_t sampled(const SamplingParams& p, const Row<Real>& row, const double* settings,
                const int64_t* table) {
  const int64_t top = likeliest(row);
  const Real most = row[top];
  const double temperature = settings[kTemperature];
  if (temperature < FLT_MIN || std::isinf(most)) {
    return top;
  }
  std::vector<float>& z = scratch(p.vocab);
  for (int64_t v = 0; v < p.vocab; ++v) {
    z[static_cast<size_t>(v)] =
        static_cast<float>((row[v] - most) / static_cast<Real>(temperature));
  }
  const uint32_t least = threshold(z.data(), p.vocab, settings);
  return draw(z.data(), p.vocab, top, least, table);
}

template <class Real>
void sample_row(const SamplingParams& p, int64_t b) {
  const double* const settings = p.settings + b * kSettings;
  int64_t* const table = p.table + b * kColumns;
  const Real* const logits = static_cast<const Real*>(p.logits) + b * p.stride;
  uint8_t* const seen = p.seen == nullptr ? nullptr : p.seen + b * p.vocab;
  int64_t token = table[kFill];
  if (table[kDone] == 0) {
    const Row<Real> row{logits, seen, static_cast<Real>(settings[kPenalty]), p.vocab};
    token = sampled(p, row, settings, table);
  }
  if (p.log_probs != nullptr) {
    const Row<Real> plain{logits, nullptr, Real(1), p.vocab};
    const bool is_real = table[kDone] == 0;
    p.log_probs[b * p.window + table[kDrawn] % p.window] = is_real ? log_prob(plain, token) : 0.0f;
  }
  note_token(p, b, token);
}

}  // namespace

void sample_cpu(const SamplingParams& params, const ParallelFor& parallel) {
  parallel.run(params.rows, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      params.dtype == DType::kFloat64 ? sample_row<double>(params, b)
                                      : sample_row<float>(params, b);
    }
  });
}

}  // namespace tidegate::kernels::sampling
