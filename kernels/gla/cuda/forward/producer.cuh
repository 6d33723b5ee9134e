#pragma once

// Producer warps. Each turns whole sub-chunks into what consumers need, q~ = q pre, k~ = k suf,
// their scores and the product of their decays, and shares nothing with the other producers.

#include "kernels/gla/cuda/forward/loader.cuh"
#include "kernels/gla/cuda/forward/stage.cuh"

namespace tidegate::kernels::gla {

/// kMaps: only what the state is made of, keys and totals, without queries and scores.
template <class Data, class Gate, GateKind kKind, int kKeys, bool kMaps>
class Producer {
 public:
  static constexpr bool kGateIsKey = Loader<Data, Gate, kKind, kKeys, kMaps>::kGateIsKey;
  using Stage = typename Loader<Data, Gate, kKind, kKeys, kMaps>::Stage;
  static constexpr int kChannelGroups = kKeys / 32;  // of 32 channels, eight a lane

  __device__ Producer(const GlaParams& p, const WorkTile& work, const float* bounds, int lane)
      : p_(p), work_(work), bounds_(bounds), lane_(lane) {
    if (kKind == GateKind::kLogDecay && p.gate_per_head) {
      head_gates_ = HeadRows(p.gate, work.segment.sequence, p.layout.reverse, work.head);
    }
  }

  /// Makes sub-chunk b of the segment, whose copies have landed in the stage.
  __device__ void make(Stage& stage, int b) const {
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
    for (int group = 0; group < kChannelGroups; ++group) {
      make_group(stage, b, group, head_decay, scores);
    }
    if constexpr (!kMaps) {
      store(stage, scores);
    }
    if (!std::is_same_v<Data, __nv_bfloat16> || p_.v_activation != InputActivation::kNone) {
      activate_values(stage);
    }
  }

 private:
  // A logit that stands for no token or channel: no key, and a decay of one. (A log decay of zero
  // is that already, with its key of zero.)
  static constexpr uint32_t kNoLogit = std::is_same_v<Gate, __half> ? 0x7bff7bffu : 0x7f7f7f7fu;

  __device__ int token(int i) const { return lane_ / 4 * 2 + i; }
  __device__ int step_of(int b, int i) const {
    return work_.segment.first + b * kSubChunk + token(i);
  }
  /// The first of the lane's eight channels of a group.
  __device__ int channel(int group) const { return group * 32 + lane_ % 4 * 8; }

  __device__ void load_gates(Stage& stage, int b, int group, Eight<Gate> (&gate)[2]) const {
    const int piece = channel(group) / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kGateIsKey) {
        gate[i].load(stage.key, token(i), piece);
      } else {
        gate[i].load(stage.gate, token(i), piece);
      }
    }
    if constexpr (kKind == GateKind::kLogit) {
      const bool whole = work_.segment.first + (b + 1) * kSubChunk <= work_.segment.end();
      if (!whole || work_.keys < kKeys) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (step_of(b, i) >= work_.segment.end() || channel(group) >= work_.keys) {
            gate[i].fill(kNoLogit);
          }
        }
      }
    }
  }

  /// Keys and decays of four of the eight channels.
  __device__ void gates(const Eight<Gate> (&gate)[2], const Eight<Data> (&key)[2],
                        const float (&head_decay)[2], int group, int first, float (&k)[2][4],
                        float (&f)[2][4]) const {
    float gamma[4] = {};
    if constexpr (kKind == GateKind::kLogit) {
      *reinterpret_cast<float4*>(gamma) =
          *reinterpret_cast<const float4*>(bounds_ + channel(group) + first);
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

  __device__ void make_group(Stage& stage, int b, int group, const float (&head_decay)[2],
                             DyadicScores& scores) const {
    const int piece = channel(group) / 8;
    Eight<Gate> gate[2];
    Eight<Data> raw_q[2], raw_k[2];
    load_gates(stage, b, group, gate);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!kMaps) {
        raw_q[i].load(stage.query, token(i), piece);
      }
      if constexpr (kKind == GateKind::kLogDecay) {
        raw_k[i].load(stage.key, token(i), piece);
      }
    }
    uint32_t query[2][4], key[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float q[2][4], k[2][4], f[2][4], total[4];
      gates(gate, raw_k, head_decay, group, 4 * h, k, f);
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
        stage.total.set(channel(group) + 4 * h, total);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!kMaps) {
        *stage.query.at(token(i), piece) = {query[i][0], query[i][1], query[i][2], query[i][3]};
      }
      *stage.key.at(token(i), piece) = {key[i][0], key[i][1], key[i][2], key[i][3]};
    }
  }

  __device__ void store(Stage& stage, DyadicScores& scores) const {
    float s[2][4];
    scores.finish(s, lane_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      stage.score.rows[token(i)][lane_ % 4] = {pack_bf16(s[i][0], s[i][1]),
                                               pack_bf16(s[i][2], s[i][3])};
    }
  }

  __device__ void activate_values(Stage& stage) const {
#pragma unroll 1
    for (int group = 0; group < kValueTile / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Eight<Data> raw;
        raw.load(stage.value, token(i), channel(group) / 8);
        *stage.value.at(token(i), channel(group) / 8) = activated_bf16(p_.v_activation, raw);
      }
    }
  }

  const GlaParams& p_;
  const WorkTile& work_;
  const float* bounds_;  // gamma of the work's keys, in shared memory
  const int lane_;
  HeadRows head_gates_;
};

}  // namespace tidegate::kernels::gla
