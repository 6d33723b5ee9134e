// Norms of rows of any size, type and alignment. A warp has a row, which it reads once for each sum
// and once for the results; where rows are short the caches have them. Elements are converted by
// their dtype as it is known when the program runs, so that there is one kernel for float and one
// for double.

#include "kernels/norm/cuda/plain.cuh"

#include <algorithm>

#include "kernels/norm/cuda/row_tile.cuh"

namespace tidegate::kernels::norm {
namespace {

constexpr int kWarps = 8;       // of a block, each with a row
constexpr int kColumns = 32;    // of a block that sums over rows
constexpr int kRowsAtOnce = 8;  // that it reads side by side
constexpr int64_t kMostPartials = 64;

template <class Real>
__device__ Real read(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kFloat16:
      return widen(static_cast<const __half*>(data)[i]);
    case DType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

template <class Real>
__device__ void write(void* data, DType dtype, int64_t i, Real x) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[i] = narrow<__nv_bfloat16>(static_cast<float>(x));
      break;
    case DType::kFloat16:
      static_cast<__half*>(data)[i] = narrow<__half>(static_cast<float>(x));
      break;
    case DType::kFloat64:
      static_cast<double*>(data)[i] = x;
      break;
    default:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
  }
}

/// x rounded to `dtype`.
template <class Real>
__device__ Real rounded(Real x, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return widen(narrow<__nv_bfloat16>(static_cast<float>(x)));
    case DType::kFloat16:
      return widen(narrow<__half>(static_cast<float>(x)));
    default:
      return x;
  }
}

/// a * b, rounded, whatever is done with it.
__device__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ double product(double a, double b) { return __dmul_rn(a, b); }

__device__ int64_t rows_of(const NormParams& p) { return p.batch * p.time * p.heads; }

template <class Real>
using PlainMath = GateMath<Real, false>;

/// One row: where it is in each tensor, and what its sums have come to.
template <class Real>
struct PlainRow {
  const NormParams& p;
  int64_t row;
  RowPlace<int64_t> place;
  Real mean = 0, rest = 0, scale = 1;  // the mean in two numbers

  __device__ PlainRow(const NormParams& params, int64_t of_row)
      : p(params), row(of_row), place(row_place(params, of_row)) {}

  __device__ Real at(const HeadSeries& series, int64_t i) const {
    return read<Real>(series.data, series.dtype, offset(series) + i);
  }
  __device__ void put(const HeadSeries& series, int64_t i, Real x) const {
    write(series.data, series.dtype, offset(series) + i, x);
  }
  __device__ int64_t offset(const HeadSeries& series) const {
    return place.batch * series.stride_b + place.time * series.stride_t +
           place.head * series.stride_h;
  }

  __device__ int64_t of_head(int64_t i) const { return row % p.weight_heads * p.channels + i; }
  __device__ Real weight(int64_t i) const {
    return p.weight == nullptr ? Real(1) : read<Real>(p.weight, p.weight_dtype, of_head(i));
  }
  __device__ Real bias(int64_t i) const {
    return p.bias == nullptr ? Real(0) : read<Real>(p.bias, p.bias_dtype, of_head(i));
  }

  __device__ bool has_gate() const { return p.gate.data != nullptr; }
  __device__ void gate(int64_t i, Real* value, Real* derivative) const {
    activate<PlainMath<Real>>(p.activation, at(p.gate, i), value, derivative);
  }
  __device__ Real gate_value(int64_t i) const {
    Real value, derivative;
    gate(i, &value, &derivative);
    return value;
  }

  /// What is normed.
  __device__ Real normed(int64_t i) const {
    const Real x = at(p.x, i);
    if (p.addend.data != nullptr) {
      return rounded(x + at(p.addend, i), p.x.dtype);
    }
    return has_gate() && p.gate_first ? product(x, gate_value(i)) : x;
  }

  __device__ Real centred(int64_t i) const { return (normed(i) - mean) - rest; }

  /// Sets mean and scale; the whole warp comes here.
  __device__ void find_moments(int lane) {
    Real sum = 0;
    if (p.kind == NormKind::kLayer) {
      for (int64_t i = lane; i < p.channels; i += kWarpSize) {
        sum += normed(i);
      }
      mean = warp_sum(sum) / static_cast<Real>(p.channels);
    }
    sum = 0;
    Real left = 0;
    for (int64_t i = lane; i < p.channels; i += kWarpSize) {
      const Real c = centred(i);
      sum = fused(c, c, sum);
      left += c;
    }
    Real variance = warp_sum(sum) / static_cast<Real>(p.channels);
    if (p.kind == NormKind::kLayer) {
      rest = warp_sum(left) / static_cast<Real>(p.channels);
      variance = positive_part(variance - rest * rest);
    }
    scale = Real(1) / sqrt(variance + static_cast<Real>(p.eps));
  }
};

template <class Real>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    plain_forward_kernel(const __grid_constant__ NormParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (index >= rows_of(p)) {
    return;
  }
  PlainRow<Real> row(p, index);
  row.find_moments(lane);
  for (int64_t i = lane; i < p.channels; i += kWarpSize) {
    const Real u = row.normed(i);
    Real y = fused(row.centred(i) * row.scale, row.weight(i), row.bias(i));
    if (row.has_gate() && !p.gate_first) {
      y *= row.gate_value(i);
    }
    if (p.addend.data != nullptr) {
      row.put(p.sum, i, u);
    }
    row.put(p.y, i, y);
  }
}

/// g, the gradient of the normed row times weight plus bias.
template <class Real>
__device__ Real plain_gradient(const NormBackwardParams& p, const PlainRow<Real>& row, int64_t i) {
  const Real dy = row.at(p.dy, i);
  return row.has_gate() && !row.p.gate_first ? dy * row.gate_value(i) : dy;
}

