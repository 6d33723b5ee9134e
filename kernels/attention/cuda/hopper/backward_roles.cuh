#pragma once

// The math warpgroups of the Hopper backward kernel for head dimensions whose dk and dv do not fit
// the registers of one: both have the block's 64 keys, and each a role.
//
//   weights    S^T = K Q^T   P = exp(S - lse)                    dv += P^T dO
//   gradients  dP^T = V dO^T  dS = P (dP - delta + dlse)         dk += dS^T Q     sums of dS
//
// P passes in fp32 from warp to warp of the same keys (weights_full, weights_free); dS, in 16 bits,
// is read by both for dq, of which the weights' role makes 128 columns and the other one the rest
// (ds_full, ds_free). The weights' role is a tile ahead: it makes dq of a tile beside the
// exponentials of the next one.

#include "kernels/attention/cuda/hopper/backward_math.cuh"
#include "kernels/attention/cuda/hopper/backward_tiles.cuh"

namespace tidegate::kernels::attention {

constexpr int kWeightsDqColumns = 128;  // the columns of dq that the weights' role makes

/// What both roles have: where in the rings of stages they are, and dq's way to shared memory.
template <class Shape>
struct HopperRole {
  const HopperKeyTile<Shape>& at;
  HopperBackwardShared<Shape>& shared;
  HopperKeyGradients<Shape> math;
  hopper::RingPlace<Shape::kStages> stage = {};
  hopper::RingPlace<1> exchanged = {};  // of P and of dS
  int dq_parity = 0;

  __device__ __forceinline__ HopperRole(const HopperKeyTile<Shape>& block,
                                        HopperBackwardShared<Shape>& memory, int thread)
      : at(block), shared(memory), math(block.p, thread) {}

  __device__ __forceinline__ int thread() const { return 32 * math.warp + math.lane; }

  /// Hands a tile's columns 8 kFirst and so on of dq to the producer's third warp.
  template <int kFirst, int kColumns>
  __device__ __forceinline__ void store_dq(const float (&dq)[kColumns][4]) {
    mbarrier_wait(&shared.dq_free, dq_parity ^ 1);
    math.template store_dq_columns<kFirst>(dq, shared.dq);
    hopper::fence_async_proxy();
    hopper::named_barrier_arrive(kDqBarrier, kMathAndWarp);
    dq_parity ^= 1;
  }
};

template <class Shape>
struct HopperWeightsRole : HopperRole<Shape> {
  using Base = HopperRole<Shape>;
  using Base::at, Base::exchanged, Base::math, Base::shared, Base::stage;
  using Base::HopperRole;
  float dq[kWeightsDqColumns / 8][4];
  int ds_parity = 0;

  __device__ __forceinline__ void begin_s() {
    mbarrier_wait(&shared.queries_full[stage.stage()], stage.phase());
    math.start(math.s, shared.stats[stage.stage()].start_s);
    math.multiply_scores(math.s, shared.keys, shared.queries[stage.stage()]);
  }
  __device__ __forceinline__ void begin_dq() {
    mbarrier_wait(&shared.ds_full[0], ds_parity);
    ds_parity ^= 1;
    math.multiply_dq_columns(dq, shared_address(shared.ds[0]), shared_address(shared.keys));
  }
  __device__ __forceinline__ void end_dq() {
    hopper::wait_for_products<0>();
    hopper::keep(dq);
    hopper::arrive_from(&shared.exchange.ds_free, math.lane);
    this->template store_dq<0>(dq);
  }

  /// P of a tile, from S.
  __device__ __forceinline__ void compute_weights(int tile) {
    const int i = stage.stage(), row = tile * Shape::kRows;
    math.compute_p(shared.stats[i], 0, at.is_edge(row), at.mask(), row + at.shift - at.first_key);
    mbarrier_arrive(&shared.queries_free[i]);
    mbarrier_wait(&shared.exchange.weights_free[math.warp], exchanged.phase() ^ 1);
#pragma unroll
    for (int n = 0; n < Shape::kPart / 8; ++n) {
      const float (&x)[4] = math.s[n];
      *reinterpret_cast<float4*>(shared.exchange.weights[n][this->thread()]) =
          make_float4(x[0], x[1], x[2], x[3]);
    }
    mbarrier_arrive(&shared.exchange.weights_full[math.warp]);
    exchanged.advance();
  }

  /// dv of a tile, and S of the next one.
  __device__ __forceinline__ void accumulate_dv(bool more) {
    const int taken = stage.stage();
    typename HopperKeyGradients<Shape>::ScoreOperand operand;
    math.pack(operand, math.s);
    mbarrier_wait(&shared.d_o_full[taken], stage.phase());
    math.accumulate(math.dv, operand, shared.d_o[taken]);
    stage.advance();
    if (more) {
      begin_s();
    }
    hopper::wait_for_products<0>();
    hopper::keep(math.s);
    hopper::arrive_from(&shared.d_o_free[taken], math.lane);
  }

