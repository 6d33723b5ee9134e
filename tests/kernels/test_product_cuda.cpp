// Products of a few rows with what a layer does around them, on CUDA through raw pointers: held
// against the definition in double.

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/product/product_cuda.h"
#include "support/device_mirror.h"
#include "support/typed_series.h"

namespace tidegate::testing {
namespace {

using kernels::norm::Activation;
using kernels::norm::NormKind;
using kernels::product::FusedProductParams;

struct Case {
  int64_t rows, outer, inner;
  std::string norm = "none";  // "rms", "weightless", "layer"
  std::string gate = "none";  // "before", "after" the norm
  bool is_glu = false, has_bias = false, has_residual = false;
  int64_t gap = 0;  // elements between rows

  std::string name() const {
    return std::to_string(rows) + "x" + std::to_string(inner) + "x" + std::to_string(outer) +
           " norm " + norm + " gate " + gate + (is_glu ? " glu" : "") + (has_bias ? " bias" : "") +
           (has_residual ? " residual" : "") + " gap " + std::to_string(gap);
  }
};

double activated(Activation kind, double x) {
  const double sigmoid = 1 / (1 + std::exp(-x));
  return kind == Activation::kNone ? x : kind == Activation::kSigmoid ? sigmoid : x * sigmoid;
}

/// The tensors of a case, on the host and on the device.
class Problem {
 public:
  Problem(const Case& given, DType dtype)
      : c(given),
        x(dtype, 1, c.rows, c.inner, c.gap),
        w(dtype, 1, c.is_glu ? 2 * c.outer : c.outer, c.inner, c.gap),
        bias(dtype, 1, 1, w.tokens()),
        weight(dtype, 1, 1, c.inner),
        shift(dtype, 1, 1, c.inner),
        gate(dtype, 1, c.rows, c.inner, c.gap),
        residual(dtype, 1, c.rows, c.outer, 3),
        y(dtype, 1, c.rows, c.outer, 5, 1) {
    std::mt19937_64 engine(static_cast<uint64_t>(c.inner * 31 + c.outer));
    for (auto [tensor, size] : {std::pair{&x, 1.0},
                                {&w, 1 / std::sqrt(static_cast<double>(c.inner))},
                                {&bias, 1.0},
                                {&weight, 1.0},
                                {&shift, 1.0},
                                {&gate, 1.0},
                                {&residual, 1.0}}) {
      std::normal_distribution<double> normal(0, size);
      for (int64_t i = 0; i < tensor->tokens(); ++i) {
        for (int64_t j = 0; j < tensor->columns(); ++j) tensor->set(i, j, normal(engine));
      }
    }
  }

  FusedProductParams params() {
    FusedProductParams p;
    p.product.rows = c.rows;
    p.product.inner = c.inner;
    p.product.outer = c.outer;
    p.product.dtype = x.dtype();
    p.product.x = x.at(0, 0);
    p.product.stride_x = x.series().stride_t;
    p.product.w = w.at(0, 0);
    p.product.stride_w = w.series().stride_t;
    p.product.bias = c.has_bias ? bias.at(0, 0) : nullptr;
    p.product.y = y.at(0, 0);
    p.product.stride_y = y.series().stride_t;
    p.has_norm = c.norm != "none";
    p.norm_kind = c.norm == "layer" ? NormKind::kLayer : NormKind::kRms;
    p.eps = kEps;
    if (c.norm == "rms" || c.norm == "layer") p.norm_weight = weight.at(0, 0);
    if (c.norm == "layer") p.norm_bias = shift.at(0, 0);
    if (c.gate != "none") {
      p.gate = gate.at(0, 0);
      p.stride_gate = gate.series().stride_t;
      p.gate_first = c.gate == "before";
      p.gate_activation = p.gate_first ? Activation::kSigmoid : Activation::kSilu;
    }
    p.is_glu = c.is_glu;
    if (c.has_residual) {
      p.residual = residual.at(0, 0);
      p.stride_residual = residual.series().stride_t;
    }
    return p;
  }

