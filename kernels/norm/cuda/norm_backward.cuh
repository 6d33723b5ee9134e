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

/// Whether the bias stays in registers: a gate after a layer norm asks for it in every row. In
/// float32 there is no room for it.
template <class Data, Gate kGate, bool kLayer>
constexpr bool kKeepsBias = sizeof(Data) == 2 && kGate == Gate::kAfter && kLayer;

/// A thread's part of a row. Beside x and dy there is a gate, or a gradient `dsum`, or nothing.
template <class Data, class Stream, Gate kGate, bool kLayer>
struct BackwardTile {
  static constexpr bool kFast = sizeof(Data) == 2, kGated = kGate != Gate::kNone;
  static constexpr bool kHasBias = kKeepsBias<Data, kGate, kLayer>;
  using Math = GateMath<float, kFast>;
  using Ring = RowRing<kVec * (2 * sizeof(Stream) + sizeof(Data))>;
  // Where the parts lie in the ring, in units of 16 bytes. A gate is in Data, which then is Stream.
  static constexpr int kX = 0, kOther = Eight<Stream>::kParts, kDy = 2 * kOther;

  const NormBackwardParams& p;
  const Columns& columns;
  Ring ring;
  bool has_dsum, has_dbias;
  float c[kOwnColumns];                     // u, then u - mean
  float opening[kGated ? kOwnColumns : 1];  // what is kept of the gate
  float bias[kHasBias ? kOwnColumns : 1];

  /// Asks for a row, by the threads' own copies.
  __device__ void load(unsigned stage, unsigned row) {
    const NormParams& f = p.forward;
    const RowPlace<unsigned> place = row_place(f, row);
    const bool merged = is_merged(f);
    ring.template copy<kX>(stage, row_in<const Stream>(f.x, place, merged));
    ring.template copy<kDy>(stage, row_in<const Data>(p.dy, place, merged));
    if (kGated || has_dsum) {
      ring.template copy<kOther>(stage,
                                 row_in<const Stream>(kGated ? f.gate : p.dsum, place, merged));
    }
  }

  /// What is kept of a gate: SiLU's sigmoid; otherwise the smaller of sigmoid(x) and sigmoid(-x),
  /// since both are needed with their digits.
  template <bool kSilu>
  __device__ static float kept_of(float gate) {
    if constexpr (kSilu) {
      return sigmoids<Math>(gate).pos;
    }
    PackedSigmoids<float> both;
    find_sigmoids<Math>(gate, &both);
    return both.smaller;
  }

  /// act(gate) and its derivative.
  template <bool kSilu>
  __device__ static float activated(float gate, float kept) {
    return kSilu ? gate * kept : PackedSigmoids<float>{kept}.both().pos;
  }
  template <bool kSilu>
  __device__ static float slope(float gate, float kept) {
    if constexpr (kSilu) {
      // s + x s (1 - s): one minus a sigmoid has no digits where it is next to one, and there s
      // has.
      return fmaf(gate * kept, 1.0f - kept, kept);
    }
    const Sigmoids<float> both = PackedSigmoids<float>{kept}.both();
    return both.pos * both.neg;
  }

  /// c of the row that has come, and what is kept of the gate.
  __device__ void begin() {
    ring.template read<kX, Stream>(c);
    if constexpr (kGated) {
      float gate[kOwnColumns];
      ring.template read<kOther, Stream>(gate);
      with_activation(p.forward.activation, [&]<bool kSilu>() {
#pragma unroll
        for (int v = 0; v < kOwnColumns; ++v) {
          opening[v] = kept_of<kSilu>(gate[v]);
          if constexpr (kGate == Gate::kFirst) {
            // Rounded: as part of an FMA it would have more digits than the mean is made of.
            c[v] = __fmul_rn(c[v], activated<kSilu>(gate[v], opening[v]));
          }
        }
      });
    }
  }

