#pragma once

// Gradients that are sums over V, of every chunk from S before it and D after it, as
// chunk_states.cuh finds them: dq, dk, the gate's and dgamma.
//
// A block of threads has a chunk of one head and a tile of 32 or 16 channels, whose states it holds
// as rows of V. It first finds S before each sub-chunk, and then goes back through them with D:
//
//   multiply   do S^T, v D^T and w = do v^T, and rowsum(S * D), element by element
//   descend    from the sub-chunk's 16 tokens to halves, to a lane's four, and to the token: what
//              comes from the state before (`before`, S do), from the one after (`after`, D v) and
//              what passes (`through`, rowsum(S * D)), each for the part of the group below
//   D = total D + q~^T do
//
// Every term is a product of decays and inputs, as on the CPU (kernels/gla/cpu/key_tile.h says what
// they are): nothing is divided by a decay, and dlog f is no difference of long sums.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/gla/cuda/fp32_chunks/chunk_factors.cuh"
#include "kernels/gla/cuda/fp32_chunks/tile_products.cuh"

namespace tidegate::kernels::gla::fp32_chunks {

struct ChunkGradients {
  GlaBackwardParams params = {};
  ChunkFactors factors = {};
  TimeTiles chunks = {};
  const float* states = nullptr;     // [chunk index, H, K, V]: S before a chunk
  const float* gradients = nullptr;  // D after it
  float* gate_channels = nullptr;    // [B, T, H, K]: dlog f a channel, where the gate is one a head
  // Whether this is launched after outputs that let it begin when factors and states are there: it
  // needs nothing of these, and waits for their end at its own.
  bool runs_beside = false;
};

constexpr int kPairStride = kTokens + 4, kPairSize = kTokens * kPairStride;

/// A block's shared memory, in floats. kRows: channels.
template <int kRows>
struct GradientShared {
  static constexpr int kShares = kWarps / 2;
  int stride;                       // of rows of V columns
  float* first_kept;                // S before all sub-chunks but the first; in the end its own
  float *gradient, *value, *d_out;  // D; v and do, [tokens] rows
  float *factor, *total, *through;  // [tokens][channels], [channels], [channels]
  float* partials;                  // split-K sums of w; then of S do, and of D v
  float *pairs, *pairs_back;        // w, [t][s] and [s][t]

  __host__ __device__ GradientShared(float* memory, int value_dim, ChunkSize chunk)
      : stride(padded_stride(value_dim)) {
    const auto take = [&memory](int count) {
      float* part = memory;
      memory += count;
      return part;
    };
    const int kept_states = chunk.bits == 0 ? 1 : chunk.sub_chunks() - 1;
    first_kept = take(kept_states * kRows * stride);
    gradient = take(kRows * stride);
    value = take(kTokens * stride);
    d_out = take(kTokens * stride);
    factor = take(kTokens * kRows);
    total = take(kRows);
    through = take(kRows);
    static_assert(kPairSize <= kPartialSize);
    partials = take(kWarps * kPartialSize);
    pairs = take(kPairSize);
    pairs_back = take(kPairSize);
    floats_ = memory;
  }

  /// Where S before a sub-chunk is; the first one's has no place of its own.
  __device__ float* kept(int sub) const { return first_kept + max(sub - 1, 0) * kRows * stride; }

  static int bytes(int value_dim, ChunkSize chunk) {
    float* const none = nullptr;
    return static_cast<int>((GradientShared(none, value_dim, chunk).floats_ - none) *
                            sizeof(float));
  }

 private:
  float* floats_;
};

/// What reaches a lane's four tokens from outside of their group, which is 16 tokens at first, and
/// then their gradients.
struct LaneGradients {
  float before[kLaneTokens], after[kLaneTokens], through;
  float dq[kLaneTokens] = {}, dk[kLaneTokens] = {}, df[kLaneTokens] = {};

