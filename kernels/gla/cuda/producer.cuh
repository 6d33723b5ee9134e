#pragma once

// Producer warps: each makes whole blocks of 16 tokens, from device memory to what consumers need,
// and shares nothing with the other producers.

#include "kernels/gla/cuda/block_tiles.cuh"
#include "kernels/gla/cuda/raw_tokens.cuh"
#include "kernels/gla/cuda/segments.cuh"

namespace tidegate::kernels {

/// Which part of the work of a launch a thread block has.
struct BlockWork {
  Segment segment;
  int64_t head;
  int first_key, keys;      // channels of K: 128 at most
  int first_value, values;  // columns of V: 128 at most
};

/// kMaps: only what the state is made of, keys and totals: no queries, no scores.
template <class Data, class Gate, GateKind kKind, int kKeys, bool kMaps>
class Producer {
 public:
  using Block = TokenBlock<kKeys>;
  static constexpr int kRounds = kKeys / 32;  // of 32 channels, eight a lane
  static constexpr int kValueRounds = kTileColumns / 32 / kRounds;

  /// Makes blocks first, first + stride, ... of the segment's.
  __device__ Producer(const GlaParams& p, const BlockWork& work, const float* bounds, int lane,
                      int first, int stride)
      : p_(p),
        work_(work),
        bounds_(bounds),
        lane_(lane),
        stride_(stride),
        step_(work.segment.begin + first * kDyadicTokens + token(0)),
        q_(rows<Data>(p.q, work.first_key)),
        k_(rows<Data>(p.k, work.first_key)),
        v_(rows<Data>(p.v, work.first_value)),
        gate_(rows<Gate>(p.gate, p.gate_per_head ? -channel(0) : work.first_key)) {}

  /// `acquire` and `release` guard the tiles of a block.
  template <class Acquire, class Release>
  __device__ void run(int first, int blocks, Acquire acquire, Release release) {
    Raw next;
    load(next, 0);
    for (int b = first; b < blocks; b += stride_) {
      Block& block = acquire(b);
      DyadicScores scores;
#pragma unroll 1
      for (int round = 0; round < kRounds; ++round) {
        const Raw raw = next;
        advance(round + 1 == kRounds);
        load(next, round + 1 == kRounds ? 0 : round + 1);
        make(block, raw, round, scores);
      }
      if constexpr (!kMaps) {
        store(block, scores);
      }
      release(b);
    }
  }

 private:
  struct Raw {
    Eight<Data> q[2], k[2], v[kValueRounds][2];
    Eight<Gate> gate[2];
  };
  // A logit and a log decay that stand for no token: no key (the log decay's is zero), decay one.
  static constexpr uint32_t kNoGate = kKind == GateKind::kLogDecay   ? 0u
                                      : std::is_same_v<Gate, __half> ? 0x7bff7bffu
                                                                     : 0x7f7f7f7fu;

  template <class T>
  __device__ LaneRows<T> rows(const HeadSeries& series, int first) const {
    return LaneRows<T>(series, work_.segment.seq, p_.layout.reverse, work_.head, step_,
                       first + channel(0));
  }
  __device__ int token(int i) const { return lane_ / 4 * 2 + i; }
  /// The first of the lane's eight channels, or columns, of a round.
  __device__ int channel(int round) const { return round * 32 + lane_ % 4 * 8; }

  /// To the next round, or to the first of the next block.
  __device__ void advance(bool to_next_block) {
    const int channels = to_next_block ? -32 * (kRounds - 1) : 32;
    if constexpr (!kMaps) {
      q_.move_channels(channels);
    }
    if constexpr (kKind == GateKind::kLogDecay) {
      k_.move_channels(channels);
    }
    v_.move_channels(channels * kValueRounds);
    if (kKind == GateKind::kLogit || !p_.gate_per_head) {
      gate_.move_channels(channels);
    }
    if (to_next_block) {
      const int steps = stride_ * kDyadicTokens;
      step_ += steps;
      if constexpr (!kMaps) {
        q_.move_steps(steps);
      }
      if constexpr (kKind == GateKind::kLogDecay) {
        k_.move_steps(steps);
      }
      v_.move_steps(steps);
      gate_.move_steps(steps);
    }
  }

  __device__ void load(Raw& raw, int round) const {
    const int whole = step_ - token(0) + kDyadicTokens;
    if (whole <= work_.segment.end && work_.keys == kKeys && work_.values == kTileColumns) {
      load_from<false>(raw, round);
    } else {
      load_from<true>(raw, round);
    }
  }

