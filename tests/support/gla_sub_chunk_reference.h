#pragma once

// The forward pass as tensor cores compute it, naively: sub-chunks of 16 tokens, scores by dyadic
// references, every operand of a product rounded to bf16, sums in float, those of the state rounded
// towards zero as tensor cores do. Its error is what that form costs in that precision, and a
// kernel's error is compared with it.

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/gla_reference.h"
#include "support/typed_series.h"

namespace tidegate::testing {

class GlaSubChunkReference : public GlaReference<float> {
 public:
  /// Writes o and h_final.
  void run_forward(const ReferenceLayout& layout) {
    o.assign(layout.tokens * heads * value_dim, 0);
    h_final.assign(layout.sequences.size() * heads * key_dim * value_dim, 0);
    for (size_t n = 0; n < layout.sequences.size(); ++n) {
      for (int64_t h = 0; h < heads; ++h) run_head(layout, static_cast<int64_t>(n), h);
    }
  }

 private:
  static constexpr int64_t kSubChunk = 16;
  static constexpr int64_t kKeyTile = 128;  // channels whose scores are rounded together
  using Tokens = std::vector<int64_t>;      // of a sub-chunk

  static float operand(float x) { return static_cast<float>(rounded(DType::kBFloat16, x).real()); }

  void run_head(const ReferenceLayout& layout, int64_t n, int64_t h) {
    const TokenRange& range = layout.sequences[n];
    const int64_t size = key_dim * value_dim, first = (n * heads + h) * size;
    Array state(size, 0);
    if (!h0.empty()) state.assign(h0.begin() + first, h0.begin() + first + size);
    for (int64_t begin = 0; begin < range.length; begin += kSubChunk) {
      const int64_t end = std::min(begin + kSubChunk, range.length);
      Tokens tokens;
      for (int64_t step = begin; step < end; ++step) tokens.push_back(layout.token(range, step));
      outputs(tokens, h, state);
      update(tokens, h, &state);
    }
    std::copy(state.begin(), state.end(), h_final.begin() + first);
  }

  /// x + y, rounded towards zero.
  static float truncated_sum(float x, float y) {
    const double sum = static_cast<double>(x) + y;
    const float nearest = static_cast<float>(sum);
    return std::abs(static_cast<double>(nearest)) > std::abs(sum) ? std::nextafter(nearest, 0.0f)
                                                                  : nearest;
  }

  /// The product of the decays of tokens begin .. end - 1.
  float decays(const Tokens& tokens, int64_t h, int64_t i, size_t begin, size_t end) const {
    float product = 1;
    for (size_t u = begin; u < end; ++u) product *= decay(tokens[u], h, i);
    return product;
  }

  /// q_t k_s and the decays between, over a tile of the channels: both referred to the boundary
  /// between the largest neighbouring groups of tokens that part them. Neighbours of a pair are
  /// multiplied in float.
  float score(const Tokens& tokens, int64_t h, size_t t, size_t s, int64_t first) const {
    size_t group = 1;
    while (t / (2 * group) != s / (2 * group)) group *= 2;
    const size_t boundary = t == s ? t + 1 : t / group * group;
    float sum = 0;
    for (int64_t i = first; i < std::min(first + kKeyTile, key_dim); ++i) {
      const float q = query(tokens[t], h, i) * decays(tokens, h, i, boundary, t + 1);
      const float k = key(tokens[s], h, i) * decays(tokens, h, i, s + 1, std::min(boundary, t + 1));
      sum += group == 1 ? q * k : operand(q) * operand(k);
    }
    return sum;
  }

  void outputs(const Tokens& tokens, int64_t h, const Array& state) {
    for (size_t t = 0; t < tokens.size(); ++t) {
      for (size_t s = 0; s <= t; ++s) {
        float weight = 0;
        for (int64_t i = 0; i < key_dim; i += kKeyTile) {
          weight += operand(score(tokens, h, t, s, i));
        }
        for (int64_t j = 0; j < value_dim; ++j) {
          o[value_at(tokens[t], h, j)] += weight * operand(value(tokens[s], h, j));
        }
      }
      for (int64_t i = 0; i < key_dim; ++i) {
        const float q = operand(query(tokens[t], h, i) * decays(tokens, h, i, 0, t + 1));
        for (int64_t j = 0; j < value_dim; ++j) {
          o[value_at(tokens[t], h, j)] += q * operand(state[i * value_dim + j]);
        }
      }
    }
  }

  void update(const Tokens& tokens, int64_t h, Array* state) const {
    for (int64_t i = 0; i < key_dim; ++i) {
      const float total = decays(tokens, h, i, 0, tokens.size());
      Array sums(value_dim, 0);
      for (size_t s = 0; s < tokens.size(); ++s) {
        const float k = operand(key(tokens[s], h, i) * decays(tokens, h, i, s + 1, tokens.size()));
        for (int64_t j = 0; j < value_dim; ++j) sums[j] += k * operand(value(tokens[s], h, j));
      }
      for (int64_t j = 0; j < value_dim; ++j) {
        float& s = (*state)[i * value_dim + j];
        s = truncated_sum(total * s, sums[j]);
      }
    }
  }
};

}  // namespace tidegate::testing