  /// Whether the kernel took it. more: where rows of w from a channel on are instead.
  bool run(const std::vector<std::pair<TypedSeries*, int64_t>>& more = {}) {
    DeviceMirror mirror;
    FusedProductParams p = on_device(&mirror);
    for (size_t i = 0; i < more.size(); ++i) {
      mirror.add(*more[i].first);
      p.more[i] = {more[i].first->at(0, 0), more[i].first->series().stride_t, more[i].second};
      mirror.translate(p.more[i].w);
    }
    bool fits = false;
    check_cuda(kernels::product::fused_product_fits(p, &fits), "fits");
    if (!fits) return false;
    check_cuda(kernels::product::fused_product_cuda(p, nullptr), "launch");
    check_cuda(cudaDeviceSynchronize(), "kernel");
    mirror.download();
    return true;
  }

  /// How many of so many launches, one behind the other and each into memory of its own, make
  /// another y than run() has made.
  int wrong_in_chain(int launches) {
    DeviceMirror mirror;
    FusedProductParams p = on_device(&mirror);
    const size_t row_bytes = static_cast<size_t>(c.outer) * sizeof(uint16_t);
    const size_t bytes = static_cast<size_t>(c.rows) * row_bytes;
    const DeviceBuffer all(static_cast<size_t>(launches) * bytes);
    p.product.stride_y = c.outer;
    for (int i = 0; i < launches; ++i) {
      p.product.y = all.data() + static_cast<size_t>(i) * bytes;
      check_cuda(kernels::product::fused_product_cuda(p, nullptr), "launch");
    }
    check_cuda(cudaDeviceSynchronize(), "kernels");
    std::vector<unsigned char> found(static_cast<size_t>(launches) * bytes);
    check_cuda(cudaMemcpy(found.data(), all.data(), found.size(), cudaMemcpyDeviceToHost), "y");
    int wrong = 0;
    for (int i = 0; i < launches; ++i) {
      bool is_same = true;
      for (int64_t r = 0; r < c.rows; ++r) {
        const auto* const row =
            found.data() + static_cast<size_t>(i) * bytes + static_cast<size_t>(r) * row_bytes;
        is_same = is_same && std::memcmp(row, y.at(r, 0), row_bytes) == 0;
      }
      wrong += !is_same;
    }
    return wrong;
  }

  void check() {
    const double unit = x.dtype() == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    for (int64_t r = 0; r < c.rows; ++r) {
      const std::vector<double> u = normed(r);
      for (int64_t o = 0; o < c.outer; ++o) {
        // What rounding u may turn is as large as the sum of what its roundings weigh.
        const auto [z, slack] = product(u, o);
        double exact = z, allowed = unit * (std::fabs(z) + slack);
        if (c.is_glu) {
          const auto [value, other] = product(u, o + c.outer);
          const double act = activated(Activation::kSilu, z);
          allowed = 1.2 * allowed * std::fabs(value) +
                    unit * (std::fabs(value) + other) * std::fabs(act) +
                    unit * std::fabs(act * value);
          exact = act * value;
        }
        if (c.has_residual) {
          exact += residual.get(r, o).real();
          allowed += unit * std::fabs(exact);
        }
        ASSERT_NEAR(y.get(r, o).real(), exact, 2 * allowed + 1e-6) << r << ", " << o;
      }
    }
    EXPECT_TRUE(y.surroundings_untouched());
  }

  const Case c;
  TypedSeries x, w, bias, weight, shift, gate, residual, y;

 private:
  static constexpr double kEps = 1e-5;

  FusedProductParams on_device(DeviceMirror* mirror) {
    FusedProductParams p = params();
    for (TypedSeries* t : {&x, &w, &bias, &weight, &shift, &gate, &residual, &y}) mirror->add(*t);
    for (const void** pointer : {&p.product.x, &p.product.w, &p.product.bias, &p.norm_weight,
                                 &p.norm_bias, &p.gate, &p.residual}) {
      mirror->translate(*pointer);
    }
    mirror->translate(p.product.y);
    return p;
  }

  double gated(int64_t row, int64_t k, double value, bool first) const {
    if (c.gate != (first ? "before" : "after")) return value;
    return value *
           activated(first ? Activation::kSigmoid : Activation::kSilu, gate.get(row, k).real());
  }

