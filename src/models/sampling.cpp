#include "src/models/sampling.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "kernels/sampling/sampling.h"
#include "src/ops/launch.h"
#include "src/ops/views.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/sampling/sampling_cuda.h"
#endif

namespace tidegate::models {
namespace {

namespace sampling = kernels::sampling;

// Sums of so many probabilities fit 64 bits as the kernels count them.
constexpr int64_t kMaxSampledVocab = int64_t{1} << 23;

}  // namespace

void check_sampling(const char* owner, double temperature, std::optional<int64_t> top_k,
                    std::optional<double> top_p, std::optional<double> min_p, double penalty) {
  TORCH_CHECK_VALUE(temperature >= 0.0, owner, ": temperature: expected >= 0; got ", temperature);
  TORCH_CHECK_VALUE(!top_k || *top_k >= 1, owner, ": top_k: expected an integer >= 1; got ",
                    top_k.value_or(0));
  TORCH_CHECK_VALUE(!top_p || (*top_p > 0.0 && *top_p <= 1.0), owner,
                    ": top_p: expected in (0, 1]; got ", top_p.value_or(0.0));
  TORCH_CHECK_VALUE(!min_p || (*min_p >= 0.0 && *min_p <= 1.0), owner,
                    ": min_p: expected in [0, 1]; got ", min_p.value_or(0.0));
  TORCH_CHECK_VALUE(penalty > 0.0, owner, ": repetition_penalty: expected > 0; got ", penalty);
}

SampledRows::SampledRows(int64_t rows, int64_t vocab, int64_t stops_a_row, int64_t window,
                         bool with_log_probs, at::Device device)
    : vocab_(vocab) {
  TORCH_CHECK_VALUE(vocab <= kMaxSampledVocab, "CausalLM: vocab_size: expected at most ",
                    kMaxSampledVocab, " to draw from; got ", vocab);
  const auto integers = at::TensorOptions(at::kLong).device(device);
  ids = at::zeros({rows}, integers);
  tokens = at::zeros({rows, window}, integers);
  if (with_log_probs) log_probs = at::zeros({rows, window}, integers.dtype(at::kFloat));
  settings = at::zeros({rows, sampling::kSettings}, integers.dtype(at::kDouble));
  table = at::zeros({rows, sampling::kColumns}, integers);
  table.select(1, sampling::kDone).fill_(1);
  stops = at::full({rows, stops_a_row}, -1, integers);
}

void SampledRows::sample(const at::Tensor& given, int64_t count) {
  // The CPU's kernel knows fp32 and fp64: to widen a row costs less than to draw from it.
  const bool is_half = given.scalar_type() == at::kHalf || given.scalar_type() == at::kBFloat16;
  const at::Tensor logits = given.is_cpu() && is_half ? given.to(at::kFloat) : given;
  sampling::SamplingParams params;
  params.rows = count;
  params.vocab = vocab_;
  params.stride = logits.stride(0);
  params.dtype = ops::kernel_dtype(logits.scalar_type());
  params.logits = logits.const_data_ptr();
  params.settings = settings.const_data_ptr<double>();
  params.table = table.data_ptr<int64_t>();
  params.stops_a_row = stops.size(1);
  params.stops = stops.const_data_ptr<int64_t>();
  params.seen = seen.defined() ? seen.data_ptr<uint8_t>() : nullptr;
  params.ids = ids.data_ptr<int64_t>();
  params.window = tokens.size(1);
  params.tokens = tokens.data_ptr<int64_t>();
  params.log_probs = log_probs.defined() ? log_probs.data_ptr<float>() : nullptr;
#ifdef TIDEGATE_WITH_CUDA
  if (logits.is_cuda()) {
    const c10::DeviceGuard guard(logits.device());
    ops::check_launch("sample", "launch",
                      sampling::sample_cuda(params, ops::current_stream(logits.device())));
    return;
  }
#endif
  sampling::sample_cpu(params, ops::torch_threads());
}

void SampledRows::write(int64_t first, const std::vector<RowSettings>& rows,
                        const at::Tensor& seen_rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const at::Tensor numbers = at::empty({count, sampling::kSettings}, at::kDouble);
  const at::Tensor entries = at::zeros({count, sampling::kColumns}, at::kLong);
  const at::Tensor ends = at::full({count, stops_a_row()}, -1, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const RowSettings& row = rows[static_cast<size_t>(i)];
    double* const number = numbers.data_ptr<double>() + i * sampling::kSettings;
    number[sampling::kTemperature] = row.temperature;
    number[sampling::kTopK] = static_cast<double>(row.top_k);
    number[sampling::kTopP] = row.top_p;
    number[sampling::kMinP] = row.min_p;
    number[sampling::kPenalty] = row.penalty;
    int64_t* const entry = entries.data_ptr<int64_t>() + i * sampling::kColumns;
    entry[sampling::kSeed] = row.seed;
    entry[sampling::kStream] = row.stream;
    entry[sampling::kLimit] = row.limit;
    entry[sampling::kDone] = row.limit > 0 ? 0 : 1;
    entry[sampling::kFill] = row.fill;
    std::copy(row.stops.begin(), row.stops.end(), ends.data_ptr<int64_t>() + i * stops_a_row());
  }
  settings.narrow(0, first, count).copy_(numbers);
  table.narrow(0, first, count).copy_(entries);
  stops.narrow(0, first, count).copy_(ends);
  if (seen_rows.defined()) {
    seen.narrow(0, first, count).copy_(seen_rows);
  } else if (seen.defined()) {
    seen.narrow(0, first, count).zero_();
  }
}

void SampledRows::copy_row(int64_t from, int64_t to) {
  for (const at::Tensor* t : {&ids, &tokens, &log_probs, &settings, &table, &stops, &seen}) {
    if (t->defined()) t->select(0, to).copy_(t->select(0, from));
  }
}

bool SampledRows::make_seen() {
  if (seen.defined()) return false;
  seen = at::zeros({ids.size(0), vocab_}, ids.options().dtype(at::kByte));
  return true;
}

int64_t SampledRows::bytes() const {
  int64_t total = 0;
  for (const at::Tensor* t : {&ids, &tokens, &log_probs, &settings, &table, &stops, &seen}) {
    if (t->defined()) total += static_cast<int64_t>(t->nbytes());
  }
  return total;
}

}  // namespace tidegate::models
