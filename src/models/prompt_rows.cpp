#include "src/models/prompt_rows.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "src/nn/shape_text.h"

namespace tidegate::models {
namespace {

// How many threads generate with a model, and every module's mode before the first of them did.
struct ModelInUse {
  int threads = 0;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
};

std::mutex models_in_use_lock;

std::map<const torch::nn::Module*, ModelInUse>& models_in_use() {
  static std::map<const torch::nn::Module*, ModelInUse> models;
  return models;
}

}  // namespace

std::vector<int64_t> host_lengths(const at::Tensor& ids, const at::Tensor& lengths,
                                  int64_t minimum) {
  if (!lengths.defined()) return std::vector<int64_t>(ids.size(0), ids.size(1));
  const bool fits = lengths.dim() == 1 && lengths.size(0) == ids.size(0) &&
                    (lengths.scalar_type() == at::kInt || lengths.scalar_type() == at::kLong);
  TORCH_CHECK_VALUE(fits, "lengths: expected int32 or int64 [B=", ids.size(0), "]; got ",
                    lengths.scalar_type(), " ", nn::shape_text(lengths));
  const at::Tensor host = lengths.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> values(host.const_data_ptr<int64_t>(),
                              host.const_data_ptr<int64_t>() + host.numel());
  const bool all_fit = std::all_of(values.begin(), values.end(), [&](int64_t length) {
    return minimum <= length && length <= ids.size(1);
  });
  TORCH_CHECK_VALUE(all_fit, "lengths: expected ", minimum, " to T=", ids.size(1), "; got [",
                    c10::Join(", ", values), "]");
  return values;
}

std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& ids, const at::Tensor& lengths,
                                        int64_t minimum) {
  const std::vector<int64_t> values = host_lengths(ids, lengths, minimum);
  std::vector<at::Tensor> rows;
  for (int64_t b = 0; b < ids.size(0); ++b) {
    rows.push_back(ids.select(0, b).narrow(0, 0, values[b]));
  }
  const at::Tensor packed = rows.empty() ? at::empty({0}, ids.options()) : at::cat(rows);
  const at::Tensor bounds = lengths.to(ids.device(), at::kLong).cumsum(0);
  return {packed.unsqueeze(0), at::constant_pad_nd(bounds, {1, 0})};
}

at::Tensor append(const at::Tensor& ids, const at::Tensor& lengths, const at::Tensor& tokens,
                  int64_t fill) {
  const at::Tensor fresh = tokens.to(ids.scalar_type());
  at::Tensor out = at::cat({ids, fresh}, 1);
  if (!lengths.defined()) return out;
  const at::Tensor ends = lengths.to(ids.device(), at::kLong).unsqueeze(1);
  const auto counting = ends.options();
  out = out.masked_fill(at::arange(out.size(1), counting).unsqueeze(0) >= ends, fill);
  return out.scatter(1, ends + at::arange(fresh.size(1), counting).unsqueeze(0), fresh);
}

Evaluating::Evaluating(torch::nn::Module& model) : model_(model) {
  const std::lock_guard<std::mutex> guard(models_in_use_lock);
  ModelInUse& mine = models_in_use()[&model_];
  if (mine.threads++ > 0) return;
  for (const auto& module : model_.modules())
    mine.modes.emplace_back(module, module->is_training());
  model_.eval();
}

Evaluating::~Evaluating() {
  const std::lock_guard<std::mutex> guard(models_in_use_lock);
  const auto mine = models_in_use().find(&model_);
  if (--mine->second.threads > 0) return;
  // A module comes before its children, which train() sets, too.
  for (const auto& [module, training] : mine->second.modes) module->train(training);
  models_in_use().erase(mine);
}

}  // namespace tidegate::models
