#pragma once

// Norms of rows, forward: rows are read once, normed in registers and written once.

#include "kernels/norm/cuda/row_ring.cuh"

namespace tidegate::kernels::norm {

/// Registers of a thread.
constexpr int kForwardRegisters = 56;

/// A thread's part of a row. kGated: beside x there is a gate, otherwise an addend or nothing.
template <class Data, class Stream, bool kGated>
struct ForwardTile {
  static constexpr bool kFast = sizeof(Data) == 2;
  using Math = GateMath<float, kFast>;
  using Ring = RowRing<kVec * (sizeof(Stream) + sizeof(Data))>;
  // Where the parts lie in the ring, in units of 16 bytes.
  static constexpr int kX = 0, kOther = Eight<Stream>::kParts;

  const NormParams& p;
  Ring ring;
  int column;   // the thread's first
  bool exists;  // whether it has columns at all: lanes are more than needed at times
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

  /// u, what is normed, of the row that has come; zero where the thread has no columns.
  __device__ void combine() {
    ring.template read<kX, Stream>(u);
    if constexpr (kGated) {
      if (p.gate_first) {
        float gate[kVec];
        ring.template read<kOther, Data>(gate);
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          u[v] = __fmul_rn(u[v], activated<Math>(p.activation, gate[v]));
        }
      }
    } else if (has_addend) {
      float addend[kVec];
      ring.template read<kOther, Data>(addend);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        u[v] = widen(narrow<Stream>(u[v] + addend[v]));
      }
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      u[v] = exists ? u[v] : 0.0f;
    }
  }

  /// y from u - mean, of which `rest` is left in u, and its factor.
  __device__ void store(unsigned row, float rest, float factor, const float (&w)[kVec],
                        const float (&b)[kVec]) {
    float y[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      y[v] = fmaf((u[v] - rest) * factor, w[v], b[v]);
    }
    if constexpr (kGated) {
      if (!p.gate_first) {
        float gate[kVec];
        ring.template read<kOther, Data>(gate);
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          y[v] *= activated<Math>(p.activation, gate[v]);
        }
      }
    }
    store_eight(row_in<Data>(p.y, row_place(p, row), is_merged(p)) + column, y);
  }
};

template <class Data, class Stream, bool kGated>
__global__ void __maxnreg__(kForwardRegisters)
    norm_forward_kernel(const __grid_constant__ NormParams p,
                        const __grid_constant__ RowShape shape) {
  using Tile = ForwardTile<Data, Stream, kGated>;
  __shared__ RowSumsMemory<2> memory;
  extern __shared__ uint4 ring_memory[];
  RowReducer<2> reducer(&memory, shape.lanes);
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const unsigned slot = blockIdx.x * shape.slots + threadIdx.x / shape.lanes;
  const bool exists = lane * kVec < p.channels;
  const int column = exists ? lane * kVec : 0;
  const float channels = static_cast<float>(p.channels);
  const bool is_layer = p.kind == NormKind::kLayer;

  float w[kVec], b[kVec];
  const int64_t of_head = slot % p.weight_heads * p.channels + column;
  load_weights<Data>(p.weight, p.weight_dtype, of_head, 1.0f, w);
  load_weights<Data>(p.bias, p.bias_dtype, of_head, 0.0f, b);

  Tile tile{p, typename Tile::Ring(ring_memory), column, exists, p.addend.data != nullptr};
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
    tile.combine();
    const bool writes = exists && row < shape.rows;
    if (!kGated && tile.has_addend && writes) {
      store_eight(row_in<Stream>(p.sum, row_place(p, row), is_merged(p)) + column, tile.u);
    }
    float rest = 0.0f, squares = 0.0f;  // what the mean's rounding has left in u; sum of squares
    if (is_layer) {
      float sum[1] = {};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sum[0] += tile.u[v];
      }
      reducer.sum(sum);
      const float mean = sum[0] / channels;
      float moments[2] = {};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        tile.u[v] = exists ? tile.u[v] - mean : 0.0f;
        moments[0] = fmaf(tile.u[v], tile.u[v], moments[0]);
        moments[1] += tile.u[v];
      }
      reducer.sum(moments);
      squares = moments[0], rest = moments[1] / channels;
    } else {
      float moments[1] = {};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        moments[0] = fmaf(tile.u[v], tile.u[v], moments[0]);
      }
      reducer.sum(moments);
      squares = moments[0];
    }
    if (writes) {
      const float variance = positive_part(fmaf(-rest, rest, squares / channels));
      tile.store(row, rest, rsqrtf(variance + static_cast<float>(p.eps)), w, b);
    }
    tile.ring.next_read();
    row += shape.stride;
  }
}

template <class Data, class Stream, bool kGated>
cudaError_t launch_forward(const NormParams& p, cudaStream_t stream, bool* fits) {
  RowShape shape = row_shape(p);
  const int shared_bytes = ForwardTile<Data, Stream, kGated>::Ring::shared_bytes(shape);
  constexpr auto* kKernel = &norm_forward_kernel<Data, Stream, kGated>;
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(count_blocks<kKernel>(p, shape, shared_bytes, &blocks));
  *fits = blocks > 0;
  shape.stride = static_cast<unsigned>(blocks * shape.slots);
  return launch_unless_empty(kKernel, blocks, dim3(shape.threads()), shared_bytes, stream, p,
                             shape);
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::forward(const NormParams& p, cudaStream_t stream,
                                               bool* fits) {
  if constexpr (sizeof(Data) == sizeof(Stream)) {
    if (p.gate.data != nullptr) {
      return launch_forward<Data, Stream, true>(p, stream, fits);
    }
  }
  return launch_forward<Data, Stream, false>(p, stream, fits);
}

}  // namespace tidegate::kernels::norm
