// The command line of bench_models.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/models/sizes.h"
#include "benchmarks/models/work.h"

namespace tidegate::benchmarks {

extern const char kUsage[];

struct Flags {
  bool help = false;
  bool list = false;
  Setup setup;
  Size size;
  std::vector<int64_t> contexts;
  std::vector<std::string> mixers;
  int64_t rounds = 2;
  std::string json;    // a path; empty: none is written
  std::string commit;  // for the JSON
};

/// Throws c10::ValueError that names the flag, what it takes and what was given.
Flags parse_flags(const std::vector<std::string>& arguments);

}  // namespace tidegate::benchmarks
