#pragma once

// Norms of rows, forward: rows are read once, normed in registers and written once.

#include "kernels/norm/cuda/row_ring.cuh"

namespace tidegate::kernels::norm {

/// Registers of a thread.
constexpr int kForwardRegisters = 56;

/// A thread's part of a row. Beside x there is a gate, or an addend, or nothing.
template <class Data, class Stream, Gate kGate, bool kLayer>
struct ForwardTile {
  static constexpr bool kFast = sizeof(Data) == 2, kGated = kGate != Gate::kNone;
  using Math = GateMath<float, kFast>;
  using Ring = RowRing<kVec * (sizeof(Stream) + sizeof(Data))>;
  // Where the parts lie in the ring, in units of 16 bytes.
  static constexpr int kX = 0, kOther = Eight<Stream>::kParts;

  const NormParams& p;
  Ring ring;
  int column;  // the thread's first
  bool has_addend;
  float u[kVec];

  /// Asks for a row.
  __device__ void load(unsigned row) {
    const RowPlace<unsigned> place = row_place(p, row);
    const bool merged = is_merged(p);
    ring.template copy<kX>(row_in<const Stream>(p.x, place, merged) + column);
    if (kGated || has_addend) {
      ring.template copy<kOther>(row_in<const Data>(kGated ? p.gate : p.addend, place, merged) +
                                 column);
    }
  }

  /// u, what is normed, of the row that has come; a sum is stored as it is found, where `writes`.
  __device__ void combine(unsigned row, bool writes) {
    ring.template read<kX, Stream>(u);
    if constexpr (kGate == Gate::kFirst) {
      float gate[kVec];
      ring.template read<kOther, Data>(gate);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        u[v] = __fmul_rn(u[v], activated<Math>(p.activation, gate[v]));
      }
    } else if (!kGated && has_addend) {
      float addend[kVec];
      ring.template read<kOther, Data>(addend);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        u[v] += addend[v];
      }
      store_rounded(row_in<Stream>(p.sum, row_place(p, row), is_merged(p)) + column, writes, u);
    }
  }

  /// y from u - mean, of which `rest` is left in u for kLayer, and its factor.
  __device__ void store(unsigned row, float rest, float factor, const float (&w)[kVec],
                        const float (&b)[kVec]) {
    float y[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      y[v] = fmaf((kLayer ? u[v] - rest : u[v]) * factor, w[v], b[v]);
    }
    if constexpr (kGate == Gate::kAfter) {
      float gate[kVec];
      ring.template read<kOther, Data>(gate);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        y[v] *= activated<Math>(p.activation, gate[v]);
      }
    }
    store_eight(row_in<Data>(p.y, row_place(p, row), is_merged(p)) + column, y);
  }
};

template <class Data, class Stream, Gate kGate, bool kLayer>
__global__ void __maxnreg__(kForwardRegisters)
    norm_forward_kernel(const __grid_constant__ NormParams p,
                        const __grid_constant__ RowShape shape) {
  using Tile = ForwardTile<Data, Stream, kGate, kLayer>;
  __shared__ RowSumsMemory<2> memory;
  extern __shared__ uint4 ring_memory[];
  RowReducer<2> reducer(&memory, shape.lanes);
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const unsigned slot = blockIdx.x * shape.slots + threadIdx.x / shape.lanes;
  const bool exists = lane * kVec < p.channels;
  const int column = exists ? lane * kVec : 0;
  const float per_channel = 1.0f / static_cast<float>(p.channels);

  float w[kVec], b[kVec];
  const int64_t of_head = slot % p.weight_heads * p.channels + column;
  load_weights<Data>(p.weight, p.weight_dtype, of_head, 1.0f, w);
  load_weights<Data>(p.bias, p.bias_dtype, of_head, 0.0f, b);

  Tile tile{p, typename Tile::Ring(ring_memory), column, p.addend.data != nullptr};
  unsigned asked = slot;
  const auto ask = [&] {
    if (asked < shape.rows) {
      tile.load(asked);
    }
    tile.ring.next_filled();
    asked += shape.stride;
  };
#pragma unroll
  for (int i = 0; i < Tile::Ring::kStages - 1; ++i) {
    ask();
  }
  unsigned row = slot;
  for (unsigned base = blockIdx.x * shape.slots; base < shape.rows; base += shape.stride) {
    tile.ring.wait();
    ask();
    const bool writes = exists && row < shape.rows;
    tile.combine(row, writes);
    if constexpr (kLayer) {
      float sum[1] = {};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sum[0] += tile.u[v];
      }
      sum[0] = exists ? sum[0] : 0.0f;
      reducer.sum(sum);
      const float mean = sum[0] * per_channel;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        tile.u[v] -= mean;
      }
    }
    float moments[kLayer ? 2 : 1] = {};  // of squares, and of what the mean's rounding left in u
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      moments[0] = fmaf(tile.u[v], tile.u[v], moments[0]);
      if constexpr (kLayer) {
        moments[1] += tile.u[v];
      }
    }
#pragma unroll
    for (float& moment : moments) {
      moment = exists ? moment : 0.0f;
    }
    reducer.sum(moments);
    if (writes) {
      float rest = 0.0f, variance = moments[0] * per_channel;
      if constexpr (kLayer) {
        rest = moments[1] * per_channel;
        variance = positive_part(fmaf(-rest, rest, variance));
      }
      tile.store(row, rest, rsqrtf(variance + static_cast<float>(p.eps)), w, b);
    }
    tile.ring.next_read();
    row += shape.stride;
  }
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::forward(const NormParams& p, cudaStream_t stream,
                                               bool* fits) {
  return dispatch_form<Data, Stream>(p, [&]<Gate kGate, bool kLayer>() {
    RowShape shape = row_shape(p);
    const int shared_bytes = ForwardTile<Data, Stream, kGate, kLayer>::Ring::shared_bytes(shape);
    constexpr auto* kKernel = &norm_forward_kernel<Data, Stream, kGate, kLayer>;
    int64_t blocks = 0;
    TIDEGATE_RETURN_IF_CUDA_ERROR(count_blocks<kKernel>(p, shape, shared_bytes, &blocks));
    *fits = blocks > 0;
    shape.stride = static_cast<unsigned>(blocks * shape.slots);
    return launch_unless_empty(kKernel, blocks, dim3(shape.threads()), shared_bytes, stream, p,
                               shape);
  });
}

}  // namespace tidegate::kernels::norm
