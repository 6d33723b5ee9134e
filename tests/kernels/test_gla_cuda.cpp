// Gated linear attention on CUDA through raw pointers: the plain path in every dtype and the
// tensor-core path in every form, whole and in segments, held against the naive references.
// test_gla_fp32_chunks_cuda.cpp has float32 in chunks.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/gla/gla_cuda.h"
#include "support/gla_device.h"
#include "support/packed_shapes.h"

namespace tidegate::testing {
namespace {

using kernels::gla::GlaPath;

constexpr int64_t kTimes[] = {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000, 4097};

// ---- the plain path ----

class GlaCudaPlain : public GlaCuda {
 protected:
  static void check(const GlaShape& shape) { check_both_passes(shape, GlaPath::kPlain); }
};

TEST_P(GlaCudaPlain, EveryLength) {
  uint32_t i = 0;
  for (const int64_t time : kTimes) {
    for (const bool packed : {false, true}) {
      if (packed && time > 1000) continue;
      GlaShape shape = vary(i++);
      shape.time = time;
      if (time >= 1000) {
        shape.batch = shape.heads = 1;
        shape.key_dim = 9;
        shape.value_dim = 4;
      }
      if (packed) pack(&shape, i / 2);
      check(shape);
    }
  }
}

TEST_P(GlaCudaPlain, EverySize) {
  uint32_t i = 0;
  for (const int64_t key_dim : {1, 16, 17, 130}) {
    for (const int64_t value_dim : {1, 4, 33, 128, 200}) {
      GlaShape shape = vary(i++);
      shape.batch = 1;
      shape.time = i % 4 == 0 ? 2 : 21;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.gap = i % 3;
      shape.shift = i % 2;
      check(shape);
    }
  }
  GlaShape largest = vary(0);
  largest.batch = largest.heads = 1;
  largest.time = 5;
  largest.key_dim = largest.value_dim = kernels::gla::kMaxHeadDim;
  check(largest);
}

constexpr DType kReal[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
constexpr DType kHalf[] = {DType::kBFloat16, DType::kFloat16};

INSTANTIATE_TEST_SUITE_P(Kernels, GlaCudaPlain,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Values(false),
                                            ::testing::ValuesIn(kGlaForms)),
                         gla_cuda_name);
INSTANTIATE_TEST_SUITE_P(WideGates, GlaCudaPlain,
                         ::testing::Combine(::testing::ValuesIn(kHalf), ::testing::Values(true),
                                            ::testing::ValuesIn(kGlaForms)),
                         gla_cuda_name);

// ---- the tensor-core path ----

class GlaCudaTensorCore : public GlaCuda {
 protected:
  /// Lengths around those of chunks and tiles, packed ones too where they are not long.
  std::vector<GlaShape> shapes_of_every_length() const {
    std::vector<GlaShape> shapes;
    uint32_t i = 0;
    for (const int64_t time : kTimes) {
      for (const bool packed : {false, true}) {
        if (packed && time > 1000) continue;
        GlaShape shape = vary(i++);
        shape.time = std::max<int64_t>(time, 3);  // shorter ones are steps
        shape.key_dim = i % 3 == 0 ? 64 : 32;
        shape.value_dim = i % 2 == 0 ? 16 : 48;
        if (time >= 1000) {
          shape.batch = shape.heads = 1;
          shape.key_dim = shape.value_dim = 16;
        }
        if (packed) pack(&shape, i / 2);
        shapes.push_back(shape);
      }
    }
    return shapes;
  }

  /// The backward pass, twice for its bits.
  static void check_backward(const GlaShape& shape) {
    SCOPED_TRACE(shape.full_name());
    GlaProblem problem(shape), again(shape);
    for (GlaProblem* p : {&problem, &again}) {
      kernels::gla::GlaBackwardParams params = p->backward_params();
      params.forward.path = GlaPath::kTensorCore;
      check_cuda(kernels::gla::gla_backward_plan(params, &params.forward.plan), "plan");
      p->take_partials(params.forward.plan.partials);
      GlaOnDevice device(*p, GlaPath::kTensorCore);
      device.backward();
      device.download();
    }
    problem.check_tensor_core_backward();
    for (size_t i = 2; i < problem.outputs().size(); ++i) {
      EXPECT_TRUE(problem.outputs()[i]->surroundings_untouched());
      EXPECT_TRUE(problem.outputs()[i]->same_bits(*again.outputs()[i])) << "output " << i;
    }
  }

