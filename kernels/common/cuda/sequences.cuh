#pragma once

// Where a sequence of a layout lies, how its time is divided into tiles, and where its elements and
// rows are in a tensor.

#include <cstdint>

#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels {

// ---- A sequence ----

/// One sequence of a layout. Lengths fit 32 bits (see *_unsupported); positions in memory do not.
struct Sequence {
  int64_t index;  // n in [0, N)
  int64_t batch;  // row of the batch
  int64_t start;  // first token
  int length;     // tokens
};

__device__ inline Sequence find_sequence(const SequenceLayout& layout, int64_t n) {
  if (layout.offsets == nullptr) {
    return {n, n, 0, static_cast<int>(layout.time)};
  }
  const auto offset = [&](int64_t i) -> int64_t {
    return layout.offsets_are_int64 ? static_cast<const int64_t*>(layout.offsets)[i]
                                    : static_cast<const int32_t*>(layout.offsets)[i];
  };
  const int64_t start = offset(n);
  return {n, 0, start, static_cast<int>(offset(n + 1) - start)};
}

// ---- Tiles of time ----
//
// Time divided into tiles that blocks work on at the same time: chunks, or segments of many chunks.
// Every tile has an index in [0, count). How many indices there are is known without reading the
// sequences' offsets, so some indices of packed sequences belong to no tile.

/// Every sequence divided into tiles of `length` tokens in the order of its scan, the last one
/// shorter.
struct TimeTiles {
  SequenceLayout layout = {};
  int length = 0;
  int64_t count = 0;     // of tile indices
  int per_sequence = 1;  // padded sequences: how many tiles each of them has
};

/// A tile is a whole sequence where `length` is larger than all of time.
inline TimeTiles time_tiles(const SequenceLayout& layout, int64_t length) {
  const int64_t needed = (layout.time + length - 1) / length, tiles = needed > 1 ? needed : 1;
  const int64_t count = layout.offsets == nullptr ? layout.sequences * tiles
                                                  : layout.time / length + layout.sequences;
  return {layout, static_cast<int>(length), count, static_cast<int>(tiles)};
}

/// One tile a sequence, whose index is the sequence's. With tiles of `time` tokens, an empty last
/// sequence, which begins at the end of time, would have an index one larger.
inline TimeTiles whole_sequences(const SequenceLayout& layout) {
  return time_tiles(layout, layout.time + 1);
}

/// Tokens [first, first + tokens) of a sequence, in the order of its scan.
struct TimeTile {
  Sequence sequence;
  int index;  // among its sequence's tiles
  int tiles;  // of the sequence: one, without tokens, if it is empty
  int first;
  int tokens;

  __device__ bool exists() const { return index < tiles; }
  __device__ bool last() const { return index + 1 == tiles; }
  __device__ int end() const { return first + tokens; }
};

/// The tile index at which sequence n begins. Packed: a sequence over [a, b) has at most
/// b / L - a / L + 1 tiles, so that a / L + n leaves it enough indices whatever comes before it.
__device__ inline int first_tile_index(const TimeTiles& tiles, int n) {
  return tiles.layout.offsets == nullptr
             ? n * tiles.per_sequence
             : static_cast<int>(find_sequence(tiles.layout, n).start) / tiles.length + n;
}

__device__ inline int tiles_of(const TimeTiles& tiles, const Sequence& seq) {
  return max(1, (seq.length + tiles.length - 1) / tiles.length);
}

__device__ inline TimeTile find_time_tile(const TimeTiles& tiles, int tile_index) {
  int n = 0;
  if (tiles.layout.offsets == nullptr) {
    n = tile_index / tiles.per_sequence;
  } else {
    for (int end = static_cast<int>(tiles.layout.sequences); end - n > 1;) {
      // first_tile_index(n) <= tile_index < first_tile_index(end)
      const int middle = (n + end) / 2;
      (first_tile_index(tiles, middle) <= tile_index ? n : end) = middle;
    }
  }
  TimeTile tile;
  tile.sequence = find_sequence(tiles.layout, n);
  tile.index = tile_index - first_tile_index(tiles, n);
  tile.tiles = tiles_of(tiles, tile.sequence);
  tile.first = tile.index * tiles.length;
  tile.tokens = max(0, min(tiles.length, tile.sequence.length - tile.first));
  return tile;
}

// ---- Elements and rows ----
//
// Reading and writing is of elements of any type.

/// Elements from a tensor's first one to the first channel of a token and head.
__device__ inline int64_t element_offset(const HeadSeries& t, int64_t batch, int64_t token,
                                         int64_t head) {
  return batch * t.stride_b + token * t.stride_t + head * t.stride_h;
}
/// Elements from a tensor's first one to a channel of a token.
__device__ inline int64_t element_offset(const TimeSeries& t, int64_t batch, int64_t token,
                                         int64_t channel) {
  return batch * t.stride_b + token * t.stride_t + channel;
}

/// The token at which a scan of a sequence begins: its first one, or backwards its last one.
__device__ inline int64_t first_token(const Sequence& seq, bool backwards) {
  return seq.start + (backwards ? seq.length - 1 : 0);
}

/// The first byte of a token's row of a head; `token` counts from the sequence's start. Elements
/// are kBytes wide.
template <int kBytes>
__device__ inline char* row_address(const HeadSeries& t, const Sequence& seq, int64_t head,
                                    int64_t token) {
  return static_cast<char*>(t.data) +
         (seq.batch * t.stride_b + (seq.start + token) * t.stride_t + head * t.stride_h) * kBytes;
}

/// Bytes from one row to the next, which fit 32 bits: see `rows_too_far_apart`.
template <int kBytes>
__device__ inline int row_stride(const HeadSeries& t) {
  return static_cast<int>(t.stride_t) * kBytes;
}

// Elements whose type is known when the program runs only: for kernels that something else bounds,
// where one kernel serves all types. The host has seen to it that the type is one of those named.

/// Element `index` of `data`, whose type is that of the state (Real) or one of 16 bits.
template <class Real>
__device__ inline Real load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<Real>(widen(static_cast<const __nv_bfloat16*>(data)[index]));
    case DType::kFloat16:
      return static_cast<Real>(widen(static_cast<const __half*>(data)[index]));
    default:
      return static_cast<const Real*>(data)[index];
  }
}
template <class Real>
__device__ inline void store_element(void* data, DType dtype, int64_t index, Real x) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(static_cast<float>(x));
      return;
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = narrow<__half>(static_cast<float>(x));
      return;
    default:
      static_cast<Real*>(data)[index] = x;
  }
}

/// Element `index` of `data`, whose type is any real one, whatever Real is.
template <class Real>
__device__ inline Real load_any_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(data)[index]);
    case DType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return widen(static_cast<const __half*>(data)[index]);
  }
}
template <class Real>
__device__ inline void store_any_element(void* data, DType dtype, int64_t index, Real x) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(x);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = x;
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(static_cast<float>(x));
      return;
    default:
      static_cast<__half*>(data)[index] = narrow<__half>(static_cast<float>(x));
  }
}

}  // namespace tidegate::kernels
