// Caches that grow where they are, on the CPU and on CUDA: addresses, contents, memory, errors.

#include "src/models/growing_cache.h"

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <vector>

#include "src/models/device_work.h"
#include "src/models/row_states.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

std::vector<at::Device> devices() {
  std::vector<at::Device> all = {at::kCPU};
  if (torch::cuda::is_available()) all.emplace_back(at::kCUDA, 0);
  return all;
}

Tensor like(at::IntArrayRef shape, at::Device device, at::ScalarType dtype = at::kFloat) {
  return at::empty(shape, at::TensorOptions(device).dtype(dtype));
}

TEST(GrowingCache, GrowsWhereItIs) {
  for (const at::Device device : devices()) {
    SCOPED_TRACE(device.str());
    GrowingCache cache(like({3, 1, 2, 40}, device), 1 << 20);
    EXPECT_TRUE(cache.is_in_place());
    cache.grow(7);
    const Tensor first = cache.tensor();
    EXPECT_EQ(first.sizes(), at::IntArrayRef({3, 7, 2, 40}));
    EXPECT_EQ(first.stride(-1), 1);
    EXPECT_EQ(at::count_nonzero(first).item<int64_t>(), 0);
    const Tensor written = at::randn({3, 7, 2, 40}).to(device);
    first.copy_(written);
    const int64_t before = cache.bytes();
    for (const int64_t tokens : {8, 300, 20000}) {
      cache.grow(tokens);
      const Tensor& now = cache.tensor();
      EXPECT_EQ(now.size(1), tokens);
      EXPECT_EQ(now.data_ptr(), first.data_ptr());
      EXPECT_EQ(now.strides(), first.strides());
      EXPECT_TRUE(at::equal(now.narrow(1, 0, 7), written));
      EXPECT_EQ(at::count_nonzero(now.narrow(1, 7, tokens - 7)).item<int64_t>(), 0);
      EXPECT_GE(cache.bytes(), 3 * tokens * 80 * 4);
    }
    // 3 x 20000 x 80 numbers are 19.2 MB, and a page is 2 MB.
    EXPECT_GT(cache.bytes(), before);
    EXPECT_LT(cache.bytes(), 22 << 20);
    cache.grow(5);
    EXPECT_EQ(cache.tensor().size(1), 20000) << "it never shrinks";
  }
}

TEST(GrowingCache, TensorsKeepTheMemory) {
  for (const at::Device device : devices()) {
    Tensor kept;
    {
      GrowingCache cache(like({2, 1, 5}, device), 1000);
      cache.grow(10);
      kept = cache.tensor();
    }
    kept.fill_(3);
    EXPECT_EQ(kept.sum().item<float>(), 300) << device;
  }
}

TEST(GrowingCache, TakesMemoryOnlyAsItGrows) {
  // Addresses of more memory than any machine has.
  for (const at::Device device : devices()) {
    SCOPED_TRACE(device.str());
    GrowingCache cache(like({4, 1, 1 << 16}, device), 1 << 22);
    ASSERT_TRUE(cache.is_in_place());
    cache.grow(2);
    cache.tensor().fill_(1);
    EXPECT_LE(cache.bytes(), 2 << 20);
    EXPECT_THROW(cache.grow(1 << 22), c10::OutOfMemoryError);
    try {
      cache.grow(1 << 22);
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what())
                    .find("generation: out of memory: a layer's cache [4, "
                          "4194304, 65536] of Float has room for 2 tokens"),
                std::string::npos)
          << error.what();
    }
    EXPECT_EQ(cache.tensor().size(1), 2);
    EXPECT_EQ(cache.tensor().sum().item<float>(), 8 << 16);
  }
}

TEST(GrowingCache, KeepsNothingOfEmptyTokens) {
  for (const at::Device device : devices()) {
    GrowingCache cache(like({4, 1, 0}, device), 100);
    cache.grow(6);
    EXPECT_EQ(cache.tensor().sizes(), at::IntArrayRef({4, 6, 0}));
    EXPECT_EQ(cache.bytes(), 0);
  }
}

TEST(RowStates, OfAttentionGrowWhereTheyAre) {
  for (const at::Device device : devices()) {
    LMConfig config;
    config.mixer = std::string("fox");
    config.vocab_size = 11;
    config.dim = 32;
    config.layers = 2;
    const CausalLM model(config, nn::Placement{device, torch::kFloat});
    RowStates states(*model, 3, 16);
    std::vector<const void*> places;
    for (const nn::MixerState& layer : states.all()) {
      for (const Tensor& t : layer) places.push_back(t.const_data_ptr());
      layer[0].fill_(2);
    }
    const ModelState views = states.first(2);
    states.grow(5000);
    EXPECT_EQ(states.capacity(), 5000);
    std::vector<const void*> after;
    for (const nn::MixerState& layer : states.all()) {
      for (const Tensor& t : layer) after.push_back(t.const_data_ptr());
      EXPECT_EQ(layer[0].size(1), 5000);
      EXPECT_EQ(layer[0].narrow(1, 0, 16).min().item<float>(), 2);
    }
    EXPECT_EQ(places, after);
    EXPECT_EQ(views[0][0].data_ptr(), states.all()[0][0].data_ptr());
    EXPECT_EQ(views[0][0].size(1), 16);
  }
}

}  // namespace
}  // namespace tidegate::models
