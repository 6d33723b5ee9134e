#pragma once

// Between the drivers (scan_cpu.cpp) and the code compiled once an instruction set.

#include <cstdint>

#include "kernels/common/cpu_isa.h"
#include "kernels/scan/scan.h"
#include "kernels/scan/wkv4.h"

namespace tidegate::kernels::scan {

/// One piece of work: some neighbouring channels of one sequence.
struct ScanBlock {
  int64_t sequence = 0;  // n
  int64_t batch = 0;     // b, the row of the [B, T, D] tensors
  int64_t begin = 0;     // the sequence's first token
  int64_t length = 0;    // and its number of tokens
  int64_t channel = 0;   // the block's first channel
  int64_t width = 0;     // and its number of channels
  bool stream = false;   // outputs bypass the caches: they are large and their rows aligned
};

/// A block's row is at most this long in the type of the state. Wide rows make long streams, which
/// are worth more than a first-level cache that holds the block's states and gates.
constexpr int64_t kMaxBlockRowBytes = 16384;

/// What lru needs to know of its channels: rows of D numbers of the state's type in the workspace,
/// written once a call. The decay is a sum of two numbers where the state is single precision:
/// lambda rounded to one makes the same error at every step of a long memory. Where numbers are
/// complex, the row of imaginary parts follows that of real ones: readers of one count on from it.
enum LruRow : uint8_t {
  kLruDecayRe,
  kLruDecayIm,  // this and other rows of the phase: zero when real
  kLruDecayReRest,
  kLruDecayImRest,
  kLruGamma,
  kLruNu,
  kLruTheta,
  kLruRows
};

struct ScanKernels {
  void (*linear_scan_forward)(const LinearScanParams&, const ScanBlock&);
  void (*linear_scan_backward)(const LinearScanBackwardParams&, const ScanBlock&);
  void (*hgru_forward)(const HgruParams&, const ScanBlock&);
  void (*hgru_backward)(const HgruBackwardParams&, const ScanBlock&);
  void (*lru_forward)(const LruParams&, const ScanBlock&);
  void (*lru_backward)(const LruBackwardParams&, const ScanBlock&);
  void (*wkv4_forward)(const Wkv4Params&, const ScanBlock&);
  void (*wkv4_backward)(const Wkv4BackwardParams&, const ScanBlock&);
};

TIDEGATE_ISA_KERNELS(ScanKernels, kScanKernels)

}  // namespace tidegate::kernels::scan
