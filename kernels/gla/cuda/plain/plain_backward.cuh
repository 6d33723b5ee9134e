#pragma once

// Gradients that are sums over V (dq, dk, the gate's, dgamma) and dh0, token by token. With
// P_t = dL/dS_t:
//   dq_t = scale S_t do_t    dk_t = P_t v_t    df_t = rowsum(S_{t-1} * P_t)
// where * is element by element.
// df is summed as it stands: it needs both states of the same token, so a block of threads
// first scans the sequence and keeps S where chunks of `chunk` tokens begin. Then it takes the
// chunks from the last to the first: forward through a chunk, keeping every S, and back with P.

#include "kernels/common/cuda/precise.cuh"
#include "kernels/gla/cuda/plain/plain_scan.cuh"

namespace tidegate::kernels::gla {

struct PlainBackward {
  GlaBackwardParams params = {};
  void* states = nullptr;  // of a block of threads: [kept + chunk][kPlainOwn / 4][threads][4]
  void* gate_channels = nullptr;  // [B, T, H, K] for dlog f a channel, where the gate is one a head
  int64_t items = 0;              // sequences x heads x tiles of rows
  int kept = 0;                   // chunks of a sequence, at most
  int chunk = 1;                  // tokens
  int tile_time = 1;
};

template <class Real>
int plain_backward_bytes_per_token(int64_t value_dim) {
  const LaneSplit values(value_dim);
  return (2 * values.padded() + 5 * values.lines()) * static_cast<int>(sizeof(Real));
}

/// The work of a block of threads on some rows (channels of K) of the states of one head of one
/// sequence.
template <class Real>
class PlainGradients {
 public:
  __device__ PlainGradients(const PlainBackward& w, int64_t item, char* shared)
      : w_(w),
        p_(w.params.forward),
        values_(p_.value_dim),
        tiles_(static_cast<int>((p_.key_dim + values_.lines() - 1) / values_.lines())),
        first_row_(static_cast<int>(item % tiles_) * values_.lines()),
        head_(item / tiles_ % p_.heads),
        seq_(find_sequence(p_.layout, item / tiles_ / p_.heads)),
        inputs_(p_, seq_, p_.layout.reverse, head_),
        d_o_(w.params.d_o, seq_, p_.layout.reverse, head_),
        dq_(w.params.dq, seq_, p_.layout.reverse, head_),
        dk_(w.params.dk, seq_, p_.layout.reverse, head_),
        dgate_(w.params.dgate, seq_, p_.layout.reverse, head_) {
    const int wide = w.tile_time * values_.padded(), narrow = w.tile_time * values_.lines();
    value_ = reinterpret_cast<Real*>(shared);
    d_out_ = value_ + wide;
    query_ = d_out_ + wide;
    key_ = query_ + narrow;
    decay_ = key_ + narrow;
    sum_ = decay_ + narrow;
  }

  __device__ void run() {
    const int chunks = (seq_.length + w_.chunk - 1) / w_.chunk;
    Real s[kPlainOwn], p[kPlainOwn];
    load_state(s, p_.h0);
    for (int c = 0; c < chunks; ++c) {
      store(s, c);
      if (c + 1 < chunks) {
        forward<false>(s, c);
      }
    }
    load_state(p, w_.params.dh_final);
    for (int c = chunks - 1; c >= 0; --c) {
      load(s, c);
      forward<true>(s, c);
      backward(p, c);
    }
    store_state(p, w_.params.dh0);
    store_dgamma();
  }

 private:
  using Math = GateMath<Real, false>;

  // ---- states in device memory ----

