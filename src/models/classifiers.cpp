#include "tidegate/models/classifiers.h"
#include "tidegate/ops/init.h"

#include <algorithm>

#include "src/models/inputs.h"
#include "src/models/prompt_rows.h"
#include "src/nn/common.h"
#include "src/nn/states.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

LMConfig checked(const char* owner, const LMConfig& config) {
  config.validate();
  TORCH_CHECK_VALUE(config.num_classes, owner,
                    ": num_classes: expected a positive integer; got None");
  return config;
}

// The mean over each packed sequence: x [total, dim] -> [N, dim], summed in fp32 (fp64 for fp64);
// zeros for an empty sequence.
Tensor mean_pool(const Tensor& x, const Tensor& cu_seqlens) {
  const Tensor lengths = cu_seqlens.to(x.device(), torch::kLong).diff();
  const Tensor sums = at::segment_reduce(nn::widen(x), "sum", lengths, /*indices=*/{},
                                         /*offsets=*/{}, /*axis=*/0, /*unsafe=*/true,
                                         /*initial=*/0);
  return (sums / lengths.clamp_min(1).unsqueeze(1)).to(x.scalar_type());
}

// The mean over T: x [B, T, dim] -> [B, dim], summed in fp32 (fp64 for fp64).
Tensor mean_over_time(const Tensor& x) {
  const auto wide = nn::wide_dtype(x.scalar_type());
  return (x.sum(1, /*keepdim=*/false, wide) / std::max<int64_t>(x.size(1), 1)).to(x.scalar_type());
}

// like: what there is a label of, "one an image".
Output classified(const char* owner, const Tensor& logits, const std::optional<Tensor>& labels,
                  const char* like) {
  const bool has_labels = labels && labels->defined();
  if (has_labels) check_labels(owner, *labels, logits.sizes().slice(0, 1), like, logits.size(1));
  return {logits, has_labels ? mean_cross_entropy(logits, *labels) : Tensor(), {}};
}

template <typename Holder>
Holder load_classifier(const char* owner, const std::string& directory, torch::Device device) {
  const LMConfig config = load_config(owner, directory);
  const nn::UndrawnGuard undrawn;
  Holder model(config, nn::Placement{device, std::nullopt});
  load_weights(*model, directory, device);
  model->eval();
  return model;
}

}  // namespace

SequenceClassifierImpl::SequenceClassifierImpl(const LMConfig& given,
                                               const nn::Placement& placement)
    : Backbone(checked("SequenceClassifier", given), placement) {
  TORCH_CHECK_VALUE(config.vocab_size,
                    "SequenceClassifier: vocab_size: expected a positive integer; got None");
  reset();
}

void SequenceClassifierImpl::reset() {
  register_children(*this);
  embedding =
      register_module("embedding", nn::make_embedding(*config.vocab_size, config.dim, placement_));
  head =
      register_module("head", nn::make_linear(config.dim, *config.num_classes, true, placement_));
  if (!nn::UndrawnGuard::is_active()) reset_parameters();
}

void SequenceClassifierImpl::reset_parameters() {
  init_normal_(embedding->weight, 0.0, 1.0);
  reset_children();
  nn::reset_linear(head);
  reset_matrices(*this);
}

Output SequenceClassifierImpl::forward(const Tensor& given_ids, const std::optional<Tensor>& labels,
                                       const std::optional<Tensor>& lengths,
                                       const std::optional<Tensor>& given_bounds) {
  check_ids("SequenceClassifier", given_ids, config.vocab_size);
  Tensor ids = given_ids;
  Tensor cu_seqlens = given_bounds.value_or(Tensor());
  if (lengths && lengths->defined()) {
    TORCH_CHECK_VALUE(!cu_seqlens.defined(),
                      "SequenceClassifier: expected lengths or cu_seqlens; got both");
    std::tie(ids, cu_seqlens) = pack(ids, *lengths);
  }
  const auto [x, state] =
      run("SequenceClassifier", embedding->forward(ids), std::nullopt, cu_seqlens);
  const Tensor pooled =
      cu_seqlens.defined() ? mean_pool(x.squeeze(0), cu_seqlens) : mean_over_time(x);
  return classified("SequenceClassifier", nn::apply_linear(head, pooled), labels, "one a sequence");
}

void SequenceClassifierImpl::save(const std::string& directory) const {
  save_model("SequenceClassifier", *this, config, directory);
}

SequenceClassifier SequenceClassifier::load(const std::string& directory, torch::Device device) {
  return load_classifier<SequenceClassifier>("SequenceClassifier", directory, device);
}

ImageClassifierImpl::ImageClassifierImpl(const LMConfig& given, const nn::Placement& placement)
    : Backbone(checked("ImageClassifier", given), placement) {
  TORCH_CHECK_VALUE(config.patch_size,
                    "ImageClassifier: patch_size: expected a positive integer; got None");
  reset();
}

void ImageClassifierImpl::reset() {
  register_children(*this);
  const int64_t pixels = config.image_channels * *config.patch_size * *config.patch_size;
  patch = register_module("patch", nn::make_linear(pixels, config.dim, true, placement_));
  head =
      register_module("head", nn::make_linear(config.dim, *config.num_classes, true, placement_));
  if (!nn::UndrawnGuard::is_active()) reset_parameters();
}

void ImageClassifierImpl::reset_parameters() {
  nn::reset_linear(patch);
  reset_children();
  nn::reset_linear(head);
  reset_matrices(*this);
}

// images [B, C, H, W] -> [B, H/p * W/p, C*p*p], rows of patches in reading order.
Tensor ImageClassifierImpl::patches(const Tensor& images) const {
  const int64_t p = *config.patch_size, c = config.image_channels;
  const bool fits = images.dim() == 4 && images.size(1) == c && images.size(2) % p == 0 &&
                    images.size(3) % p == 0;
  TORCH_CHECK_VALUE(fits, "ImageClassifier: images: expected [B, ", c,
                    ", H, W] with H and W multiples of the patch size ", p, "; got ",
                    nn::shape_text(images));
  const int64_t b = images.size(0), rows = images.size(2) / p, columns = images.size(3) / p;
  return images.reshape({b, c, rows, p, columns, p})
      .permute({0, 2, 4, 1, 3, 5})
      .reshape({b, rows * columns, c * p * p});
}

Output ImageClassifierImpl::forward(const Tensor& images, const std::optional<Tensor>& labels) {
  const auto [x, state] =
      run("ImageClassifier", nn::apply_linear(patch, patches(images)), std::nullopt, std::nullopt);
  return classified("ImageClassifier", nn::apply_linear(head, mean_over_time(x)), labels,
                    "one an image");
}

void ImageClassifierImpl::save(const std::string& directory) const {
  save_model("ImageClassifier", *this, config, directory);
}

ImageClassifier ImageClassifier::load(const std::string& directory, torch::Device device) {
  return load_classifier<ImageClassifier>("ImageClassifier", directory, device);
}

}  // namespace tidegate::models
