#pragma once

// What the blocks of the Hopper backward kernel are made of: its shape, its shared memory with the
// barriers, which tiles of queries see its keys, and how the producer's warps bring them.

#include "kernels/attention/cuda/backward/query_gradients.cuh"
#include "kernels/attention/cuda/backward/tiles.cuh"
#include "kernels/attention/cuda/hopper/select.cuh"
#include "kernels/attention/cuda/work.cuh"
#include "kernels/common/cuda/hopper.cuh"

namespace tidegate::kernels::attention {

template <class Data, HopperBackwardTile kTile>
struct HopperBackwardShape {
  using T = Data;
  static constexpr int kDim = kTile.dim;
  static constexpr int kRows = kTile.queries;
  static constexpr int kKeys = kTile.keys;
  static constexpr int kPart = 64;  // queries of a tile whose scores are in registers at a time
  static constexpr int kParts = kRows / kPart;
  static constexpr bool kHasRoles = kTile.has_roles();
  static constexpr int kStages = 2;  // of Q and dO
  static constexpr int kScoreStages = kHasRoles ? 1 : 2;
  static constexpr int kMathWarps = 8;
  static constexpr int kKeyWarps = kKeys / 16;  // warps that have dS, of 16 keys each
  static constexpr int kThreads = 384;
  // Whether dP's start is read while the S before it is under way, which takes registers.
  static constexpr bool kStartsEarly = kDim <= 64;
  // Registers a thread. setmaxnreg hands out no more than the launch allotted, 168 x 384 threads.
  static constexpr int kMathRegisters = kDim > 96 ? 240 : 232;
  static constexpr int kProducerRegisters = kDim > 96 ? 24 : 40;

  using KeyPanels = hopper::Panels<kKeys>;
  using RowPanels = hopper::Panels<kRows>;
  static constexpr int kKeyBytes = KeyPanels::bytes(kDim);
  static constexpr int kRowBytes = RowPanels::bytes(kDim);
  static constexpr int kScoreBytes = RowPanels::bytes(kKeys);
  static constexpr bool kDqByRows = kTile.dq_by_rows();
  static constexpr int kDqColumns = kTile.sum_columns();
  static_assert(kDim <= kDqColumns);

  // What convert_dq_kernel (query_gradients.cuh) wants to know of the sums' layout.
  struct Sums {
    using T = Data;
    static constexpr int kDim = kDqColumns, kRows = HopperBackwardShape::kRows;
    static constexpr int kThreads = 256;
    static constexpr int kRowBytes = Tile16Bit<kDim>::bytes(kRows);
    struct QueryGradPart {
      static constexpr int kRowTiles = 1, kColumnTiles = kDqByRows ? 8 : kDqColumns / 16;
      static __device__ int row(int warp) { return kDqByRows ? 16 * warp : warp % 4 * 16; }
      static __device__ int column(int warp) { return kDqByRows ? 0 : warp / 4 * (kDqColumns / 2); }
    };
  };
};

// Named barriers of a block (0 is __syncthreads'). Those that wait at one do so at one place of the
// code, others arrive: compute-sanitizer's synccheck calls anything else divergent.
constexpr int kKeysReadBarrier = 1;     // all have read the keys and values
constexpr int kGroupBarrier = 2;        // and 3: the four warps of one math warpgroup
constexpr int kDqBarrier = 4;           // dq and row_sums of a tile are in shared memory
constexpr int kStatsBarrier = 5;        // the stats of a tile's queries have been read (no roles)
constexpr int kValuesReadBarrier = 6;   // with roles, beside kKeysReadBarrier
constexpr int kMathAndWarp = 256 + 32;  // threads of the math warpgroups and of a producer's warp

/// What a tile of queries brings beside Q, a number for each query. S starts from start_s: in an
/// inner part c_i - c_ref - lse_i, in units of Q K^T, in a part with an edge zero. dP starts from
/// start_dp, dlse - delta. Edges need more, in units of log2: c_i - c_ref, in high and low parts,
/// and lse_i.
template <int kRows>
struct HopperRowStats {
  float start_s[kRows], start_dp[kRows];
  float gate_high[kRows], gate_low[kRows], lse[kRows];
};

/// What passes between warpgroups with roles (backward_roles.cuh), besides dS: P in fp32, as the
/// lanes hold it, each warp's for the one of the other warpgroup that has the same keys.
template <bool kHasRoles>
struct HopperExchange {
  __device__ void init_barriers() {}
};
template <>
struct HopperExchange<true> {
  alignas(16) float weights[8][128][4];
  uint64_t weights_full[4], weights_free[4];  // a warp's
  uint64_t ds_free;