  template <bool kGuarded>
  __device__ void load_from(Raw& raw, int round) const {
    const auto get = [](auto& eight, const char* from, bool exists, uint32_t otherwise) {
      if (!kGuarded || exists) {
        eight.load(from);
      } else {
        eight.fill(otherwise);
      }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool token = step_ + i < work_.segment.end;
      const bool exists = token && channel(round) < work_.keys;
      if constexpr (!kMaps) {
        get(raw.q[i], q_.at(i, 0), exists, 0);
      }
      if constexpr (kKind == GateKind::kLogDecay) {
        get(raw.k[i], k_.at(i, 0), exists, 0);
      }
      if (kKind == GateKind::kLogDecay && p_.gate_per_head) {
        raw.gate[i].splat(exists ? *reinterpret_cast<const Gate*>(gate_.at(i, 0)) : Gate(0.0f));
      } else {
        get(raw.gate[i], gate_.at(i, 0), exists, kNoGate);
      }
#pragma unroll
      for (int h = 0; h < kValueRounds; ++h) {
        get(raw.v[h][i], v_.at(i, 32 * h),
            token && channel(round * kValueRounds + h) < work_.values, 0);
      }
    }
  }

  /// Keys and decays of four of the eight channels.
  __device__ void gates(const Raw& raw, int round, int first, float (&k)[2][4],
                        float (&f)[2][4]) const {
    float gamma[4] = {};
    if constexpr (kKind == GateKind::kLogit) {
      *reinterpret_cast<float4*>(gamma) =
          *reinterpret_cast<const float4*>(bounds_ + channel(round) + first);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = raw.gate[i].get(first + j);
        if constexpr (kKind == GateKind::kLogit) {
          const auto gate = logit_gate<GateMath<float, true>>(x, gamma[j], 1.0f - gamma[j]);
          k[i][j] = gate.key;
          f[i][j] = gate.decay;
        } else {
          k[i][j] = raw.k[i].get(first + j);
          f[i][j] = exp2_approx(x * 1.4426950408889634f);
        }
      }
    }
  }

  __device__ void make(Block& block, const Raw& raw, int round, DyadicScores& scores) const {
    uint32_t query[2][4], key[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float q[2][4], k[2][4], f[2][4], total[4];
      gates(raw, round, 4 * h, k, f);
      if constexpr (kMaps) {
        dyadic_keys(k, f, lane_, total);
      } else {
        activated(p_.q_activation, raw.q[0], 4 * h, q[0]);
        activated(p_.q_activation, raw.q[1], 4 * h, q[1]);
        dyadic_step(q, k, f, lane_, scores, total);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (!kMaps) {
          query[i / 2][2 * h + i % 2] = pack_bf16(q[i / 2][i % 2 * 2], q[i / 2][i % 2 * 2 + 1]);
        }
        key[i / 2][2 * h + i % 2] = pack_bf16(k[i / 2][i % 2 * 2], k[i / 2][i % 2 * 2 + 1]);
      }
      if (lane_ / 4 == h) {
        block.total.set(channel(round) + 4 * h, total);
      }
    }
    const int piece = channel(round) / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!kMaps) {
        *block.query.at(token(i), piece) = {query[i][0], query[i][1], query[i][2], query[i][3]};
      }
      *block.key.at(token(i), piece) = {key[i][0], key[i][1], key[i][2], key[i][3]};
#pragma unroll
      for (int h = 0; h < kValueRounds; ++h) {
        *block.value.at(token(i), channel(round * kValueRounds + h) / 8) =
            activated_bf16(p_.v_activation, raw.v[h][i]);
      }
    }
  }

  __device__ void store(Block& block, DyadicScores& scores) const {
    float s[2][4];
    scores.finish(s, lane_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block.score.rows[token(i)][lane_ % 4] = {pack_bf16(s[i][0], s[i][1]),
                                               pack_bf16(s[i][2], s[i][3])};
    }
  }

  const GlaParams& p_;
  const BlockWork& work_;
  const float* bounds_;  // gamma of the work's keys, in shared memory
  const int lane_, stride_;
  int step_;  // of the lane's first token in the block to load next
  LaneRows<Data> q_, k_, v_;
  LaneRows<Gate> gate_;
};

}  // namespace tidegate::kernels
