#pragma once

// Time divided into tiles that blocks work on at the same time: chunks of 64 tokens, or segments of
// many chunks. Every tile has an index in [0, count). How many indices there are is known without
// reading the sequences' offsets, so some indices of packed sequences belong to no tile.

#include <algorithm>

#include "kernels/common/cuda/sequence.cuh"

namespace tidegate::kernels {

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
  const int64_t tiles = std::max<int64_t>(1, (layout.time + length - 1) / length);
  const int64_t count = layout.offsets == nullptr ? layout.sequences * tiles
                                                  : layout.time / length + layout.sequences;
  return {layout, static_cast<int>(length), count, static_cast<int>(tiles)};
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

}  // namespace tidegate::kernels