  __device__ bool row_exists() const { return first_row_ + values_.line() < p_.key_dim; }
  __device__ int64_t state_row() const {
    return ((seq_.index * p_.heads + head_) * p_.key_dim + first_row_ + values_.line()) *
           p_.value_dim;
  }
  __device__ void load_state(Real (&s)[kPlainOwn], const void* from) const {
#pragma unroll
    for (int e = 0; e < kPlainOwn; ++e) {
      const int column = values_.first(e / 4) + e % 4;
      s[e] = from != nullptr && row_exists() && column < p_.value_dim
                 ? static_cast<const Real*>(from)[state_row() + column]
                 : Real(0);
    }
  }
  __device__ void store_state(const Real (&s)[kPlainOwn], void* to) const {
#pragma unroll
    for (int e = 0; e < kPlainOwn; ++e) {
      const int column = values_.first(e / 4) + e % 4;
      if (row_exists() && column < p_.value_dim) {
        static_cast<Real*>(to)[state_row() + column] = s[e];
      }
    }
  }
  __device__ Real* place(int64_t index, int g) const {
    const int64_t of_block = (blockIdx.x * int64_t{w_.kept + w_.chunk} + index) * (kPlainOwn / 4);
    return static_cast<Real*>(w_.states) + ((of_block + g) * kPlainThreads + threadIdx.x) * 4;
  }
  __device__ void store(const Real (&s)[kPlainOwn], int64_t index) const {
#pragma unroll
    for (int g = 0; g < kPlainOwn / 4; ++g) {
      Real* to = place(index, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i] = s[4 * g + i];
      }
    }
  }
  __device__ void load(Real (&s)[kPlainOwn], int64_t index) const {
#pragma unroll
    for (int g = 0; g < kPlainOwn / 4; ++g) {
      const Real* from = place(index, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[4 * g + i] = from[i];
      }
    }
  }

  // ---- tiles of inputs ----

  __device__ void stage(int start, int tokens) {
    const int padded = values_.padded(), rows = values_.lines();
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * padded; i += kPlainThreads) {
      const int step = start + i / padded, column = i % padded;
      const bool exists = column < p_.value_dim;
      value_[i] = exists ? inputs_.value(step, column) : Real(0);
      d_out_[i] = exists ? d_o_.template load<Real>(step, column) : Real(0);
    }
    for (int i = threadIdx.x; i < tokens * rows; i += kPlainThreads) {
      const int step = start + i / rows, row = first_row_ + i % rows;
      const bool exists = row < p_.key_dim;
      const LogitGate<Real> gate =
          exists ? inputs_.gate(step, row) : LogitGate<Real>{Real(1), Real(0)};
      query_[i] = exists ? inputs_.query(step, row) : Real(0);
      key_[i] = gate.key;
      decay_[i] = gate.decay;
    }
    __syncthreads();
  }

  // ---- the scans ----

  /// Through chunk c with S. kKeep: keeps S before every token, and writes dq.
  template <bool kKeep>
  __device__ void forward(Real (&s)[kPlainOwn], int c) {
    const int begin = c * w_.chunk, end = min(begin + w_.chunk, seq_.length);
    const int padded = values_.padded(), rows = values_.lines();
    for (int start = begin; start < end; start += w_.tile_time) {
      const int tokens = min(w_.tile_time, end - start);
      stage(start, tokens);
      for (int t = 0; t < tokens; ++t) {
        const int line = t * rows + values_.line();
        const Real k = key_[line], f = decay_[line];
        if (kKeep) {
          store(s, w_.kept + start - begin + t);
        }
        Real sums[4] = {};
#pragma unroll
        for (int e = 0; e < kPlainOwn; ++e) {
          const int at = t * padded + values_.first(e / 4) + e % 4;
          s[e] = fused(f, s[e], k * value_[at]);
          if (kKeep) {
            sums[e % 4] = fused(s[e], d_out_[at], sums[e % 4]);
          }
        }
        if (kKeep) {
          const Real sum = values_.sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
          if (values_.lane() == 0) {
            sum_[line] = sum;
          }
        }
      }
      if (kKeep) {
        __syncthreads();
        for (int i = threadIdx.x; i < tokens * rows; i += kPlainThreads) {
          const int step = start + i / rows, row = first_row_ + i % rows;
          if (row < p_.key_dim) {
            dq_.store(step, row,
                      Real(p_.scale) * sum_[i] *
                          activation_slope<Math>(p_.q_activation, inputs_.raw_query(step, row)));
          }
        }
      }
    }
  }

  /// Back through chunk c with P.
  __device__ void backward(Real (&p)[kPlainOwn], int c) {
    const int begin = c * w_.chunk, end = min(begin + w_.chunk, seq_.length);
    const int padded = values_.padded(), rows = values_.lines();
    const int last = (end - begin - 1) / w_.tile_time * w_.tile_time + begin;
    for (int start = last; start >= begin; start -= w_.tile_time) {
      const int tokens = min(w_.tile_time, end - start);
      stage(start, tokens);
      for (int t = tokens - 1; t >= 0; --t) {
        const int line = t * rows + values_.line();
        const Real q = query_[line], f = decay_[line];
        Real before[kPlainOwn];
        load(before, w_.kept + start - begin + t);
        Real dk = 0, df = 0;
#pragma unroll
        for (int e = 0; e < kPlainOwn; ++e) {
          const int at = t * padded + values_.first(e / 4) + e % 4;
          p[e] = fused(q, d_out_[at], p[e]);
          dk = fused(p[e], value_[at], dk);
          df = fused(p[e], before[e], df);
          p[e] *= f;
        }
        dk = values_.sum(dk);
        df = values_.sum(df);
        if (values_.lane() == 0) {
          sum_[line] = dk;
          sum_[w_.tile_time * rows + line] = df;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < tokens * rows; i += kPlainThreads) {
        if (first_row_ + i % rows < p_.key_dim) {
          write(start + i / rows, first_row_ + i % rows, sum_[i], sum_[w_.tile_time * rows + i],
                decay_[i]);
        }
      }
    }
  }

  /// Stores dk and df of one element as gradients of what is in memory.
  __device__ void write(int step, int row, Real dk, Real df, Real f) {
    if (p_.gate_kind == GateKind::kLogit) {
      const Sigmoids<Real> s = sigmoids<Math>(inputs_.raw_gate(step, row));
      const Real both = df - dk;  // f and k move against each other
      dgate_.store(step, row, both * (Real(1) - inputs_.bound(row)) * s.pos * s.neg);
      dgamma_.add(both * s.neg);
      return;
    }
    dk_.store(step, row, dk);
    if (p_.gate_per_head) {
      const int64_t time = seq_.start + (p_.layout.reverse ? seq_.length - 1 - step : step);
      static_cast<Real*>(
          w_.gate_channels)[((seq_.batch * p_.layout.time + time) * p_.heads + head_) * p_.key_dim +
                            row] = df * f;
    } else {
      dgate_.store(step, row, df * f);
    }
  }

  /// A thread has met one row only, since the number of rows divides that of threads.
  __device__ void store_dgamma() {
    if (w_.params.dgamma_partial == nullptr) {
      return;
    }
    const int rows = values_.lines();
    __syncthreads();
    value_[threadIdx.x] = dgamma_.value();
    __syncthreads();
    const int row = first_row_ + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) < rows && row < p_.key_dim) {
      Sum<Real, true> total;
      for (int i = threadIdx.x; i < kPlainThreads; i += rows) {
        total.add(value_[i]);
      }
      static_cast<Real*>(
          w_.params.dgamma_partial)[(seq_.index * p_.heads + head_) * p_.key_dim + row] =
          total.value();
    }
  }

  const PlainBackward& w_;
  const GlaParams& p_;
  const LaneSplit values_;
  const int tiles_, first_row_;
  const int64_t head_;
  const Sequence seq_;
  const PlainInputs<Real> inputs_;
  const HeadRows d_o_, dq_, dk_, dgate_;
  Real *value_, *d_out_;                // [tile][padded]
  Real *query_, *key_, *decay_, *sum_;  // [tile][lines], sum_ twice
  Sum<Real, true> dgamma_;
};

