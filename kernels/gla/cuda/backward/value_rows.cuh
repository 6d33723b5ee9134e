#pragma once

// The gradients of v, from where a warp has them to memory.

#include "kernels/gla/cuda/backward/chunk_layout.cuh"

namespace tidegate::kernels::gla {

/// The gradients of the activated v of a block of 16 tokens and 16 columns, through the activation:
/// x[n][2h + e] of token 2r + h and column 8n + 2c + e. `raw` and `out` start at the block's first
/// token and the columns; `tokens` of it exist.
template <class T>
__device__ inline void store_value_tile(InputActivation activation, const NearRows& raw,
                                        const NearRows& out, int tokens, int lane,
                                        const float (&x)[2][4]) {
  const int first = lane / 4 * 2, c = lane % 4;
  const bool odd = c % 2 != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool exists = first + h < tokens;
    uint32_t pairs[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float pair[2] = {x[n][2 * h], x[n][2 * h + 1]};
      if (activation != InputActivation::kNone && exists) {
        using Math = GateMath<float, true>;
        const float2 value =
            unpack_pair<T>(*reinterpret_cast<const uint32_t*>(raw.row(first + h) + 4 * c + 16 * n));
        pair[0] *= activation_slope<Math>(activation, value.x);
        pair[1] *= activation_slope<Math>(activation, value.y);
      }
      pairs[n] = pack<T, 2>(pair).bits;
    }
    // Two lanes exchange halves, so that each has four adjacent columns.
    const uint32_t got = __shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1);
    if (exists) {
      *reinterpret_cast<uint2*>(out.row(first + h) + (odd ? 16 + 4 * (c - 1) : 4 * c)) =
          odd ? make_uint2(got, pairs[1]) : make_uint2(pairs[0], got);
    }
  }
}

}  // namespace tidegate::kernels::gla
