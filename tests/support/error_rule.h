#pragma once

// The error rule of the tests: against the exact result, a kernel may be wrong by at most twice
// what the same maths in its own precision is, in norm and in the largest element.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"

namespace tidegate::testing {

using Values = std::vector<std::complex<double>>;

/// `yardstick` is the same maths in `dtype`'s state type, rounded to `dtype`. The floor is four
/// roundings of float32 (1e-12 in double precision, where the reference is no more exact).
inline void expect_within_rule(const std::string& name, kernels::DType dtype, const Values& found,
                               const Values& exact, const Values& yardstick) {
  using kernels::DType;
  ASSERT_EQ(found.size(), exact.size()) << name;
  ASSERT_EQ(yardstick.size(), exact.size()) << name;
  const bool wide = dtype == DType::kFloat64 || dtype == DType::kComplex128;
  const double relative = wide ? 1e-12 : 4 * 1.1920929e-7;
  double norm[3] = {};  // of the error, the yardstick's error, the exact values
  double largest[3] = {};
  size_t worst = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double parts[3] = {std::abs(found[i] - exact[i]), std::abs(yardstick[i] - exact[i]),
                             std::abs(exact[i])};
    for (int k = 0; k < 3; ++k) {
      norm[k] += parts[k] * parts[k];
      // A NaN stays: it compares false with everything.
      if (!(parts[k] <= largest[k])) {
        largest[k] = std::isnan(largest[k]) ? largest[k] : parts[k];
        worst = k == 0 ? i : worst;
      }
    }
  }
  const double tiny = 1e-20 * std::sqrt(static_cast<double>(std::max<size_t>(1, exact.size())));
  EXPECT_LE(std::sqrt(norm[0]), 2 * std::sqrt(norm[1]) + relative * std::sqrt(norm[2]) + tiny)
      << name << ": norm of the error, of " << std::sqrt(norm[2]);
  EXPECT_LE(largest[0], 2 * largest[1] + relative * largest[2] + tiny)
      << name << ": largest error, at " << worst << ", of " << largest[2];
}

}  // namespace tidegate::testing
