#pragma once

// What kernels of norms have beside row_tile.cuh as they go from row to row: how rows come to a
// thread, and sums over a row.

#include "kernels/common/cuda/hopper.cuh"
#include "kernels/common/cuda/shared_memory.cuh"
#include "kernels/common/cuda/warp.cuh"
#include "kernels/norm/cuda/row_tile.cuh"

namespace tidegate::kernels::norm {

// ---- What a kernel is made for ----

enum class Gate : uint8_t { kNone, kAfter, kFirst };

constexpr Gate gate_of(const NormParams& p) {
  return p.gate.data == nullptr ? Gate::kNone : p.gate_first ? Gate::kFirst : Gate::kAfter;
}

/// Calls visit.template operator()<kGate, kLayer>(): what is known when the kernel is compiled
/// costs no instructions, of which these kernels have as many as the memory leaves time for. Beside
/// 16-bit results of a float32 stream there is no gate.
template <class Data, class Stream, class Visit>
cudaError_t dispatch_form(const NormParams& p, Visit visit) {
  const auto with_gate = [&]<Gate kGate>() {
    return p.kind == NormKind::kLayer ? visit.template operator()<kGate, true>()
                                      : visit.template operator()<kGate, false>();
  };
  if constexpr (sizeof(Data) == sizeof(Stream)) {
    if (gate_of(p) == Gate::kAfter) {
      return with_gate.template operator()<Gate::kAfter>();
    }
    if (gate_of(p) == Gate::kFirst) {
      return with_gate.template operator()<Gate::kFirst>();
    }
  }
  return with_gate.template operator()<Gate::kNone>();
}

/// Calls visit.template operator()<kSilu>() for what a gate passes through, outside of loops: asked
/// for every column it is a branch each.
template <class Visit>
__device__ inline void with_activation(Activation kind, Visit visit) {
  if (kind == Activation::kSilu) {
    visit.template operator()<true>();
  } else {
    visit.template operator()<false>();
  }
}

// ---- Where a row is ----

/// Whether the dimensions of rows are merged into one.
__device__ inline bool is_merged(const NormParams& p) { return p.time == 1 && p.batch == 1; }

/// A product as one instruction makes it.
__device__ inline int64_t wide_product(int a, int b) {
  int64_t product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

/// A row's place. Most launches have merged dimensions: then it costs one product, whose factors
/// have 32 bits (rows_fit).
template <class E>
__device__ inline E* row_in(const HeadSeries& series, const RowPlace<unsigned>& place,
                            bool is_merged) {
  int64_t offset = wide_product(static_cast<int>(place.head), static_cast<int>(series.stride_h));
  if (!is_merged) {
    offset += static_cast<int64_t>(place.batch) * series.stride_b +
              static_cast<int64_t>(place.time) * series.stride_t;
  }
  return static_cast<E*>(series.data) + offset;
}

/// A thread's columns: of pack i, `first(i)` is the first one.
struct Columns {
  const RowShape& shape;
  int mine;  // the first of pack 0

  __device__ explicit Columns(const RowShape& shape)
      : shape(shape), mine(static_cast<int>(threadIdx.x) % shape.lanes * kVec) {}

  __device__ int first(int pack) const { return mine + pack * shape.lanes * kVec; }
  /// Whether the row is so wide.
  __device__ bool exists(int pack) const { return first(pack) < shape.channels; }
};

// ---- Rows under way ----

/// mbarrier_wait for an address in shared memory.
__device__ inline void wait_for_barrier(unsigned barrier, unsigned parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

/// The rows that a slot reads next, in a ring in the block's shared memory: loads are under way
/// while the rows before are summed and stored, and take no registers. From compute capability 9.0
/// on, rows of a warp or more are copied whole by the copy engine, which a lane a tensor asks: a
/// thread's own copies would be a third of its instructions. Elsewhere every thread copies what it
/// reads itself, so that no barrier is needed. kBytes: of a pack, in all tensors.
template <int kBytes>
class RowRing {
  static constexpr int kParts = kBytes / 16;
  static constexpr int kMostBytes = 96 * 1024;  // of a block, on the smallest chip

 public:
  static constexpr int kStages = 3 * kBytes * kMaxChannels / kVec <= kMostBytes ? 3 : 2;
  using Barriers = uint64_t[kMostSlots][kStages];

  static constexpr int kThreadBytes = kStages * kBytes * kPacks;

  /// Every thread of the block comes here.
  __device__ RowRing(const Columns& columns, int tensors, uint4* memory, Barriers& barriers)
      : columns_(columns) {
    const RowShape& shape = columns.shape;
    const unsigned slot = threadIdx.x / shape.lanes;
    memory_ = shared_address(memory) + slot * kStages * kParts * unit();
    barriers_ = shared_address(barriers[shape.is_bulk ? slot : 0]);
    if (shape.is_bulk && columns.mine == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(barriers[slot] + stage, tensors);
      }
    }
    if (shape.channels != shape.lanes * kOwnColumns) {
      // What nothing is copied to is zero.
      const unsigned pieces = kStages * kParts * kPacks * blockDim.x;
      for (unsigned i = threadIdx.x; i < pieces; i += blockDim.x) {
        memory[i] = make_uint4(0, 0, 0, 0);
      }
      hopper::fence_async_proxy();
    }
    hopper::fence_barrier_init();
    __syncthreads();
  }

  /// Copies a whole row of one tensor to a stage, at 16 * part bytes of each pack's.
  __device__ void copy_whole(unsigned stage, int part, const void* row, int bytes) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const unsigned barrier = barriers_ + 8 * stage;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(place(stage, part)),
        "l"(row), "r"(bytes), "r"(barrier)
        : "memory");
#endif
  }

