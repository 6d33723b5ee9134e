// Linear cross-entropy, computed: the loop over chunks of rows.
//
// The weight's gradient is a sum over chunks. On CUDA it is float32 and every chunk reads and
// writes it once more, 8 V D bytes beside the 2 C D V operations of its product over C rows: 0.2 ms
// a chunk of V = 50257, D = 1536 on an H100, so that chunks want to be large, and the memory that
// they take is what bounds them.

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <tuple>

#include "kernels/common/integers.h"
#include "src/ops/launch.h"
#include "src/ops/linear_cross_entropy.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/loss/cross_entropy_cuda.h"
#endif

namespace tidegate::ops {
namespace {

using kernels::ceil_div;
using kernels::loss::CrossEntropyParams;
using kernels::loss::kRowPack;

/// 4096 rows of 50257 16-bit logits are 393 MiB: the products run at full speed, the weight's
/// gradient is read and written three times for 16384 tokens (6 % of the products' time if nothing
/// hid it), and the chunk is a tenth of what logits and their gradient would take in float32.
constexpr int64_t kChunkBytesCuda = int64_t{512} << 20;
constexpr int64_t kChunkBytesCpu = int64_t{128} << 20;
/// On the CPU 1024 rows already hide the traffic of the weight's gradient; fewer stay in the cache.
constexpr int64_t kMostRowsCpu = 1024;
/// Rows of a chunk are a multiple of this where there is more than one: a tile of the products.
constexpr int64_t kRowTile = 128;
/// Tensor-core kernels for aligned operands want leading dimensions of so many bytes.
constexpr int64_t kAlignedBytes = 16;

bool has_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) >= std::max<int64_t>(matrix.size(1), 1);
}

bool is_aligned(const at::Tensor& matrix) {
  const int64_t size = matrix.element_size();
  return reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAlignedBytes == 0 &&
         matrix.size(0) * size % kAlignedBytes == 0 && matrix.stride(0) * size % kAlignedBytes == 0;
}

/// The weight as the products take it: in their type, and on CUDA with a whole number of vectors of
/// classes, since 50257 of them keep cuBLAS from its kernels for aligned operands, at more than
/// twice the time. One copy a call (0.1 ms for 50257 x 1536) is 1 % of the products; leaving the
/// last classes to products of their own would take three more launches a chunk. The rows past V
/// are zeros: their logits are never read, and gradients of zero times them must stay zero.
at::Tensor weight_for_products(const at::Tensor& weight, at::ScalarType dtype) {
  const bool is_ready = weight.scalar_type() == dtype && has_dense_rows(weight);
  if (!weight.is_cuda()) {
    return is_ready ? weight : weight.to(dtype).contiguous();
  }
  if (is_ready && is_aligned(weight)) {
    return weight;
  }
  const int64_t vocab = weight.size(0);
  const int64_t columns = ceil_div(vocab, kRowPack) * kRowPack;
  const at::Tensor copy = at::empty({columns, weight.size(1)}, weight.options().dtype(dtype));
  copy.narrow(0, 0, vocab).copy_(weight);
  copy.narrow(0, vocab, columns - vocab).zero_();
  return copy;
}

/// x as [N, D] rows.
at::Tensor matrix_of(const at::Tensor& x, int64_t count) {
  const at::Tensor rows = x.reshape({count, x.size(-1)});
  return has_dense_rows(rows) ? rows : rows.contiguous();
}

/// Rows of a chunk, of `rows` in all; a function of sizes alone, so that results are repeatable.
int64_t rows_of_chunk(int64_t rows, int64_t row_bytes, bool is_cuda) {
  int64_t most = (is_cuda ? kChunkBytesCuda : kChunkBytesCpu) / row_bytes;
  if (!is_cuda) {
    most = std::min(most, kMostRowsCpu);
  }
  most = std::max(most / kRowTile * kRowTile, kRowTile);
  const int64_t chunks = ceil_div(rows, most);
  return chunks <= 1 ? rows : ceil_div(ceil_div(rows, chunks), kRowTile) * kRowTile;
}

/// out = a b, or out + a b with `add`; `out` has the type of a and b or a wider one.
void multiply_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool add) {
  at::Tensor result = out;
  const bool widens = out.scalar_type() != a.scalar_type();
  if (add && widens) {
    at::addmm_out(result, result, a, b, out.scalar_type());
  } else if (add) {
    at::addmm_out(result, result, a, b);
  } else if (widens) {
    at::mm_out(result, a, b, out.scalar_type());
  } else {
    at::mm_out(result, a, b);
  }
}

void run_cross_entropy(const char* op, const CrossEntropyParams& params, const at::Tensor& like) {
#ifdef TIDEGATE_WITH_CUDA
  if (like.is_cuda()) {
    check_launch(op, "launch", kernels::loss::cross_entropy(params, current_stream(like.device())));
    return;
  }
#endif
  kernels::loss::cross_entropy_cpu(params, torch_threads());
}

/// The loop's tensors. Products are in x's type, on the CPU in its state's; all that is summed up
/// over rows or classes is in the state's type.
struct Chunks {
  const char* op;
  HeadGradients wanted;
  at::Tensor x, weight, labels, bias, row_gradient, logits;
  HeadResults results;
  CrossEntropyParams params;

  Chunks(const char* op, const HeadInputs& inputs, HeadGradients gradients, bool losses,
         const at::Tensor& row_gradient);
  void run(int64_t begin, int64_t rows);
};

