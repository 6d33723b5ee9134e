#pragma once

// Norms of rows, forward: rows are read once, normed in registers and written once.

#include "kernels/norm/cuda/row_ring.cuh"

namespace tidegate::kernels::norm {

/// Registers of a thread. None may be spilled in the loop over rows: what is stored there passes
/// through L2.
constexpr int kForwardRegisters = 96;

/// A thread's part of a row. Beside x there is a gate, or an addend, or nothing.
template <class Data, class Stream, Gate kGate, bool kLayer>
struct ForwardTile {
  static constexpr bool kFast = sizeof(Data) == 2, kGated = kGate != Gate::kNone;
  using Math = GateMath<float, kFast>;
  using Ring = RowRing<kVec * (sizeof(Stream) + sizeof(Data))>;
  // Where the parts lie in the ring, in units of 16 bytes.
  static constexpr int kX = 0, kOther = Eight<Stream>::kParts;

  const NormParams& p;
  const Columns& columns;
  Ring ring;
  bool has_addend;
  float u[kOwnColumns];

  template <bool kSilu>
  __device__ static float activated(float gate) {
    const float sigmoid = sigmoids<Math>(gate).pos;
    return kSilu ? gate * sigmoid : sigmoid;
  }

  /// Asks for a row, by the threads' own copies.
  __device__ void load(unsigned stage, unsigned row) {
    const RowPlace<unsigned> place = row_place(p, row);
    const bool merged = is_merged(p);
    ring.template copy<kX>(stage, row_in<const Stream>(p.x, place, merged));
    if (kGated || has_addend) {
      ring.template copy<kOther>(stage,
                                 row_in<const Data>(kGated ? p.gate : p.addend, place, merged));
    }
  }

  /// u, what is normed, of the row that has come; a sum is stored as it is found, where `writes`.
  __device__ void combine(unsigned row, bool writes) {
    ring.template read<kX, Stream>(u);
    if constexpr (kGate == Gate::kFirst) {
      float gate[kOwnColumns];
      ring.template read<kOther, Data>(gate);
      with_activation(p.activation, [&]<bool kSilu>() {
#pragma unroll
        for (int v = 0; v < kOwnColumns; ++v) {
          u[v] = __fmul_rn(u[v], activated<kSilu>(gate[v]));
        }
      });
    } else if (!kGated && has_addend) {
      float addend[kOwnColumns];
      ring.template read<kOther, Data>(addend);
#pragma unroll
      for (int v = 0; v < kOwnColumns; ++v) {
        u[v] += addend[v];
      }
      Stream* const sum = row_in<Stream>(p.sum, row_place(p, row), is_merged(p));
#pragma unroll
      for (int pack = 0; pack < kPacks; ++pack) {
        store_rounded(sum + columns.first(pack), writes && columns.exists(pack), u + pack * kVec);
      }
    }
  }

  /// Sums over the row, of squares of u - mean, which takes the place of u, and of what the mean's
  /// rounding has left in it. Once the slot's threads have met they are done with the row before,
  /// in whose place one more is asked for.
  template <class Requests, class Reducer, int kMoments>
  __device__ void find_moments(const Requests& requests, Reducer& reducer, unsigned row,
                               float per_channel, float (&moments)[kMoments]) {
    if constexpr (kLayer) {
      subtract_mean(columns, requests, reducer, row, per_channel, u);
    }
#pragma unroll
    for (int v = 0; v < kOwnColumns; ++v) {
      moments[0] = fmaf(u[v], u[v], moments[0]);
      if constexpr (kLayer) {
        moments[1] += u[v];
      }
    }
    reducer.sum(moments);
    if constexpr (!kLayer) {
      requests.next(row);
    }
  }

  /// y from the sums over the row.
  template <int kMoments>
  __device__ void finish(unsigned row, const float (&moments)[kMoments], float per_channel,
                         const float (&w)[kOwnColumns], const float (&b)[kOwnColumns]) {
    float rest = 0.0f, variance = moments[0] * per_channel;
    if constexpr (kLayer) {
      rest = moments[1] * per_channel;
      variance = positive_part(fmaf(-rest, rest, variance));
    }
    store(row, rest, rsqrtf(variance + static_cast<float>(p.eps)), w, b);
  }

