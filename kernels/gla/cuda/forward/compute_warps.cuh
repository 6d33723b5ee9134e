#pragma once

// The warps of the forward pass that compute, between which a stage passes: producers turn inputs
// into operands, consumers multiply them and keep the state.

#include <cstddef>

#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/gla/cuda/forward/loader.cuh"
#include "kernels/gla/cuda/forward/stage.cuh"

namespace tidegate::kernels::gla {

// ---- Producer warps ----
//
// Each turns whole sub-chunks into what consumers need, q~ = q pre, k~ = k suf, their scores and
// the product of their decays, and shares nothing with the other producers. pre(t) is the product
// of the sub-chunk's decays up to token t, suf(t) of those after it (tensor_forward.cuh).

/// kMaps: only what the state is made of, keys and totals, without queries and scores.
template <class Data, class Gate, GateKind kKind, int kKeys, bool kMaps>
class Producer {
 public:
  static constexpr bool kGateIsKey = Loader<Data, Gate, kKind, kKeys, kMaps>::kGateIsKey;
  using Stage = typename Loader<Data, Gate, kKind, kKeys, kMaps>::Stage;
  static constexpr int kChannelGroups = kKeys / 32;  // of 32 channels, eight a lane

  __device__ Producer(const GlaParams& p, const WorkTile& work, const float* bounds, int lane)
      : p_(p),
        work_(work),
        bounds_(bounds),
        lane_(lane),
        late_q_(p.q, work, p.layout.reverse),
        late_k_(kKind == GateKind::kLogit ? p.gate : p.k, work, p.layout.reverse),
        late_v_(p.v, work, p.layout.reverse),
        late_gate_(p.gate, work, p.layout.reverse),
        any_late_(late_q_.any() || late_k_.any() || late_v_.any() ||
                  (!p.gate_per_head && late_gate_.any())) {
    if (kKind == GateKind::kLogDecay && p.gate_per_head) {
      head_gates_ = HeadRows(p.gate, work.segment.sequence, p.layout.reverse, work.head);
    }
  }

  /// Makes sub-chunk b of the segment, whose copies have landed in the stage.
  __device__ void make(Stage& stage, int b) const {
    if (any_late_) {
      move_rows(stage);
    }
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
  __device__ void move_rows(Stage& stage) const {
    if constexpr (!kMaps) {
      late_q_.move(stage.query, lane_);
    }
    late_v_.move(stage.value, lane_);
    if constexpr (kKind == GateKind::kLogDecay || kGateIsKey) {
      late_k_.move(stage.key, lane_);
    }
    if constexpr (!kGateIsKey) {
      if (!p_.gate_per_head) {
        late_gate_.move(stage.gate, lane_);
      }
    }
    __syncwarp();
  }

  // A logit that stands for no token: no key, and a decay of one. (A log decay of zero is that
  // already, with its key of zero; past the last channel, gamma is one.)
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
      if (work_.segment.first + (b + 1) * kSubChunk > work_.segment.end()) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (step_of(b, i) >= work_.segment.end()) {
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
  // Copies are of 16 bytes, so rows that begin elsewhere in memory lie some bytes late in a stage,
  // and are moved to where products expect them before anything reads them.
  const LateRows late_q_, late_k_, late_v_, late_gate_;
  const bool any_late_;
  HeadRows head_gates_;
};

// ---- Consumer warps ----
//
// Each owns 16 columns of V of a state, transposed, as the accumulator of S^T += V^T K~ (rows v,
// columns k). Rounded to bf16 pairs, the accumulator is the B operand of o = Q~ S as it stands; o^T
// is never formed.

/// Adds scores * values where some values are not finite. Finite values are added by one product as
/// ever; the others token by token, and only to the tokens from theirs on. (A score of zero times
/// such a value is NaN, for tokens before it that must not see it.)
__device__ inline void add_nonfinite_values(float (&o)[2][4], const uint32_t (&score)[4],
                                            const uint32_t (&value)[4], int lane) {
  const int r = lane / 4, c = lane % 4;
  uint32_t odd[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = (value[i] & 0x7f80u) == 0x7f80u ? 0xffffu : 0;
    const uint32_t high = (value[i] >> 16 & 0x7f80u) == 0x7f80u ? 0xffff0000u : 0;
    odd[i] = value[i] & (low | high);
    rest[i] = value[i] & ~(low | high);
  }
  mma_bf16(o[0], score, rest[0], rest[2]);
  mma_bf16(o[1], score, rest[1], rest[3]);
#pragma unroll 1
  for (int s = 0; s < kSubChunk; ++s) {
    const uint32_t half = s % 2 == 0 ? 0x0000ffffu : 0xffff0000u;
    const uint32_t keep_low = s < 8 && s / 2 == c ? half : 0;
    const uint32_t keep_high = s >= 8 && s / 2 - 4 == c ? half : 0;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float product[4] = {};
      mma_bf16(product, score, odd[tile] & keep_low, odd[tile + 2] & keep_high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[tile][i] += r + i / 2 * 8 >= s ? product[i] : 0.0f;
      }
    }
  }
}

/// Whether any of the bf16 pairs of the warp is an infinity or NaN: zero times such a value is NaN.
__device__ inline bool any_not_finite(const uint32_t (&pairs)[4]) {
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pairs[i]), "r"(0u));
  }
  return __any_sync(~0u, (sum & 0x7fff7fffu) != 0);
}

