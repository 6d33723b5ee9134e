#include "benchmarks/models/sizes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <variant>

#include "tidegate/models/causal_lm.h"

namespace tidegate::benchmarks {
namespace {

using models::LMConfig;
using models::MixerOptions;

// GLU widths are multiples of this, and of an eighth of it in small models.
constexpr int64_t kWidthUnit = 64;

// What each mixer is in its own paper's language models; heads of 128 where there are heads.
MixerOptions options_of(const std::string& mixer, int64_t dim) {
  const int64_t heads = std::max<int64_t>(dim / 128, 1);
  const auto starts = [&](const char* text) { return mixer.rfind(text, 0) == 0; };
  if (starts("transformer")) return {{"num_heads", std::max<int64_t>(dim / 64, 1)}};
  if (starts("fox")) return {{"num_heads", heads}};
  if (mixer == "hgrn") return {{"preset", "official"}, {"bias", false}, {"norm", "rms_no_weight"}};
  if (mixer == "hgrn2") return {{"num_heads", heads}, {"preset", "fla"}};
  if (mixer == "gla") return {{"num_heads", std::max<int64_t>(dim / 256, 1)}};
  if (mixer == "rwkv4") return {{"time_shift", true}};
  return {};
}

// The frame of the Forgetting Transformer's models (arXiv 2503.02130, appendix B).
LMConfig frame(const Size& size, const std::string& mixer, int64_t glu_hidden) {
  return {.mixer = mixer,
          .vocab_size = size.vocab_size,
          .dim = size.dim,
          .layers = size.layers,
          .mixer_options = options_of(mixer, size.dim),
          .glu_hidden = glu_hidden,
          .glu_activation = "silu",
          .norm = "rms",
          .norm_eps = 1e-6,
          .tied = false,
          .init_std = 0.02};
}

// The width with which the count comes closest to `target`; the count is linear in it.
int64_t width_for(const Size& size, const std::string& mixer, int64_t target) {
  const int64_t unit = size.dim >= 512 ? kWidthUnit : kWidthUnit / 8;
  const int64_t one = parameter_count(frame(size, mixer, unit));
  const int64_t step = parameter_count(frame(size, mixer, 2 * unit)) - one;
  const double more = static_cast<double>(target - one) / static_cast<double>(step);
  return unit * (1 + std::max<int64_t>(std::llround(more), 0));
}

}  // namespace

const std::vector<Size>& sizes() {
  static const std::vector<Size> known = {
      {"tiny", 32, 2, 64, {16, 32}, 64},
      {"small", 256, 4, 256, {256, 1024, 4096}, 4096},
      {"125m", 768, 12, 50257, {2048, 8192, 32768}, 32768},
      {"360m", 1024, 24, 50257, {2048, 8192, 32768}, 32768},
      {"756m", 1536, 24, 50257, {2048, 8192, 16384}, 16384},
  };
  return known;
}

const Size& find_size(const std::string& name) {
  std::string names;
  for (const Size& size : sizes()) {
    if (name == size.name) return size;
    names += (names.empty() ? "" : ", ") + std::string(size.name);
  }
  TORCH_CHECK_VALUE(false, "--size: expected one of ", names, "; got '", name, "'");
}

std::vector<std::string> ordered_mixers() {
  const std::vector<std::string> first = {kBaseline, "fox", "transformer-pro", "fox-pro"};
  const auto rank = [&](const std::string& mixer) {
    if (mixer == "gated-rnn") return first.size() + 1;
    return static_cast<size_t>(std::find(first.begin(), first.end(), mixer) - first.begin());
  };
  std::vector<std::string> names = models::mixers();
  std::stable_sort(names.begin(), names.end(),
                   [&](const std::string& a, const std::string& b) { return rank(a) < rank(b); });
  return names;
}

LMConfig config_of(const Size& size, const std::string& mixer) {
  const auto presets = models::presets();
  const auto preset_of = [&](const std::string& name) {
    return presets.find(name + "-" + size.name);
  };
  const auto own = preset_of(mixer), baseline = preset_of(kBaseline);
  // Presets of other frames, tied or with another vocabulary, are other models.
  if (own != presets.end() && baseline != presets.end() &&
      own->second.vocab_size == baseline->second.vocab_size &&
      own->second.layers == baseline->second.layers && own->second.tied == baseline->second.tied) {
    return own->second;
  }
  const LMConfig base = baseline != presets.end()
                            ? baseline->second
                            : frame(size, kBaseline, (8 * size.dim / 3 + 63) / 64 * 64);
  if (mixer == kBaseline) return base;
  return frame(size, mixer, width_for(size, mixer, parameter_count(base)));
}

int64_t parameter_count(const LMConfig& config) {
  const models::CausalLM model(config, nn::Placement{torch::Device(torch::kMeta), std::nullopt});
  int64_t total = 0;
  for (const torch::Tensor& parameter : model->parameters()) total += parameter.numel();
  return total;
}

int64_t heads_of(const LMConfig& config) {
  for (const auto& [name, value] : config.mixer_options) {
    if (name == "num_heads") return std::get<int64_t>(value);
  }
  TORCH_CHECK_VALUE(false, "heads_of: expected mixer options with num_heads; got none");
}

}  // namespace tidegate::benchmarks