  /// The gradient of a pack's n * weight + bias. It is read where it is needed, twice: kept from
  /// one sum over the row to the next it would take registers that another row needs.
  __device__ void read_gradient(int pack, float (&g)[kVec]) const {
    ring.template read<kDy, Data>(pack, g);
    if constexpr (kGate == Gate::kAfter) {
      float gate[kVec];
      ring.template read<kOther, Stream>(pack, gate);
      with_activation(p.forward.activation, [&]<bool kSilu>() {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          g[v] *= activated<kSilu>(gate[v], opening[pack * kVec + v]);
        }
      });
    }
  }

  /// Sums over the row: of c * c and of e * c; for kLayer also of e, and of what the mean's
  /// rounding has left in c, which first is u. Once the slot's threads have met they are done with
  /// the row before, in whose place one more is asked for.
  template <class Requests, class Reducer, int kSums>
  __device__ void find_sums(const Requests& requests, Reducer& reducer, unsigned row,
                            float per_channel, const float (&w)[kOwnColumns],
                            float (&sums)[kSums]) {
    if constexpr (kLayer) {
      subtract_mean(columns, requests, reducer, row, per_channel, c);
    }
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      float g[kVec];
      read_gradient(pack, g);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float own = c[pack * kVec + v], e = g[v] * w[pack * kVec + v];
        sums[0] = fmaf(own, own, sums[0]);
        sums[1] = fmaf(e, own, sums[1]);
        if constexpr (kLayer) {
          sums[2] += e;
          sums[3] += own;
        }
      }
    }
    reducer.sum(sums);
    if constexpr (!kLayer) {
      requests.next(row);
    }
  }

  /// The row's gradients from the sums over it.
  template <int kSums>
  __device__ void finish(unsigned row, const float (&sums)[kSums], float per_channel,
                         const float (&w)[kOwnColumns], float (&dw)[kOwnColumns],
                         float (&db)[kOwnColumns]) {
    float rest = 0.0f, mean_e = 0.0f;
    float variance = sums[0] * per_channel, mean_ec = sums[1] * per_channel;
    if constexpr (kLayer) {
      rest = sums[3] * per_channel;
      mean_e = sums[2] * per_channel;
      variance = positive_part(fmaf(-rest, rest, variance));
      mean_ec = fmaf(-rest, mean_e, mean_ec);
    }
    const float scale = rsqrtf(variance + static_cast<float>(p.forward.eps));
    store(row, rest, scale, mean_e, mean_ec * scale, w, dw, db);
  }

  /// `rest` is what the mean's rounding has left in c, `scale` 1 / sigma; `mean_e` and `mean_en`
  /// are the means of e and of e * n. All but `scale` and `mean_en` are zero but for kLayer.
  __device__ void store(unsigned row, float rest, float scale, float mean_e, float mean_en,
                        const float (&w)[kOwnColumns], float (&dw)[kOwnColumns],
                        float (&db)[kOwnColumns]) {
    const RowPlace<unsigned> place = row_place(p.forward, row);
    const bool merged = is_merged(p.forward);
    const float shift = -rest * scale, of_n = -mean_en * scale, of_one = -mean_e * scale;
    Stream* const dx_row = row_in<Stream>(p.dx, place, merged);
    Data* const y_row = row_in<Data>(p.forward.y, place, merged);
    Data* const beside_row = row_in<Data>(kGated ? p.dgate : p.daddend, place, merged);
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      float n[kVec], g[kVec], dx[kVec];
      const int from = pack * kVec;
      read_gradient(pack, g);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float e = g[v] * w[from + v];
        n[v] = kLayer ? fmaf(c[from + v], scale, shift) : c[from + v] * scale;
        dw[from + v] = fmaf(g[v], n[v], dw[from + v]);
        dx[v] = fmaf(n[v], of_n, kLayer ? fmaf(e, scale, of_one) : e * scale);
      }
      if (has_dbias) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          db[from + v] += g[v];
        }
      }
      if (!columns.exists(pack)) {
        continue;
      }
      const int column = columns.first(pack);
      if constexpr (kGated) {
        through_gate(pack, n, w + from, row, y_row, beside_row, dx);
      } else {
        if (p.forward.y.data != nullptr) {
          float y[kVec];
          find_result(pack, n, w + from, row, y);
          store_eight(y_row + column, y);
        }
        if (has_dsum) {
          float dsum[kVec];
          ring.template read<kOther, Stream>(pack, dsum);
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            dx[v] += dsum[v];
          }
        }
      }
      store_eight(dx_row + column, dx);
      if (sizeof(Data) != sizeof(Stream) && p.daddend.data != nullptr) {
        store_eight(beside_row + column, dx);
      }
    }
  }

  /// n * weight + bias.
  __device__ void find_result(int pack, const float (&n)[kVec], const float* w, unsigned row,
                              float (&y)[kVec]) {
    if constexpr (kHasBias) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        y[v] = fmaf(n[v], w[v], bias[pack * kVec + v]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        y[v] = n[v] * w[v];
      }
      if (p.forward.bias != nullptr) {
        float b[kVec];
        const int64_t place =
            row % p.forward.weight_heads * p.forward.channels + columns.first(pack);
        load_weights<Data>(p.forward.bias, p.forward.bias_dtype, place, 0.0f, b);
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          y[v] += b[v];
        }
      }
    }
  }

  /// A pack's dgate, dx from the gradient of u where the gate is before the norm, and y where it is
  /// asked for.
  __device__ void through_gate(int pack, const float (&n)[kVec], const float* w, unsigned row,
                               Data* y_row, Data* dgate_row, float (&dx)[kVec]) {
    const bool has_y = p.forward.y.data != nullptr;
    const int column = columns.first(pack);
    float gate[kVec], other[kVec], y[kVec];  // other: what the gate is multiplied by, or dy
    ring.template read<kOther, Stream>(pack, gate);
    if constexpr (kGate == Gate::kFirst) {
      ring.template read<kX, Stream>(pack, other);
    } else {
      ring.template read<kDy, Data>(pack, other);
    }
    if (kGate == Gate::kAfter || has_y) {
      find_result(pack, n, w, row, y);
    }
    float dgate[kVec];
    with_activation(p.forward.activation, [&]<bool kSilu>() {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float kept = opening[pack * kVec + v];
        const float value = activated<kSilu>(gate[v], kept);
        const float by = other[v] * slope<kSilu>(gate[v], kept);
        if constexpr (kGate == Gate::kFirst) {
          dgate[v] = dx[v] * by;
          dx[v] *= value;
        } else {
          dgate[v] = by * y[v];
          y[v] *= value;
        }
      }
    });
    store_eight(dgate_row + column, dgate);
    if (has_y) {
      store_eight(y_row + column, y);
    }
  }
};

