#pragma once

// Norms of rows, backward: rows and their gradients are read once, what the forward pass computed
// is computed again in registers, and the sums over rows, for the weights, stay in registers until
// the block's last row.
//
// With c = u - mean, n = c / sigma, g = dy (times act(gate) where that comes after), e = g *
// weight:
//
//   du = (e - mean(e) - n * mean(e * n)) / sigma       mean(e): kLayer alone
//   dweight += g * n,   dbias += g

#include "kernels/norm/cuda/row_ring.cuh"

namespace tidegate::kernels::norm {

/// A thread's part of a row. Beside x and dy there is a gate, or a gradient `dsum`, or nothing.
template <class Data, class Stream, Gate kGate, bool kLayer>
struct BackwardTile {
  static constexpr bool kFast = sizeof(Data) == 2, kGated = kGate != Gate::kNone;
  using Math = GateMath<float, kFast>;
  using Ring = RowRing<kVec * (2 * sizeof(Stream) + sizeof(Data))>;
  // Where the parts lie in the ring, in units of 16 bytes. A gate is in Data, which then is Stream.
  static constexpr int kX = 0, kOther = Eight<Stream>::kParts, kDy = 2 * kOther;

  const NormBackwardParams& p;
  Ring ring;
  int column;
  bool has_dsum, has_dbias;
  float c[kVec];                     // u, then u - mean
  float g[kVec];                     // the gradient of n * weight + bias
  float opening[kGated ? kVec : 1];  // sigmoid of the gate

  /// Asks for a row.
  __device__ void load(unsigned row) {
    const NormParams& f = p.forward;
    const RowPlace<unsigned> place = row_place(f, row);
    const bool merged = is_merged(f);
    ring.template copy<kX>(row_in<const Stream>(f.x, place, merged) + column);
    ring.template copy<kDy>(row_in<const Data>(p.dy, place, merged) + column);
    if (kGated || has_dsum) {
      ring.template copy<kOther>(row_in<const Stream>(kGated ? f.gate : p.dsum, place, merged) +
                                 column);
    }
  }

  /// c and g of the row that has come.
  __device__ void begin() {
    ring.template read<kX, Stream>(c);
    ring.template read<kDy, Data>(g);
    if constexpr (kGated) {
      const bool is_silu = p.forward.activation == Activation::kSilu;
      float gate[kVec];
      ring.template read<kOther, Stream>(gate);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        opening[v] = sigmoids<Math>(gate[v]).pos;
        const float value = is_silu ? gate[v] * opening[v] : opening[v];
        if constexpr (kGate == Gate::kFirst) {
          // Rounded: as part of an FMA it would have more digits than the mean is made of.
          c[v] = __fmul_rn(c[v], value);
        } else {
          g[v] *= value;
        }
      }
    }
  }

