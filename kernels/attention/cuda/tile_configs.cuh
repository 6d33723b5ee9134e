#pragma once

// The tiles of the kernels on tensor cores and of decoding, with the reason beside each: by head
// dimension and, where it matters, by the shared memory that a block may have or the number of
// keys. The plan chooses a row, the launch takes it from there.

#include "kernels/attention/cuda/smem_tiles.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

/// A row of the forward pass's table.
struct ForwardTile {
  int dim;                    // D, padded
  int row_tiles;              // of 16 queries, of a warp
  int warps;                  // of a block
  int keys;                   // of a stage
  int part;                   // keys of a stage whose scores are in registers at a time
  int blocks_per_sm;          // bounds registers
  bool keep_queries = false;  // in registers, where there are enough
};

template <class Data, ForwardTile kTile>
struct ForwardShape {
  using T = Data;
  static constexpr int kDim = kTile.dim;
  static constexpr int kRowTiles = kTile.row_tiles;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kPart = kTile.part;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr bool kKeep = kTile.keep_queries;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kQueryBytes = Tile16Bit<kDim>::bytes(kRows);
  static constexpr int kKeyBytes = Tile16Bit<kDim>::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kKeyBytes;  // keys, values
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes =
      kQueryBytes + kStages * kStageBytes + (2 * 2 * kKeys + 2 * kRows + 16) * int{sizeof(float)};
  // The last 16: the queries' norm and BlockConstants.
};

/// The tile of single_tile_forward_kernel, which is all of a sequence: one stage. Where there are
/// few sequences nothing hides a warp's latencies, so eight warps have 16 queries each; where there
/// are many, two blocks hide each other's.
template <class Data>
struct SingleTileForwardShape
    : ForwardShape<Data, ForwardTile{64, 1, 8, kSingleTileTime, 64, 2, true}> {
  using Base = ForwardShape<Data, ForwardTile{64, 1, 8, kSingleTileTime, 64, 2, true}>;
  static constexpr int kStages = 1;
  static constexpr int kSharedBytes = Base::kSharedBytes - Base::kStageBytes;
};

/// A row of key_gradient_kernel's table. Eight warps share every product of a pair of tiles, and
/// each product divides its result among them in its own way: so many warps along its rows, the
/// others along its columns.
struct BackwardTile {
  int dim;                // D, padded
  int queries, keys;      // of a tile
  int score_warps;        // along the rows of S and dP
  int key_warps;          // along the rows of dk and dv
  int query_warps;        // along the rows of dq
  int stages;             // one or two tiles of queries and of dO
  int blocks_per_sm = 1;  // bounds registers
};

template <class Data, BackwardTile kTile>
struct BackwardShape {
  using T = Data;
  static constexpr int kDim = kTile.dim;
  static constexpr int kRows = kTile.queries;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;

  /// One product's part of a warp, in tiles of 16 rows and of 8 columns.
  template <int kAllRows, int kAllColumns, int kWarpsAlongRows>
  struct Part {
    static constexpr int kWarpsOfRows = kWarpsAlongRows;
    static constexpr int kRowTiles = kAllRows / kWarpsAlongRows / 16;
    static constexpr int kColumnTiles = kAllColumns / (kWarps / kWarpsAlongRows) / 8;
    static __device__ int row(int warp) { return warp % kWarpsAlongRows * (16 * kRowTiles); }
    static __device__ int column(int warp) { return warp / kWarpsAlongRows * (8 * kColumnTiles); }
  };
  using Scores = Part<kRows, kKeys, kTile.score_warps>;        // S, dP
  using KeyGradPart = Part<kKeys, kDim, kTile.key_warps>;      // dk, dv
  using QueryGradPart = Part<kRows, kDim, kTile.query_warps>;  // dq

  static constexpr int kKeyBytes = Tile16Bit<kDim>::bytes(kKeys);
  static constexpr int kRowBytes = Tile16Bit<kDim>::bytes(kRows);
  static constexpr int kScoreBytes = Tile16Bit<kKeys>::bytes(kRows);
  static constexpr int kRowStats = 4;  // c_i - c_ref, high and low; lse; dlse - delta
  // Whether dq's sums go by way of shared memory (add_dq_tile). At D = 128 that was slower.
  static constexpr bool kDqViaSmem = kStages > 1 && kDim < 128;
  static constexpr int kSharedBytes = 2 * kKeyBytes + 2 * kStages * kRowBytes + 2 * kScoreBytes +
                                      (2 * kKeys + 2 * kRowStats * kRows) * int{sizeof(float)};