  __device__ void init_barriers() {
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(&weights_full[i], 32);
      mbarrier_init(&weights_free[i], 32);
    }
    mbarrier_init(&ds_free, 8);
  }
};

template <class Shape>
struct HopperBackwardShared {
  static constexpr int kStages = Shape::kStages;
  alignas(1024) unsigned char keys[Shape::kKeyBytes];
  alignas(1024) unsigned char values[Shape::kKeyBytes];
  alignas(1024) unsigned char queries[kStages][Shape::kRowBytes];
  alignas(1024) unsigned char d_o[kStages][Shape::kRowBytes];
  alignas(1024) unsigned char ds[Shape::kScoreStages][Shape::kScoreBytes];
  alignas(
      128) float dq[Shape::kRows * Shape::kDqColumns];  // of a tile, as convert_dq_kernel has it
  HopperRowStats<Shape::kRows> stats[kStages];
  float row_sums[kStages][Shape::kKeyWarps][Shape::kRows];  // of dS over a warp's keys
  int block;                                                // which of the launch's
  uint64_t keys_full, values_full;                          // once
  uint64_t queries_full[kStages], queries_free[kStages];    // with stats; but see kStatsBarrier
  uint64_t d_o_full[kStages], d_o_free[kStages];
  uint64_t ds_full[Shape::kScoreStages];
  uint64_t dq_free;  // dq and row_sums may be written; kDqBarrier: they are there
  [[no_unique_address]] HopperExchange<Shape::kHasRoles> exchange;
  // In the long-range kernel, whose blocks take one tile after the other (next_long_range_tile).
  uint64_t tile_done, tile_taken;
  int tiles_taken;

  __device__ static HopperBackwardShared& at(unsigned char* bytes) {
    return *reinterpret_cast<HopperBackwardShared*>(bytes);
  }
  /// Called by one thread, before a barrier of the block. Where lanes read or write what lanes of
  /// other warps then write or read, all of them arrive: compute-sanitizer's racecheck does not see
  /// that
  /// __syncwarp orders them before one lane's arrival. One of a warp arrives where wgmma or the
  /// copy engine is on the other side: d_o_free, ds_full (dS is written by lanes and read by
  /// wgmma), and queries_free up to 128, where all lanes' arrivals for the stats that they have
  /// read would slow the hottest loop, and a named barrier costs nothing (kStatsBarrier).
  __device__ void init_barriers() {
    for_each_barrier([](uint64_t* barrier, int arrivals) { mbarrier_init(barrier, arrivals); });
    exchange.init_barriers();
    hopper::fence_barrier_init();
  }
  /// Called before init_barriers() is called again.
  __device__ void invalidate_barriers() {
    static_assert(!Shape::kHasRoles);
    for_each_barrier([](uint64_t* barrier, int) { hopper::invalidate_barrier(barrier); });
  }

 private:
  template <class F>
  __device__ void for_each_barrier(const F& f) {
    f(&keys_full, 1);
    f(&values_full, 1);
    f(&dq_free, Shape::kHasRoles ? 32 : 2 * 32);
    for (int i = 0; i < kStages; ++i) {
      f(&queries_full[i], 1 + 32);  // the warp that loads them, the lanes of their stats
      f(&d_o_full[i], 1);
      f(&queries_free[i], (Shape::kHasRoles ? 32 : 1) * Shape::kMathWarps);
      f(&d_o_free[i], Shape::kMathWarps);
    }
    for (int i = 0; i < Shape::kScoreStages; ++i) {
      f(&ds_full[i], Shape::kKeyWarps);
    }
  }
};