  __device__ __forceinline__ void run() {
    mbarrier_wait(&shared.keys_full, 0);
    for (int head = at.first_head; head < at.end_head; ++head) {
      const auto range = at.range(head);
      math.start_head(at, head);
      if (range.begin >= range.end) {
        continue;
      }
      begin_s();
      hopper::wait_for_products<0>();
      hopper::keep(math.s);
      compute_weights(range.begin);
      accumulate_dv(range.begin + 1 < range.end);
#pragma unroll 1
      for (int tile = range.begin + 1; tile < range.end; ++tile) {
        begin_dq();
        compute_weights(tile);
        end_dq();
        accumulate_dv(tile + 1 < range.end);
      }
      begin_dq();
      end_dq();
    }
    hopper::keep(math.dv);
    hopper::named_barrier_arrive(kKeysReadBarrier, 256);
    hopper::named_barrier_sync(kValuesReadBarrier, 256);
    math.stage_dv(shared);
    hopper::named_barrier_sync(kGroupBarrier, 128);
    math.store_rows(at, at.w.params.dv, shared.values);
  }
};

template <class Shape>
struct HopperGradientsRole : HopperRole<Shape> {
  using Base = HopperRole<Shape>;
  using Base::at, Base::exchanged, Base::math, Base::shared, Base::stage;
  using Base::HopperRole;
  static constexpr int kFirst = kWeightsDqColumns;
  float dq[(Shape::kDim - kFirst) / 8][4];

  __device__ __forceinline__ void begin_dp() {
    mbarrier_wait(&shared.queries_full[stage.stage()], stage.phase());  // what dP starts from
    math.start(math.dp, shared.stats[stage.stage()].start_dp);
    mbarrier_wait(&shared.d_o_full[stage.stage()], stage.phase());
    math.multiply_scores(math.dp, shared.values, shared.d_o[stage.stage()]);
  }

  /// dS of a tile, from dP.
  __device__ __forceinline__ void compute_ds() {
    hopper::arrive_from(&shared.d_o_free[stage.stage()], math.lane);
    mbarrier_wait(&shared.exchange.weights_full[math.warp], exchanged.phase());
#pragma unroll
    for (int n = 0; n < Shape::kPart / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(shared.exchange.weights[n][this->thread()]);
      math.s[n][0] = x.x;
      math.s[n][1] = x.y;
      math.s[n][2] = x.z;
      math.s[n][3] = x.w;
    }
    mbarrier_arrive(&shared.exchange.weights_free[math.warp]);
    math.compute_ds();
  }

  /// dk of a tile, its share of dq, and dP of the next one.
  __device__ __forceinline__ void accumulate_dk(bool more) {
    const int taken = stage.stage();
    typename HopperKeyGradients<Shape>::ScoreOperand operand;
    math.pack(operand, math.dp);
    mbarrier_wait(&shared.exchange.ds_free, exchanged.phase() ^ 1);
    math.store_ds(shared.ds[0], operand);
    hopper::fence_async_proxy();
    hopper::arrive_from(&shared.ds_full[0], math.lane);
    math.accumulate(math.dk, operand, shared.queries[taken]);
    math.store_row_sums(shared.row_sums[taken][math.warp]);
    mbarrier_wait(&shared.ds_full[0], exchanged.phase());
    math.multiply_dq_columns(
        dq, shared_address(shared.ds[0]),
        shared_address(shared.keys) + kFirst / 64 * Shape::KeyPanels::kPanelBytes);
    exchanged.advance();
    stage.advance();
    hopper::wait_for_products<1>();  // dk: the stage is free before the next one is waited for
    mbarrier_arrive(&shared.queries_free[taken]);
    if (more) {
      begin_dp();
      hopper::wait_for_products<1>();  // dq
    } else {
      hopper::wait_for_products<0>();
    }
    hopper::keep(dq);
    hopper::arrive_from(&shared.exchange.ds_free, math.lane);
    this->template store_dq<kFirst / 8>(dq);
    hopper::wait_for_products<0>();
    hopper::keep(math.dp);
  }

  __device__ __forceinline__ void run() {
    bool has_values = false;
    for (int head = at.first_head; head < at.end_head; ++head) {
      const auto range = at.range(head);
      math.start_head(at, head);
      if (range.begin < range.end) {
        if (!has_values) {  // values are not brought if no query sees the keys
          has_values = true;
          mbarrier_wait(&shared.values_full, 0);
        }
        begin_dp();
        hopper::wait_for_products<0>();
        hopper::keep(math.dp);
      }
#pragma unroll 1
      for (int tile = range.begin; tile < range.end; ++tile) {
        compute_ds();
        accumulate_dk(tile + 1 < range.end);
      }
      math.store_key_sums(at, head);
    }
    hopper::keep(math.dk);
    hopper::named_barrier_arrive(kValuesReadBarrier, 256);
    hopper::named_barrier_sync(kKeysReadBarrier, 256);
    math.stage_dk(at, shared);
    hopper::named_barrier_sync(kGroupBarrier + 1, 128);
    math.store_rows(at, at.w.params.dk, shared.keys);
  }
};

template <class Shape>
__device__ __forceinline__ void compute_hopper_gradients_by_roles(
    const HopperKeyTile<Shape>& at, HopperBackwardShared<Shape>& shared, int thread) {
  if (thread < 256) {
    HopperWeightsRole<Shape>(at, shared, thread).run();
  } else {
    HopperGradientsRole<Shape>(at, shared, thread).run();
  }
}

}  // namespace tidegate::kernels::attention
