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

/// A thread's part of a row. kGated: beside x and dy there is a gate, otherwise a gradient `dsum`
/// or nothing.
template <class Data, class Stream, bool kGated>
struct BackwardTile {
  static constexpr bool kFast = sizeof(Data) == 2;
  using Math = GateMath<float, kFast>;
  using Ring = RowRing<kVec * (2 * sizeof(Stream) + sizeof(Data))>;
  // Where the parts lie in the ring, in units of 16 bytes. A gate is in Data, which then is Stream.
  static constexpr int kX = 0, kOther = Eight<Stream>::kParts, kDy = 2 * kOther;

  const NormBackwardParams& p;
  Ring ring;
  int column;
  bool gate_first, has_dsum;
  float c[kVec];  // u, then u - mean
  float g[kVec];  // the gradient of n * weight + bias

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
      float gate[kVec];
      ring.template read<kOther, Stream>(gate);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float value = activated<Math>(p.forward.activation, gate[v]);
        if (gate_first) {
          // Rounded: as part of an FMA it would have more digits than the mean is made of.
          c[v] = __fmul_rn(c[v], value);
        } else {
          g[v] *= value;
        }
      }
    }
  }

  /// `rest` is what the mean's rounding has left in c, `scale` 1 / sigma; `mean_e` and `mean_en`
  /// are the means of e and of e * n.
  __device__ void store(unsigned row, float rest, float scale, float mean_e, float mean_en,
                        const float (&w)[kVec], const void* bias, int64_t of_head,
                        float (&dw)[kVec], float (&db)[kVec]) {
    const RowPlace<unsigned> place = row_place(p.forward, row);
    const bool merged = is_merged(p.forward);
    float n[kVec], dx[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      n[v] = (c[v] - rest) * scale;
      dw[v] = fmaf(g[v], n[v], dw[v]);
      db[v] += g[v];
      dx[v] = (fmaf(g[v], w[v], -mean_e) - n[v] * mean_en) * scale;
    }
    if constexpr (kGated) {
      float dgate[kVec];
      through_gate(n, w, bias, of_head, dx, dgate);
      store_eight(row_in<Data>(p.dgate, place, merged) + column, dgate);
    } else if (has_dsum) {
      float dsum[kVec];
      ring.template read<kOther, Stream>(dsum);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        dx[v] += dsum[v];
      }
    }
    store_eight(row_in<Stream>(p.dx, place, merged) + column, dx);
    if (sizeof(Data) != sizeof(Stream) && p.daddend.data != nullptr) {
      store_eight(row_in<Data>(p.daddend, place, merged) + column, dx);
    }
  }

  /// dgate, and dx from the gradient of u where the gate is before the norm.
  __device__ void through_gate(const float (&n)[kVec], const float (&w)[kVec], const void* bias,
                               int64_t of_head, float (&dx)[kVec], float (&dgate)[kVec]) {
    float b[kVec], gate[kVec], x[kVec], dy[kVec];
    load_weights<Data>(gate_first ? nullptr : bias, p.forward.bias_dtype, of_head, 0.0f, b);
    ring.template read<kOther, Stream>(gate);
    ring.template read<kX, Stream>(x);
    ring.template read<kDy, Data>(dy);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      float value, derivative;
      activate<Math>(p.forward.activation, gate[v], &value, &derivative);
      if (gate_first) {
        dgate[v] = dx[v] * x[v] * derivative;
        dx[v] *= value;
      } else {
        dgate[v] = dy[v] * fmaf(n[v], w[v], b[v]) * derivative;
      }
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
constexpr int kBackwardRegisters = 80;

template <class Data, class Stream, bool kGated>
__global__ void __maxnreg__(kGated ? 96 : kBackwardRegisters)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p,
                         const __grid_constant__ RowShape shape) {
  using Tile = BackwardTile<Data, Stream, kGated>;
  __shared__ RowSumsMemory<4> memory;
  extern __shared__ uint4 ring_memory[];
  RowReducer<4> reducer(&memory, shape.lanes);
  const NormParams& f = p.forward;
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const unsigned slot = blockIdx.x * shape.slots + threadIdx.x / shape.lanes;
  const bool exists = lane * kVec < f.channels;
  const int column = exists ? lane * kVec : 0;
  const float per_channel = 1.0f / static_cast<float>(f.channels);
  const bool is_layer = f.kind == NormKind::kLayer;

  float w[kVec], dw[kVec] = {}, db[kVec] = {};
  const int64_t of_head = slot % f.weight_heads * f.channels + column;
  load_weights<Data>(f.weight, f.weight_dtype, of_head, 1.0f, w);

  Tile tile{p, typename Tile::Ring(ring_memory), column, f.gate_first, p.dsum.data != nullptr};
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
    if (is_layer) {
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
    float squares = 0.0f, products = 0.0f;  // sums of c * c and of e * c
    float rest = 0.0f, sum_e = 0.0f;        // of what the mean's rounding has left in c, and of e
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      squares = fmaf(tile.c[v], tile.c[v], squares);
      products = fmaf(tile.g[v] * w[v], tile.c[v], products);
    }
    if (is_layer) {
      float sums[4] = {exists ? squares : 0.0f, exists ? products : 0.0f};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sums[2] += exists ? tile.g[v] * w[v] : 0.0f;
        sums[3] += exists ? tile.c[v] : 0.0f;
      }
      reducer.sum(sums);
      squares = sums[0], products = sums[1], sum_e = sums[2], rest = sums[3] * per_channel;
    } else {
      float sums[2] = {exists ? squares : 0.0f, exists ? products : 0.0f};
      reducer.sum(sums);
      squares = sums[0], products = sums[1];
    }
    if (row < shape.rows && exists) {
      const float variance = positive_part(fmaf(-rest, rest, squares * per_channel));
      const float scale = rsqrtf(variance + static_cast<float>(f.eps));
      const float mean_en = fmaf(-rest, sum_e, products) * scale * per_channel;
      tile.store(row, rest, scale, sum_e * per_channel, mean_en, w, f.bias, of_head, dw, db);
    }
    tile.ring.next_read();
    row += shape.stride;
  }
  // The ring is empty now: every thread has waited for its last row.
  float* const slot_sums = reinterpret_cast<float*>(ring_memory);
  write_partials(f, shape, dw, p.dweight, slot_sums, column, exists);
  write_partials(f, shape, db, p.dbias, slot_sums, column, exists);
}

