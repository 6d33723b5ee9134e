#pragma once

// What the tests of C++ modules share: random numbers, gradients held against a reference's, and
// the messages of errors.

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "support/vector_math.h"

namespace tidegate::testing {

inline at::Tensor randn(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

/// y and the gradients of a function of it to `targets` are those of `expected`.
inline void expect_same_with_gradients(const at::Tensor& y, const at::Tensor& expected,
                                       const std::vector<at::Tensor>& targets) {
  EXPECT_TRUE(at::allclose(y, expected, 1e-10, 1e-12));
  const at::Tensor weight = randn(y.sizes());
  const auto got = torch::autograd::grad({(y * weight).sum()}, targets);
  const auto want = torch::autograd::grad({(expected * weight).sum()}, targets);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(at::allclose(got[i], want[i], 1e-8, 1e-10)) << i;
  }
}

/// `use` throws a c10::ValueError whose text holds `part`.
inline void expect_refused(const std::function<void()>& use, const std::string& part) {
  try {
    use();
    ADD_FAILURE() << "expected an error with: " << part;
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
        << error.what_without_backtrace();
  }
}

}  // namespace tidegate::testing
