// Sums over rows on a CUDA device, held against sums in long double.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/common/cuda/row_sums.h"
#include "support/device_mirror.h"

namespace tidegate::testing {
namespace {

using kernels::DType;
using kernels::RowSums;

template <class Real>
class Matrices {
 public:
  Matrices(int count, int64_t rows, int64_t columns, DType dtype) : columns_(columns) {
    std::mt19937_64 engine(count + 10 * rows + 100 * columns);
    std::normal_distribution<double> normal;
    work_.count = count;
    work_.rows = rows;
    work_.columns = columns;
    work_.dtype = dtype;
    for (int i = 0; i < count; ++i) {
      std::vector<Real> values(rows * columns);
      for (Real& value : values) value = static_cast<Real>(normal(engine));
      const size_t bytes = values.size() * sizeof(Real);
      from_.push_back(std::make_unique<DeviceBuffer>(bytes));
      to_.push_back(std::make_unique<DeviceBuffer>((columns + 1) * sizeof(Real)));
      check_cuda(cudaMemcpy(from_[i]->data(), values.data(), bytes, cudaMemcpyHostToDevice), "up");
      work_.from[i] = from_[i]->data();
      work_.to[i] = to_[i]->data();
      values_.push_back(std::move(values));
    }
  }

  std::vector<std::vector<Real>> run() {
    check_cuda(kernels::sum_rows(work_, nullptr), "sum_rows");
    std::vector<std::vector<Real>> sums;
    for (const auto& buffer : to_) {
      sums.emplace_back(columns_ + 1);
      check_cuda(cudaMemcpy(sums.back().data(), buffer->data(), (columns_ + 1) * sizeof(Real),
                            cudaMemcpyDeviceToHost),
                 "down");
    }
    return sums;
  }

  void check() {
    const auto sums = run();
    for (int i = 0; i < work_.count; ++i) {
      for (int64_t j = 0; j < columns_; ++j) {
        long double expected = 0, size = 0;
        for (int64_t row = 0; row < work_.rows; ++row) {
          expected += values_[i][row * columns_ + j];
          size += std::fabs(values_[i][row * columns_ + j]);
        }
        // Half a last place for every addition on the way, all in double, and for the result.
        const double additions = 32 + work_.rows / 32.0;
        const double allowed = static_cast<double>(size) *
                               (additions * std::numeric_limits<double>::epsilon() +
                                std::numeric_limits<Real>::epsilon()) /
                               2;
        ASSERT_NEAR(sums[i][j], static_cast<double>(expected), allowed) << i << " " << j;
      }
      EXPECT_TRUE(std::isnan(sums[i][columns_])) << "written past the end";
    }
    EXPECT_EQ(std::memcmp(run().data()->data(), sums[0].data(), columns_ * sizeof(Real)), 0)
        << "differs from run to run";
  }

 private:
  int64_t columns_;
  RowSums work_;
  std::vector<std::vector<Real>> values_;
  std::vector<std::unique_ptr<DeviceBuffer>> from_, to_;
};

TEST(CudaRowSums, EveryShape) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    GTEST_SKIP() << "no CUDA device";
  }
  for (const int64_t rows : {0, 1, 2, 8, 31, 32, 33, 264, 1000}) {
    for (const int64_t columns : {1, 31, 32, 33, 1000}) {
      for (int matrices = 1; matrices <= RowSums::kMost; ++matrices) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns));
        Matrices<float>(matrices, rows, columns, DType::kFloat32).check();
        Matrices<double>(matrices, rows, columns, DType::kFloat64).check();
      }
    }
  }
}

}  // namespace
}  // namespace tidegate::testing
