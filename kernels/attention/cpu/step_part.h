#pragma once

// Decoding: one query a sequence. Each part of the cache is read from its last token to its
// first, with the sum of the gates in between, so that no sum grows with the cache; parts are put
// together from the newest to the oldest.

#include "kernels/attention/cpu/gate_scans.h"

namespace tidegate::kernels::attention::TIDEGATE_ISA {
namespace {

template <class R, class E>
struct StepPart {
  static constexpr int kBlock = kLanes<R>;  // keys that are scored together

  /// The oldest key that one of the query heads of `key_head` may see in spite of pruning: gates
  /// are added up from the newest key back to `oldest`, until their sum has fallen far enough for
  /// each of them.
  static TIDEGATE_NOINLINE int64_t first_key(const ForgettingAttentionStepParams& params,
                                             int64_t batch, int64_t key_head, int64_t oldest,
                                             int64_t length) {
    const int64_t group = params.heads / params.key_heads;
    int64_t first = length;
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      const double least = least_fade(params, batch, key_head, head, length);
      const GateRows<R, const R> gates(params.log_f, batch, 0, head);
      double fade = 0;  // the gates after key `j`
      int64_t j = length;
      while (j > oldest && !(fade < least)) fade += held_log_gate(gates.at(--j));
      if (j < first) first = j;
    }
    return first;
  }

  /// The sum of gates below which a key of this head is left out; NaN leaves out none.
  static TIDEGATE_INLINE double least_fade(const ForgettingAttentionStepParams& params,
                                           int64_t batch, int64_t key_head, int64_t head,
                                           int64_t length) {
    const E* q = HeadRows<const E>(params.q, batch, 0, head).first;
    const E* k = HeadRows<const E>(params.k, batch, 0, key_head).row(length > 0 ? length - 1 : 0);
    double square = 0, own = 0;
    for (int64_t n = 0; length > 0 && n < params.head_dim; ++n) {
      const double x = static_cast<double>(element<R>(q + n));
      square += x * x;
      own += x * static_cast<double>(element<R>(k + n));
    }
    const double norm =
        static_cast<double>(*HeadRows<const R>(params.key_norms, batch, 0, key_head).first);
    return __builtin_log(params.prune / static_cast<double>(params.capacity)) -
           params.scale * (kScoreSlack * __builtin_sqrt(square) * norm - own);
  }

  static TIDEGATE_NOINLINE void run(const ForgettingAttentionStepParams& params,
                                    const StepItem& item) {
    const int64_t group = params.heads / params.key_heads;
    for (int64_t i = 0; i < group; ++i) {
      iterate(params, item, item.key_head * group + i,
              static_cast<R*>(item.partial) + i * item.partial_stride);
    }
  }

  static void iterate(const ForgettingAttentionStepParams& params, const StepItem& item,
                      int64_t head, R* o) {
    const int64_t width = params.head_dim;
    const E* q = HeadRows<const E>(params.q, item.batch, 0, head).first;
    const HeadRows<const E> keys(params.k, item.batch, 0, item.key_head);
    const HeadRows<const E> values(params.v, item.batch, 0, item.key_head);
    const GateRows<R, const R> gates(params.log_f, item.batch, 0, head);
    const R scale = static_cast<R>(params.scale);
    for_each_vector<R>(width, [&](int64_t n, auto extent) { store<R>(o + n, Vec<R>{}, extent); });
    R maximum = -static_cast<R>(__builtin_inf()), total = 0;
    double between = 0;  // the gates after a key, up to the part's end
    for (int64_t end = item.end; end > item.begin; end -= kBlock) {
      const int64_t begin = end - kBlock > item.begin ? end - kBlock : item.begin;
      Vec<R> scores[kBlock];
      for (int64_t j = begin; j < begin + kBlock; ++j) {
        Vec<R> products{};
        if (j < end) {
          const E* k = keys.row(j);
          for_each_vector<R>(width, [&](int64_t n, auto extent) {
            products = fma(load<R>(q + n, extent), load<R>(k + n, extent), products);
          });
        }
        scores[j - begin] = products;
      }
      const Vec<R> dots = sums_of_lanes<R>(scores);
      R weight[kBlock];
      R top = maximum;
      for (int64_t j = end - 1; j >= begin; --j) {
        weight[j - begin] = static_cast<R>(static_cast<double>(scale * dots[j - begin]) + between);
        if (!(weight[j - begin] <= top)) top = weight[j - begin];
        between += held_log_gate(gates.at(j));
      }
      const R against = top == -static_cast<R>(__builtin_inf()) ? R(0) : top;
      const R shrink = exp_of_nonpositive(splat(maximum - against))[0];
      maximum = top;
      total *= shrink;
      Vec<R> all{};
      for (int64_t j = begin; j < end; ++j) all[j - begin] = weight[j - begin];
      all = exp_of_nonpositive(all - splat(against));
      for (int64_t j = begin; j < end; ++j) total += all[j - begin];
      for_each_vector<R>(width, [&](int64_t n, auto extent) {
        Vec<R> sum = splat(shrink) * load<R>(o + n, extent);
        for (int64_t j = begin; j < end; ++j) {
          sum = fma(splat(R(all[j - begin])), load<R>(values.row(j) + n, extent), sum);
        }
        store<R>(o + n, sum, extent);
      });
    }
    o[width] = maximum;
    o[width + 1] = total;
    o[width + 2] = static_cast<R>(between);
  }

  /// The oldest part first. What lies between an older part and the query are the gates of all
  /// newer ones.
  static TIDEGATE_NOINLINE void combine(const ForgettingAttentionStepParams& params, int64_t batch,
                                        int64_t head, const R* partials, int64_t stride,
                                        int64_t parts) {
    const int64_t width = params.head_dim;
    E* const o = HeadRows<E>(params.o, batch, 0, head).first;
    double top = -__builtin_inf(), between = 0;
    for (int64_t i = parts - 1; i >= 0; --i) {
      const R* summary = partials + i * stride + width;
      const double here = static_cast<double>(summary[0]) + between;
      if (!(here <= top)) top = here;
      between += static_cast<double>(summary[2]);
    }
    double total = 0;
    between = 0;
    const double against = top == -__builtin_inf() ? 0 : top;
    for (int64_t i = parts - 1; i >= 0; --i) {
      const R* summary = partials + i * stride + width;
      total += factor_of(summary, between, against) * static_cast<double>(summary[1]);
      between += static_cast<double>(summary[2]);
    }
    const double inverse = total == 0 ? 0 : 1 / total;
    for_each_vector<R>(width, [&](int64_t n, auto extent) {
      Vec<R> sum{};
      double gates = 0;
      for (int64_t i = parts - 1; i >= 0; --i) {
        const R* partial = partials + i * stride;
        const R factor = static_cast<R>(factor_of(partial + width, gates, against) * inverse);
        sum = fma(splat(factor), load<R>(partial + n, extent), sum);
        gates += static_cast<double>(partial[width + 2]);
      }
      store<R>(o + n, sum, extent);
    });
  }

  static TIDEGATE_INLINE double factor_of(const R* summary, double between, double against) {
    return exp_of_nonpositive(splat(static_cast<double>(summary[0]) + between - against))[0];
  }
};

}  // namespace
}  // namespace tidegate::kernels::attention::TIDEGATE_ISA
