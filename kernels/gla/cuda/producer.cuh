#pragma once

// Producer warps: each turns whole blocks of 16 tokens into what consumers need, and shares nothing
// with the other producers.

#include "kernels/gla/cuda/loader.cuh"
#include "kernels/gla/cuda/raw_tokens.cuh"

namespace tidegate::kernels::gla {

/// kMaps: only what the state is made of, keys and totals: no queries, no scores.
template <class Data, class Gate, GateKind kKind, int kKeys, bool kMaps>
class Producer {
 public:
  static constexpr bool kGateIsKey = Loader<Data, Gate, kKind, kKeys, kMaps>::kGateIsKey;
  using Block = typename Loader<Data, Gate, kKind, kKeys, kMaps>::Block;
  static constexpr int kRounds = kKeys / 32;  // of 32 channels, eight a lane

  __device__ Producer(const GlaParams& p, const BlockWork& work, const float* bounds, int lane)
      : p_(p), work_(work), bounds_(bounds), lane_(lane) {
    if (kKind == GateKind::kLogDecay && p.gate_per_head) {
      head_gates_ = HeadRows(p.gate, work.segment.sequence, p.layout.reverse, work.head);
    }
  }

  /// Block b of the segment's, whose copies have landed.
  __device__ void make(Block& block, int b) const {
    float head_decay[2];
    if (kKind == GateKind::kLogDecay && p_.gate_per_head) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = step_of(b, i);
        const float x =
            step < work_.segment.end() ? head_gates_.template load<float>(step, 0) : 0.0f;
        head_decay[i] = exp2_approx(x * kLog2E);
      }
    }
    DyadicScores scores;
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      make_round(block, b, round, head_decay, scores);
    }
    if constexpr (!kMaps) {
      store(block, scores);
    }
    if (!std::is_same_v<Data, __nv_bfloat16> || p_.v_activation != InputActivation::kNone) {
      activate_values(block);
    }
  }

 private:
  // A logit that stands for no token or channel: no key, and a decay of one. (A log decay of zero
  // is that already, with its key of zero.)
  static constexpr uint32_t kNoLogit = std::is_same_v<Gate, __half> ? 0x7bff7bffu : 0x7f7f7f7fu;

  __device__ int token(int i) const { return lane_ / 4 * 2 + i; }
  __device__ int step_of(int b, int i) const {
    return work_.segment.first + b * kDyadicTokens + token(i);
  }
  /// The first of the lane's eight channels of a round.
  __device__ int channel(int round) const { return round * 32 + lane_ % 4 * 8; }

  __device__ void load_gates(Block& block, int b, int round, Eight<Gate> (&gate)[2]) const {
    const int piece = channel(round) / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kGateIsKey) {
        gate[i].load(block.key, token(i), piece);
      } else {
        gate[i].load(block.gate, token(i), piece);
      }
    }
    if constexpr (kKind == GateKind::kLogit) {
      const bool whole = work_.segment.first + (b + 1) * kDyadicTokens <= work_.segment.end();
      if (!whole || work_.keys < kKeys) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (step_of(b, i) >= work_.segment.end() || channel(round) >= work_.keys) {
            gate[i].fill(kNoLogit);
          }
        }
      }
    }
  }

  /// Keys and decays of four of the eight channels.
  __device__ void gates(const Eight<Gate> (&gate)[2], const Eight<Data> (&key)[2],
                        const float (&head_decay)[2], int round, int first, float (&k)[2][4],
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
        if constexpr (kKind == GateKind::kLogit) {
          const auto made =
              logit_gate<GateMath<float, true>>(gate[i].get(first + j), gamma[j], 1.0f - gamma[j]);
          k[i][j] = made.key;
          f[i][j] = made.decay;
        } else {
          k[i][j] = key[i].get(first + j);
          f[i][j] = p_.gate_per_head ? head_decay[i] : exp2_approx(gate[i].get(first + j) * kLog2E);
        }
      }
    }
  }

  __device__ void make_round(Block& block, int b, int round, const float (&head_decay)[2],
                             DyadicScores& scores) const {
    const int piece = channel(round) / 8;
    Eight<Gate> gate[2];
    Eight<Data> raw_q[2], raw_k[2];
    load_gates(block, b, round, gate);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!kMaps) {
        raw_q[i].load(block.query, token(i), piece);
      }
      if constexpr (kKind == GateKind::kLogDecay) {
        raw_k[i].load(block.key, token(i), piece);
      }
    }
    uint32_t query[2][4], key[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float q[2][4], k[2][4], f[2][4], total[4];
      gates(gate, raw_k, head_decay, round, 4 * h, k, f);
      if constexpr (kMaps) {
        dyadic_keys(k, f, lane_, total);
      } else {
        activated(p_.q_activation, raw_q[0], 4 * h, q[0]);
        activated(p_.q_activation, raw_q[1], 4 * h, q[1]);
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!kMaps) {
        *block.query.at(token(i), piece) = {query[i][0], query[i][1], query[i][2], query[i][3]};
      }
      *block.key.at(token(i), piece) = {key[i][0], key[i][1], key[i][2], key[i][3]};
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

  __device__ void activate_values(Block& block) const {
#pragma unroll 1
    for (int round = 0; round < kTileColumns / 32; ++round) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Eight<Data> raw;
        raw.load(block.value, token(i), channel(round) / 8);
        *block.value.at(token(i), channel(round) / 8) = activated_bf16(p_.v_activation, raw);
      }
    }
  }

  const GlaParams& p_;
  const BlockWork& work_;
  const float* bounds_;  // gamma of the work's keys, in shared memory
  const int lane_;
  HeadRows head_gates_;
};

}  // namespace tidegate::kernels::gla