/// What the kernel is told besides: descriptions of the tensors for the copy engine.
struct HopperBackwardWork {
  TensorAttention attention;
  CUtensorMap q, d_o;  // boxes of kRows rows
  CUtensorMap k, v;    // boxes of kKeys rows
};

/// The block's keys, and which tiles of queries see them.
template <class Shape>
struct HopperKeyTile {
  static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys;
  const TensorAttention& w;
  const ForgettingAttentionParams& p;
  Sequence keys, queries;
  int key_head, first_key, tokens;
  int shift;                 // from a query to its position
  int first_head, end_head;  // query heads that share the keys

  __device__ HopperKeyTile(const TensorAttention& work, const TileAndHead& at)
      : w(work),
        p(work.params.forward),
        keys(at.tile.sequence),
        queries(find_sequence(p.layout, keys.index)),
        key_head(at.head),
        first_key(at.tile.first),
        tokens(at.tile.tokens),
        shift(keys.length - queries.length) {
    const int group = static_cast<int>(p.heads / p.key_heads);  // query heads of a key head
    first_head = key_head * group;
    end_head = first_head + group;
  }
  __device__ int last_key() const { return first_key + tokens - 1; }

  __device__ PairMask mask() const { return {static_cast<int>(p.window)}; }
  /// Whether not all of the block's keys are seen by all of the part's queries, from `row` on: the
  /// diagonal, and the far end of the window.
  __device__ bool is_edge(int row) const {
    const int first = row + shift, window = static_cast<int>(p.window);
    return first < first_key + kKeys - 1 ||
           (window > 0 && first_key <= first + Shape::kPart - 1 - window);
  }

  /// How many blocks add to a tile of queries before this one: those of later keys.
  __device__ int turn(int tile) const {
    const int last = min((tile + 1) * kRows, queries.length) - 1 + shift;
    return last / kKeys - first_key / kKeys;
  }

  /// Tiles of queries that see one of the keys, and that pruning leaves.
  __device__ QueryTileRange range(int head) const {
    const int window = static_cast<int>(p.window);
    QueryTileRange r =
        QueryTileRange::of<kRows>(first_key, last_key(), shift, queries.length, window);
    if (p.prune > 0) {
      const int64_t tile_index = first_tile_index(w.extents.keys, static_cast<int>(keys.index)) +
                                 last_key() / KeyExtents::kKeys;
      r.end = min(r.end, (w.extents.ends[tile_index * p.heads + head] + kRows - 1) / kRows);
    }
    return r;
  }
};

/// Brings rows [first, first + kRows) of a sequence's head into a tile, all lanes of a warp calling
/// it, and arrives once at the barrier for them. Rows that are not there are zero. The copy engine
/// writes zeros past a tensor's end only: a tile that reaches past its sequence's end, or, where
/// kMayPrecede, before its first row, is copied by the warp itself.
template <int kRows, int kDim, bool kMayPrecede = false>
__device__ inline void load_hopper_tile(unsigned char* to, const CUtensorMap* map,
                                        const HeadSeries& t, uint64_t* barrier,
                                        const Sequence& sequence, int head, int first, int pieces,
                                        int lane) {
  using Panels = hopper::Panels<kRows>;
  const int limit = sequence.length - first;
  if ((!kMayPrecede || first >= 0) && limit >= kRows) {
    if (lane == 0) {
      hopper::arrive_expecting(barrier, Panels::bytes(kDim));
      hopper::copy_tile<kRows, kDim>(to, map, barrier, head,
                                     static_cast<int>(sequence.start) + first,
                                     static_cast<int>(sequence.batch));
    }
  } else {
    constexpr int kPieces = Panels::bytes(kDim) / (16 * kRows);
    const char* const from = row_address<2>(t, sequence, head, first);
    const int stride = row_stride<2>(t);
#pragma unroll 1
    for (int at = lane; at < kRows * kPieces; at += 32) {
      const int row = at / kPieces, piece = at % kPieces;
      copy_async_or_zero(to + Panels::offset(row, piece),
                         from + static_cast<int64_t>(row) * stride + piece * 16,
                         (!kMayPrecede || first + row >= 0) && row < limit && piece < pieces);
    }
    commit_copies();
    wait_for_copies<0>();
    hopper::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(barrier);
    }
  }
  __syncwarp();
}

