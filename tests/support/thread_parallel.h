#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/common/parallel_for.h"

namespace tidegate::testing {

/// A ParallelFor on fresh std::threads, each with one contiguous share.
inline kernels::ParallelFor thread_parallel(int threads) {
  kernels::ParallelFor parallel;
  parallel.threads = threads;
  parallel.run = [threads](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
    const int64_t share = (n + threads - 1) / threads;
    std::vector<std::thread> workers;
    for (int64_t begin = share; begin < n; begin += share) {
      workers.emplace_back([&body, begin, end = std::min(begin + share, n)] { body(begin, end); });
    }
    if (n > 0) body(0, std::min(share, n));
    for (std::thread& worker : workers) worker.join();
  };
  return parallel;
}

}  // namespace tidegate::testing