Chunks::Chunks(const char* op, const HeadInputs& inputs, HeadGradients gradients, bool losses,
               const at::Tensor& row_gradient)
    : op(op),
      wanted(gradients),
      x(matrix_of(inputs.x, inputs.labels.numel())),
      row_gradient(row_gradient) {
  const at::ScalarType wide = state_dtype(x.scalar_type());
  const at::ScalarType dtype = x.is_cuda() ? x.scalar_type() : wide;
  const int64_t vocab = inputs.weight.size(0), rows = x.size(0);
  const int64_t stride = ceil_div(vocab, kRowPack) * kRowPack;
  weight = weight_for_products(inputs.weight, dtype);
  labels = inputs.labels.to(at::kLong).contiguous();
  const at::TensorOptions options = x.options();
  if (is_given(inputs.bias)) {
    bias = at::zeros({stride}, options.dtype(wide));
    bias.narrow(0, 0, vocab).copy_(*inputs.bias);
  }
  if (losses) {
    results.losses = at::empty({rows}, options.dtype(wide));
  }
  if (gradients.x) {
    results.dx = at::empty(inputs.x.sizes(), options);
  }
  if (gradients.weight) {
    results.dweight = rows == 0 ? at::zeros({vocab, x.size(1)}, options.dtype(wide))
                                : at::empty({weight.size(0), x.size(1)}, options.dtype(wide));
  }
  if (gradients.bias) {
    results.dbias = at::zeros({weight.size(0)}, options.dtype(wide));
  }
  params.vocab = vocab;
  params.columns = weight.size(0);
  params.stride = stride;
  params.dtype = kernel_dtype(dtype);
  params.bias = data_or_null(bias);
  params.ignored = inputs.ignore_index;
  params.label_smoothing = inputs.label_smoothing;
  params.z_loss = inputs.z_loss;
  params.gradient = gradients.any();
  const char* why = kernels::loss::cross_entropy_unsupported(params);
  TORCH_CHECK(why == nullptr, op, ": ", why);
  logits = at::empty({rows_of_chunk(rows, stride * elementSize(dtype), x.is_cuda()), stride},
                     options.dtype(dtype));
}

/// Makes a chunk's logits, then in their place their gradient, then its share of the gradients of
/// x, weight and bias.
void Chunks::run(int64_t begin, int64_t rows) {
  const at::Tensor of_x = x.narrow(0, begin, rows).to(logits.scalar_type());
  const at::Tensor chunk = logits.narrow(0, 0, rows).narrow(1, 0, params.columns);
  multiply_into(chunk, of_x, weight.t(), /*add=*/false);

  const int64_t size = elementSize(state_dtype(x.scalar_type()));
  const auto from_row = [&](const at::Tensor& t) -> void* {
    return t.defined() ? static_cast<char*>(t.data_ptr()) + begin * size : nullptr;
  };
  params.rows = rows;
  params.logits = logits.data_ptr();
  params.labels = labels.const_data_ptr<int64_t>() + begin;
  params.row_gradient = from_row(row_gradient);
  params.loss = from_row(results.losses);
  run_cross_entropy(op, params, x);

  if (wanted.x) {
    const at::Tensor dx = results.dx.view({x.size(0), x.size(1)}).narrow(0, begin, rows);
    if (dx.scalar_type() == chunk.scalar_type()) {
      multiply_into(dx, chunk, weight, /*add=*/false);
    } else {
      dx.copy_(at::mm(chunk, weight));
    }
  }
  if (wanted.weight) {
    multiply_into(results.dweight, chunk.t(), of_x, /*add=*/begin > 0);
  }
  if (wanted.bias) {
    results.dbias.add_(at::sum(chunk, {0}, /*keepdim=*/false, results.dbias.scalar_type()));
  }
}

}  // namespace

HeadResults linear_cross_entropy_chunks(const char* op, const HeadInputs& inputs,
                                        HeadGradients gradients, bool losses,
                                        const at::Tensor& row_gradient) {
  const c10::DeviceGuard guard(inputs.x.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Chunks chunks(op, inputs, gradients, losses, row_gradient);
  const int64_t rows = chunks.x.size(0);
  for (int64_t begin = 0; begin < rows; begin += chunks.logits.size(0)) {
    chunks.run(begin, std::min(chunks.logits.size(0), rows - begin));
  }
  HeadResults& results = chunks.results;
  const int64_t vocab = inputs.weight.size(0);
  for (at::Tensor* padded : {&results.dweight, &results.dbias}) {
    if (padded->defined()) {
      *padded = padded->narrow(0, 0, vocab);
    }
  }
  return std::move(results);
}

std::tuple<at::Tensor, at::Tensor> sum_of_losses(const char* op, const HeadInputs& inputs,
                                                 const at::Tensor& losses, bool mean) {
  const c10::DeviceGuard guard(losses.device());
  const at::Tensor labels = inputs.labels.to(at::kLong).contiguous();
  std::tuple<at::Tensor, at::Tensor> results{at::empty({}, losses.options()),
                                             at::empty({}, losses.options())};
  kernels::loss::LossSumParams params;
  params.rows = losses.size(0);
  params.dtype = kernel_dtype(losses.scalar_type());
  params.losses = losses.const_data_ptr();
  params.labels = labels.const_data_ptr<int64_t>();
  params.ignored = inputs.ignore_index;
  params.mean = mean;
  params.loss = std::get<0>(results).data_ptr();
  params.scale = std::get<1>(results).data_ptr();
#ifdef TIDEGATE_WITH_CUDA
  if (losses.is_cuda()) {
    check_launch(op, "sum", kernels::loss::loss_sum(params, current_stream(losses.device())));
    return results;
  }
#endif
  kernels::loss::loss_sum_cpu(params);
  return results;
}

}  // namespace tidegate::ops