  static void check(const GlaShape& shape) {
    SCOPED_TRACE(shape.full_name());
    GlaProblem problem(shape), again(shape);
    for (GlaProblem* p : {&problem, &again}) {
      GlaOnDevice device(*p, GlaPath::kTensorCore);
      device.forward(device.forward_params());
      device.download();
    }
    problem.check_tensor_core_forward();
    EXPECT_TRUE(problem.o.surroundings_untouched());
    EXPECT_TRUE(problem.o.same_bits(again.o));
    EXPECT_TRUE(problem.h_final.same_bits(again.h_final));
  }
};

TEST_P(GlaCudaTensorCore, EveryLength) {
  for (const GlaShape& shape : shapes_of_every_length()) {
    check(shape);
  }
}

TEST_P(GlaCudaTensorCore, EverySize) {
  uint32_t i = 0;
  for (const int64_t key_dim : {16, 64, 80, 128, 144, 256}) {
    for (const int64_t value_dim : {16, 64, 128, 144, 256}) {
      GlaShape shape = vary(i++);
      shape.batch = shape.heads = 1;
      shape.time = 35;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.gap = i % 3 == 0 ? 8 : 0;
      check(shape);
    }
  }
}

// Rows that no 16 bytes divide: any K and V, and rows that begin anywhere.
TEST_P(GlaCudaTensorCore, EveryRow) {
  uint32_t i = 0;
  for (const int64_t key_dim : {1, 7, 63, 64, 66, 105, 116, 121, 200}) {
    for (const int64_t value_dim : {1, 20, 77, 120, 121}) {
      GlaShape shape = vary(i++);
      shape.heads = 1 + i % 2;
      shape.batch = 1 + i / 2 % 2;
      shape.time = 35;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.gap = i % 3;
      shape.shift = i / 3 % 2;
      if (key_dim >= 128) {  // a full tile has no room for rows that begin late
        shape.gap = shape.shift = 0;
      }
      if (i % 4 == 0) pack(&shape, i / 4);
      check(shape);
    }
  }
}

// Long enough for the planner to divide time, with more than a key tile of K. Logits as narrow as
// the data have a kernel of their own for whole tiles of keys and columns, from the fifth shape on.
TEST_P(GlaCudaTensorCore, Segments) {
  const bool own_kernel = shape_.logits() && shape_.gate == shape_.dtype;
  for (uint32_t i = 0; i < (own_kernel ? 7 : 4); ++i) {
    GlaShape shape = vary(i);
    shape.batch = shape.heads = 1;
    shape.time = 1100;
    shape.key_dim = i % 2 == 0 ? 32 : 144;
    shape.value_dim = 16;
    if (i >= 2) {
      shape.value_dim = i == 2 ? 21 : 22;
      shape.offsets = {0, 0, 5, 600, 600, 1100};
    }
    if (i >= 4) {
      shape.time = 600;
      shape.key_dim = i == 4 ? 128 : 256;
      shape.value_dim = i == 6 ? 256 : 128;
      shape.offsets.clear();
      if (i == 4) shape.offsets = {0, 0, 5, 300, 300, 600};
    }
    GlaProblem problem(shape);
    kernels::gla::GlaParams params = problem.forward_params();
    check_cuda(kernels::gla::gla_forward_plan(params, &params.plan), "plan");
    EXPECT_EQ(params.plan.path, GlaPath::kTensorCore);
    EXPECT_GT(params.plan.segment_time, 0);
    check(shape);
  }
}

TEST_P(GlaCudaTensorCore, GradientsOfEveryLength) {
  for (const GlaShape& shape : shapes_of_every_length()) {
    check_backward(shape);
  }
}

TEST_P(GlaCudaTensorCore, GradientsOfEverySize) {
  uint32_t i = 0;
  for (const int64_t key_dim : {16, 64, 80, 128, 144, 256}) {
    for (const int64_t value_dim : {16, 64, 128, 144, 256}) {
      GlaShape shape = vary(i++);
      shape.batch = shape.heads = 1;
      shape.time = 70;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.gap = i % 3 == 0 ? 8 : 0;
      GlaProblem problem(shape);
      bool fits = false;
      check_cuda(kernels::gla::tensor_backward_fits(problem.backward_params(), &fits), "fits");
      if (fits) check_backward(shape);
    }
  }
}

// As many heads as leave the planner five parts of time, and just long enough for them.
TEST_P(GlaCudaTensorCore, GradientsInSegments) {
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "device");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "count");
  GlaShape shape = vary(1);
  const bool packed = shape.dtype == DType::kFloat16;
  const int64_t sequences = packed ? 5 : 1;
  shape.batch = 1;
  shape.heads = std::max<int64_t>(1, multiprocessors / (5 * sequences));
  const int64_t parts = multiprocessors / (shape.heads * sequences);
  const int64_t time = 64 * 4 * parts * sequences;
  shape.time = time;
  shape.key_dim = shape.value_dim = 16;
  if (packed) shape.offsets = {0, 0, 5, time / 2, time / 2, time};
  GlaProblem problem(shape);
  kernels::gla::GlaBackwardParams params = problem.backward_params();
  check_cuda(kernels::gla::gla_backward_plan(params, &params.forward.plan), "plan");
  EXPECT_GT(params.forward.plan.segment_time, 0);
  check_backward(shape);
}

