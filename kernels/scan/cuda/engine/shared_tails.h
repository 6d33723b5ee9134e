#pragma once

// Where rows begin anywhere (unaligned.cuh), the last channels of several sequences may share a
// channel tile. D is seldom a multiple of a tile, and for each sequence a tile would remain that
// has only D % 64 channels of its own: of 129 channels, a third of the work for one of them.
// Sequences of one length are at the same step together, so the lanes of a warp may scan different
// ones.
//
// A tile that 2^n sequences share gives each of them 32 / 2^n lanes, and 128 / 2^n bytes of a row
// of shared memory, of which the last 16 are for the shift at which its channels begin.

#include <cstdint>

#include "kernels/common/integers.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels::scan {

/// The chains of a scan, which are sequences x channel tiles, and their order: tiles of one
/// sequence stand side by side, since neighbouring tiles read the same lines of memory. Where tails
/// are shared, a group of 2^sharing sequences begins with their tails, so that of the last group,
/// which may have fewer sequences, no chain is missing but at the end.
struct ScanChains {
  int64_t count = 0;
  int64_t tiles = 0;   // of a sequence; where tails are shared, whole ones
  int8_t sharing = 0;  // 2^sharing sequences share their tails; 0: none does

  /// `tile_channels`: of a channel tile; `sharing`: what worth_sharing says, zero for aligned rows.
  static ScanChains of(int64_t sequences, int64_t channels, int64_t tile_channels, int8_t sharing) {
    ScanChains chains;
    chains.sharing = sharing;
    chains.tiles = sharing > 0 ? channels / tile_channels : ceil_div(channels, tile_channels);
    chains.count = sequences * chains.tiles;
    if (sharing > 0) {
      chains.count += ceil_div(sequences, int64_t{1} << sharing);
    }
    return chains;
  }

  /// How many sequences should share their tails, where rows are unaligned: as many as may, if the
  /// time that chains take becomes a fifth shorter or more. A block of tails takes longer than
  /// others, and reads and writes parts of lines, so that less is nothing gained.
  static int8_t worth_sharing(const SequenceLayout& layout, int64_t channels, int64_t tile_channels,
                              int64_t multiprocessors) {
    if (layout.offsets != nullptr || layout.sequences <= 1 ||
        channels / tile_channels > kMostTiles) {
      return 0;
    }
    const int8_t sharing = sharing_of(channels % tile_channels, tile_channels);
    const auto time = [&](int8_t each) {
      return time_of(of(layout.sequences, channels, tile_channels, each).count, multiprocessors);
    };
    return sharing > 0 && time(0) >= 1.25 * time(sharing) ? sharing : int8_t{0};
  }

 private:
  /// In units of one block's on a multiprocessor of its own: several blocks share the chain's time
  /// where there are enough multiprocessors, else multiprocessors have several blocks.
  static double time_of(int64_t chains, int64_t multiprocessors) {
    return chains * 2 <= multiprocessors ? 1.0 / static_cast<double>(multiprocessors / chains)
                                         : static_cast<double>(ceil_div(chains, multiprocessors));
  }

  /// Beside more whole tiles the tail is little, and lines read for single channels of several
  /// sequences cost more than it (docs/lab/scan.md).
  static constexpr int64_t kMostTiles = 4;

  static int8_t sharing_of(int64_t tail, int64_t tile_channels) {
    constexpr int64_t kShift = 8;  // channels of 16 bits in 16 bytes
    int8_t sharing = 0;
    while (sharing < 2 && tail > 0 && tail + kShift <= tile_channels >> (sharing + 1)) {
      ++sharing;
    }
    return sharing;
  }
};

}  // namespace tidegate::kernels::scan
