#pragma once

// The plain path: what its kernels read, element by element, in the precision that they compute in,
// and the scan that they have forward and for dv.

#include "kernels/gla/cuda/head_inputs.cuh"

namespace tidegate::kernels::gla {

/// exp(log_f). Next to one it rounds once: exp itself is off by up to a unit there, by the same
/// amount for all decays of a neighbourhood, and over a long time they are multiplied.
template <class Real>
__device__ Real precise_decay(Real log_f) {
  return log_f > Real(-0.5) ? Real(1) + expm1(log_f) : exp(log_f);
}

/// One head of one sequence: queries, keys, decays and values after all that is applied to them.
/// Rows: how rows are read, HeadRows (of any type) or what has its load.
template <class Real, class Rows = HeadRows>
class PlainInputs {
 public:
  using Math = GateMath<Real, false>;

  __device__ PlainInputs(const GlaParams& p, const Sequence& seq, bool backwards, int64_t head)
      : p_(p),
        q_(p.q, seq, backwards, head),
        k_(p.k, seq, backwards, head),
        v_(p.v, seq, backwards, head),
        gate_(p.gate, seq, backwards, head),
        gamma_(p.gamma == nullptr ? nullptr
                                  : static_cast<const Real*>(p.gamma) + head * p.key_dim) {}

  __device__ Real raw_query(int64_t step, int channel) const {
    return q_.template load<Real>(step, channel);
  }
  /// Times the scale.
  __device__ Real query(int64_t step, int channel) const {
    return query_of(raw_query(step, channel));
  }
  __device__ Real query_of(Real raw) const {
    return Real(p_.scale) * activate<Math>(p_.q_activation, raw);
  }

  /// Zero where a logit makes the key.
  __device__ Real raw_key(int64_t step, int channel) const {
    return p_.gate_kind == GateKind::kLogit ? Real(0) : k_.template load<Real>(step, channel);
  }
  __device__ LogitGate<Real> gate(int64_t step, int channel) const {
    return gate_of(raw_gate(step, channel), raw_key(step, channel), bound(channel));
  }
  __device__ LogitGate<Real> gate_of(Real raw, Real raw_key, Real gamma) const {
    return p_.gate_kind == GateKind::kLogit ? logit_gate<Math>(raw, gamma, Real(1) - gamma)
                                            : LogitGate<Real>{precise_decay(raw), raw_key};
  }
  __device__ Real raw_gate(int64_t step, int channel) const {
    return gate_.template load<Real>(step, p_.gate_per_head ? 0 : channel);
  }
  __device__ Real bound(int channel) const { return gamma_ == nullptr ? Real(0) : gamma_[channel]; }

  __device__ Real raw_value(int64_t step, int column) const {
    return v_.template load<Real>(step, column);
  }
  __device__ Real value(int64_t step, int column) const {
    return value_of(raw_value(step, column));
  }
  __device__ Real value_of(Real raw) const { return activate<Math>(p_.v_activation, raw); }

 private:
  const GlaParams& p_;
  Rows q_, k_, v_, gate_;
  const Real* gamma_;
};

/// Threads of a block of the plain kernels. A thread keeps 16 elements of one column (or row) of a
/// state: four groups of four that the lanes which share the column take by turns.
constexpr int kPlainThreads = 128;
constexpr int kPlainOwn = 16;

/// How the lanes of a warp share a dimension of up to 512, over which they add up. A line is what
/// they share: a column or a row.
struct LaneSplit {
  int lanes;  // of a line, a power of two

  __host__ __device__ explicit LaneSplit(int64_t dim) : lanes(1) {
    while (lanes * kPlainOwn < dim) {
      lanes *= 2;
    }
  }
  __host__ __device__ int padded() const { return lanes * kPlainOwn; }
  /// Columns (or rows) that a block works on.
  __host__ __device__ int lines() const { return kPlainThreads / lanes; }

  __device__ int lane() const { return threadIdx.x % lanes; }
  __device__ int line() const { return threadIdx.x / lanes; }
  /// The first element of the thread's group g.
  __device__ int first(int g) const { return (g * lanes + lane()) * 4; }