// What a chip with 99 KB of shared memory a block runs: fewer stages of the ring.
TEST_P(GlaCudaTensorCore, LittleSharedMemory) {
  const SharedBytesLimit limit(99 * 1024);
  for (uint32_t i = 0; i < 4; ++i) {
    GlaShape shape = vary(i);
    shape.batch = shape.heads = 1;
    shape.time = 150;
    shape.key_dim = i % 2 == 0 ? 128 : 64;
    shape.value_dim = i / 2 == 0 ? 128 : 80;
    check(shape);
    check_backward(shape);
  }
}

TEST_P(GlaCudaTensorCore, NanReachesLaterTokensOnly) {
  check_that_nan_reaches_later_tokens_only(GlaPath::kTensorCore);
}

INSTANTIATE_TEST_SUITE_P(Kernels, GlaCudaTensorCore,
                         ::testing::Combine(::testing::ValuesIn(kHalf), ::testing::Bool(),
                                            ::testing::ValuesIn(kGlaForms)),
                         gla_cuda_name);

// ---- all paths ----

class GlaCudaStep : public GlaCuda {};

TEST_P(GlaCudaStep, UpdatesTheStateInPlace) {
  for (const int64_t value_dim : {5, 128}) {
    GlaShape shape = vary(0);
    shape.time = 1;
    shape.batch = 3;
    shape.key_dim = 130;
    shape.value_dim = value_dim;
    GlaProblem apart(shape), in_place(shape);
    GlaOnDevice device(apart, GlaPath::kAuto), device_in_place(in_place, GlaPath::kAuto);
    device.forward(device.forward_params());
    auto params = device_in_place.forward_params();
    params.h_final = const_cast<void*>(params.h0);
    device_in_place.forward(params);
    device.download();
    device_in_place.download();
    EXPECT_TRUE(in_place.h0.same_bits(apart.h_final));
    EXPECT_TRUE(in_place.o.same_bits(apart.o));
  }
}