  std::vector<double> normed(int64_t row) const {
    std::vector<double> u(static_cast<size_t>(c.inner));
    double mean = 0, square = 0;
    for (int64_t k = 0; k < c.inner; ++k) {
      u[k] = x.get(row, k).real();
      if (c.norm != "none") u[k] = gated(row, k, u[k], true);
      mean += u[k] / static_cast<double>(c.inner);
    }
    if (c.norm == "none") return u;
    if (c.norm != "layer") mean = 0;
    for (const double value : u) square += (value - mean) * (value - mean);
    const double factor = 1 / std::sqrt(square / static_cast<double>(c.inner) + kEps);
    for (int64_t k = 0; k < c.inner; ++k) {
      u[k] = (u[k] - mean) * factor;
      if (c.norm != "weightless") u[k] *= weight.get(0, k).real();
      if (c.norm == "layer") u[k] += shift.get(0, k).real();
      u[k] = gated(row, k, u[k], false);
    }
    return u;
  }

  std::pair<double, double> product(const std::vector<double>& u, int64_t channel) const {
    double sum = c.has_bias ? bias.get(0, channel).real() : 0, squares = 0;
    for (int64_t k = 0; k < c.inner; ++k) {
      const double term = u[k] * w.get(channel, k).real();
      sum += term;
      squares += term * term;
    }
    return {sum, 4 * std::sqrt(squares)};
  }
};

bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// Rows that the device's kernels take.
int64_t most_rows() {
  int64_t rows = 0;
  check_cuda(kernels::product::most_fused_rows(&rows), "rows");
  return rows;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t rows : {1, 2, 3, 7, 8, 9, 15, 16, 17, 40, 64}) {
    if (rows > most_rows()) break;
    all.push_back({rows, 300, 1024, "weightless", "none", false, false, true});
    all.push_back({rows, 77, 72, "layer", "before", false, true, false, 8});
    all.push_back({rows, 150, 264, "rms", "after", true, true, true, 16});
    all.push_back({rows, 1, 8});
    all.push_back({rows, 1027, 520, "none", "none", false, true, true});
    all.push_back({rows, 40, 2816, "none", "none", false, false, true});
    all.push_back({rows, 2500, 200, "rms"});  // more tiles a block than its ring has stages
  }
  // More channels than the blocks of a batch take at once, and a longer way than their rings.
  if (most_rows() > 20) {
    all.push_back({20, 13000, 72, "layer", "none", false, true, true});
    all.push_back({19, 130, 8200, "layer", "after", true, false, true});
  }
  return all;
}

TEST(CudaFusedProduct, IsItsDefinition) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Case& c : cases()) {
      SCOPED_TRACE(c.name());
      Problem problem(c, dtype);
      ASSERT_TRUE(problem.run());
      problem.check();
    }
  }
}

/// A reduced set for compute-sanitizer: tiny shapes, each way through the kernels once, of few rows
/// and of a batch.
TEST(CudaFusedProductSanitize, Tiny) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::vector<Case> tiny = {{2, 40, 264, "rms", "after", true, true, true, 8},
                            {3, 33, 136, "layer", "before", false, true}};
  if (most_rows() > 16) {
    tiny.push_back({64, 300, 200, "weightless"});                        // x as it is
    tiny.push_back({7, 40, 264, "rms", "after", true, true, true, 8});   // times its gate
    tiny.push_back({33, 33, 136, "layer", "before", false, true});       // normed first
    tiny.push_back({17, 24, 1032, "none", "none", false, false, true});  // many chunks
    tiny.push_back({6, 13000, 72, "rms"});                               // several passes
  }
  for (const Case& c : tiny) {
    SCOPED_TRACE(c.name());
    Problem problem(c, DType::kBFloat16);
    ASSERT_TRUE(problem.run());
    problem.check();
  }
}

/// The first rows of `from` become those of `to`.
void copy_rows(const TypedSeries& from, TypedSeries* to) {
  for (int64_t r = 0; r < to->tokens(); ++r) {
    for (int64_t k = 0; k < to->columns(); ++k) to->set(r, k, from.get(r, k));
  }
}

