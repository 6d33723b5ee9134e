#pragma once

// RWKV-4's token mixing with one thread a channel, one token after another, in any type: for double
// precision, and for sequences of a token or two, where there is nothing to divide.

#include "kernels/common/cuda/launch.cuh"
#include "kernels/scan/cuda/engine/op.cuh"
#include "kernels/scan/cuda/wkv4/wkv4_state.cuh"

namespace tidegate::kernels::scan {

template <class Data>
struct Wkv4Sequential {
  using Real = typename Register<Data>::type;
  using State = Wkv4State<Real>;
  static constexpr int kChunk = static_cast<int>(kWkv4SavedEvery);

  /// One channel of one sequence.
  struct Channel {
    Sequence seq;
    int64_t channel;

    __device__ Data* at(const TimeSeries& series, int step) const {
      return static_cast<Data*>(series.data) + seq.batch * series.stride_b +
             (seq.start + step) * series.stride_t + channel;
    }
    __device__ Real read(const TimeSeries& series, int step) const {
      return widen(*at(series, step));
    }
    __device__ void write(const TimeSeries& series, int step, Real x) const {
      *at(series, step) = narrow<Data>(x);
    }
    __device__ Real of_channel(const void* values) const {
      return static_cast<const Real*>(values)[channel];
    }
  };

  /// Reads its state before writing any, so that a step may update it in place.
  static __device__ void forward(const Wkv4Params& p, const Channel& at) {
    const int64_t n = at.seq.index;
    if (at.seq.length == 0) {
      const State none = {};
      store_wkv4_state(
          p.final_state, n, p.channels, at.channel,
          p.state != nullptr ? load_wkv4_state<Real>(p.state, n, p.channels, at.channel) : none);
      return;
    }
    const Real w = at.of_channel(p.w), u = at.of_channel(p.u);
    State s = initial_wkv4_state(p.state, n, p.channels, at.channel, at.read(p.k, 0));
    for (int step = 0; step < at.seq.length; ++step) {
      if (p.saved != nullptr && is_saved(at.seq, step)) {
        store_wkv4_state(p.saved, saved_row(p.layout, at.seq, step), p.channels, at.channel, s);
      }
      const Real k = at.read(p.k, step), v = at.read(p.v, step);
      at.write(p.o, step, Wkv4Output<Real>::at(((k - s.m) - s.rest) + u, s.y, s.z, v).o);
      s.add(w, k, v);
    }
    store_wkv4_state(p.final_state, n, p.channels, at.channel, s);
  }

  /// Chunk by chunk from the end: forward through it again, then back.
  static __device__ void backward(const Wkv4BackwardParams& p, const Channel& at) {
    const Wkv4Params& f = p.forward;
    const int64_t n = at.seq.index, d = f.channels;
    const Real w = at.of_channel(f.w), u = at.of_channel(f.u);
    State flow = {};  // dL/dy and dL/dz, times exp(m) of the state that they belong to
    if (p.dfinal_state != nullptr) {
      flow = load_wkv4_state<Real>(p.dfinal_state, n, d, at.channel);
      flow.m = load_wkv4_state<Real>(f.final_state, n, d, at.channel).m;
    }
    Real dw = 0, du = 0;
    for (int end = at.seq.length; end > 0; end -= kChunk) {
      const int first = max(0, end - kChunk);
      State s = first > 0 ? load_wkv4_state<Real>(f.saved, saved_row(f.layout, at.seq, first), d,
                                                  at.channel)
                          : initial_wkv4_state(f.state, n, d, at.channel, at.read(f.k, 0));
      State states[kChunk];  // that enter a token
      Wkv4Weights<Real> weights[kChunk];
      for (int i = 0; i < end - first; ++i) {
        states[i] = s;
        weights[i] = s.add(w, at.read(f.k, first + i), at.read(f.v, first + i));
      }
      if (end == at.seq.length && p.dfinal_state == nullptr) {
        flow.m = s.m;
      }
      // Rescales to the exponent that the chunk has led to now, which may be another one by a
      // rounding.
      const Real scale = exp_of((s.m - flow.m) + s.rest);
      flow = {flow.y * scale, flow.z * scale, states[0].m};
      for (int i = end - first - 1; i >= 0; --i) {
        const Real k = at.read(f.k, first + i), v = at.read(f.v, first + i);
        const auto output = Wkv4Output<Real>::at(((k - states[i].m) - states[i].rest) + u,
                                                 states[i].y, states[i].z, v);
        const Real g = at.read(p.grad_o, first + i) * output.scale;
        const Real by_token = g * output.weights.second;
        const Real by_sums = g * output.weights.first;
        // v - o, from what does not cancel.
        const Real apart =
            output.weights.first * output.scale * fused(states[i].z, v, -states[i].y);
        const Real bonus = by_token * apart;
        const Real old = weights[i].first, token = weights[i].second;
        at.write(p.dv, first + i, fused(token, flow.y, by_token));
        at.write(p.dk, first + i, fused(token, fused(v, flow.y, flow.z), bonus));
        du += bonus;
        dw -= old * fused(flow.y, states[i].y, flow.z * states[i].z);
        flow.y = fused(old, flow.y, by_sums);
        flow.z = fused(old, flow.z, -by_sums * output.o);
      }
      if (first == 0 && f.state != nullptr) {
        // From the scan's exponent to that of the state as it was given.
        const Real given = load_wkv4_state<Real>(f.state, n, d, at.channel).m;
        const Real back = exp_of(given - states[0].m);
        flow = {flow.y * back, flow.z * back, Real(0)};
      }
    }
    flow.m = Real(0);
    store_wkv4_state(p.dstate, n, d, at.channel, flow);
    static_cast<Real*>(p.dw_partial)[n * d + at.channel] = dw;
    static_cast<Real*>(p.du_partial)[n * d + at.channel] = du;
  }

  static __device__ void work(const Wkv4Params& p, const Channel& at) { forward(p, at); }
  static __device__ void work(const Wkv4BackwardParams& p, const Channel& at) { backward(p, at); }
};

template <class Data, class Params>
__global__ void wkv4_sequential_kernel(const __grid_constant__ Params params,
                                       int64_t channel_tiles) {
  using Sequential = Wkv4Sequential<Data>;
  const Wkv4Params& f = recurrence_params(params);
  const int64_t channel = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  if (channel < f.channels) {
    Sequential::work(params, {find_sequence(f.layout, blockIdx.x / channel_tiles), channel});
  }
}

template <class Data, class Params>
cudaError_t launch_wkv4_sequential(const Params& params, cudaStream_t stream) {
  constexpr int kThreads = 64;
  const Wkv4Params& f = recurrence_params(params);
  const int64_t tiles = (f.channels + kThreads - 1) / kThreads;
  return launch_unless_empty(&wkv4_sequential_kernel<Data, Params>, f.layout.sequences * tiles,
                             kThreads, 0, stream, params, tiles);
}

}  // namespace tidegate::kernels::scan
