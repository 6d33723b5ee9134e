#pragma once

// The carry of a whole walk: a chain of a block's warps, the last one linked to the first one's
// next round.

#include "kernels/common/cuda/mbarrier.cuh"
#include "kernels/scan/cuda/maps.cuh"

namespace tidegate::kernels::scan {

constexpr int kMaxWarps = 16;  // of one block

/// A warp's place in its team (the warps of a block, or half of them), and its team's rank among
/// the teams that share a sequence.
struct Place {
  int warp, warps;  // warps: those that walk
  int lane;
  int rank, teams;

  /// Otherwise the compiler finds them anew where a carrier waits for what follows.
  __device__ void keep_in_registers() { asm("" : "+r"(warp), "+r"(lane)); }
};

/// Shared memory of a team, besides its rings.
template <class Op>
struct ChainShared {
  StateBoard<typename Op::Number, Op::kVec> mail[kMaxWarps];  // the state that enters a warp's run
  uint64_t mail_came[kMaxWarps];

  __device__ void prepare(const Op&, const Place&) const {}
  __device__ void init(const Place& at) {
    if (at.lane == 0) {
      mbarrier_init(&mail_came[at.warp], kWarpSize);
    }
  }
};

/// Waiting for the mail of a round also proves that the box it came in was emptied a round ago,
/// since the chain went through its owner: no barrier is needed for that.
template <class Op>
struct Chain {
  using Number = typename Op::Number;
  ChainShared<Op>& shared;
  const Place& at;

  /// The first run of all has no mail: its state is what the walk begins with.
  __device__ void take(int round, Number (&s)[Op::kVec]) const {
    if (round > 0 || at.warp > 0) {
      // The first warp's mail comes from the round before.
      mbarrier_wait(&shared.mail_came[at.warp], (at.warp == 0 ? round - 1 : round) & 1);
      shared.mail[at.warp].read(at.lane, s);
    }
  }
  __device__ void pass(const Number (&s)[Op::kVec]) const {
    const int next = at.warp + 1 == at.warps ? 0 : at.warp + 1;
    shared.mail[next].post(at.lane, s);
    mbarrier_arrive(&shared.mail_came[next]);
  }
};

}  // namespace tidegate::kernels::scan