  /// What a launch asks for.
  static int shared_bytes(const DeviceLimits& limits) {
    // Code compiled for 9.0 or later adds dq this way (add_dq_tile). On a later chip the code
    // of 8.0 may run, and leave this memory alone.
    const bool staged = kDqViaSmem && limits.major >= 9;
    return kSharedBytes + (staged ? kRows * kDim * int{sizeof(float)} : 0);
  }
};

/// A row of query_gradient_kernel's table.
struct QueryGradientTile {
  int dim;        // D, padded
  int row_tiles;  // of 16 queries, of a warp
  int warps;      // of a block
  int keys;       // of a stage
};

template <class Data, QueryGradientTile kTile>
struct QueryGradientShape {
  using T = Data;
  static constexpr int kDim = kTile.dim;
  static constexpr int kRowTiles = kTile.row_tiles;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kRowBytes = Tile16Bit<kDim>::bytes(kRows);
  static constexpr int kKeyBytes = Tile16Bit<kDim>::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kKeyBytes;  // keys, values
  static constexpr int kSharedBytes =
      2 * kRowBytes + 2 * kStageBytes + (2 * 2 * kKeys + 4 * kRows) * int{sizeof(float)};
};

/// Calls f.template operator()<Shape>() with the forward pass's shape of a head dimension of the
/// class. `wide`: what is_wide of forgetting_attention_cuda.cu found. All shapes but the wide ones
/// fit in 99 KB, what the smallest chip from 8.0 on gives a block, so that the plan need not look.
template <class T, HeadDims kDims, class F>
cudaError_t with_forward_shape(int64_t dim, bool wide, const F& f) {
  // clang-format off
  //                        dim  row_tiles warps keys part blocks keep
  if constexpr (kDims == HeadDims::kSmall) {
    // Up to 64 the queries fit beside the outputs; a stage of 128 keys halves the barriers.
    using D32     = ForwardShape<T, ForwardTile{ 32, 2, 4, 128, 64, 2, true}>;
    using D64     = ForwardShape<T, ForwardTile{ 64, 2, 4, 128, 64, 2, true}>;
    // Over many keys one block of eight warps reads each key for twice as many queries.
    using D64Wide = ForwardShape<T, ForwardTile{ 64, 2, 8, 192, 64, 1, true}>;
    // From here on no register is left for the queries, nor shared memory for longer stages.
    using D96     = ForwardShape<T, ForwardTile{ 96, 2, 4,  64, 64, 2}>;
    return dim <= 32           ? f.template operator()<D32>()
           : dim <= 64 && wide ? f.template operator()<D64Wide>()
           : dim <= 64         ? f.template operator()<D64>()
                               : f.template operator()<D96>();
  } else {
    using D128     = ForwardShape<T, ForwardTile{128, 2, 4,  64, 64, 2}>;
    // 128 keys a stage, 64 at a time in registers: half the barriers, 326 -> 346 TFLOP/s.
    using D128Wide = ForwardShape<T, ForwardTile{128, 2, 8, 128, 64, 1}>;
    // Outputs of 32 rows alone would fill the registers.
    using D192     = ForwardShape<T, ForwardTile{192, 1, 4,  32, 32, 2}>;
    using D256     = ForwardShape<T, ForwardTile{256, 1, 4,  32, 32, 2}>;
    return dim <= 128 && wide ? f.template operator()<D128Wide>()
           : dim <= 128       ? f.template operator()<D128>()
           : dim <= 192       ? f.template operator()<D192>()
                              : f.template operator()<D256>();
  }
  // clang-format on
}

/// The shapes of a backward pass: of key_gradient_kernel, with that for short-range heads, and of
/// query_gradient_kernel.
template <class KeysShape, class ShortRangeShape_, class QueriesShape>
struct BackwardShapes {
  using Keys = KeysShape;
  using ShortRange = ShortRangeShape_;
  using Queries = QueriesShape;
  // Sums of dq are laid out by either, and read by the first.
  static_assert(Keys::kRows == ShortRange::kRows &&
                Keys::QueryGradPart::kWarpsOfRows == ShortRange::QueryGradPart::kWarpsOfRows);
};

