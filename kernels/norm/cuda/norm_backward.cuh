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

#include "kernels/norm/cuda/row_tile.cuh"

namespace tidegate::kernels::norm {

/// A thread's part of kRows rows. kOther: there is a gate, or a gradient `dsum`.
template <class Data, class Stream, int kRows, bool kOther>
struct BackwardTile {
  static constexpr bool kFast = sizeof(Data) == 2;
  // Where the streams differ there is no gate, so that the other tensor is in Stream.
  static constexpr bool kCanHaveGate = kOther && sizeof(Data) == sizeof(Stream);
  using Math = GateMath<float, kFast>;

  const NormBackwardParams& p;
  const RowShape& shape;
  int column;
  bool exists;
  bool gate_first, gate_after;
  Eight<Stream> x[kRows];
  Eight<Data> dy[kRows];
  Eight<Stream> other[kOther ? kRows : 1];
  RowPlace<unsigned> place[kRows];
  // The mean is the sum of two numbers: next to a spread that is small beside it, the roundings of
  // one would be seen.
  float mean[kRows], rest[kRows];

  __device__ void load(unsigned first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      place[r] = row_place(p.forward, min(first + r * shape.stride, shape.rows - 1));
      x[r] = load_eight(place[r].template in<const Stream>(p.forward.x) + column);
      dy[r] = load_eight(place[r].template in<const Data>(p.dy) + column);
      if constexpr (kOther) {
        const HeadSeries& from = gate_first || gate_after ? p.forward.gate : p.dsum;
        other[r] = load_eight(place[r].template in<const Stream>(from) + column);
      }
    }
  }

  /// u - mean, computed wherever it is used: kept, it would take registers that hold loads under
  /// way.
  __device__ float centred(int r, int v) const {
    float u = x[r].get(v);
    if constexpr (kCanHaveGate) {
      if (gate_first) {
        // Rounded: as part of an FMA it would have more digits than the mean is made of.
        u = __fmul_rn(u, activated<Math>(p.forward.activation, other[r].get(v)));
      }
    }
    return exists ? (u - mean[r]) - rest[r] : 0.0f;
  }

  /// g, the gradient of n * weight + bias.
  __device__ float gradient(int r, int v) const {
    float g = dy[r].get(v);
    if constexpr (kCanHaveGate) {
      if (gate_after) {
        g *= activated<Math>(p.forward.activation, other[r].get(v));
      }
    }
    return exists ? g : 0.0f;
  }

  /// `scale` is 1 / sigma; `mean_e` and `mean_en` are the means of e and of e * n.
  __device__ void store(int r, float scale, float mean_e, float mean_en, const float (&w)[kVec],
                        const void* bias, int64_t of_head, float (&dw)[kVec], float (&db)[kVec]) {
    float dx[kVec], dgate[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const float n = centred(r, v) * scale;
      const float g = gradient(r, v);
      dw[v] = fmaf(g, n, dw[v]);
      db[v] += g;
      dx[v] = (fmaf(g, w[v], -mean_e) - n * mean_en) * scale;
    }
    if constexpr (kCanHaveGate) {
      if (gate_first || gate_after) {
        through_gate(r, scale, w, bias, of_head, dx, dgate);
        store_eight(place[r].template in<Data>(p.dgate) + column, dgate);
      }
    }
    if constexpr (kOther) {
      if (!gate_first && !gate_after) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          dx[v] += other[r].get(v);
        }
      }
    }
    store_eight(place[r].template in<Stream>(p.dx) + column, dx);
    if (sizeof(Data) != sizeof(Stream) && p.daddend.data != nullptr) {
      store_eight(place[r].template in<Data>(p.daddend) + column, dx);
    }
  }

  /// dgate, and dx from the gradient of u where the gate is before the norm.
  __device__ void through_gate(int r, float scale, const float (&w)[kVec], const void* bias,
                               int64_t of_head, float (&dx)[kVec], float (&dgate)[kVec]) {
    float b[kVec];
    load_weights<Data>(gate_after ? bias : nullptr, p.forward.bias_dtype, of_head, 0.0f, b);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      float value, derivative;
      activate<Math>(p.forward.activation, other[r].get(v), &value, &derivative);
      if (gate_first) {
        dgate[v] = dx[v] * x[r].get(v) * derivative;
        dx[v] *= value;
      } else {
        dgate[v] = dy[r].get(v) * fmaf(centred(r, v) * scale, w[v], b[v]) * derivative;
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
      memory[v * kMaxThreads + threadIdx.x] = sums[v];
    }
    __syncthreads();
    for (int other = 1; other < shape.slots; ++other) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const int from = (slot + other) * shape.lanes + static_cast<int>(threadIdx.x) % shape.lanes;
        sums[v] += slot == 0 ? memory[v * kMaxThreads + from] : 0.0f;
      }
    }
  }
  if (exists && (slot == 0 || !is_shared)) {
    store_eight(static_cast<float*>(to) + row * p.channels + column, sums);
  }
}