template <class Real>
__global__ void __launch_bounds__(kPlainThreads) plain_backward_kernel(const PlainBackward w) {
  extern __shared__ __align__(16) char shared[];
  for (int64_t item = blockIdx.x; item < w.items; item += gridDim.x) {
    __syncthreads();
    PlainGradients<Real>(w, item, shared).run();
  }
}

/// dlog f of one gate a head: the sum over its channels, a warp an element.
template <class Real>
__global__ void __launch_bounds__(kPlainThreads) plain_gate_sum_kernel(const PlainBackward w) {
  const GlaParams& p = w.params.forward;
  const int lane = threadIdx.x % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kPlainThreads / 32) + threadIdx.x / 32;
  const int64_t token = item / p.heads, head = item % p.heads;
  if (token >= p.layout.batch * p.layout.time) {
    return;
  }
  const Real* from = static_cast<const Real*>(w.gate_channels) + item * p.key_dim;
  Real sum = 0;
  for (int channel = lane; channel < p.key_dim; channel += 32) {
    sum += from[channel];
  }
  for (int distance = 1; distance < 32; distance *= 2) {  // neighbours first
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (lane == 0) {
    const Sequence row = {0, token / p.layout.time, 0, static_cast<int>(p.layout.time)};
    HeadRows(w.params.dgate, row, false, head).store(token % p.layout.time, 0, sum);
  }
}

}  // namespace tidegate::kernels::gla