  /// The sum over the lanes that share a line, in each of them.
  template <class Real>
  __device__ Real sum(Real x) const {
    for (int distance = 1; distance < lanes; distance *= 2) {
      x += __shfl_xor_sync(~0u, x, distance);
    }
    return x;
  }
};

// ---- The scan ----
//
// The recurrence token by token, with the state in registers: o, and dv, which is the same
// recurrence in the other direction with other names.
//
// A block of threads has one head of a sequence and as many columns of V as its 128 threads hold at
// 16 elements of a column each (LaneSplit). It goes through time in tiles of up to 16 tokens:
// inputs into shared memory, the tokens one after another, outputs to memory; three __syncthreads a
// tile.

/// o_t = scale q_t^T S_t with S_t = f_t S_{t-1} + k_t v_t^T, forward in time;  or, kValueGradient,
/// dv_t = k_t^T P_t with P_t = f_{t+1} P_{t+1} + scale q_t do_t^T, backward in time.
struct PlainScan {
  GlaParams params = {};
  HeadSeries d_o = {};            // kValueGradient
  HeadSeries out = {};            // o or dv
  const void* initial = nullptr;  // h0 or dh_final
  void* final = nullptr;          // h_final; null in the backward pass
  int tile_time = 1;
};

template <class Real>
int plain_scan_bytes_per_token(int64_t key_dim) {
  const LaneSplit keys(key_dim);
  return (3 * keys.padded() + 2 * keys.lines()) * static_cast<int>(sizeof(Real));
}

/// A tile of tokens in shared memory.
template <class Real>
struct PlainTile {
  Real *query, *key, *decay;  // [token][padded K]
  Real *value, *result;       // [token][columns]

  __device__ PlainTile(char* shared, int tokens, int padded, int columns)
      : query(reinterpret_cast<Real*>(shared)),
        key(query + tokens * padded),
        decay(key + tokens * padded),
        value(decay + tokens * padded),
        result(value + tokens * columns) {}
};

/// The scan of a block of threads: some columns of one head of a sequence.
template <class Real, bool kValueGradient>
class PlainColumns {
 public:
  __device__ PlainColumns(const PlainScan& w, char* shared)
      : w_(w),
        p_(w.params),
        keys_(p_.key_dim),
        padded_(keys_.padded()),
        columns_(keys_.lines()),
        tile_(shared, w.tile_time, padded_, columns_),
        key_dim_(static_cast<int>(p_.key_dim)),
        value_dim_(static_cast<int>(p_.value_dim)),
        column_tiles_((value_dim_ + columns_ - 1) / columns_),
        first_column_(static_cast<int>(blockIdx.x % column_tiles_) * columns_),
        pair_(blockIdx.x / column_tiles_),
        head_(pair_ % p_.heads),
        seq_(find_sequence(p_.layout, pair_ / p_.heads)),
        backwards_(p_.layout.reverse != kValueGradient),
        inputs_(p_, seq_, backwards_, head_),
        d_o_(w.d_o, seq_, backwards_, head_),
        out_(w.out, seq_, backwards_, head_) {}

  __device__ void run() {
    Real state[kPlainOwn] = {};
    load_state(state);
    for (int start = 0; start < seq_.length; start += w_.tile_time) {
      const int tokens = min(w_.tile_time, seq_.length - start);
      __syncthreads();
      load_tile(start, tokens);
      __syncthreads();
      for (int t = 0; t < tokens; ++t) {
        advance(t, state);
      }
      __syncthreads();
      store_tile(start, tokens);
    }
    store_state(state);
  }

 private:
  __device__ bool exists() const { return first_column_ + keys_.line() < value_dim_; }
  /// Where this thread's column begins in a state.
  __device__ int64_t state_at() const {
    return (seq_.index * p_.heads + head_) * key_dim_ * value_dim_ + first_column_ + keys_.line();
  }