/// Adds what the slots of a block have summed up, in the order of the slots, where they share a
/// weight, and writes it; otherwise every slot writes its own. Row `slot` of the partial sums is of
/// head slot % weight_heads, so that weight_heads rows together are one of the op's.
__device__ inline void write_partials(const NormParams& p, const RowShape& shape,
                                      const Columns& columns, float (&sums)[kOwnColumns], void* to,
                                      float* memory) {
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
    for (int v = 0; v < kOwnColumns; ++v) {
      memory[v * shape.threads() + threadIdx.x] = sums[v];
    }
    __syncthreads();
    for (int other = 1; other < shape.slots; ++other) {
      const int from = (slot + other) * shape.lanes + columns.mine / kVec;
#pragma unroll
      for (int v = 0; v < kOwnColumns; ++v) {
        sums[v] += slot == 0 ? memory[v * shape.threads() + from] : 0.0f;
      }
    }
  }
  if (slot == 0 || !is_shared) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (columns.exists(pack)) {
        store_eight(static_cast<float*>(to) + row * p.channels + columns.first(pack),
                    sums + pack * kVec);
      }
    }
  }
}

/// Registers of a thread: for sixteen warps of a multiprocessor, or for twelve, which 168 are the
/// most for.
template <class Data, Gate kGate, bool kLayer>
constexpr int kBackwardRegisters = kGate == Gate::kNone              ? 128
                                   : kKeepsBias<Data, kGate, kLayer> ? 168
                                                                     : 160;

