// The entry points of rnn_cuda.h: which kernel takes what. Before them come the plain kernels,
// which read the matrix anew at every step.

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/gates.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/precise.cuh"
#include "kernels/common/cuda/sequences.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/rnn/rnn.h"
#include "kernels/rnn/rnn_cuda.h"

namespace tidegate::kernels::rnn {

// ---- The plain kernels ----
//
// The gated RNN with one block a sequence and the matrix read anew at every step: any width, any
// type. What the fast kernels do not take runs here.

constexpr int kPlainRnnThreads = 512;

/// The workspace of the plain kernels: a few vectors of D numbers of the state's type for every
/// sequence, which is one block.
struct PlainWorkspace {
  // Backward has others in the places of the forward pass's two.
  enum Vector { kBefore = 0, kAfter = 1, kGateGrad = 0, kCarry = 1, kRoundedAway = 2, kVectors };

  static int64_t bytes(const GatedRnnParams& p) {
    return p.layout.sequences * kVectors * p.channels * element_size(state_dtype(p.x.dtype));
  }
  template <class Real>
  __device__ static Real* vector(const GatedRnnParams& p, Vector which) {
    return static_cast<Real*>(p.workspace) + (int64_t{blockIdx.x} * kVectors + which) * p.channels;
  }
};

/// A number of a state or of the lower bounds, which may be null.
template <class Real>
__device__ inline Real value_or_zero(const void* values, int64_t index) {
  return values == nullptr ? Real(0) : static_cast<const Real*>(values)[index];
}

template <class Real>
__global__ void __launch_bounds__(kPlainRnnThreads) gated_rnn_plain_forward(GatedRnnParams p) {
  const Sequence sequence = find_sequence(p.layout, blockIdx.x);
  const int64_t dim = p.channels;
  const Real* w = static_cast<const Real*>(p.w);
  Real* before = PlainWorkspace::vector<Real>(p, PlainWorkspace::kBefore);
  Real* after = PlainWorkspace::vector<Real>(p, PlainWorkspace::kAfter);
  for (int64_t j = threadIdx.x; j < dim; j += kPlainRnnThreads) {
    before[j] = value_or_zero<Real>(p.h0, sequence.index * dim + j);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int step = 0; step < sequence.length; ++step) {
    const int64_t t = sequence.start + step;
    for (int64_t j = threadIdx.x / 32; j < dim; j += kPlainRnnThreads / 32) {
      Real sum = 0;
      for (int64_t k = lane; k < dim; k += 32) {
        sum = fused(w[j * dim + k], before[k], sum);
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        const int64_t at_z = element_offset(p.z, sequence.batch, t, j);
        const int64_t at_x = element_offset(p.x, sequence.batch, t, j);
        const Real logit = load_element<Real>(p.z.data, p.z.dtype, at_z) + sum;
        const Sigmoids<Real> gate = sigmoids<GateMath<Real, false>>(logit);
        const Real x = load_element<Real>(p.x.data, p.x.dtype, at_x);
        const Real gamma = value_or_zero<Real>(p.gamma, j);
        const Real h = fused(forget_gate(gamma, gate), before[j], (Real(1) - gamma) * gate.neg * x);
        after[j] = h;
        store_element<Real>(p.h.data, p.h.dtype, element_offset(p.h, sequence.batch, t, j), h);
        if (p.logits.data != nullptr) {
          static_cast<Real*>(p.logits.data)[element_offset(p.logits, sequence.batch, t, j)] = logit;
        }
      }
    }
    __syncthreads();
    Real* const swapped = before;
    before = after;
    after = swapped;
  }
  for (int64_t j = threadIdx.x; j < dim; j += kPlainRnnThreads) {
    static_cast<Real*>(p.h_final)[sequence.index * dim + j] = before[j];
  }
}

template <class Real>
__global__ void __launch_bounds__(kPlainRnnThreads)
    gated_rnn_plain_backward(GatedRnnBackwardParams params) {
  const GatedRnnParams& p = params.forward;
  const Sequence sequence = find_sequence(p.layout, blockIdx.x);
  const int64_t dim = p.channels;
  const Real* w = static_cast<const Real*>(p.w);
  Real* gate_grad = PlainWorkspace::vector<Real>(p, PlainWorkspace::kGateGrad);
  Real* carry = PlainWorkspace::vector<Real>(p, PlainWorkspace::kCarry);
  // dgamma of this sequence; and what its additions have rounded away, which over many tokens
  // counts.
  Real* bound_grad = static_cast<Real*>(params.dgamma_partial);
  Real* rounded_away = PlainWorkspace::vector<Real>(p, PlainWorkspace::kRoundedAway);
  if (bound_grad != nullptr) bound_grad += sequence.index * dim;
  for (int64_t j = threadIdx.x; j < dim; j += kPlainRnnThreads) {
    carry[j] = value_or_zero<Real>(params.dh_final, sequence.index * dim + j);
    if (bound_grad != nullptr) bound_grad[j] = rounded_away[j] = 0;
  }
  for (int step = sequence.length - 1; step >= 0; --step) {
    const int64_t t = sequence.start + step;
    const auto at = [&](const TimeSeries& series, int64_t j) {
      return element_offset(series, sequence.batch, t, j);
    };
    for (int64_t j = threadIdx.x; j < dim; j += kPlainRnnThreads) {
      const Real logit = static_cast<const Real*>(p.logits.data)[at(p.logits, j)];
      const Sigmoids<Real> gate = sigmoids<GateMath<Real, false>>(logit);
      const Real h = step > 0 ? load_element<Real>(p.h.data, p.h.dtype, at(p.h, j) - p.h.stride_t)
                              : value_or_zero<Real>(p.h0, sequence.index * dim + j);
      const Real x = load_element<Real>(p.x.data, p.x.dtype, at(p.x, j));
      const Real g =
          load_element<Real>(params.dh.data, params.dh.dtype, at(params.dh, j)) + carry[j];
      const Real gamma = value_or_zero<Real>(p.gamma, j);
      const Real part = Real(1) - gamma;
      const Real bound_term = gate.neg * (h - x) * g;
      const Real da = part * gate.pos * bound_term;
      if (bound_grad != nullptr) {
        const Precise<Real> sum = exact_sum(bound_grad[j], bound_term);
        bound_grad[j] = sum.hi;
        rounded_away[j] += sum.lo;
      }
      gate_grad[j] = da;
      carry[j] = forget_gate(gamma, gate) * g;
      store_element<Real>(params.dz.data, params.dz.dtype, at(params.dz, j), da);
      store_element<Real>(params.dx.data, params.dx.dtype, at(params.dx, j), part * gate.neg * g);
      store_element<Real>(params.h_before.data, params.h_before.dtype, at(params.h_before, j), h);
    }
    __syncthreads();
    for (int64_t j = threadIdx.x; j < dim; j += kPlainRnnThreads) {
      Real sum = 0;
      for (int64_t k = 0; k < dim; ++k) {
        sum = fused(w[k * dim + j], gate_grad[k], sum);
      }
      carry[j] += sum;
    }
    __syncthreads();
  }
  for (int64_t j = threadIdx.x; j < dim; j += kPlainRnnThreads) {
    static_cast<Real*>(params.dh0)[sequence.index * dim + j] = carry[j];
    if (bound_grad != nullptr) bound_grad[j] += rounded_away[j];
  }
}

// ---- The entry points ----

namespace {

/// Calls visit<Family>() with the family for a matrix of 16-bit numbers, or for one of floats.
template <int kWidth, bool kExchangesInMemory, class Visit>
cudaError_t with_matrix_type(const GatedRnnParams& p, Visit visit) {
  return p.w_is_16_bit
             ? visit.template operator()<OnChipFamily<kWidth, true, kExchangesInMemory>>()
             : visit.template operator()<OnChipFamily<kWidth, false, kExchangesInMemory>>();
}

/// Calls visit<Family>() with the least wide family that D fits.
template <class Visit>
cudaError_t with_on_chip_family(const GatedRnnParams& p, bool exchanges_in_memory, Visit visit) {
  if (p.channels <= 128) return visit.template operator()<OnChipFamily<128, false, false>>();
  if (exchanges_in_memory) return with_matrix_type<512, true>(p, visit);
  if (p.channels <= 256) return visit.template operator()<OnChipFamily<256, false, false>>();
  if (p.channels <= 512) return with_matrix_type<512, false>(p, visit);
  return visit.template operator()<OnChipFamily<1024, false, false>>();
}

cudaError_t find_plan(const GatedRnnParams& p, bool backward, GatedRnnPlan* plan) {
  *plan = {};
  if (p.allow_on_chip && p.x.dtype != DType::kFloat64) {
    for (const bool exchanges_in_memory : {false, true}) {
      const bool is_allowed =
          exchanges_in_memory || p.allow_clusters || p.channels <= kMaxBlockWidth;
      const int64_t widest = exchanges_in_memory ? kMaxMemoryWidth : kMaxChipWidth;
      if (!is_allowed || p.channels > widest) continue;
      if (const cudaError_t error =
              with_on_chip_family(p, exchanges_in_memory,
                                  [&]<class Family>() { return Family::plan(p, backward, plan); });
          error != cudaSuccess || plan->on_chip) {
        return error;
      }
    }
  }
  // The plain kernel takes any width. A product takes one token of every padded sequence at once.
  plan->by_products = p.layout.offsets == nullptr && p.channels > kMaxPlainWidth;
  plan->workspace_bytes = PlainWorkspace::bytes(p);
  return cudaSuccess;
}

}  // namespace

cudaError_t gated_rnn_forward_plan(const GatedRnnParams& params, GatedRnnPlan* plan) {
  return find_plan(params, /*backward=*/false, plan);
}

cudaError_t gated_rnn_backward_plan(const GatedRnnBackwardParams& params, GatedRnnPlan* plan) {
  TIDEGATE_RETURN_IF_CUDA_ERROR(find_plan(params.forward, /*backward=*/true, plan));
  plan->partials = params.forward.layout.sequences;
  return cudaSuccess;
}

cudaError_t gated_rnn_forward(const GatedRnnParams& params, cudaStream_t stream) {
  if (params.plan.on_chip) {
    return with_on_chip_family(params, params.plan.exchanges_in_memory,
                               [&]<class Family>() { return Family::forward(params, stream); });
  }
  return dispatch_state(params.x.dtype, [&]<class Real>() {
    const auto blocks = static_cast<unsigned>(params.layout.sequences);
    gated_rnn_plain_forward<Real><<<blocks, kPlainRnnThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t gated_rnn_backward(const GatedRnnBackwardParams& params, cudaStream_t stream) {
  const GatedRnnParams& forward = params.forward;
  if (forward.plan.on_chip) {
    return with_on_chip_family(forward, forward.plan.exchanges_in_memory,
                               [&]<class Family>() { return Family::backward(params, stream); });
  }
  return dispatch_state(forward.x.dtype, [&]<class Real>() {
    const auto blocks = static_cast<unsigned>(forward.layout.sequences);
    gated_rnn_plain_backward<Real><<<blocks, kPlainRnnThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace tidegate::kernels::rnn
