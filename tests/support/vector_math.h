#pragma once

// torch takes exp, log and their like on the CPU from oneMKL's vector mathematics, which chooses
// the code for a function when it is first called. Where several threads call it for the first time
// at once, one of them may get code of low accuracy for that one call (1e-9 in float64, on Intel's
// CPUs: pytorch/pytorch issue 188792), and a reference is wrong once in some hundred runs. So each
// function is called with one number, by one thread, before the first test.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tidegate::testing {

class VectorMath : public ::testing::Environment {
 public:
  void SetUp() override {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor x = at::full({1}, 0.5, dtype);
      for (auto* const function :
           {at::exp, at::expm1, at::log, at::log1p, at::log2, at::log10, at::sqrt, at::sin, at::cos,
            at::tan, at::tanh, at::asin, at::acos, at::atan, at::erf, at::erfc}) {
        function(x);
      }
    }
  }
};

/// GoogleTest owns it.
inline ::testing::Environment* const vector_math =
    ::testing::AddGlobalTestEnvironment(new VectorMath);

}  // namespace tidegate::testing
