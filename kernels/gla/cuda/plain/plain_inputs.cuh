#pragma once

// What the plain kernels read, element by element, in the precision that they compute in.

#include "kernels/gla/cuda/head_inputs.cuh"

namespace tidegate::kernels::gla {

/// exp(log_f). Next to one it rounds once: exp itself is off by up to a unit there, by the same
/// amount for all decays of a neighbourhood, and over a long time they are multiplied.
template <class Real>
__device__ Real precise_decay(Real log_f) {
  return log_f > Real(-0.5) ? Real(1) + expm1(log_f) : exp(log_f);
}

/// One head of one sequence: queries, keys, decays and values after all that is applied to them.
template <class Real>
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
    return Real(p_.scale) * activate<Math>(p_.q_activation, raw_query(step, channel));
  }

  __device__ LogitGate<Real> gate(int64_t step, int channel) const {
    if (p_.gate_kind == GateKind::kLogit) {
      const Real gamma = bound(channel);
      return logit_gate<Math>(raw_gate(step, channel), gamma, Real(1) - gamma);
    }
    return {precise_decay(raw_gate(step, channel)), k_.template load<Real>(step, channel)};
  }
  __device__ Real raw_gate(int64_t step, int channel) const {
    return gate_.template load<Real>(step, p_.gate_per_head ? 0 : channel);
  }
  __device__ Real bound(int channel) const { return gamma_ == nullptr ? Real(0) : gamma_[channel]; }

  __device__ Real raw_value(int64_t step, int column) const {
    return v_.template load<Real>(step, column);
  }
  __device__ Real value(int64_t step, int column) const {
    return activate<Math>(p_.v_activation, raw_value(step, column));
  }

 private:
  const GlaParams& p_;
  HeadRows q_, k_, v_, gate_;
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

}  // namespace tidegate::kernels::gla