/// Waits until `turn` blocks have ended their turns at a tile of queries, and sees what they added.
__device__ inline void wait_for_turn(const int* turns, int turn) {
  int ended = 0;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(ended) : "l"(turns) : "memory");
  } while (ended != turn);
}
/// Ends a turn: what the warp added before the last __syncwarp, and what this thread's bulk
/// additions, which have ended, is seen by whoever waits.
__device__ inline void end_turn(int* turns) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}

/// The producer's first warp: the block's keys and values, then every tile of Q and dO.
template <class Shape>
__device__ inline void load_tiles(const HopperBackwardWork& work, const HopperKeyTile<Shape>& at,
                                  HopperBackwardShared<Shape>& shared, int lane) {
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kDim = Shape::kDim;
  const ForgettingAttentionParams& p = at.p;
  const int pieces = static_cast<int>(p.head_dim / 8);
  load_hopper_tile<kKeys, kDim>(shared.keys, &work.k, p.k, &shared.keys_full, at.keys, at.key_head,
                                at.first_key, pieces, lane);
  hopper::RingPlace<Shape::kStages> stage;
  bool has_values = false;
  for (int head = at.first_head; head < at.end_head; ++head) {
    const auto range = at.range(head);
    for (int tile = range.begin; tile < range.end; ++tile, stage.advance()) {
      mbarrier_wait(&shared.queries_free[stage.stage()], stage.phase() ^ 1);
      load_hopper_tile<kRows, kDim>(shared.queries[stage.stage()], &work.q, p.q,
                                    &shared.queries_full[stage.stage()], at.queries, head,
                                    tile * kRows, pieces, lane);
      if (!has_values) {  // after the queries, which are needed first
        has_values = true;
        load_hopper_tile<kKeys, kDim>(shared.values, &work.v, p.v, &shared.values_full, at.keys,
                                      at.key_head, at.first_key, pieces, lane);
      }
      mbarrier_wait(&shared.d_o_free[stage.stage()], stage.phase() ^ 1);
      load_hopper_tile<kRows, kDim>(shared.d_o[stage.stage()], &work.d_o, at.w.params.d_o,
                                    &shared.d_o_full[stage.stage()], at.queries, head, tile * kRows,
                                    pieces, lane);
    }
  }
}

/// The producer's second warp waits until math has read the next tile's stats. That it has come
/// here is waited for, too, before math comes again (dq_free): a named barrier counts one phase
/// only.
template <class Shape>
__device__ inline void wait_for_stats_read(HopperBackwardShared<Shape>& shared) {
  hopper::named_barrier_sync(kStatsBarrier, kMathAndWarp);
  mbarrier_arrive(&shared.dq_free);
}