  /// From a group to its two halves, of kLanes lanes each. `weights` is w with a row for each of
  /// this half's tokens; `factors` are a lane's keys up to the halves' boundary (the earlier half)
  /// or its queries from there (the later one); `other_total` is the product of the other half's
  /// decays, whose lanes begin with first_other.
  template <int kLanes>
  __device__ void descend(bool earlier, const float* weights, const float (&factors)[kLaneTokens],
                          float other_total, int group, int first_other) {
    float reached[kLaneTokens], sent[kLaneTokens], passed = other_total * through;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      sent[i] = earlier ? after[i] : before[i];
      reached[i] = other_total * sent[i];
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      float other[kLaneTokens];
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) {
        other[j] = of_group(factors[j], first_other + lane);
        passed = fmaf(other[j], of_group(sent[j], first_other + lane), passed);
      }
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        const float4 w = four(weights + (group * kLaneTokens + i) * kPairStride +
                              (first_other + lane) * kLaneTokens);
        reached[i] = fmaf(w.x, other[0], reached[i]);
        reached[i] = fmaf(w.y, other[1], reached[i]);
        reached[i] = fmaf(w.z, other[2], reached[i]);
        reached[i] = fmaf(w.w, other[3], reached[i]);
      }
    }
    through = passed;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      after[i] = earlier ? reached[i] : after[i];
      before[i] = earlier ? before[i] : reached[i];
    }
  }

  /// What comes from outside of the four tokens, or goes there.
  __device__ void add_outside(const LaneTokens& tokens) {
    float from_start[kLaneTokens], decay = 1.0f, begun = 0.0f;
#pragma unroll
    for (int u = 0; u < kLaneTokens; ++u) {  // and the paths that began at earlier tokens
      from_start[u] = decay;
      df[u] = fmaf(decay, through, begun);
      decay *= tokens.decay[u];
      dq[u] = decay * before[u];
      begun = fmaf(tokens.decay[u], begun, tokens.key[u] * after[u]);
    }
    float to_end = 1.0f, ending = 0.0f;
#pragma unroll
    for (int u = kLaneTokens - 1; u >= 0; --u) {  // and the paths that end at later tokens
      ending = fmaf(tokens.query[u], before[u], ending);
      df[u] = fmaf(to_end, df[u], from_start[u] * ending);
      dk[u] = to_end * after[u];
      ending *= tokens.decay[u];
      to_end *= tokens.decay[u];
    }
  }

  /// The paths from one of the four tokens to another. While u goes forwards,
  /// reached[t] = sum over s < u of w(t, s) (decays after s up to u - 1) k_s.
  __device__ void add_pairs(const LaneTokens& tokens, const float* pairs, int group) {
    float w[kLaneTokens][kLaneTokens];
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
      const float4 row =
          four(pairs + (group * kLaneTokens + t) * kPairStride + group * kLaneTokens);
      w[t][0] = row.x;
      w[t][1] = row.y;
      w[t][2] = row.z;
      w[t][3] = row.w;
    }
    float reached[kLaneTokens] = {};
#pragma unroll
    for (int u = 0; u < kLaneTokens; ++u) {
      float decay = 1.0f;
#pragma unroll
      for (int t = u; t < kLaneTokens; ++t) {
        if (t > u) decay *= tokens.decay[t];
        const float query = decay * tokens.query[t];
        df[u] = fmaf(query, reached[t], df[u]);
        dk[u] = fmaf(w[t][u], query, dk[u]);
        reached[t] = fmaf(tokens.decay[u], reached[t], w[t][u] * tokens.key[u]);
      }
      dq[u] += reached[u];
    }
  }
};

/// A block's work.
template <int kRows>
class GradientTile {
 public:
  using Shared = GradientShared<kRows>;

  __device__ GradientTile(const ChunkGradients& w, float* memory)
      : w_(w),
        p_(w.params.forward),
        shared_(memory, static_cast<int>(p_.value_dim), w.factors.chunk),
        key_dim_(static_cast<int>(p_.key_dim)),
        value_dim_(static_cast<int>(p_.value_dim)),
        width_(rounded_to_fours(value_dim_)),
        tiles_((key_dim_ + kRows - 1) / kRows),
        first_row_(static_cast<int>(blockIdx.x) % tiles_ * kRows),
        index_(static_cast<int>(blockIdx.x / tiles_ / p_.heads)),
        head_(blockIdx.x / tiles_ % p_.heads),
        chunk_(find_time_tile(w.chunks, index_)),
        inputs_(p_, chunk_.sequence, p_.layout.reverse, head_),
        d_o_(w.params.d_o, chunk_.sequence, p_.layout.reverse, head_),
        dq_(w.params.dq, chunk_.sequence, p_.layout.reverse, head_),
        dk_(w.params.dk, chunk_.sequence, p_.layout.reverse, head_),
        dgate_(w.params.dgate, chunk_.sequence, p_.layout.reverse, head_),
        gamma_(inputs_.bound(min(channel(), key_dim_ - 1))) {}