/// Calls visit.template operator()<kGated>().
template <class Data, class Stream, class Visit>
cudaError_t dispatch_gated(const NormBackwardParams& p, Visit visit) {
  if constexpr (sizeof(Data) == sizeof(Stream)) {
    if (p.forward.gate.data != nullptr) {
      return visit.template operator()<true>();
    }
  }
  return visit.template operator()<false>();
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward_blocks(const NormBackwardParams& p,
                                                       int64_t* blocks) {
  return dispatch_gated<Data, Stream>(p, [&]<bool kGated>() {
    using Ring = typename BackwardTile<Data, Stream, kGated>::Ring;
    const RowShape shape = row_shape(p.forward);
    return count_blocks<&norm_backward_kernel<Data, Stream, kGated>>(
        p.forward, shape, Ring::shared_bytes(shape), blocks);
  });
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward(const NormBackwardParams& p, cudaStream_t stream) {
  RowShape shape = row_shape(p.forward);
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(backward_blocks(p, &blocks));
  shape.stride = static_cast<unsigned>(blocks * shape.slots);
  return dispatch_gated<Data, Stream>(p, [&]<bool kGated>() {
    using Ring = typename BackwardTile<Data, Stream, kGated>::Ring;
    return launch_unless_empty(&norm_backward_kernel<Data, Stream, kGated>, blocks,
                               dim3(shape.threads()), Ring::shared_bytes(shape), stream, p, shape);
  });
}

}  // namespace tidegate::kernels::norm
