#pragma once

// What results say of the machine.

#include <fstream>
#include <string>

namespace tidegate::testing {

/// The CPU's name as Linux tells it, or empty.
inline std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "";
}

}  // namespace tidegate::testing