template <int kKeys>
class Consumer {
 public:
  using Stage = SubChunkStage<kKeys>;
  static constexpr int kTiles = kKeys / 8;

  /// The warp's columns of the value tile begin at 16-byte piece `first_piece`.
  __device__ Consumer(int lane, int first_piece)
      : lane_(lane),
        // V^T as A of S^T += V^T K~, and V as B of scores * V: the same registers.
        value_at_(
            offsetof(Stage, value) +
            TokenTile<kValueTile>::offset(lane / 16 * 8 + lane % 8, first_piece + lane / 8 % 2)) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      step_at_[j] = TokenTile<kKeys>::offset(lane % 16, 2 * j + lane / 16);
    }
  }

  /// The warp's columns, those that exist, of rows [key][V] of a state; null is zero.
  __device__ void load(const float* state, int keys, int64_t value_dim, int columns) {
    each(keys, columns, [&](int key, int column, float& x) {
      x = state == nullptr ? 0.0f : state[key * value_dim + column];
    });
  }
  __device__ void store(float* state, int keys, int64_t value_dim, int columns) {
    each(keys, columns,
         [&](int key, int column, float& x) { state[key * value_dim + column] = x; });
  }

  /// o of 16 tokens: o[tile][i] of tokens r, r + 8 and columns 8 tile + 2c, 2c + 1, without the
  /// scale. Then takes the tokens into the state.
  __device__ void output_and_update(const Stage& stage, float (&o)[2][4]) {
    const auto base = shared_address(&stage);
    uint32_t score[4], value[4];
    load_matrices_transposed(value, base + value_at_);
    float more[2][4] = {};  // a second sequence of dependent products, to wait half as long
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t query[4];
      load_matrices(query, base + step_at(j));
      const float (&a)[4] = state_[2 * j];
      const float (&b)[4] = state_[2 * j + 1];
      auto& sum = j % 2 == 0 ? o : more;
      mma_bf16(sum[0], query, pack_bf16(a[0], a[1]), pack_bf16(b[0], b[1]));
      mma_bf16(sum[1], query, pack_bf16(a[2], a[3]), pack_bf16(b[2], b[3]));
      update(stage, base, value, j);
    }
    load_matrices(score, base + static_cast<unsigned>(offsetof(Stage, score)) +
                             lane_ % 16 * sizeof(ScoreTile::rows[0]) + lane_ / 16 * 16);
    if (any_not_finite(value)) {
      add_nonfinite_values(o, score, value, lane_);
    } else {
      mma_bf16(o[0], score, value[0], value[2]);
      mma_bf16(o[1], score, value[1], value[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      o[i / 4][i % 4] += more[i / 4][i % 4];
    }
  }

  __device__ void update(const Stage& stage) {
    const auto base = shared_address(&stage);
    uint32_t value[4];
    load_matrices_transposed(value, base + value_at_);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      update(stage, base, value, j);
    }
  }

 private:
  /// Channels 16j .. 16j + 15 of a token tile, for ldmatrix.
  __device__ unsigned step_at(int j) const { return step_at_[j % 4] + j / 4 * 8 * sizeof(uint4); }

  /// Channels 16j .. 16j + 15 of the state.
  __device__ void update(const Stage& stage, unsigned base, const uint32_t (&value)[4], int j) {
    uint32_t key[4];
    load_matrices_transposed(key, base + static_cast<unsigned>(offsetof(Stage, key)) + step_at(j));
    const float4 total = stage.total.get(j, lane_ % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float (&s)[4] = state_[2 * j + h];
      s[0] *= h == 0 ? total.x : total.z;
      s[1] *= h == 0 ? total.y : total.w;
      s[2] *= h == 0 ? total.x : total.z;
      s[3] *= h == 0 ? total.y : total.w;
      mma_bf16(s, value, key[2 * h], key[2 * h + 1]);
    }
  }

  template <class Visit>
  __device__ void each(int keys, int columns, Visit visit) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * j + lane_ % 4 * 2 + i % 2, column = lane_ / 4 + i / 2 * 8;
        if (key < keys && column < columns) {
          visit(key, column, state_[j][i]);
        }
      }
    }
  }

  const int lane_;
  const unsigned value_at_;  // offsets in a stage of what this lane gives ldmatrix
  unsigned step_at_[4];
  float state_[kTiles][4] = {};
};