  __device__ void run() {
    if (chunk_.exists() && chunk_.tokens > 0) {
      const int last = (chunk_.tokens - 1) / kTokens;
      load_state(w_.states, shared_.kept(0));
      load_state(w_.gradients, shared_.gradient);
      commit_copies();
      for (int sub = 0; sub < last; ++sub) {
        advance(sub);
      }
      for (int sub = last; sub >= 0; --sub) {
        if (sub == 0 && last > 0) {
          load_state(w_.states, shared_.kept(0));  // S before sub-chunk 1 has been there
          commit_copies();
        }
        find_gradients(sub);
      }
    }
    store_dgamma();
  }

 private:
  // ---- loads ----

  __device__ bool has_channel() const { return static_cast<int>(threadIdx.x) < kRows * kGroups; }
  __device__ int channel() const { return first_row_ + LanePlace().channel; }
  __device__ int first(int sub) const { return chunk_.first + sub * kTokens; }
  __device__ int count(int sub) const { return sub_chunk_tokens(first(sub), chunk_.end()); }

  /// Copies the rows of the tile from [K, V] of this chunk; zeros past K and V.
  __device__ void load_state(const float* from, float* to) const {
    from += ((int64_t{index_} * p_.heads + head_) * key_dim_ + first_row_) * value_dim_;
    for (int row = warp_index(); row < kRows; row += kWarps) {
      for (int column = lane_index(); column < width_; column += 32) {
        float* const element = to + row * shared_.stride + column;
        if (first_row_ + row < key_dim_ && column < value_dim_) {
          copy_async<4>(element, from + int64_t{row} * value_dim_ + column);
        } else {
          *element = 0;
        }
      }
    }
  }

  /// v, or do as well, of a sub-chunk.
  template <bool kWithGradient>
  __device__ void load_values(int sub) const {
    constexpr int kIterations = kTokens / kWarps, kBeside = 2;
    for (int first_of = lane_index(); first_of < width_; first_of += 32 * kBeside) {
      float v[kBeside][kIterations], d_o[kBeside][kIterations];
#pragma unroll
      for (int i = 0; i < kBeside * kIterations; ++i) {
        const int token = warp_index() + i % kIterations * kWarps, step = first(sub) + token;
        const int column = first_of + i / kIterations * 32;
        const bool exists = token < count(sub) && column < value_dim_;
        v[i / kIterations][i % kIterations] = exists ? inputs_.raw_value(step, column) : 0.0f;
        d_o[i / kIterations][i % kIterations] =
            kWithGradient && exists ? d_o_.load<float>(step, column) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBeside * kIterations; ++i) {
        const int token = warp_index() + i % kIterations * kWarps;
        const int column = first_of + i / kIterations * 32, at = token * shared_.stride + column;
        if (column < width_) {
          shared_.value[at] = inputs_.value_of(v[i / kIterations][i % kIterations]);
          if (kWithGradient) shared_.d_out[at] = d_o[i / kIterations][i % kIterations];
        }
      }
    }
  }

  __device__ RawTokens load_tokens(int sub) const {
    RawTokens raw;
    raw.load(inputs_, channel() < key_dim_, channel(), count(sub),
             [this, sub](int token) { return first(sub) + token; });
    return raw;
  }

  // ---- forward, from one sub-chunk's state to the next one's ----

  __device__ void advance(int sub) const {
    load_factors(sub, &SubChunkFactors::key);
    load_values<false>(sub);
    wait_for_copies<0>();  // of states
    __syncthreads();
    update_state<4, DecayOf::kRow>(shared_.kept(sub), shared_.kept(sub + 1), shared_.total,
                                   shared_.factor, kRows, shared_.value, shared_.stride, kRows,
                                   width_, static_cast<int>(threadIdx.x), kThreads);
    __syncthreads();
  }