TEST_P(GlaCudaStep, WithoutAFinalState) {
  for (const int64_t time : {0, 1, 2, 40}) {
    GlaShape shape = vary(0);
    shape.time = time;
    shape.key_dim = shape.value_dim = 32;
    GlaProblem with(shape), without(shape);
    GlaOnDevice device(with, GlaPath::kAuto), device_without(without, GlaPath::kAuto);
    device.forward(device.forward_params());
    auto params = device_without.forward_params();
    params.h_final = nullptr;
    device_without.forward(params);
    device.download();
    device_without.download();
    EXPECT_TRUE(with.o.same_bits(without.o));
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GlaCudaStep,
                         ::testing::Combine(::testing::ValuesIn(kReal), ::testing::Values(false),
                                            ::testing::ValuesIn(kGlaForms)),
                         gla_cuda_name);

/// A reduced set for compute-sanitizer: tiny shapes, each kernel once or twice.
class GlaCudaSanitize : public GlaCudaTensorCore {};

TEST_P(GlaCudaSanitize, Tiny) {
  for (const GlaPath path : {GlaPath::kPlain, GlaPath::kTensorCore}) {
    // The third shape is for the maps' own kernel. In the others' ring of stages racecheck would
    // report hazards there: it does not see that one lane's arrival, after __syncwarp, is for its
    // whole warp.
    const bool own_kernel =
        path == GlaPath::kTensorCore && shape_.logits() && shape_.gate == shape_.dtype;
    for (uint32_t i = 0; i < (own_kernel ? 3 : 2); ++i) {
      GlaShape shape = vary(6 + i);
      shape.has_states = true;
      shape.batch = shape.heads = 1;
      shape.time = i == 0 ? 35 : i == 1 ? 600 : 512;  // in segments
      shape.key_dim = i == 0 ? 144 : i == 1 ? 32 : 128;
      shape.value_dim = i == 2 ? 128 : 16;
      if (i == 1) pack(&shape, 0);
      GlaProblem problem(shape);
      GlaOnDevice device(problem, path);
      device.forward(device.forward_params());
      if (path == GlaPath::kPlain && i == 0) device.backward();
      device.download();
      if (path == GlaPath::kTensorCore) {
        problem.check_tensor_core_forward();
        check_backward(shape);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GlaCudaSanitize,
                         ::testing::Combine(::testing::Values(DType::kBFloat16),
                                            ::testing::Values(false),
                                            ::testing::ValuesIn(kGlaForms)),
                         gla_cuda_name);

TEST(GlaCudaPlan, TakesTensorCoresWhereTheyFit) {
  if (no_device()) GTEST_SKIP() << "no CUDA device";
  GlaShape shape;
  shape.dtype = shape.gate = DType::kBFloat16;
  shape.time = 100;
  shape.key_dim = shape.value_dim = 64;
  const auto path_of = [&](auto change) {
    GlaProblem problem(shape);
    auto params = problem.forward_params();
    change(params);
    check_cuda(kernels::gla::gla_forward_plan(params, &params.plan), "plan");
    return params.plan.path;
  };
  using kernels::gla::GlaParams;
  EXPECT_EQ(path_of([](GlaParams&) {}), GlaPath::kTensorCore);
  EXPECT_EQ(path_of([](GlaParams& p) { p.path = GlaPath::kPlain; }), GlaPath::kPlain);
  EXPECT_EQ(path_of([](GlaParams& p) { p.key_dim = 63; }), GlaPath::kTensorCore);
  EXPECT_EQ(path_of([](GlaParams& p) { p.value_dim = 272; }), GlaPath::kPlain);
  EXPECT_EQ(path_of([](GlaParams& p) { p.q.stride_t += 1; }), GlaPath::kTensorCore);
  // Rows of 254 bytes that begin anywhere have no room in a tile of 256.
  const auto outgrow_tile = [](GlaParams& p) {
    p.key_dim = 127;
    p.q.stride_t += 1;
  };
  EXPECT_EQ(path_of(outgrow_tile), GlaPath::kPlain);
  EXPECT_EQ(path_of([](GlaParams& p) { p.layout.time = 2; }), GlaPath::kPlain);
  const auto as_float32 = [](GlaParams& p) {
    for (kernels::HeadSeries* rows : {&p.q, &p.k, &p.v, &p.gate, &p.o}) {
      rows->dtype = DType::kFloat32;
    }
  };
  EXPECT_EQ(path_of(as_float32), GlaPath::kFp32Chunks);
  EXPECT_EQ(path_of([&](GlaParams& p) {
              as_float32(p);
              p.layout.time = kernels::gla::kMostUnpaddedTokens;
            }),
            GlaPath::kPlain);
  EXPECT_EQ(path_of([&](GlaParams& p) {
              as_float32(p);
              p.value_dim = 272;
            }),
            GlaPath::kPlain);
  GlaProblem problem(shape);
  auto params = problem.forward_params();
  params.path = GlaPath::kTensorCore;
  outgrow_tile(params);
  EXPECT_EQ(kernels::gla::gla_forward_plan(params, &params.plan), cudaErrorNotSupported);
}

}  // namespace
}  // namespace tidegate::testing