/// The rows of o, 16 tokens after 16 tokens, of a warp's 16 columns. Two lanes exchange halves, so
/// that each stores four neighbouring columns of two tokens, and four lanes a whole 32-byte sector.
/// Where rows are not that aligned, or end within the four, they are stored by twos or one by one.
template <class Data, bool kKeyTiles>
class OutputRows {
 public:
  __device__ OutputRows(const TensorForward& w, const WorkTile& work, int lane, int first_column)
      : w_(w),
        work_(work),
        lane_(lane),
        column_(work.first_value + first_column),
        step_(work.segment.first + lane / 4) {
    const HeadRows o(w.params.o, work.segment.sequence, w.params.layout.reverse, work.head);
    const int first = column_ + lane % 2 * 8 + lane % 4 / 2 * 4;
    at_ = o.row(step_) + first * int{sizeof(Data)};
    stride_ = 8 * int64_t{o.stride_bytes()};
    columns_ = static_cast<int>(w.params.value_dim) - first;
    end_ = columns_ > 0 ? work.segment.end() : 0;
  }

  __device__ void store(float (&o)[2][4]) {
    if constexpr (kKeyTiles) {
      if (w_.sum_before != nullptr) {
        each(o, [&](int64_t index, float& x) { x += w_.sum_before[index]; });
      }
      if (w_.sum_after != nullptr) {
        each(o, [&](int64_t index, float& x) { w_.sum_after[index] = x; });
      }
    }
    if (!kKeyTiles || w_.sum_after == nullptr) {
      const auto scale = static_cast<float>(w_.params.scale);
      const bool odd = lane_ % 2 != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float left[2] = {o[0][2 * i] * scale, o[0][2 * i + 1] * scale};
        const float right[2] = {o[1][2 * i] * scale, o[1][2 * i + 1] * scale};
        const uint32_t a = pack<Data, 2>(left).bits, b = pack<Data, 2>(right).bits;
        const uint32_t got = __shfl_xor_sync(~0u, odd ? a : b, 1);
        if (step_ + 8 * i < end_) {
          store_four(at_ + i * stride_, odd ? uint2{got, b} : uint2{a, got});
        }
      }
    }
    step_ += kSubChunk;
    at_ += 2 * stride_;
  }

 private:
  __device__ void store_four(char* to, const uint2& four) const {
    if (w_.output_bytes == 8) {
      *reinterpret_cast<uint2*>(to) = four;
    } else if (w_.output_bytes == 4) {
      *reinterpret_cast<uint32_t*>(to) = four.x;
      if (columns_ > 2) {
        *reinterpret_cast<uint32_t*>(to + 4) = four.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < columns_) {
          *reinterpret_cast<uint16_t*>(to + 2 * i) =
              static_cast<uint16_t>((i < 2 ? four.x : four.y) >> 16 * (i % 2));
        }
      }
    }
  }

  /// Visits what this lane holds, as elements of [B, T, H, V].
  template <class Visit>
  __device__ void each(float (&o)[2][4], Visit visit) const {
    const GlaParams& p = w_.params;
    const Sequence& seq = work_.segment.sequence;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int step = step_ + i % 4 / 2 * 8;
      const int column = column_ + i / 4 * 8 + lane_ % 4 * 2 + i % 2;
      if (step < work_.segment.end() && column < p.value_dim) {
        const int64_t token = seq.batch * p.layout.time + seq.start +
                              (p.layout.reverse ? seq.length - 1 - step : step);
        visit((token * p.heads + work_.head) * p.value_dim + column, o[i / 4][i % 4]);
      }
    }
  }

  const TensorForward& w_;
  const WorkTile& work_;
  const int lane_, column_;
  int step_;     // of this lane's first token
  int end_;      // of the segment; 0 where none of the lane's columns exists
  int columns_;  // from the lane's first of four on
  char* at_;
  int64_t stride_;  // eight rows, in bytes
};

}  // namespace tidegate::kernels::gla
