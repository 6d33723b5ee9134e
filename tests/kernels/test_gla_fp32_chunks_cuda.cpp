// Gated linear attention of float32 in chunks on CUDA, through raw pointers: in every form, whole
// and in segments, held against the naive references.

#include <gtest/gtest.h>

#include "kernels/gla/gla_cuda.h"
#include "support/gla_device.h"
#include "support/packed_shapes.h"

namespace tidegate::testing {
namespace {

using kernels::gla::GlaPath;

class GlaCudaFp32Chunks : public GlaCuda {
 protected:
  static void check(const GlaShape& shape) { check_both_passes(shape, GlaPath::kFp32Chunks); }
};

TEST_P(GlaCudaFp32Chunks, EveryLength) {
  uint32_t i = 0;
  for (const int64_t time : {9, 15, 16, 17, 31, 48, 63, 64, 65, 127, 128, 200, 1000}) {
    for (const bool packed : {false, true}) {
      GlaShape shape = vary(i++);
      shape.time = time;
      shape.batch = time >= 200 ? 1 : 2;
      shape.heads = 2;
      shape.key_dim = i % 2 == 0 ? 9 : 40;
      shape.value_dim = i % 3 == 0 ? 4 : 37;
      if (packed) pack(&shape, i / 2);
      check(shape);
    }
  }
}

TEST_P(GlaCudaFp32Chunks, EverySize) {
  uint32_t i = 0;
  for (const int64_t key_dim : {1, 3, 16, 17, 64, 97, 130}) {
    for (const int64_t value_dim : {1, 4, 31, 33, 128, 200}) {
      GlaShape shape = vary(i++);
      shape.batch = 1;
      shape.heads = 1 + i % 2;
      shape.time = i % 4 == 0 ? 16 : 41;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.gap = i % 3;
      shape.shift = i % 2;
      check(shape);
    }
  }
}

// Enough heads for chunks of several sub-chunks; from 132 tiles on (on an H200), outputs go by
// whole sequences.
TEST_P(GlaCudaFp32Chunks, LongChunks) {
  struct Size {
    int64_t batch, heads, keys, values;
  };
  uint32_t i = 0;
  for (const auto& [batch, heads, keys, values] :
       {Size{1, 48, 97, 65}, Size{2, 40, 64, 35}, Size{1, 90, 40, 36}, Size{2, 72, 41, 39}}) {
    for (const bool packed : {false, true}) {
      GlaShape shape = vary(i++);
      shape.batch = batch;
      shape.heads = heads;
      shape.time = 64 * 3 + 37;
      shape.key_dim = keys;
      shape.value_dim = values;
      if (packed) shape.offsets = {0, 0, 100, 100, 105, 64 * 3 + 37};
      if (packed) shape.batch = 1;
      check(shape);
    }
  }
}

TEST_P(GlaCudaFp32Chunks, LargestSizes) {
  for (const int64_t key_dim : {8, 256}) {
    for (const int64_t value_dim : {8, 256}) {
      GlaShape shape = vary(static_cast<uint32_t>(key_dim + value_dim));
      shape.batch = shape.heads = 1;
      shape.time = 81;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      check(shape);
    }
  }
}

// Long enough, and few enough heads, for the states to be found in segments.
TEST_P(GlaCudaFp32Chunks, Segments) {
  for (uint32_t i = 0; i < 4; ++i) {
    GlaShape shape = vary(i);
    shape.batch = shape.heads = 1;
    shape.time = 64 * 8 * 4 + (i % 2 == 0 ? 0 : 37);
    shape.key_dim = i % 2 == 0 ? 16 : 35;
    shape.value_dim = i < 2 ? 8 : 21;
    if (i >= 2) shape.offsets = {0, 0, shape.time - 5, shape.time - 5, shape.time};
    GlaProblem problem(shape);
    kernels::gla::GlaParams params = problem.forward_params();
    params.path = GlaPath::kFp32Chunks;
    check_cuda(kernels::gla::gla_forward_plan(params, &params.plan), "plan");
    EXPECT_EQ(params.plan.segment_time > 0, i < 2);
    check(shape);
  }
}

TEST_P(GlaCudaFp32Chunks, LittleSharedMemory) {
  const SharedBytesLimit limit(99 * 1024);
  for (const int64_t dim : {64, 128}) {
    GlaShape shape = vary(static_cast<uint32_t>(dim));
    shape.batch = shape.heads = 1;
    shape.time = 90;
    shape.key_dim = shape.value_dim = dim;
    check(shape);
  }
}

TEST_P(GlaCudaFp32Chunks, NanReachesLaterTokensOnly) {
  check_that_nan_reaches_later_tokens_only(GlaPath::kFp32Chunks);
}

TEST_P(GlaCudaFp32Chunks, Sanitize) {
  for (uint32_t i = 0; i < 3; ++i) {
    GlaShape shape = vary(6 + i);
    shape.has_states = true;
    shape.batch = shape.heads = 1;
    shape.heads = i == 0 ? 120 : 1;  // enough for long chunks
    shape.time = i == 1 ? 64 * 8 * 4 : 83;
    shape.key_dim = i == 0 ? 130 : i == 1 ? 17 : 40;
    shape.value_dim = i == 0 ? 4 : i == 1 ? 20 : 33;
    if (i == 2) pack(&shape, 0);
    check(shape);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GlaCudaFp32Chunks,
                         ::testing::Combine(::testing::Values(DType::kFloat32),
                                            ::testing::Values(false),
                                            ::testing::ValuesIn(kGlaForms)),
                         gla_cuda_name);

}  // namespace
}  // namespace tidegate::testing