/// Calls f.template operator()<BackwardShapes>() with those of a head dimension of the class:
/// `small` ones where a block may have too little shared memory for the others.
template <class T, HeadDims kDims, class F>
cudaError_t with_backward_shapes(int64_t dim, bool small, const F& f) {
  const auto choose = [&]<class Large, class Small>() {
    return small ? f.template operator()<Small>() : f.template operator()<Large>();
  };
  // clang-format off
  //                    dim queries keys  warps: S, dk, dq  stages blocks
  if constexpr (kDims == HeadDims::kSmall) {
    // Two stages of queries fit everywhere.
    using Q32  = QueryGradientShape<T, QueryGradientTile{32, 2, 4, 64}>;
    using K32  = BackwardShape<T, BackwardTile{ 32,  64, 128, 2, 4, 4, 2}>;
    using D32  = BackwardShapes<K32, K32, Q32>;
    // 128 x 128: S and dP of 32 x 64 a warp still fit beside dk and dv of 32 x 32.
    using Q64  = QueryGradientShape<T, QueryGradientTile{64, 2, 4, 64}>;
    using K64  = BackwardShape<T, BackwardTile{ 64, 128, 128, 4, 4, 4, 2}>;
    using S64  = BackwardShape<T, BackwardTile{ 64,  64, 128, 2, 4, 4, 1}>;  // where a block has 99 KB
    using D64  = BackwardShapes<K64, K64, Q64>;
    using Q96  = QueryGradientShape<T, QueryGradientTile{96, 2, 4, 32}>;
    using K96  = BackwardShape<T, BackwardTile{ 96,  64, 128, 2, 4, 4, 2}>;
    using S96  = BackwardShape<T, BackwardTile{ 96,  64,  64, 4, 4, 4, 1}>;
    using D96  = BackwardShapes<K96, K96, Q96>;
    return dim <= 32   ? choose.template operator()<D32, D32>()
           : dim <= 64 ? choose.template operator()<D64, BackwardShapes<S64, S64, Q64>>()
                       : choose.template operator()<D96, BackwardShapes<S96, S96, Q96>>();
  } else {
    // The aimed shape: dk and dv of 32 x 64 a warp, 128 registers, leave room for 32 x 32 scores.
    using Q128 = QueryGradientShape<T, QueryGradientTile{128, 2, 4, 32}>;
    using K128 = BackwardShape<T, BackwardTile{128,  64, 128, 2, 4, 2, 2}>;
    // Short-range heads: tiles of 64 keys have a third fewer products, two blocks an SM.
    using R128 = BackwardShape<T, BackwardTile{128,  64,  64, 2, 2, 2, 1, 2}>;
    using S128 = BackwardShape<T, BackwardTile{128,  64,  64, 4, 4, 2, 1}>;
    // Above 128 the operands alone fill shared memory: 64 keys, one stage.
    using Q192 = QueryGradientShape<T, QueryGradientTile{192, 1, 4, 32}>;
    using K192 = BackwardShape<T, BackwardTile{192,  64,  64, 4, 2, 2, 1}>;
    using S192 = BackwardShape<T, BackwardTile{192,  32,  64, 2, 2, 2, 1}>;
    // 147 KB: where there is less, D above 192 takes the plain path.
    using Q256 = QueryGradientShape<T, QueryGradientTile{256, 1, 4, 32}>;
    using K256 = BackwardShape<T, BackwardTile{256,  64,  64, 4, 2, 2, 1}>;
    using D256 = BackwardShapes<K256, K256, Q256>;
    return dim <= 128   ? choose.template operator()<BackwardShapes<K128, R128, Q128>,
                                                     BackwardShapes<S128, S128, Q128>>()
           : dim <= 192 ? choose.template operator()<BackwardShapes<K192, K192, Q192>,
                                                     BackwardShapes<S192, S192, Q192>>()
                        : choose.template operator()<D256, D256>();
  }
  // clang-format on
}

/// Tiles of step_kernel.
struct StepTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kHeads = 4;            // query heads that read a key together
  static constexpr int kChannelsPerLane = 8;  // of a row: 16 bytes of 16-bit data
  static constexpr int kKeysPerLane = 2;      // of the warp that turns a tile's scores to weights
  static constexpr int kTile = 32 * kKeysPerLane;  // keys of a tile, at most
  static constexpr int kTileBytes = 16384;         // of keys, and of values, in a stage
  static constexpr int kMostStages = 3;            // 96 KB, where a block may have so much
  static constexpr int kMaxDim = static_cast<int>(kMaxAttentionHeadDim);
};

/// Tiles of tensor_step_kernel.
struct TensorStepTile {
  static constexpr int kKeys = 16;  // the inner dimension of one product with V
  static constexpr int kHeads = 8;  // half the rows of a product: the other half has the remainders
  static constexpr int kStages =
      3;  // four leave room for six warps instead of eight: 4.4 -> 3.9 TB/s
};

}  // namespace tidegate::kernels::attention