  /// Copies the thread's part of a row there.
  template <int kPart, class T>
  __device__ void copy(unsigned stage, const T* row) const {
    const unsigned to = place(stage, kPart);
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (columns_.exists(pack)) {
#pragma unroll
        for (int i = 0; i < Eight<T>::kParts; ++i) {
          const T* const from = row + columns_.first(pack) + i * Eight<T>::kPart;
          const unsigned part = to + columns_.first(pack) * sizeof(T) + i * 16;
          if constexpr (Eight<T>::kParts == 1) {
            copy_async_16(part, from);
          } else {
            // Through L1: half a sector each time, which L2 would be asked for twice.
            asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(part), "l"(from)
                         : "memory");
          }
        }
      }
    }
  }

  /// Where the next row goes that is asked for while one is read.
  __device__ unsigned next_filled() const { return read_ == 0 ? kStages - 1 : read_ - 1; }

  /// Waits for the row that is to be read, where kStages - 1 rows are under way. `exists`: whether
  /// it has been copied.
  __device__ void wait(bool exists) const {
    if (!columns_.shape.is_bulk) {
      wait_for_copies<kStages - 2>();
    } else if (exists) {
      wait_for_barrier(barriers_ + 8 * read_, parity_);
    }
  }

  /// Reads eight numbers.
  template <int kPart, class T>
  __device__ void read(int pack, float* x) const {
    const unsigned from = place(read_, kPart) + columns_.first(pack) * sizeof(T);
#pragma unroll
    for (int i = 0; i < Eight<T>::kParts; ++i) {
      uint32_t words[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from + 16 * i)
                   : "memory");
#pragma unroll
      for (int v = 0; v < Eight<T>::kPart; ++v) {
        if constexpr (sizeof(T) == 2) {
          x[v] = Pack<T, 2>{words[v / 2]}.get(v % 2);
        } else {
          x[i * Eight<T>::kPart + v] = __uint_as_float(words[v]);
        }
      }
    }
  }

  /// Reads the numbers of all packs.
  template <int kPart, class T>
  __device__ void read(float (&x)[kOwnColumns]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      read<kPart, T>(pack, x + pack * kVec);
    }
  }

  __device__ void next_read() {
    read_ = read_ == kStages - 1 ? 0 : read_ + 1;
    parity_ ^= read_ == 0 ? 1 : 0;
  }

 private:
  /// Sixteen bytes of each pack of a row.
  __device__ unsigned unit() const { return columns_.shape.lanes * kPacks * 16; }
  __device__ unsigned place(unsigned stage, int part) const {
    return memory_ + (stage * kParts + part) * unit();
  }

  const Columns& columns_;
  unsigned memory_, barriers_;
  unsigned read_ = 0, parity_ = 0;
};

/// x - mean. What does not exist stays zero, and is part of no sum.
__device__ inline void center(const Columns& columns, float mean, float (&x)[kOwnColumns]) {
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const float of_pack = columns.exists(pack) ? mean : 0.0f;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      x[pack * kVec + v] -= of_pack;
    }
  }
}

/// The rows of the tensor that a lane copies whole, where rows are merged.
struct RowSource {
  const char* data;
  int stride, bytes, part;

  __device__ RowSource(const HeadSeries& rows, int channels, int size, int part)
      : data(static_cast<const char*>(rows.data)),
        stride(static_cast<int>(rows.stride_h) * size),
        bytes(channels * size),
        part(part) {}

  template <class Ring>
  __device__ void copy(const Ring& ring, unsigned stage, unsigned row) const {
    ring.copy_whole(stage, part, data + wide_product(static_cast<int>(row), stride), bytes);
  }
};

/// Asks for the rows of a slot: lane i of it for those of tensor i, whole, or every thread for what
/// it reads itself.
template <class Tile>
struct RowRequests {
  const RowShape& shape;
  Tile& tile;
  const RowSource& source;
  unsigned lane, tensors;

  __device__ void operator()(unsigned stage, unsigned row) const {
    if (shape.is_bulk) {
      if (lane < tensors && row < shape.rows) {
        source.copy(tile.ring, stage, row);
      }
    } else {
      if (row < shape.rows) {
        tile.load(stage, row);
      }
      commit_copies();
    }
  }

