#pragma once

// How blocks that run at once hand values to each other: within a cluster through each other's
// shared memory, and anywhere through records in device memory.

#include <cstdint>

#include "kernels/common/cuda/numeric.cuh"

namespace tidegate::kernels {

// ---- Blocks of a cluster ----
//
// What blocks of a cluster tell each other: stores into each other's shared memory, and the
// mbarriers that count their bytes (compute capability 9.0). Addresses are those of
// shared_address().

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline int cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// All threads of all blocks; what they wrote before, shared memory of others included, is seen
/// after.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// All threads of all blocks have arrived before one goes on, in two halves. What they wrote is
/// only seen after where it was published before: cluster_sync() publishes device memory, too, and
/// waits until what was stored there has got through, a thousand cycles where something was.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}

/// Makes what the thread wrote to its own block's shared memory known to the other blocks, before
/// cluster_arrive().
__device__ inline void publish_shared() {
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}

/// Makes initialised barriers known to the other blocks, before cluster_arrive().
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Where the variable at `address` of this block's shared memory lies in that of block `rank`.
__device__ inline unsigned address_in_block(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/// Arrives once, and announces that this phase has to see `bytes` besides.
__device__ inline void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
}

/// What arrived is seen after, of shared memory only: a plain acquire at the cluster's scope would
/// wait for the loads from device memory that are on their way, and empty the first-level cache.
__device__ inline void wait_for_bytes(unsigned barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Stores into a block's shared memory; that block's barrier counts the bytes when they are there.
__device__ inline void store_remote(unsigned address, float value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}
__device__ inline void store_remote(unsigned address, float4 value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
      "r"(__float_as_uint(value.w)), "r"(barrier)
      : "memory");
}

#else  // never called: the planner chooses clusters where code for 9.0a is loaded

__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_sync() {}
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
__device__ inline void cluster_meet() {}
__device__ inline void publish_shared() {}
__device__ inline void publish_barriers() {}
__device__ inline unsigned address_in_block(unsigned address, int) { return address; }
__device__ inline void expect_bytes(unsigned, unsigned) {}
__device__ inline void wait_for_bytes(unsigned, unsigned) {}
__device__ inline void store_remote(unsigned, float, unsigned) {}
__device__ inline void store_remote(unsigned, float4, unsigned) {}

#endif

// ---- Through device memory ----
//
// Carries between blocks that run at once, through device memory. A record holds its value and the
// epoch in which it was written in the same access, so that no fence is needed and no flag can be
// seen before its value: whoever polls it sees either an older epoch or the whole record. Memory is
// zero at the start, and epochs count from one.

/// A value of 4-byte words for each lane of a warp. Three words and the epoch come with one access
/// of 16 bytes. Words that are left over hold the epoch too, and are compared: otherwise ptxas
/// leaves them out and makes two accesses of the rest.
template <class Value>
struct PackedCarry {
  static constexpr int kWords = sizeof(Value) / 4;
  static constexpr int kUnits = (kWords + 2) / 3;
  uint4 units[kUnits][kWarpSize];

  __device__ void write(int lane, unsigned epoch, const Value& value) {
    unsigned words[3 * kUnits];
    memcpy(words, &value, sizeof(value));
#pragma unroll
    for (int i = kWords; i < 3 * kUnits; ++i) {
      words[i] = epoch;
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      asm volatile(
          "{ .reg .b64 low, high; .reg .b128 unit;\n"
          "mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 unit, {low, high};\n"
          "st.relaxed.gpu.global.b128 [%0], unit; }" ::"l"(&units[i][lane]),
          "r"(words[3 * i]), "r"(words[3 * i + 1]), "r"(words[3 * i + 2]), "r"(epoch)
          : "memory");
    }
  }
};

/// What one lane has read of a record so far.
template <class Value>
struct PolledCarry {
  static constexpr int kUnits = PackedCarry<Value>::kUnits;
  uint4 units[kUnits];

  /// Starts a read.
  __device__ void poll(const PackedCarry<Value>& record, int lane) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      asm volatile(
          "{ .reg .b64 low, high; .reg .b128 unit;\n"
          "ld.relaxed.gpu.global.b128 unit, [%4];\n"
          "mov.b128 {low, high}, unit; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
          : "=r"(units[i].x), "=r"(units[i].y), "=r"(units[i].z), "=r"(units[i].w)
          : "l"(&record.units[i][lane])
          : "memory");
    }
  }
  /// Whether the last read found the whole record of this epoch.
  __device__ bool ready(unsigned epoch) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      all = all && units[i].w == epoch;
    }
    constexpr int kLeftOver = 3 * kUnits - PackedCarry<Value>::kWords;
    return all && (kLeftOver < 1 || units[kUnits - 1].z == epoch) &&
           (kLeftOver < 2 || units[kUnits - 1].y == epoch);
  }
  /// Polls until the record is ready. Two reads are under way at a time, so that one comes back
  /// soon after the record was written.
  __device__ void wait(const PackedCarry<Value>& record, int lane, unsigned epoch) {
    if (ready(epoch)) {
      return;
    }
    PolledCarry next;
    poll(record, lane);
    next.poll(record, lane);
    while (!ready(epoch)) {
      *this = next;
      next.poll(record, lane);
    }
  }
  __device__ Value value() const {
    unsigned words[3 * kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      words[3 * i] = units[i].x;
      words[3 * i + 1] = units[i].y;
      words[3 * i + 2] = units[i].z;
    }
    Value v;
    memcpy(&v, words, sizeof(v));
    return v;
  }
};

/// Calls consume(index, value) for the records [first, end) in order: those that
/// record_at(index) refers to, kAtOnce of them on their way at a time.
template <class Value, int kAtOnce, class RecordAt, class Consume>
__device__ __forceinline__ void poll_in_order(int first, int end, int lane, unsigned epoch,
                                              RecordAt record_at, Consume consume) {
  for (; first < end; first += kAtOnce) {
    PolledCarry<Value> polled[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < end) {
        polled[i].poll(record_at(first + i), lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < end) {
        polled[i].wait(record_at(first + i), lane, epoch);
        consume(first + i, polled[i].value());
      }
    }
  }
}

/// A record of one word, in one access of 8 bytes.
struct PackedWord {
  static __device__ void write(uint64_t* to, unsigned epoch, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(uint64_t{epoch} << 32 | word)
                 : "memory");
  }
  /// Reads the word; whether it is that of this epoch.
  static __device__ bool poll(const uint64_t* from, unsigned epoch, uint32_t& word) {
    uint64_t record;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(record) : "l"(from) : "memory");
    word = static_cast<uint32_t>(record);
    return record >> 32 == epoch;
  }
  /// Reads two records that lie side by side, 16-byte aligned; whether both are those of this
  /// epoch.
  static __device__ bool poll_pair(const uint64_t* from, unsigned epoch, uint32_t& first,
                                   uint32_t& second) {
    uint64_t records[2];
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(records[0]), "=l"(records[1])
                 : "l"(from)
                 : "memory");
    first = static_cast<uint32_t>(records[0]), second = static_cast<uint32_t>(records[1]);
    return records[0] >> 32 == epoch && records[1] >> 32 == epoch;
  }
};

}  // namespace tidegate::kernels
