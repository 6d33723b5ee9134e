#pragma once

// Norms of rows, forward: rows are read once, normed in registers and written once.

#include "kernels/norm/cuda/row_tile.cuh"

namespace tidegate::kernels::norm {

/// Registers of a thread, so few that 24 warps fit on a multiprocessor: loads under way are what
/// memory's speed is made of.
constexpr int kForwardRegisters = 80;

/// A thread's part of kRows rows. kOther: there is an addend, or a gate.
template <class Data, class Stream, int kRows, bool kOther>
struct ForwardTile {
  static constexpr bool kFast = sizeof(Data) == 2;
  using Math = GateMath<float, kFast>;

  const NormParams& p;
  const RowShape& shape;
  int column;     // the thread's first
  bool exists;    // whether it has columns at all: lanes are more than needed at times
  bool is_gated;  // what the other tensor is
  Eight<Stream> x[kRows];
  Eight<Data> other[kOther ? kRows : 1];
  RowPlace<unsigned> place[kRows];
  float u[kRows][kVec];

  /// Asks for all that is read. Past the last row, the last one again.
  __device__ void load(unsigned first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      place[r] = row_place(p, min(first + r * shape.stride, shape.rows - 1));
      x[r] = load_eight(place[r].template in<const Stream>(p.x) + column);
      if constexpr (kOther) {
        const HeadSeries& from = is_gated ? p.gate : p.addend;
        other[r] = load_eight(place[r].template in<const Data>(from) + column);
      }
    }
  }

  /// u, what is normed; zero where the thread has no columns.
  __device__ void combine(int r) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      float value = x[r].get(v);
      if constexpr (kOther) {
        if (!is_gated) {
          value = widen(narrow<Stream>(value + other[r].get(v)));
        } else if (p.gate_first) {
          value = __fmul_rn(value, activated<Math>(p.activation, other[r].get(v)));
        }
      }
      u[r][v] = exists ? value : 0.0f;
    }
  }

  /// y from u - mean, of which `rest` is left in u, and its factor.
  __device__ void store(int r, float rest, float factor, const float (&w)[kVec],
                        const float (&b)[kVec]) {
    float y[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      y[v] = fmaf((u[r][v] - rest) * factor, w[v], b[v]);
      if constexpr (kOther) {
        if (is_gated && !p.gate_first) {
          y[v] *= activated<Math>(p.activation, other[r].get(v));
        }
      }
    }
    store_eight(place[r].template in<Data>(p.y) + column, y);
  }
};

template <class Data, class Stream, int kRows, bool kOther>
__global__ void __maxnreg__(kForwardRegisters)
    norm_forward_kernel(const __grid_constant__ NormParams p,
                        const __grid_constant__ RowShape shape) {
  __shared__ RowSumsMemory<2 * kRows> memory;
  RowReducer<2 * kRows> reducer(&memory, shape.lanes);
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

  ForwardTile<Data, Stream, kRows, kOther> tile{p, shape, column, exists, p.gate.data != nullptr};
  for (unsigned base = blockIdx.x * shape.slots; base < shape.rows; base += kRows * shape.stride) {
    const unsigned first = base + (slot - blockIdx.x * shape.slots);
    tile.load(first);
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tile.combine(r);
      if (kOther && !tile.is_gated && exists && first + r * shape.stride < shape.rows) {
        store_eight(tile.place[r].template in<Stream>(p.sum) + column, tile.u[r]);
      }
    }
    if (is_layer) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] = 0.0f;
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          sums[r] += tile.u[r][v];
        }
      }
      reducer.sum(sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float mean = sums[r] / channels;
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          tile.u[r][v] = exists ? tile.u[r][v] - mean : 0.0f;
        }
      }
    }
    float moments[2 * kRows] = {};  // sums of squares, and what the mean's rounding has left
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        moments[2 * r] = fmaf(tile.u[r][v], tile.u[r][v], moments[2 * r]);
        moments[2 * r + 1] += tile.u[r][v];
      }
    }
    reducer.sum(moments);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (exists && first + r * shape.stride < shape.rows) {
        const float rest = is_layer ? moments[2 * r + 1] / channels : 0.0f;
        const float variance = positive_part(fmaf(-rest, rest, moments[2 * r] / channels));
        tile.store(r, rest, rsqrtf(variance + static_cast<float>(p.eps)), w, b);
      }
    }
  }
}

template <auto* kKernel>
cudaError_t launch_forward(const NormParams& p, int rows, cudaStream_t stream, bool* fits) {
  RowShape shape = row_shape(p);
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(count_blocks<kKernel>(p, shape, rows, &blocks));
  *fits = blocks > 0;
  shape.stride = static_cast<unsigned>(blocks * shape.slots);
  return launch_unless_empty(kKernel, blocks, dim3(shape.threads()), 0, stream, p, shape);
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::forward(const NormParams& p, cudaStream_t stream,
                                               bool* fits) {
  constexpr int kRows = 2;
  return p.addend.data != nullptr || p.gate.data != nullptr
             ? launch_forward<&norm_forward_kernel<Data, Stream, kRows, true>>(p, kRows, stream,
                                                                               fits)
             : launch_forward<&norm_forward_kernel<Data, Stream, kRows, false>>(p, kRows, stream,
                                                                                fits);
}

}  // namespace tidegate::kernels::norm