  /// For the first rows of the slot, as many as are under way while one is read.
  __device__ void begin(unsigned slot) const {
#pragma unroll
    for (int i = 0; i < Tile::Ring::kStages - 1; ++i) {
      (*this)(i, slot + i * shape.stride);
    }
  }

  /// For the row that follows those under way while `row` is read.
  __device__ void next(unsigned row) const {
    (*this)(tile.ring.next_filled(), row + (Tile::Ring::kStages - 1) * shape.stride);
  }
};

// ---- Sums over a row ----

/// The sum of a thread's columns, by two chains of additions that do not wait for each other.
__device__ inline float sum_columns(const float (&x)[kOwnColumns]) {
  float even = x[0], odd = x[1];
#pragma unroll
  for (int v = 2; v < kOwnColumns; v += 2) {
    even += x[v];
    odd += x[v + 1];
  }
  return even + odd;
}

/// Memory for the sums of two reductions in turn, so that each takes one barrier of the row's
/// warps. These begin at a multiple of four.
template <int kCount>
struct RowSumsMemory {
  alignas(16) float of_warp[2][kCount][kSumPlaces];
};

/// Waits for the threads of a slot. Numbers that are known when the kernel is compiled: a block
/// then takes so many of the multiprocessor's barriers, and otherwise sixteen, of which it has 64.
__device__ inline void sync_slot(unsigned slot, int threads) {
  static_assert(kMostSlots == 5);
  switch (slot) {
    case 0:
      return hopper::named_barrier_sync(1, threads);
    case 1:
      return hopper::named_barrier_sync(2, threads);
    case 2:
      return hopper::named_barrier_sync(3, threads);
    case 3:
      return hopper::named_barrier_sync(4, threads);
    default:
      return hopper::named_barrier_sync(5, threads);
  }
}

/// Adds up to kCount numbers, a power of two, over the threads of a row, which wait for each other;
/// every thread of the block comes to the constructor.
template <int kCount>
class RowReducer {
  static constexpr unsigned kTurn = kCount * kSumPlaces * 4;  // bytes of one of the two

 public:
  __device__ RowReducer(RowSumsMemory<kCount>* memory, const RowShape& shape) : shape_(shape) {
    // Places past a row's last warp stay zero.
    for (unsigned i = threadIdx.x; i < sizeof(*memory) / sizeof(float); i += blockDim.x) {
      memory->of_warp[0][0][i] = 0.0f;
    }
    slot_ = threadIdx.x / shape.lanes;
    from_ = shared_address(memory) + 4 * slot_ * shape.places;
    __syncthreads();
  }

  template <int kUsed>
  __device__ void sum(float (&x)[kUsed]) {
    static_assert(kUsed <= kCount);
    if (shape_.lanes <= kWarpSize) {
      for (int distance = shape_.lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < kUsed; ++i) {
          x[i] += __shfl_xor_sync(0xffffffffu, x[i], distance);
        }
      }
      __syncwarp();
      return;
    }
    constexpr unsigned kLanes = kWarpSize / kUsed;  // that are left with the same number's sum
    const unsigned lane = threadIdx.x % kWarpSize;
    scatter_sums<kUsed, kWarpSize / 2>(x, static_cast<int>(lane));
    if (lane % kLanes == 0) {
      const unsigned warp = threadIdx.x / kWarpSize - slot_ * (shape_.lanes / kWarpSize);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(from_ + 4 * (lane / kLanes * kSumPlaces + warp)),
                   "f"(x[0])
                   : "memory");
    }
    sync_slot(slot_, shape_.lanes);
#pragma unroll
    for (int i = 0; i < kUsed; ++i) {
      x[i] = sum_of_four(i, 0);
    }
#pragma unroll 1
    for (int place = 4; place < shape_.places; place += 4) {
#pragma unroll
      for (int i = 0; i < kUsed; ++i) {
        x[i] += sum_of_four(i, place);
      }
    }
    from_ += is_odd_ ? -kTurn : kTurn;
    is_odd_ = !is_odd_;
  }

 private:
  __device__ float sum_of_four(int number, int place) const {
    float a, b, c, d;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                 : "r"(from_ + 4 * (number * kSumPlaces + place))
                 : "memory");
    return (a + b) + (c + d);
  }

  const RowShape& shape_;
  unsigned slot_, from_;
  bool is_odd_ = false;
};

/// x less the row's mean. Once the slot's threads have met they are done with the row before, in
/// whose place one more is asked for.
template <class Requests, class Reducer>
__device__ inline void subtract_mean(const Columns& columns, const Requests& requests,
                                     Reducer& reducer, unsigned row, float per_channel,
                                     float (&x)[kOwnColumns]) {
  float sum[1] = {sum_columns(x)};
  reducer.sum(sum);
  requests.next(row);
  center(columns, sum[0] * per_channel, x);
}

}  // namespace tidegate::kernels::norm