  /// `rest` is what the mean's rounding has left in c, `scale` 1 / sigma; `mean_e` and `mean_en`
  /// are the means of e and of e * n. All but `scale` and `mean_en` are zero but for kLayer.
  __device__ void store(unsigned row, float rest, float scale, float mean_e, float mean_en,
                        const float (&w)[kVec], const void* bias, int64_t of_head,
                        float (&dw)[kVec], float (&db)[kVec]) {
    const RowPlace<unsigned> place = row_place(p.forward, row);
    const bool merged = is_merged(p.forward);
    float n[kVec], dx[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      n[v] = (kLayer ? c[v] - rest : c[v]) * scale;
      dw[v] = fmaf(g[v], n[v], dw[v]);
      const float e = kLayer ? fmaf(g[v], w[v], -mean_e) : g[v] * w[v];
      dx[v] = fmaf(-n[v], mean_en, e) * scale;
    }
    if (has_dbias) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        db[v] += g[v];
      }
    }
    if constexpr (kGated) {
      through_gate(place, merged, n, w, bias, of_head, dx);
    } else {
      if (p.forward.y.data != nullptr) {
        float y[kVec];
        find_result(n, w, bias, of_head, y);
        store_eight(row_in<Data>(p.forward.y, place, merged) + column, y);
      }
      if (has_dsum) {
        float dsum[kVec];
        ring.template read<kOther, Stream>(dsum);
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          dx[v] += dsum[v];
        }
      }
    }
    store_eight(row_in<Stream>(p.dx, place, merged) + column, dx);
    if (sizeof(Data) != sizeof(Stream) && p.daddend.data != nullptr) {
      store_eight(row_in<Data>(p.daddend, place, merged) + column, dx);
    }
  }

  /// n * weight + bias.
  __device__ void find_result(const float (&n)[kVec], const float (&w)[kVec], const void* bias,
                              int64_t of_head, float (&y)[kVec]) {
    load_weights<Data>(bias, p.forward.bias_dtype, of_head, 0.0f, y);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      y[v] = fmaf(n[v], w[v], y[v]);
    }
  }

  /// dgate, dx from the gradient of u where the gate is before the norm, and y where it is asked
  /// for.
  __device__ void through_gate(const RowPlace<unsigned>& place, bool merged, const float (&n)[kVec],
                               const float (&w)[kVec], const void* bias, int64_t of_head,
                               float (&dx)[kVec]) {
    const bool has_y = p.forward.y.data != nullptr;
    float gate[kVec], other[kVec], y[kVec];  // other: what the gate is multiplied by, or dy
    ring.template read<kOther, Stream>(gate);
    if constexpr (kGate == Gate::kFirst) {
      ring.template read<kX, Stream>(other);
    } else {
      ring.template read<kDy, Data>(other);
    }
    if (kGate == Gate::kAfter || has_y) {
      find_result(n, w, bias, of_head, y);
    }
    const bool is_silu = p.forward.activation == Activation::kSilu;
    float dgate[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float value = is_silu ? gate[v] * opening[v] : opening[v];
      // s + x s (1 - s): one minus a sigmoid has no digits where it is next to one, and there s
      // has.
      const float slope = is_silu ? fmaf(value, 1.0f - opening[v], opening[v])
                                  : opening[v] * sigmoids<Math>(gate[v]).neg;
      if constexpr (kGate == Gate::kFirst) {
        dgate[v] = dx[v] * other[v] * slope;
        dx[v] *= value;
      } else {
        dgate[v] = other[v] * y[v] * slope;
        y[v] *= value;
      }
    }
    store_eight(row_in<Data>(p.dgate, place, merged) + column, dgate);
    if (has_y) {
      store_eight(row_in<Data>(p.forward.y, place, merged) + column, y);
    }
  }
};

/// Adds what the slots of a block have summed up, in the order of the slots, where they share a
/// weight, and writes it; otherwise every slot writes its own. Row `slot` of the partial sums is of
/// head slot % weight_heads, so that weight_heads rows together are one of the op's.
__device__ inline void write_partials(const NormParams& p, const RowShape& shape,
                                      float (&sums)[kVec], void* to, float* memory, int column,
                                      bool exists) {
  if (to == nullptr) {
    return;
  }
  const bool is_shared = p.weight_heads == 1;
  const int slot = static_cast<int>(threadIdx.x) / shape.lanes;
  int64_t row = static_cast<int64_t>(blockIdx.x) * shape.slots + slot;
  if (is_shared && shape.slots > 1) {
    row = blockIdx.x;
    __syncthreads();  // the memory is free again
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      memory[v * shape.threads() + threadIdx.x] = sums[v];
    }
    __syncthreads();
    for (int other = 1; other < shape.slots; ++other) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const int from = (slot + other) * shape.lanes + static_cast<int>(threadIdx.x) % shape.lanes;
        sums[v] += slot == 0 ? memory[v * shape.threads() + from] : 0.0f;
      }
    }
  }
  if (exists && (slot == 0 || !is_shared)) {
    store_eight(static_cast<float*>(to) + row * p.channels + column, sums);
  }
}

/// Registers of a thread.
constexpr int kBackwardRegisters = 80, kGatedRegisters = 96;