/// The producer's second warp: what the queries' scores need. See HopperRowStats.
template <class Shape>
__device__ inline void load_row_stats(const HopperKeyTile<Shape>& at,
                                      HopperBackwardShared<Shape>& shared, int lane) {
  constexpr int kRows = Shape::kRows;
  const ForgettingAttentionParams& p = at.p;
  const float inverse_scale = 1 / (static_cast<float>(p.scale) * kLog2E);
  hopper::RingPlace<Shape::kStages> stage;
  int written = 0;  // tiles
  for (int head = at.first_head; head < at.end_head; ++head) {
    const auto range = at.range(head);
    const GateSums gates(at.w, at.keys, head);
    const double reference = gates.at(at.last_key());
    const int64_t first_row =
        (at.queries.batch * p.heads + head) * p.layout.time + at.queries.start;
    for (int tile = range.begin; tile < range.end; ++tile, stage.advance()) {
      RawRowStats rows[kRows / 32];
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) {
        const int row = tile * kRows + 32 * i + lane;
        const bool exists = row < at.queries.length;
        rows[i] = {gates.at(row + at.shift),
                   exists ? static_cast<const float*>(p.lse)[first_row + row] : -INFINITY,
                   exists ? at.w.delta_minus_dlse[first_row + row] : 0.0f};
      }
      if constexpr (Shape::kHasRoles) {
        mbarrier_wait(&shared.queries_free[stage.stage()], stage.phase() ^ 1);
      } else {
        if (written >= Shape::kStages) {
          wait_for_stats_read(shared);
        }
        ++written;
      }
      HopperRowStats<kRows>& stats = shared.stats[stage.stage()];
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) {
        const int row = 32 * i + lane;
        float x[4];
        write_row_stats<1>(x, rows[i], reference);
        const bool is_edge = at.is_edge(tile * kRows + row / Shape::kPart * Shape::kPart);
        stats.start_s[row] = is_edge ? 0.0f : (x[0] - x[2]) * inverse_scale;
        stats.start_dp[row] = x[3];
        stats.gate_high[row] = x[0];
        stats.gate_low[row] = x[1];
        stats.lse[row] = x[2];
      }
      mbarrier_arrive(&shared.queries_full[stage.stage()]);
    }
  }
  for (int left = min(written, Shape::kStages); left > 0; --left) {  // the last tiles'
    wait_for_stats_read(shared);
  }
}

/// The producer's third warp: adds what the warps of math have made of a tile of queries, its dq
/// and its sums of dS over keys, to the sums in device memory. In an ordered pass a tile of queries
/// gets the additions of the last keys that see it first, and so on: the same bits from run to run.
template <class Shape>
__device__ inline void add_query_sums(const HopperKeyTile<Shape>& at,
                                      HopperBackwardShared<Shape>& shared, int lane) {
#if TIDEGATE_HOPPER_CODE
  constexpr int kRows = Shape::kRows, kTileFloats = kRows * Shape::kDqColumns;
  const ForgettingAttentionParams& p = at.p;
  const TensorAttention& w = at.w;
  int stage = 0;
  for (int head = at.first_head; head < at.end_head; ++head) {
    const auto range = at.range(head);
    int64_t tile_index = (first_tile_index(w.query_tiles, static_cast<int>(at.queries.index)) +
                          int64_t{range.begin}) *
                             p.heads +
                         head;
    float* const row_sums =
        w.row_sums + (at.queries.batch * p.heads + head) * p.layout.time + at.queries.start;
    for (int tile = range.begin; tile < range.end; ++tile, tile_index += p.heads) {
      if (w.turns != nullptr) {
        if (lane == 0) {
          wait_for_turn(w.turns + 1 + tile_index, at.turn(tile));
        }
        __syncwarp();
      }
      hopper::named_barrier_sync(kDqBarrier, kMathAndWarp);
      if (lane == 0) {
        add_bulk<kTileFloats* int{sizeof(float)}>(w.dq_sums + tile_index * kTileFloats, shared.dq);
      }
#pragma unroll 1
      for (int row = lane; row < kRows; row += 32) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Shape::kKeyWarps; ++i) {
          sum += shared.row_sums[stage][i][row];
        }
        if (tile * kRows + row < at.queries.length) {
          atomicAdd(row_sums + tile * kRows + row, sum);
        }
      }
      if (lane == 0) {
        wait_for_bulk_reads();
      }
      mbarrier_arrive(&shared.dq_free);
      __syncwarp();
      if (lane == 0) {
        if (w.turns != nullptr) {
          wait_for_bulk_additions();
          end_turn(w.turns + 1 + tile_index);
        }
      }
      __syncwarp();
      stage ^= 1;
    }
  }
  if (lane == 0) {
    wait_for_bulk_additions();
  }
#endif
}

}  // namespace tidegate::kernels::attention
