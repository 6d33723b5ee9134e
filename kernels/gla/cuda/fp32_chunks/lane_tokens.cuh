#pragma once

// Sixteen tokens of a channel in four neighbouring lanes, and what every kernel on float32 chunks
// does with them: the decays between the tokens, from the sub-chunk's start and to its end.
//
// Lane 4 c + g of a warp has tokens 4 g to 4 g + 3 of its c-th channel. A factor that reaches past
// the lane's own tokens is that of a token within its group of four, times the totals of groups.
// All factors are products of decays, so at most one.

#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/gla/cuda/plain/plain_scan.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

/// Tokens of a sub-chunk, which a block of threads takes at a time, and of a lane; and the most of
/// a chunk, between which states are kept in device memory.
constexpr int kTokens = 16, kLaneTokens = 4, kMostChunkBits = 2;
constexpr int kMostChunk = kTokens << kMostChunkBits;
constexpr int kGroups = kTokens / kLaneTokens;

/// Rows of one head in float32: row k is what the k-th step of the scan sees.
class FloatRows {
 public:
  FloatRows() = default;
  __device__ FloatRows(const HeadSeries& series, const Sequence& seq, bool backwards, int64_t head)
      : base_(static_cast<float*>(series.data) +
              element_offset(series, seq.batch, first_token(seq, backwards), head)),
        stride_(backwards ? -series.stride_t : series.stride_t) {}

  __device__ float* at(int64_t k, int channel) const { return base_ + k * stride_ + channel; }

  template <class Real>
  __device__ Real load(int64_t k, int channel) const {
    return *at(k, channel);
  }
  __device__ void store(int64_t k, int channel, float x) const { *at(k, channel) = x; }

 private:
  float* base_ = nullptr;
  int64_t stride_ = 0;  // elements
};

using Inputs = PlainInputs<float, FloatRows>;

/// A lane's place among a sub-chunk's tokens and a block's channels.
struct LanePlace {
  int channel, group;

  __device__ LanePlace()
      : channel(static_cast<int>(threadIdx.x) / kGroups),
        group(static_cast<int>(threadIdx.x) % kGroups) {}
  __device__ int token(int i) const { return group * kLaneTokens + i; }
};

/// The value of x in the lane that has another group of the same channel.
__device__ inline float of_group(float x, int group) { return __shfl_sync(~0u, x, group, kGroups); }

/// exp(log_f) for log_f of at most zero, to a unit in the last place, and next to one rounded once,
/// as precise_decay (plain/plain_scan.cuh) has it, without a branch: 2^n times the series of a
/// remainder.
__device__ inline float decay_of(float log_f) {
  const float n = rintf(log_f * kLog2E);
  const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, log_f));  // ln 2 in two floats
  float q = 1.98569484e-4f;
  q = fmaf(q, r, 1.39819994e-3f);
  q = fmaf(q, r, 8.33345205e-3f);
  q = fmaf(q, r, 4.16657962e-2f);
  q = fmaf(q, r, 1.66666657e-1f);
  q = fmaf(q, r, 0.5f);
  const float e = 1.0f + fmaf(r * r, q, r);
  // In two steps, of which both are normal numbers where the result is none.
  const int power = static_cast<int>(n), half = power / 2;
  const auto scale = [](int of) { return __int_as_float((of + 127) << 23); };
  return log_f < -104.0f ? 0.0f : e * scale(half) * scale(power - half);
}

/// What a lane knows of its four tokens. Tokens that do not exist have queries and keys of zero and
/// decays of one.
struct LaneTokens {
  float query[kLaneTokens], key[kLaneTokens], decay[kLaneTokens];
};

/// What a lane's tokens have in memory. It is asked for all at once, before anything is made of it:
/// a load takes longer than all else that is done with what it brings.
struct RawTokens {
  float query[kLaneTokens], key[kLaneTokens], gate[kLaneTokens];
  bool exists[kLaneTokens];