/// dx and dgate of a warp's row, and its mean and scale for the sums over rows.
template <class Real>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    plain_backward_kernel(const __grid_constant__ NormBackwardParams p) {
  const NormParams& f = p.forward;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (index >= rows_of(f)) {
    return;
  }
  PlainRow<Real> row(f, index);
  row.find_moments(lane);
  Real sum_e = 0, sum_en = 0;
  for (int64_t i = lane; i < f.channels; i += kWarpSize) {
    const Real e = product(plain_gradient(p, row, i), row.weight(i));
    sum_e += e;
    sum_en = fused(e, row.centred(i) * row.scale, sum_en);
  }
  const Real channels = static_cast<Real>(f.channels);
  const Real mean_e = f.kind == NormKind::kLayer ? warp_sum(sum_e) / channels : Real(0);
  const Real mean_en = warp_sum(sum_en) / channels;
  for (int64_t i = lane; i < f.channels; i += kWarpSize) {
    const Real n = row.centred(i) * row.scale;
    const Real e = product(plain_gradient(p, row, i), row.weight(i));
    Real dx = (e - mean_e - n * mean_en) * row.scale;
    if (f.y.data != nullptr) {
      const Real y = fused(n, row.weight(i), row.bias(i));
      row.put(f.y, i, row.has_gate() && !f.gate_first ? y * row.gate_value(i) : y);
    }
    if (row.has_gate()) {
      Real value, derivative;
      row.gate(i, &value, &derivative);
      const Real through = f.gate_first ? dx * row.at(f.x, i)
                                        : row.at(p.dy, i) * fused(n, row.weight(i), row.bias(i));
      row.put(p.dgate, i, through * derivative);
      dx *= f.gate_first ? value : Real(1);
    }
    if (p.dsum.data != nullptr) {
      dx += row.at(p.dsum, i);
    }
    row.put(p.dx, i, dx);
    if (p.daddend.data != nullptr) {
      row.put(p.daddend, i, dx);
    }
  }
  if (lane == 0) {
    Real* const moments = static_cast<Real*>(p.workspace) + 3 * index;
    moments[0] = row.mean;
    moments[1] = row.rest;
    moments[2] = row.scale;
  }
}

/// Partial sums of dweight and dbias: a block has 32 columns and every P-th group of rows.
template <class Real>
__global__ void __launch_bounds__(kColumns* kRowsAtOnce)
    plain_weights_kernel(const __grid_constant__ NormBackwardParams p) {
  __shared__ Real sums[2][kRowsAtOnce][kColumns];
  const NormParams& f = p.forward;
  const int64_t width = f.weight_heads * f.channels;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const int64_t tokens = rows_of(f) / f.weight_heads;
  Real dweight = 0, dbias = 0;
  if (column < width) {
    const int64_t i = column % f.channels;
    const int64_t step = p.plan.partials * kRowsAtOnce;
    for (int64_t token = blockIdx.y * kRowsAtOnce + threadIdx.y; token < tokens; token += step) {
      const int64_t index = token * f.weight_heads + column / f.channels;
      PlainRow<Real> row(f, index);
      const Real* const moments = static_cast<const Real*>(p.workspace) + 3 * index;
      const Real g = plain_gradient(p, row, i);
      dweight = fused(g, ((row.normed(i) - moments[0]) - moments[1]) * moments[2], dweight);
      dbias += g;
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = dweight;
  sums[1][threadIdx.y][threadIdx.x] = dbias;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) {
    return;
  }
  for (int y = 1; y < kRowsAtOnce; ++y) {
    dweight += sums[0][y][threadIdx.x];
    dbias += sums[1][y][threadIdx.x];
  }
  const int64_t to = blockIdx.y * width + column;
  if (p.dweight != nullptr) {
    static_cast<Real*>(p.dweight)[to] = dweight;
  }
  if (p.dbias != nullptr) {
    static_cast<Real*>(p.dbias)[to] = dbias;
  }
}

}  // namespace

cudaError_t plain_forward(const NormParams& p, cudaStream_t stream) {
  return dispatch_state(p.y.dtype, [&]<class Real>() {
    return launch_unless_empty(&plain_forward_kernel<Real>, ceil_div(row_count(p), kWarps),
                               dim3(kWarps * kWarpSize), 0, stream, p);
  });
}

void plain_backward_plan(const NormBackwardParams& p, NormBackwardPlan* plan) {
  const int64_t rows = row_count(p.forward);
  const int64_t tokens = rows / p.forward.weight_heads;
  plan->is_plain = true;
  plan->partials = std::clamp<int64_t>(ceil_div(tokens, 2 * kRowsAtOnce), 1, kMostPartials);
  plan->workspace_bytes = 3 * rows * element_size(state_dtype(p.dy.dtype));
}

cudaError_t plain_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return dispatch_state(p.dy.dtype, [&]<class Real>() {
    TIDEGATE_RETURN_IF_CUDA_ERROR(launch_unless_empty(&plain_backward_kernel<Real>,
                                                      ceil_div(row_count(p.forward), kWarps),
                                                      dim3(kWarps * kWarpSize), 0, stream, p));
    if (p.dweight == nullptr && p.dbias == nullptr) {
      return cudaSuccess;
    }
    const int64_t width = p.forward.weight_heads * p.forward.channels;
    const dim3 grid(static_cast<unsigned>(ceil_div(width, kColumns)),
                    static_cast<unsigned>(p.plan.partials));
    return launch_unless_empty(&plain_weights_kernel<Real>, grid, dim3(kColumns, kRowsAtOnce), 0,
                               stream, p);
  });
}

}  // namespace tidegate::kernels::norm