  __device__ void load_state(Real (&state)[kPlainOwn]) const {
    const int64_t column = state_at();
#pragma unroll
    for (int e = 0; e < kPlainOwn; ++e) {
      const int64_t channel = keys_.first(e / 4) + e % 4;
      if (w_.initial != nullptr && exists() && channel < key_dim_) {
        state[e] = static_cast<const Real*>(w_.initial)[column + channel * value_dim_];
      }
    }
  }

  __device__ void store_state(const Real (&state)[kPlainOwn]) const {
    if (w_.final == nullptr || !exists()) {
      return;
    }
    const int64_t column = state_at();
#pragma unroll
    for (int e = 0; e < kPlainOwn; ++e) {
      const int64_t channel = keys_.first(e / 4) + e % 4;
      if (channel < key_dim_) {
        static_cast<Real*>(w_.final)[column + channel * value_dim_] = state[e];
      }
    }
  }

  /// Inputs of the tokens from `start` on, by all threads.
  __device__ void load_tile(int start, int tokens) const {
    for (int i = threadIdx.x; i < tokens * padded_; i += kPlainThreads) {
      const int step = start + i / padded_, channel = i % padded_;
      Real q = 0, k = 0, f = 1;
      if (channel < key_dim_) {
        const LogitGate<Real> gate = inputs_.gate(step, channel);
        q = inputs_.query(step, channel);
        k = gate.key;
        f = gate.decay;
        if (kValueGradient) {
          f = step == 0 ? Real(1) : inputs_.gate(step - 1, channel).decay;
        }
      }
      tile_.query[i] = kValueGradient ? k : q;
      tile_.key[i] = kValueGradient ? q : k;
      tile_.decay[i] = f;
    }
    for (int i = threadIdx.x; i < tokens * columns_; i += kPlainThreads) {
      const int step = start + i / columns_, column = first_column_ + i % columns_;
      tile_.value[i] = column >= value_dim_ ? Real(0)
                       : kValueGradient     ? d_o_.template load<Real>(step, column)
                                            : inputs_.value(step, column);
    }
  }

  /// The t-th token of the tile: the state, then the output from it.
  __device__ void advance(int t, Real (&state)[kPlainOwn]) const {
    const Real v = tile_.value[t * columns_ + keys_.line()];
    Real sums[4] = {};
#pragma unroll
    for (int g = 0; g < kPlainOwn / 4; ++g) {
      const int at = t * padded_ + keys_.first(g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Real& s = state[4 * g + i];
        s = fused(tile_.decay[at + i], s, tile_.key[at + i] * v);
        sums[i] = fused(tile_.query[at + i], s, sums[i]);
      }
    }
    const Real sum = keys_.sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (keys_.lane() == 0) {
      tile_.result[t * columns_ + keys_.line()] = sum;
    }
  }

  __device__ void store_tile(int start, int tokens) const {
    for (int i = threadIdx.x; i < tokens * columns_; i += kPlainThreads) {
      const int step = start + i / columns_, column = first_column_ + i % columns_;
      if (column < value_dim_) {
        Real x = tile_.result[i];
        if (kValueGradient && p_.v_activation != InputActivation::kNone) {
          x *= activation_slope<GateMath<Real, false>>(p_.v_activation,
                                                       inputs_.raw_value(step, column));
        }
        out_.store(step, column, x);
      }
    }
  }

  const PlainScan& w_;
  const GlaParams& p_;
  const LaneSplit keys_;
  const int padded_, columns_;  // of a tile's rows
  const PlainTile<Real> tile_;
  const int key_dim_, value_dim_;
  const int column_tiles_, first_column_;
  const int64_t pair_;  // of sequence and head
  const int64_t head_;
  const Sequence seq_;
  const bool backwards_;
  const PlainInputs<Real> inputs_;
  const HeadRows d_o_, out_;
};

template <class Real, bool kValueGradient>
__global__ void __launch_bounds__(kPlainThreads) plain_scan_kernel(const PlainScan w) {
  extern __shared__ __align__(16) char shared[];
  PlainColumns<Real, kValueGradient>(w, shared).run();
}

}  // namespace tidegate::kernels::gla