template <class Data, class Stream, Gate kGate, bool kLayer>
__global__ void __maxnreg__((kBackwardRegisters<Data, kGate, kLayer>))
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p,
                         const __grid_constant__ RowShape shape) {
  using Tile = BackwardTile<Data, Stream, kGate, kLayer>;
  constexpr int kSums = kLayer ? 4 : 2;
  __shared__ RowSumsMemory<kSums> memory;
  __shared__ typename Tile::Ring::Barriers barriers;
  extern __shared__ uint4 ring_memory[];
  RowReducer<kSums> reducer(&memory, shape);
  const NormParams& f = p.forward;
  const Columns columns(shape);
  const unsigned local = threadIdx.x / shape.lanes, slot = blockIdx.x * shape.slots + local;
  const float per_channel = 1.0f / static_cast<float>(f.channels);

  const unsigned tensors = Tile::kGated || p.dsum.data != nullptr ? 3 : 2;
  Tile tile{p, columns, typename Tile::Ring(columns, tensors, ring_memory, barriers),
            p.dsum.data != nullptr, p.dbias != nullptr};
  const unsigned lane = columns.mine / kVec;
  const RowSource source(lane == 0      ? f.x
                         : lane == 1    ? p.dy
                         : Tile::kGated ? f.gate
                                        : p.dsum,
                         shape.channels, lane == 1 ? sizeof(Data) : sizeof(Stream),
                         lane == 0   ? Tile::kX
                         : lane == 1 ? Tile::kDy
                                     : Tile::kOther);
  const RowRequests<Tile> requests{shape, tile, source, lane, tensors};
  requests.begin(slot);
  float w[kOwnColumns] = {}, dw[kOwnColumns] = {}, db[kOwnColumns] = {};
  const int64_t of_head = slot % f.weight_heads * f.channels;
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    if (columns.exists(pack)) {
      load_weights<Data>(f.weight, f.weight_dtype, of_head + columns.first(pack), 1.0f,
                         w + pack * kVec);
    }
    if constexpr (Tile::kHasBias) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        tile.bias[pack * kVec + v] = 0.0f;
      }
      if (columns.exists(pack)) {
        load_weights<Data>(f.bias, f.bias_dtype, of_head + columns.first(pack), 0.0f,
                           tile.bias + pack * kVec);
      }
    }
  }
  for (unsigned row = slot; row < shape.rows + local; row += shape.stride) {
    tile.ring.wait(row < shape.rows);
    tile.begin();
    float sums[kSums] = {};
    tile.find_sums(requests, reducer, row, per_channel, w, sums);
    if (row < shape.rows) {
      tile.finish(row, sums, per_channel, w, dw, db);
    }
    tile.ring.next_read();
  }
  // The ring is empty now: every thread has waited for its last row.
  float* const slot_sums = reinterpret_cast<float*>(ring_memory);
  write_partials(f, shape, columns, dw, p.dweight, slot_sums);
  write_partials(f, shape, columns, db, p.dbias, slot_sums);
}

/// How the backward pass is cut, and its grid.
template <class Data, class Stream, Gate kGate, bool kLayer>
struct BackwardLaunch {
  static constexpr auto* kKernel = &norm_backward_kernel<Data, Stream, kGate, kLayer>;
  using Ring = typename BackwardTile<Data, Stream, kGate, kLayer>::Ring;
  static constexpr int kBytes = Ring::kThreadBytes;

  RowShape shape;
  int64_t blocks = 0;

  cudaError_t plan(const NormBackwardParams& p) {
    const NormParams& f = p.forward;
    DeviceLimits device;
    TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&device));
    shape = row_shape<kBackwardRegisters<Data, kGate, kLayer>>(f, kBytes, device);
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        find_bulk<kKernel>(Ring::kStages, f, &shape, f.x, f.gate, p.dy, p.dsum));
    TIDEGATE_RETURN_IF_CUDA_ERROR(
        count_blocks<kKernel>(f, shape, device, kBytes * shape.threads(), &blocks));
    shape.stride = static_cast<unsigned>(blocks * shape.slots);
    return cudaSuccess;
  }
};

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward_grid(const NormBackwardParams& p, int64_t* blocks,
                                                     int* slots) {
  return dispatch_form<Data, Stream>(p.forward, [&]<Gate kGate, bool kLayer>() {
    BackwardLaunch<Data, Stream, kGate, kLayer> launch;
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch.plan(p));
    *blocks = launch.blocks;
    *slots = launch.shape.slots;
    return cudaSuccess;
  });
}

template <class Data, class Stream>
cudaError_t NormKernels<Data, Stream>::backward(const NormBackwardParams& p, cudaStream_t stream) {
  return dispatch_form<Data, Stream>(p.forward, [&]<Gate kGate, bool kLayer>() {
    using Launch = BackwardLaunch<Data, Stream, kGate, kLayer>;
    Launch launch;
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch.plan(p));
    const int threads = launch.shape.threads();
    return launch_unless_empty(Launch::kKernel, launch.blocks, dim3(threads),
                               Launch::kBytes * threads, stream, p, launch.shape);
  });
}

}  // namespace tidegate::kernels::norm
