#pragma once

// How tests of packed sequences divide their tokens.

#include <cstdint>
#include <vector>

namespace tidegate::testing {

/// Divides about shape->time tokens into packed sequences, empty ones among them, in one of four
/// ways.
template <class Shape>
void pack(Shape* shape, uint32_t way) {
  const int64_t time = shape->time;
  const std::vector<int64_t> ways[] = {{0, 0, time / 3, time / 3, time, time},
                                       {0, time / 2, 2 * (time / 2), 3 * (time / 2)},
                                       {0, 1, time + 1, time + 3},
                                       {0, time, time, time}};
  shape->offsets = ways[way % 4];
  shape->time = shape->offsets.back();
  shape->batch = 1;
}

}  // namespace tidegate::testing