template <class Data, class Stream, int kRows, bool kOther>
__global__ void __maxnreg__(kOther ? 112 : 96)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p,
                         const __grid_constant__ RowShape shape) {
  __shared__ RowSumsMemory<4 * kRows> memory;
  __shared__ float slot_sums[kVec * kMaxThreads];
  RowReducer<4 * kRows> reducer(&memory, shape.lanes);
  const NormParams& f = p.forward;
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes;
  const unsigned slot = blockIdx.x * shape.slots + threadIdx.x / shape.lanes;
  const bool exists = lane * kVec < f.channels;
  const int column = exists ? lane * kVec : 0;
  const float channels = static_cast<float>(f.channels);
  const bool is_layer = f.kind == NormKind::kLayer;

  float w[kVec], dw[kVec] = {}, db[kVec] = {};
  const int64_t of_head = slot % f.weight_heads * f.channels + column;
  load_weights<Data>(f.weight, f.weight_dtype, of_head, 1.0f, w);

  const bool has_gate = f.gate.data != nullptr;
  BackwardTile<Data, Stream, kRows, kOther> tile{
      p, shape, column, exists, has_gate && f.gate_first, has_gate && !f.gate_first};
  for (unsigned base = blockIdx.x * shape.slots; base < shape.rows; base += kRows * shape.stride) {
    const unsigned first = base + (slot - blockIdx.x * shape.slots);
    tile.load(first);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tile.mean[r] = tile.rest[r] = 0.0f;
    }
    if (is_layer) {
      float sums[kRows] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          sums[r] += tile.centred(r, v);
        }
      }
      reducer.sum(sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        tile.mean[r] = sums[r] / channels;
      }
    }
    float sums[4 * kRows] = {};  // of c * c, e * c, e and c
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float c = tile.centred(r, v), e = tile.gradient(r, v) * w[v];
        sums[4 * r] = fmaf(c, c, sums[4 * r]);
        sums[4 * r + 1] = fmaf(e, c, sums[4 * r + 1]);
        sums[4 * r + 2] += e;
        sums[4 * r + 3] += c;
      }
    }
    reducer.sum(sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r * shape.stride < shape.rows && exists) {
        const float rest = is_layer ? sums[4 * r + 3] / channels : 0.0f;
        tile.rest[r] = rest;
        const float variance = positive_part(fmaf(-rest, rest, sums[4 * r] / channels));
        const float scale = rsqrtf(variance + static_cast<float>(f.eps));
        const float mean_e = is_layer ? sums[4 * r + 2] / channels : 0.0f;
        const float mean_en = fmaf(-rest, sums[4 * r + 2], sums[4 * r + 1]) * scale / channels;
        tile.store(r, scale, mean_e, mean_en, w, f.bias, of_head, dw, db);
      }
    }
  }
  write_partials(f, shape, dw, p.dweight, slot_sums, column, exists);
  write_partials(f, shape, db, p.dbias, slot_sums, column, exists);
}

constexpr int kBackwardRows = 2;

template <auto* kKernel>
cudaError_t launch_backward(const NormBackwardParams& p, cudaStream_t stream) {
  RowShape shape = row_shape(p.forward);
  int64_t blocks = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(count_blocks<kKernel>(p.forward, shape, kBackwardRows, &blocks));
  shape.stride = static_cast<unsigned>(blocks * shape.slots);
  return launch_unless_empty(kKernel, blocks, dim3(shape.threads()), 0, stream, p, shape);
}

/// Whether a tensor is read beside x and dy.
inline bool has_other(const NormBackwardParams& p) {
  return p.forward.gate.data != nullptr || p.dsum.data != nullptr;
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward_blocks(const NormBackwardParams& p,
                                                       int64_t* blocks) {
  const RowShape shape = row_shape(p.forward);
  constexpr int kRows = kBackwardRows;
  return has_other(p) ? count_blocks<&norm_backward_kernel<Data, Stream, kRows, true>>(
                            p.forward, shape, kRows, blocks)
                      : count_blocks<&norm_backward_kernel<Data, Stream, kRows, false>>(
                            p.forward, shape, kRows, blocks);
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward(const NormBackwardParams& p, cudaStream_t stream) {
  return has_other(p)
             ? launch_backward<&norm_backward_kernel<Data, Stream, kBackwardRows, true>>(p, stream)
             : launch_backward<&norm_backward_kernel<Data, Stream, kBackwardRows, false>>(p,
                                                                                          stream);
}

}  // namespace tidegate::kernels::norm
