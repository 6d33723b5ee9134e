// Where a training step's time goes: matrix products, attention of torch's, the ops of this
// library, the optimiser, and the rest.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tidegate::benchmarks {

/// Seconds. On a GPU of kernels, by their names, and `idle` is what of the step no kernel covers;
/// on the CPU of torch's ops, each without those that it calls, and `idle` is the time between ops.
struct StepSplit {
  double products = 0, attention = 0, ours = 0, optimizer = 0, rest = 0, idle = 0;
};

/// Runs `step` once under torch's profiler. `seconds`: how long a step takes without it.
StepSplit split_of(c10::Device device, double seconds, const std::function<void()>& step);

/// Kinds of time, as split_of() sorts names into them.
enum class Kind { kNone, kProducts, kAttention, kOurs, kOptimizer };
Kind kind_of_kernel(const std::string& name);
Kind kind_of_op(const std::string& name);

/// What a step cannot be faster than, whatever its kernels: its products at the speed of one large
/// product, and the optimiser's numbers at the speed of a copy, measured here and now.
struct Speeds {
  double operations = 0;  // a second, of a product in the step's dtype
  double bytes = 0;       // a second, read and written by a copy
};
Speeds measure_speeds(c10::Device device, bool is_bf16);

}  // namespace tidegate::benchmarks
