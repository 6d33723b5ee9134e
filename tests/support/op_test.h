#pragma once

// Ops through the C++ API, on every device that is there: values and gradients against functions of
// torch ops in double precision, and the messages of errors.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <tidegate/version.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/vector_math.h"

namespace tidegate::testing {

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// Runs on the CPU and, where tidegate can, on a GPU: suites named Cpu/... and Cuda/...
class OpTest : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    at::manual_seed(1);
    if (device() == at::kCUDA && !at::globalContext().hasCUDA()) {
      GTEST_SKIP() << "no CUDA device";
    }
    if (device() == at::kCUDA && std::string(build_info()).find("cuda: off") != std::string::npos) {
      GTEST_SKIP() << "tidegate was built without CUDA";
    }
  }

  at::DeviceType device() const { return GetParam(); }
  at::TensorOptions options() const { return at::TensorOptions(device()); }
};

inline Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::TensorOptions(dtype));
}

using Function = std::function<std::pair<Tensor, Tensor>(const Tensors&)>;

/// Values and gradients of `op` on `device` equal those of `reference` on the CPU.
inline void expect_same(at::DeviceType device, const Tensors& inputs, const Function& op,
                        const Function& reference) {
  const auto results = [&](const Function& function, at::DeviceType where) {
    Tensors leaves;
    for (const Tensor& input : inputs) {
      leaves.push_back(input.detach().to(where).requires_grad_());
    }
    const auto [h, last] = function(leaves);
    const Tensor weight = at::linspace(0.5, 1.5, h.numel(), h.options().dtype(at::kDouble));
    const Tensor loss = at::sum(at::abs(h).reshape(-1) * weight) + at::sum(at::abs(last + 1));
    Tensors out = torch::autograd::grad({loss}, leaves);
    out.insert(out.end(), {h, last});
    return out;
  };
  const Tensors expected = results(reference, at::kCPU);
  const Tensors found = results(op, device);
  for (size_t i = 0; i < expected.size(); ++i) {
    const Tensor there = found[i].cpu();
    EXPECT_TRUE(at::allclose(there, expected[i], 1e-9, 1e-11))
        << "result " << i << ", largest difference "
        << (there - expected[i]).abs().max().item<double>();
  }
}

/// The message of the c10::Error that `call` throws, its first line.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace tidegate::testing