template <class Data, class Stream, Gate kGate, bool kLayer>
__global__ void __maxnreg__(kGate == Gate::kNone ? kBackwardRegisters : kGatedRegisters)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p,
                         const __grid_constant__ RowShape shape) {
  using Tile = BackwardTile<Data, Stream, kGate, kLayer>;
  constexpr int kSums = kLayer ? 4 : 2;
  __shared__ RowSumsMemory<kSums> memory;
  extern __shared__ uint4 ring_memory[];
  RowReducer<kSums> reducer(&memory, shape.lanes);
  const NormParams& f = p.forward;
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const unsigned slot = blockIdx.x * shape.slots + threadIdx.x / shape.lanes;
  const bool exists = lane * kVec < f.channels;
  const int column = exists ? lane * kVec : 0;
  const float per_channel = 1.0f / static_cast<float>(f.channels);

  float w[kVec], dw[kVec] = {}, db[kVec] = {};
  const int64_t of_head = slot % f.weight_heads * f.channels + column;
  load_weights<Data>(f.weight, f.weight_dtype, of_head, 1.0f, w);

  Tile tile{p, typename Tile::Ring(ring_memory), column, p.dsum.data != nullptr,
            p.dbias != nullptr};
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
    tile.begin();
    if constexpr (kLayer) {
      float sum[1] = {};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sum[0] += tile.c[v];
      }
      sum[0] = exists ? sum[0] : 0.0f;
      reducer.sum(sum);
      const float mean = sum[0] * per_channel;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        tile.c[v] -= mean;
      }
    }
    // Of c * c and of e * c; for kLayer also of e, and of what the mean's rounding has left in c.
    float sums[kSums] = {};
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float e = tile.g[v] * w[v];
      sums[0] = fmaf(tile.c[v], tile.c[v], sums[0]);
      sums[1] = fmaf(e, tile.c[v], sums[1]);
      if constexpr (kLayer) {
        sums[2] += e;
        sums[3] += tile.c[v];
      }
    }
#pragma unroll
    for (float& sum : sums) {
      sum = exists ? sum : 0.0f;
    }
    reducer.sum(sums);
    if (row < shape.rows && exists) {
      float rest = 0.0f, mean_e = 0.0f;
      float variance = sums[0] * per_channel, mean_ec = sums[1] * per_channel;
      if constexpr (kLayer) {
        rest = sums[3] * per_channel;
        mean_e = sums[2] * per_channel;
        variance = positive_part(fmaf(-rest, rest, variance));
        mean_ec = fmaf(-rest, mean_e, mean_ec);
      }
      const float scale = rsqrtf(variance + static_cast<float>(f.eps));
      tile.store(row, rest, scale, mean_e, mean_ec * scale, w, f.bias, of_head, dw, db);
    }
    tile.ring.next_read();
    row += shape.stride;
  }
  // The ring is empty now: every thread has waited for its last row.
  float* const slot_sums = reinterpret_cast<float*>(ring_memory);
  write_partials(f, shape, dw, p.dweight, slot_sums, column, exists);
  write_partials(f, shape, db, p.dbias, slot_sums, column, exists);
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward_blocks(const NormBackwardParams& p,
                                                       int64_t* blocks) {
  return dispatch_form<Data, Stream>(p.forward, [&]<Gate kGate, bool kLayer>() {
    using Ring = typename BackwardTile<Data, Stream, kGate, kLayer>::Ring;
    const RowShape shape = row_shape(p.forward);
    return count_blocks<&norm_backward_kernel<Data, Stream, kGate, kLayer>>(
        p.forward, shape, Ring::shared_bytes(shape), blocks);
  });
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward(const NormBackwardParams& p, cudaStream_t stream) {
  RowShape shape = row_shape(p.forward);
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(backward_blocks(p, &blocks));
  shape.stride = static_cast<unsigned>(blocks * shape.slots);
  return dispatch_form<Data, Stream>(p.forward, [&]<Gate kGate, bool kLayer>() {
    using Ring = typename BackwardTile<Data, Stream, kGate, kLayer>::Ring;
    return launch_unless_empty(&norm_backward_kernel<Data, Stream, kGate, kLayer>, blocks,
                               dim3(shape.threads()), Ring::shared_bytes(shape), stream, p, shape);
  });
}

}  // namespace tidegate::kernels::norm
