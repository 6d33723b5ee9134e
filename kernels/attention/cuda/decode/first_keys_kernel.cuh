#pragma once

// Pruning of a decoding step: which keys are left out, found in a launch of its own, before any
// older key is read. What it needs is small: the gates, from the newest key back until no older key
// can matter, the query and its own key.
//
// A block takes one key/value head. For each of its query heads it adds up gates tile by tile, a
// thread a few keys in a row, and stops behind the tile in which their sum has fallen far enough.

#include <cmath>

#include "kernels/attention/cuda/rows.cuh"
#include "kernels/common/cuda/kernel_chain.cuh"
#include "kernels/common/cuda/launch.cuh"
#include "kernels/common/cuda/warp.cuh"

namespace tidegate::kernels::attention {

struct FirstKeysTile {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kKeysAThread = 8;  // whose gates are under way together
  static constexpr int kKeys = kThreads * kKeysAThread;
};

/// The sum of gates below which a key of this head is left out, the same in every warp. `limit` is
/// the logarithm of what one key may weigh. NaN leaves out none.
template <class E>
__device__ inline double least_fade(const ForgettingAttentionStepParams& p, int64_t batch,
                                    int64_t key_head, int64_t head, int64_t length, double limit) {
  const E* const q = AttentionRows<const E>(p.q, batch, 0, head).first;
  const E* const k = AttentionRows<const E>(p.k, batch, 0, key_head).row(length - 1);
  double square = 0, own = 0;
  for (int64_t d = threadIdx.x % 32; d < p.head_dim; d += 32) {
    const auto x = static_cast<double>(widen(q[d]));
    square += x * x;
    own += x * static_cast<double>(widen(k[d]));
  }
  square = warp_sum(square);
  own = warp_sum(own);
  using Real = typename Register<E>::type;
  const auto norm =
      static_cast<double>(*AttentionRows<const Real>(p.key_norms, batch, 0, key_head).first);
  return limit - p.scale * (kScoreSlack * sqrt(square) * norm - own);
}

/// Gates of a thread's keys of the tile that ends before key `end`, from the newest back; zero
/// before key `oldest`.
template <class Real>
__device__ inline void load_gates(const AttentionRows<const Real>& log_f, int64_t end,
                                  int64_t oldest, Real (&gates)[FirstKeysTile::kKeysAThread]) {
#pragma unroll
  for (int i = 0; i < FirstKeysTile::kKeysAThread; ++i) {
    const int64_t j = end - 1 - FirstKeysTile::kKeysAThread * static_cast<int64_t>(threadIdx.x) - i;
    gates[i] = j >= oldest ? *log_f.row(j) : Real(0);
  }
}

/// What the block's threads tell each other of a tile: the gates' sum of each warp. Two tiles take
/// turns, so that one barrier a tile is enough.
struct TileSums {
  double warps[2][FirstKeysTile::kWarps];
};

/// The sum of the gates of all keys of the tile that are newer than this thread's; `total` becomes
/// that of the whole tile.
__device__ inline double sum_of_newer(double own, double* warps, double* total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double through = own;
#pragma unroll
  for (int s = 1; s < 32; s *= 2) {
    const double newer = __shfl_up_sync(~0u, through, s);
    through += lane >= s ? newer : 0.0;
  }
  const double of_lanes = __shfl_up_sync(~0u, through, 1);
  if (lane == 31) warps[warp] = through;
  __syncthreads();
  double before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < FirstKeysTile::kWarps; ++w) {
    before += w < warp ? warps[w] : 0.0;
    all += warps[w];
  }
  *total = all;
  return before + (lane == 0 ? 0.0 : of_lanes);
}

template <class E>
__global__ void __launch_bounds__(FirstKeysTile::kThreads)
    first_keys_kernel(const __grid_constant__ ForgettingAttentionStepParams p,
                      int32_t* const first_keys, const double limit) {
  using Real = typename Register<E>::type;
  using T = FirstKeysTile;
  __shared__ TileSums sums;
  __shared__ int first;
  let_next_kernel_begin();
  wait_for_kernels_before();
  const int64_t key_head = blockIdx.x, batch = blockIdx.y, group = p.heads / p.key_heads;
  const int64_t length = max(int64_t{0}, min(int64_t{p.lengths[batch]}, p.capacity));
  const int64_t oldest = oldest_key(p, batch, key_head, length);
  if (threadIdx.x == 0) first = static_cast<int>(length);
  __syncthreads();
  auto mine = static_cast<int>(length);  // the oldest key that this thread has seen to stay
  int turn = 0;
  for (int64_t head = key_head * group; head < (key_head + 1) * group && length > 0; ++head) {
    const AttentionRows<const Real> log_f(p.log_f, batch, 0, head);
    Real next[T::kKeysAThread];
    load_gates(log_f, length, oldest, next);
    const double least = least_fade<E>(p, batch, key_head, head, length, limit);
    double newer_tiles = 0;
    for (int64_t end = length; end > oldest && !(newer_tiles < least); end -= T::kKeys) {
      double gates[T::kKeysAThread], own = 0;
#pragma unroll
      for (int i = 0; i < T::kKeysAThread; ++i) {
        gates[i] = static_cast<double>(next[i]);
        gates[i] = gates[i] < kLeastLogGate ? kLeastLogGate : gates[i];
        own += gates[i];
      }
      // Most heads end with their first tile; the next one is asked for ahead from the second on.
      const bool is_first = end == length;
      if (!is_first) load_gates(log_f, end - T::kKeys, oldest, next);
      double of_tile;
      double fade = newer_tiles + sum_of_newer(own, sums.warps[turn], &of_tile);
      turn ^= 1;
#pragma unroll
      for (int i = 0; i < T::kKeysAThread; ++i) {
        const int64_t j = end - 1 - T::kKeysAThread * static_cast<int64_t>(threadIdx.x) - i;
        if (j >= oldest && !(fade < least)) mine = min(mine, static_cast<int>(j));
        fade += gates[i];
      }
      newer_tiles += of_tile;
      if (is_first && !(newer_tiles < least)) load_gates(log_f, end - T::kKeys, oldest, next);
    }
  }
  atomicMin(&first, mine);
  __syncthreads();
  if (threadIdx.x == 0) first_keys[batch * p.key_heads + key_head] = first;
}

/// Fills the workspace's oldest keys.
inline cudaError_t find_first_keys(const ForgettingAttentionStepParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.key_heads), static_cast<unsigned>(p.layout.batch));
  const double limit = std::log(p.prune / static_cast<double>(std::max<int64_t>(p.capacity, 1)));
  return dispatch_real(p.q.dtype, [&]<class E>() {
    return launch_in_chain<&first_keys_kernel<E>>(grid, dim3(FirstKeysTile::kThreads), 0, stream, p,
                                                  static_cast<int32_t*>(p.workspace), limit);
  });
}

}  // namespace tidegate::kernels::attention
