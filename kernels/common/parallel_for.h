#pragma once

#ifdef __CUDACC__
namespace tidegate::kernels {
struct ParallelFor;  // CUDA units only pass it by; <functional> would cost each of them a second
}
#else

#include <cstdint>
#include <functional>

namespace tidegate::kernels {

/// Runs `body(begin, end)` over a partition of [0, n), possibly on several threads. The caller of a
/// CPU kernel lends it its own thread pool through this, so that the kernels start no threads and
/// follow the application's thread settings. `threads` is a hint for how finely to divide work;
/// no kernel's result depends on it.
struct ParallelFor {
  int threads = 1;
  std::function<void(int64_t n, const std::function<void(int64_t begin, int64_t end)>& body)> run =
      [](int64_t n, const std::function<void(int64_t, int64_t)>& body) { body(0, n); };
};

}  // namespace tidegate::kernels

#endif