  /// y from u - mean, of which `rest` is left in u for kLayer, and its factor.
  __device__ void store(unsigned row, float rest, float factor, const float (&w)[kOwnColumns],
                        const float (&b)[kOwnColumns]) {
    const float shift = -rest * factor;
    float y[kOwnColumns];
#pragma unroll
    for (int v = 0; v < kOwnColumns; ++v) {
      y[v] = fmaf(kLayer ? fmaf(u[v], factor, shift) : u[v] * factor, w[v], b[v]);
    }
    if constexpr (kGate == Gate::kAfter) {
      float gate[kOwnColumns];
      ring.template read<kOther, Data>(gate);
      with_activation(p.activation, [&]<bool kSilu>() {
#pragma unroll
        for (int v = 0; v < kOwnColumns; ++v) {
          y[v] *= activated<kSilu>(gate[v]);
        }
      });
    }
    Data* const to = row_in<Data>(p.y, row_place(p, row), is_merged(p));
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (columns.exists(pack)) {
        store_eight(to + columns.first(pack), y + pack * kVec);
      }
    }
  }
};

template <class Data, class Stream, Gate kGate, bool kLayer>
__global__ void __maxnreg__(kForwardRegisters)
    norm_forward_kernel(const __grid_constant__ NormParams p,
                        const __grid_constant__ RowShape shape) {
  using Tile = ForwardTile<Data, Stream, kGate, kLayer>;
  __shared__ RowSumsMemory<2> memory;
  __shared__ typename Tile::Ring::Barriers barriers;
  extern __shared__ uint4 ring_memory[];
  RowReducer<2> reducer(&memory, shape);
  const Columns columns(shape);
  const unsigned local = threadIdx.x / shape.lanes, slot = blockIdx.x * shape.slots + local;
  const float per_channel = 1.0f / static_cast<float>(p.channels);

  const unsigned tensors = Tile::kGated || p.addend.data != nullptr ? 2 : 1;
  Tile tile{p, columns, typename Tile::Ring(columns, tensors, ring_memory, barriers),
            p.addend.data != nullptr};
  const unsigned lane = columns.mine / kVec;
  const RowSource source(lane == 0      ? p.x
                         : Tile::kGated ? p.gate
                                        : p.addend,
                         shape.channels, lane == 0 ? sizeof(Stream) : sizeof(Data),
                         lane == 0 ? Tile::kX : Tile::kOther);
  const RowRequests<Tile> requests{shape, tile, source, lane, tensors};
  requests.begin(slot);
  float w[kOwnColumns] = {}, b[kOwnColumns] = {};
  const int64_t of_head = slot % p.weight_heads * p.channels;
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    if (columns.exists(pack)) {
      const int64_t first = of_head + columns.first(pack);
      load_weights<Data>(p.weight, p.weight_dtype, first, 1.0f, w + pack * kVec);
      load_weights<Data>(p.bias, p.bias_dtype, first, 0.0f, b + pack * kVec);
    }
  }

  for (unsigned row = slot; row < shape.rows + local; row += shape.stride) {
    tile.ring.wait(row < shape.rows);
    tile.combine(row, row < shape.rows);
    float moments[kLayer ? 2 : 1] = {};
    tile.find_moments(requests, reducer, row, per_channel, moments);
    if (row < shape.rows) {
      tile.finish(row, moments, per_channel, w, b);
    }
    tile.ring.next_read();
  }
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::forward(const NormParams& p, cudaStream_t stream,
                                               bool* fits) {
  return dispatch_form<Data, Stream>(p, [&]<Gate kGate, bool kLayer>() {
    using Ring = typename ForwardTile<Data, Stream, kGate, kLayer>::Ring;
    constexpr int kBytes = Ring::kThreadBytes;
    constexpr auto* kKernel = &norm_forward_kernel<Data, Stream, kGate, kLayer>;
    DeviceLimits device;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&device));
    RowShape shape = row_shape<kForwardRegisters>(p, kBytes, device);
    const int shared_bytes = kBytes * shape.threads();
    int64_t blocks = 0;
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        find_bulk<kKernel>(Ring::kStages, p, &shape, p.x, p.addend, p.gate));
    TIDEGATE_RETURN_IF_CUDA_ERROR(count_blocks<kKernel>(p, shape, device, shared_bytes, &blocks));
    *fits = blocks > 0;
    shape.stride = static_cast<unsigned>(blocks * shape.slots);
    return launch_unless_empty(kKernel, blocks, dim3(shape.threads()), shared_bytes, stream, p,
                               shape);
  });
}

}  // namespace tidegate::kernels::norm
