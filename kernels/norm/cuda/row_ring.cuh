#pragma once

// What kernels of norms have beside row_tile.cuh as they go from row to row: how rows come to a
// thread, and sums over a row.

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

// ---- Where a row is ----

/// Whether the dimensions of rows are merged into one.
__device__ inline bool is_merged(const NormParams& p) { return p.time == 1 && p.batch == 1; }

/// A row's place where most launches have merged dimensions: then it costs one product.
template <class E>
__device__ inline E* row_in(const HeadSeries& series, const RowPlace<unsigned>& place,
                            bool is_merged) {
  int64_t offset = static_cast<int64_t>(place.head) * series.stride_h;
  if (!is_merged) {
    offset += static_cast<int64_t>(place.batch) * series.stride_b +
              static_cast<int64_t>(place.time) * series.stride_t;
  }
  return static_cast<E*>(series.data) + offset;
}

// ---- Rows under way ----

/// The rows that a thread reads next, in a ring in the block's shared memory: loads are under way
/// while the rows before are summed and stored, and take no registers. A thread reads what it
/// copied itself, so that no barrier is needed. kBytes: of a row, a thread's part of all tensors.
template <int kBytes>
class RowRing {
  static constexpr int kParts = kBytes / 16;
  static constexpr int kMostBytes = 96 * 1024;  // of a block, on the smallest chip

 public:
  static constexpr int kStages = 3 * kBytes * kMaxThreads <= kMostBytes ? 3 : 2;

  static int shared_bytes(const RowShape& shape) { return kStages * kBytes * shape.threads(); }

  __device__ explicit RowRing(uint4* memory) : mine_(memory + threadIdx.x) {}

  /// Copies eight numbers to the stage that is filled now, at 16 * kPart bytes of the thread's.
  template <int kPart, class T>
  __device__ void copy(const T* from) const {
#pragma unroll
    for (int i = 0; i < Eight<T>::kParts; ++i) {
      if constexpr (Eight<T>::kParts == 1) {
        copy_async<16>(part(filled_, kPart + i), from);
      } else {
        // Through L1: half a sector each time, which L2 would be asked for twice.
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(
                         shared_address(part(filled_, kPart + i))),
                     "l"(from + i * Eight<T>::kPart)
                     : "memory");
      }
    }
  }

  /// Ends the row that copy() has been filling, or leaves it out.
  __device__ void next_filled() {
    commit_copies();
    filled_ = after(filled_);
  }

  /// Waits for the row that is to be read, where kStages - 1 rows are under way.
  __device__ void wait() const { wait_for_copies<kStages - 2>(); }

  /// Reads eight numbers.
  template <int kPart, class T>
  __device__ void read(float (&x)[kVec]) const {
    if constexpr (sizeof(T) == 2) {
      const uint4 four = *part(read_, kPart);
      const uint32_t words[kVec / 2] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        x[v] = Pack<T, 2>{words[v / 2]}.get(v % 2);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec / 4; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(part(read_, kPart + i));
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
      }
    }
  }

  __device__ void next_read() { read_ = after(read_); }

 private:
  __device__ static unsigned after(unsigned stage) { return stage == kStages - 1 ? 0 : stage + 1; }
  /// Threads' parts lie side by side: a warp's copy is one piece in shared memory too.
  __device__ uint4* part(unsigned stage, int number) const {
    return mine_ + (stage * kParts + number) * blockDim.x;
  }

  uint4* mine_;
  unsigned filled_ = 0, read_ = 0;
};

// ---- Sums over a row ----

/// Memory for the sums of two reductions in turn, so that each takes one barrier. A row's warps
/// begin at a multiple of four.
template <int kCount>
struct RowSumsMemory {
  alignas(16) float of_warp[2][kCount][kMaxThreads / kWarpSize];
};

/// Adds up to kCount numbers, a power of two, over the threads of a row; every thread of the block
/// comes here, and to the constructor.
template <int kCount>
class RowReducer {
 public:
  __device__ RowReducer(RowSumsMemory<kCount>* memory, int lanes)
      : memory_(memory),
        lanes_(lanes),
        places_((lanes / kWarpSize + 3) / 4 * 4),
        first_(static_cast<int>(threadIdx.x) / lanes * places_),
        mine_(first_ + static_cast<int>(threadIdx.x) % lanes / kWarpSize) {
    // Places past a row's last warp stay zero.
    for (unsigned i = threadIdx.x; i < sizeof(*memory) / sizeof(float); i += blockDim.x) {
      memory->of_warp[0][0][i] = 0.0f;
    }
    __syncthreads();
  }

  template <int kUsed>
  __device__ void sum(float (&x)[kUsed]) {
    static_assert(kUsed <= kCount);
    if (lanes_ <= kWarpSize) {
      for (int distance = lanes_ / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < kUsed; ++i) {
          x[i] += __shfl_xor_sync(0xffffffffu, x[i], distance);
        }
      }
      return;
    }
    constexpr int kLanes = kWarpSize / kUsed;  // that are left with the same number's sum
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    scatter_sums<kUsed, kWarpSize / 2>(x, lane);
    float (*const of_warp)[kMaxThreads / kWarpSize] = memory_->of_warp[turn_];
    turn_ ^= 1;
    if (lane % kLanes == 0) {
      of_warp[lane / kLanes][mine_] = x[0];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kUsed; ++i) {
      const float4* const from = reinterpret_cast<const float4*>(&of_warp[i][first_]);
      x[i] = from->x + from->y + from->z + from->w;
    }
#pragma unroll 1
    for (int place = 4; place < places_; place += 4) {
#pragma unroll
      for (int i = 0; i < kUsed; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(&of_warp[i][first_ + place]);
        x[i] = x[i] + four.x + four.y + four.z + four.w;
      }
    }
  }

 private:
  RowSumsMemory<kCount>* memory_;
  int lanes_, places_, first_, mine_;
  int turn_ = 0;
};

}  // namespace tidegate::kernels::norm