void expect_rows_alone(int64_t inner, int64_t most, std::initializer_list<int64_t> fewer) {
  const auto made = [&](int64_t rows) {
    return Case{rows, 150, inner, "rms", "after", true, true, true};
  };
  Problem all(made(most), DType::kBFloat16);
  ASSERT_TRUE(all.run());
  for (const int64_t rows : fewer) {
    Problem some(made(rows), DType::kBFloat16);
    for (auto tensor : {&Problem::x, &Problem::gate, &Problem::residual, &Problem::w,
                        &Problem::bias, &Problem::weight}) {
      copy_rows(all.*tensor, &(some.*tensor));
    }
    ASSERT_TRUE(some.run());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < 150; ++o) {
        ASSERT_EQ(some.y.get(r, o).real(), all.y.get(r, o).real()) << rows << ": " << r;
      }
    }
  }
}

TEST(CudaFusedProduct, ARowHasTheSameBitsInAnyCompany) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t inner : {264, 1024, 2056}) {
    SCOPED_TRACE(std::to_string(inner));
    expect_rows_alone(inner, 5, {1, 2, 3});
    expect_rows_alone(inner, most_rows(), {6, 9, 16});
  }
}

/// The next product of a chain is launched early, and its blocks get the shared memory of those
/// that have ended, as blocks that make none of 17 rows could before their sums are copied.
TEST(CudaFusedProduct, BatchesOfAChainLeaveEachOtherSMemoryAlone) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  if (most_rows() < 17) GTEST_SKIP() << "no clusters";
  for (const int64_t inner : {264, 2048}) {
    for (const int64_t outer : {300, 2500}) {
      Problem problem({17, outer, inner, "rms"}, DType::kBFloat16);
      ASSERT_TRUE(problem.run());
      EXPECT_EQ(problem.wrong_in_chain(200), 0) << inner << "x" << outer;
    }
  }
}

TEST(CudaFusedProduct, TakesWeightsOfSeveralPlaces) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t rows : {3, 21}) {
    if (rows > most_rows()) break;
    Problem whole({rows, 300, 264, "rms"}, DType::kBFloat16);
    ASSERT_TRUE(whole.run());
    // Rows 0 to 199, 200 to 291 and 292 to 299 of the weights in memory of their own.
    Problem parts({rows, 300, 264, "rms"}, DType::kBFloat16);
    TypedSeries second(DType::kBFloat16, 1, 92, 264, 8), third(DType::kBFloat16, 1, 8, 264);
    for (int64_t k = 0; k < 264; ++k) {
      for (int64_t r = 200; r < 300; ++r) {
        (r < 292 ? second : third).set(r < 292 ? r - 200 : r - 292, k, parts.w.get(r, k));
        parts.w.set(r, k, NAN);
      }
    }
    ASSERT_TRUE(parts.run({{&second, 200}, {&third, 292}}));
    EXPECT_TRUE(parts.y.same_bits(whole.y));
  }
}

TEST(CudaFusedProduct, NanStaysInItsRow) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t rows : {11, 30}) {
    if (rows > most_rows()) break;
    for (const std::string norm : {"none", "rms", "layer"}) {
      Problem problem({rows, 90, 136, norm}, DType::kBFloat16);
      problem.x.set(4, 100, NAN);
      problem.x.set(9, 0, INFINITY);
      ASSERT_TRUE(problem.run());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < 90; ++o) {
          const double y = problem.y.get(r, o).real();
          ASSERT_EQ(std::isfinite(y), r != 4 && r != 9) << norm << ": " << r << ", " << o;
        }
      }
    }
  }
}

TEST(CudaFusedProduct, LeavesTheRestToOthers) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  const auto fits = [](const Case& c, DType dtype) { return Problem(c, dtype).run(); };
  EXPECT_TRUE(fits({16, 8, 64}, DType::kBFloat16));
  EXPECT_EQ(fits({17, 8, 64}, DType::kBFloat16), most_rows() >= 17);
  EXPECT_FALSE(fits({65, 8, 64}, DType::kBFloat16));
  EXPECT_FALSE(fits({1, 8, 63}, DType::kBFloat16));
  EXPECT_FALSE(fits({1, 8, 64, "none", "none", false, false, false, 3}, DType::kBFloat16));
  EXPECT_FALSE(fits({1, 8, 64}, DType::kFloat32));
  EXPECT_FALSE(fits({16, 8, 32768}, DType::kBFloat16)) << "rows larger than shared memory";
}

}  // namespace
}  // namespace tidegate::testing