  /// Loads the lane's tokens of a channel. The sub-chunk has `count` tokens, and step_of(i) is the
  /// step of the scan of its token i.
  template <class StepOf>
  __device__ void load(const Inputs& inputs, bool has_channel, int channel, int count,
                       StepOf step_of) {
    const LanePlace lane;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      exists[i] = has_channel && lane.token(i) < count;
      const int64_t step = step_of(lane.token(i));
      query[i] = exists[i] ? inputs.raw_query(step, channel) : 0.0f;
      key[i] = exists[i] ? inputs.raw_key(step, channel) : 0.0f;
      gate[i] = exists[i] ? inputs.raw_gate(step, channel) : 0.0f;
    }
  }

  __device__ LaneTokens tokens(const Inputs& inputs, bool is_logit, float gamma) const {
    LaneTokens made;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const LogitGate<float> both = is_logit
                                        ? logit_gate<Inputs::Math>(gate[i], gamma, 1.0f - gamma)
                                        : LogitGate<float>{decay_of(gate[i]), key[i]};
      made.query[i] = exists[i] ? inputs.query_of(query[i]) : 0.0f;
      made.key[i] = exists[i] ? both.key : 0.0f;
      made.decay[i] = exists[i] ? both.decay : 1.0f;
    }
    return made;
  }
};

/// The decays of a lane's tokens: within its group, and of all four groups.
class LaneDecays {
 public:
  /// By all lanes of a warp.
  __device__ explicit LaneDecays(const float (&decay)[kLaneTokens]) {
    from_start_[0] = decay[0];
    to_end_[kLaneTokens - 1] = 1.0f;
#pragma unroll
    for (int i = 1; i < kLaneTokens; ++i) {
      from_start_[i] = from_start_[i - 1] * decay[i];
      to_end_[kLaneTokens - 1 - i] = to_end_[kLaneTokens - i] * decay[kLaneTokens - i];
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      total_[g] = of_group(from_start_[kLaneTokens - 1], g);
    }
  }

  /// From the group's start to token i, its own decay included; from after it to the group's end.
  __device__ float from_start(int i) const { return from_start_[i]; }
  __device__ float to_end(int i) const { return to_end_[i]; }

  /// The product over the group beside this one; over the other half of the sub-chunk.
  __device__ float beside(int group) const {
    return group == 0 ? total_[1] : group == 1 ? total_[0] : group == 2 ? total_[3] : total_[2];
  }
  __device__ float other_half(int group) const {
    return group < 2 ? total_[2] * total_[3] : total_[0] * total_[1];
  }
  /// From a group to the middle of the sub-chunk: over the group between, if there is one.
  __device__ float to_middle(int group) const {
    return group == 0 ? total_[1] : group == 3 ? total_[2] : 1.0f;
  }
  /// Over the groups before this one, and after it.
  __device__ float before(int group) const {
    const float two = total_[0] * total_[1];
    return group == 0 ? 1.0f : group == 1 ? total_[0] : group == 2 ? two : two * total_[2];
  }
  __device__ float after(int group) const {
    const float two = total_[2] * total_[3];
    return group == 3 ? 1.0f : group == 2 ? total_[3] : group == 1 ? two : total_[1] * two;
  }

 private:
  float from_start_[kLaneTokens], to_end_[kLaneTokens], total_[kGroups];
};

/// The product over a sub-chunk's decays, in the lane of the first group, with what roundings
/// leave: states are multiplied by it again and again. By all lanes of a warp.
__device__ inline float total_decay(const float (&decay)[kLaneTokens]) {
  Precise<float> total = as_precise(decay[0]);
#pragma unroll
  for (int i = 1; i < kLaneTokens; ++i) {
    total = total * decay[i];
  }
#pragma unroll
  for (int distance = 1; distance < kGroups; distance *= 2) {
    const Precise<float> next = {__shfl_down_sync(~0u, total.hi, distance, kGroups),
                                 __shfl_down_sync(~0u, total.lo, distance, kGroups)};
    total = multiply(total, next);
  }
  return total.hi + total.lo;
}

/// Tokens of the sub-chunk that begins at step `first`, of `end` steps.
__device__ inline int sub_chunk_tokens(int first, int end) { return min(kTokens, end - first); }

/// Elements from one row to the next of tiles in shared memory that are read in fours, from eight
/// rows at once: an odd number of fours, so that these lie in different banks.
__host__ __device__ inline int padded_stride(int width) {
  const int fours = (width + 3) / 4;
  return (fours + (fours % 2 == 0 ? 1 : 0)) * 4;
}
__host__ __device__ inline int rounded_to_fours(int width) { return (width + 3) / 4 * 4; }

}  // namespace tidegate::kernels::gla::fp32_chunks