  /// k~ or q~ of the tile's channels, and the total decays.
  __device__ void load_factors(int sub, const float* SubChunkFactors::* which) const {
    const SubChunkFactors from = w_.factors.of(index_, sub, head_);
    const int width = w_.factors.width, fours = kRows / 4;
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < kTokens * fours) {
      const int row = first_row_ + thread % fours * 4;
      *reinterpret_cast<float4*>(shared_.factor + thread * 4) =
          row < width ? four(from.*which + thread / fours * width + row) : float4{};
    }
    if (thread < kRows) {
      shared_.total[thread] = first_row_ + thread < width ? from.total[first_row_ + thread] : 1.0f;
    }
  }

  // ---- back, with the gradient of the state ----

  __device__ void find_gradients(int sub) {
    RawTokens raw;
    if (has_channel()) raw = load_tokens(sub);
    load_factors(sub, &SubChunkFactors::query);
    load_values<true>(sub);
    wait_for_copies<0>();
    __syncthreads();
    multiply_values();
    __syncthreads();
    multiply_states(shared_.kept(sub));
    __syncthreads();
    if (has_channel()) {
      const LaneTokens tokens = raw.tokens(inputs_, p_.gate_kind == GateKind::kLogit, gamma_);
      const LaneDecays decays(tokens.decay);
      LaneGradients gradients = from_outside();
      descend(tokens, decays, &gradients);
      store_results(sub, tokens, gradients);
    }
    if (sub > 0) {
      take_up();
      __syncthreads();
    }
  }

  /// The next D: by the threads that have no channels to descend with, where there are as many.
  __device__ void take_up() const {
    const int others = kThreads - kRows * kGroups;
    const int thread = static_cast<int>(threadIdx.x) - kRows * kGroups;
    if (thread >= 0) {
      update_state<4, DecayOf::kRow>(shared_.gradient, shared_.gradient, shared_.total,
                                     shared_.factor, kRows, shared_.d_out, shared_.stride, kRows,
                                     width_, thread, others);
    }
  }

  /// w = do v^T, by some columns a warp.
  __device__ void multiply_values() const {
    const ColumnShare share(width_, warp_index(), kWarps);
    PartialProduct<2> pairs;
    pairs.add(shared_.d_out, shared_.value, shared_.stride, share.first, share.last);
    pairs.store<kPairStride>(shared_.partials + warp_index() * kPairSize);
  }

  /// Half of the warps multiply with either state, by some columns each; then the rows of both.
  /// The partial sums of w, which lie where those of the products will, are added up first.
  __device__ void multiply_states(const float* state) const {
    const int stride = shared_.stride, warp = warp_index();
    const float pair = sum_of_pair_partials();
    const ColumnShare share(width_, warp % Shared::kShares, Shared::kShares);
    const bool of_state = warp < Shared::kShares;
    PartialProduct<kRows / 8> product;
    product.add(of_state ? shared_.d_out : shared_.value, of_state ? state : shared_.gradient,
                stride, share.first, share.last);
    __syncthreads();
    product.store<kPartialStride>(shared_.partials + warp * kPartialSize);
    const int t = static_cast<int>(threadIdx.x) / kTokens;
    const int s = static_cast<int>(threadIdx.x) % kTokens;
    shared_.pairs[t * kPairStride + s] = pair;
    shared_.pairs_back[s * kPairStride + t] = pair;
    multiply_rows(state);
  }

  __device__ float sum_of_pair_partials() const {
    const int t = static_cast<int>(threadIdx.x) / kTokens;
    const int s = static_cast<int>(threadIdx.x) % kTokens;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      sum += shared_.partials[i * kPairSize + t * kPairStride + s];
    }
    return sum;
  }

  /// The sums over V of S * D, element by element.
  __device__ void multiply_rows(const float* state) const {
    const int row = static_cast<int>(threadIdx.x) / 8;
    float sum = 0;
    if (row < kRows) {
      for (int column = static_cast<int>(threadIdx.x) % 8 * 4; column < width_; column += 32) {
        const float4 s = four(state + row * shared_.stride + column);
        const float4 d = four(shared_.gradient + row * shared_.stride + column);
        sum += fmaf(s.x, d.x, s.y * d.y) + fmaf(s.z, d.z, s.w * d.w);
      }
    }
    for (int distance = 1; distance < 8; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (row < kRows && threadIdx.x % 8 == 0) {
      shared_.through[row] = sum;
    }
  }

  __device__ LaneGradients from_outside() const {
    const LanePlace lane;
    LaneGradients gradients;
    gradients.through = shared_.through[lane.channel];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      gradients.before[i] =
          sum_of_partials<Shared::kShares>(shared_.partials, lane.token(i), lane.channel);
      gradients.after[i] = sum_of_partials<Shared::kShares>(
          shared_.partials + Shared::kShares * kPartialSize, lane.token(i), lane.channel);
    }
    return gradients;
  }

  __device__ void descend(const LaneTokens& tokens, const LaneDecays& decays,
                          LaneGradients* gradients) const {
    const int group = LanePlace().group;
    // Halves of 8: the first and the last group's factors pass the group between.
    const bool first_half = group < 2;
    const float past = decays.to_middle(group);
    float factors[kLaneTokens], to_middle[kLaneTokens];
    const bool even = group % 2 == 0;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const float query = tokens.query[i] * decays.from_start(i);
      const float key = tokens.key[i] * decays.to_end(i);
      to_middle[i] = (first_half ? key : query) * past;
      factors[i] = even ? key : query;
    }
    gradients->descend<2>(first_half, first_half ? shared_.pairs_back : shared_.pairs, to_middle,
                          decays.other_half(group), group, first_half ? 2 : 0);
    gradients->descend<1>(even, even ? shared_.pairs_back : shared_.pairs, factors,
                          decays.beside(group), group, group ^ 1);
    gradients->add_outside(tokens);
    gradients->add_pairs(tokens, shared_.pairs, group);
  }

  // ---- results ----

  __device__ void store_results(int sub, const LaneTokens& tokens, const LaneGradients& g) {
    const LanePlace lane;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (lane.token(i) >= count(sub) || channel() >= key_dim_) {
        continue;
      }
      const int step = first(sub) + lane.token(i);
      float dq = static_cast<float>(p_.scale) * g.dq[i];
      if (p_.q_activation != InputActivation::kNone) {
        dq *= activation_slope<Inputs::Math>(p_.q_activation, inputs_.raw_query(step, channel()));
      }
      dq_.store(step, channel(), dq);
      store_gate(step, tokens.decay[i], g.dk[i], g.df[i]);
    }
  }

  /// dk and dL/df of one element as gradients of what is in memory.
  __device__ void store_gate(int step, float decay, float dk, float df) {
    if (p_.gate_kind == GateKind::kLogit) {
      const Sigmoids<float> s = sigmoids<Inputs::Math>(inputs_.raw_gate(step, channel()));
      const float both = df - dk;  // f and k move against each other
      dgate_.store(step, channel(), both * (1.0f - inputs_.bound(channel())) * s.pos * s.neg);
      dgamma_.add(both * s.neg);
      return;
    }
    dk_.store(step, channel(), dk);
    if (p_.gate_per_head) {
      const Sequence& seq = chunk_.sequence;
      const int64_t time = seq.start + (p_.layout.reverse ? seq.length - 1 - step : step);
      w_.gate_channels[((seq.batch * p_.layout.time + time) * p_.heads + head_) * key_dim_ +
                       channel()] = df * decay;
    } else {
      dgate_.store(step, channel(), df * decay);
    }
  }

  /// A row for every chunk's index; zeros where that is no chunk's.
  __device__ void store_dgamma() const {
    if (w_.params.dgamma_partial == nullptr || !has_channel()) {
      return;
    }
    const float sum = quad_sum(dgamma_.value());
    if (LanePlace().group == 0 && channel() < key_dim_) {
      static_cast<float*>(
          w_.params.dgamma_partial)[(int64_t{index_} * p_.heads + head_) * key_dim_ + channel()] =
          sum;
    }
  }

  const ChunkGradients& w_;
  const GlaParams& p_;
  const Shared shared_;
  const int key_dim_, value_dim_;
  const int width_;  // columns, in whole fours
  const int tiles_, first_row_;
  const int index_;  // of the chunk
  const int64_t head_;
  const TimeTile chunk_;
  const Inputs inputs_;
  const FloatRows d_o_, dq_, dk_, dgate_;
  const float gamma_;  // of the lane's channel
  Sum<float, true> dgamma_;
};

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_gradients_kernel(const __grid_constant__ ChunkGradients w) {
  extern __shared__ __align__(16) float memory[];
  if (!w.runs_beside) wait_for_kernels_before();
  GradientTile<kRows>(w, memory).run();
  if (w.runs_beside) wait_for_kernels_before();
}

}  // namespace tidegate::kernels::gla::fp32_chunks
