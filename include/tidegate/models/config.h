// The configuration of a whole model, its JSON form, and the papers' configurations by name.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tidegate::models {

/// The value of a mixer's option; std::monostate is Python's None: the mixer's default.
using OptionValue = std::variant<std::monostate, bool, int64_t, double, std::string>;

/// Options by name, in the order given.
using MixerOptions = std::vector<std::pair<std::string, OptionValue>>;

/// A mixer's name for all layers, or one name a layer.
using MixerNames = std::variant<std::string, std::vector<std::string>>;

/// What a CausalLM, SequenceClassifier or ImageClassifier is made of; the fields, defaults and JSON
/// are those of tidegate.models.LMConfig in Python.
///
///     LMConfig config{.mixer = "hgrn", .dim = 512, .layers = 6, .glu_hidden = 1024};
///     auto same =
///     LMConfig().with_mixer("hgrn").with_dim(512).with_layers(6).with_glu_hidden(1024); auto
///     longer = presets().at("hgrn-44m").with_layers(12);
struct LMConfig {
  /// The token mixer's name, one of mixers(), or one name a layer.
  MixerNames mixer = "hgrn2";
  /// Number of token ids; unset for image models.
  std::optional<int64_t> vocab_size = 256;
  /// Width of the residual stream.
  int64_t dim = 256;
  /// Number of blocks.
  int64_t layers = 4;
  /// Further options of the mixers, e.g. {{"complex", false}, {"expand", int64_t{2}}}.
  MixerOptions mixer_options = {};
  /// Options of single layers, over mixer_options: one entry a layer from the first on; layers
  /// beyond the last have none.
  std::vector<MixerOptions> layer_options = {};
  /// Hidden width of the channel mixer; unset = 2 * dim.
  std::optional<int64_t> glu_hidden = std::nullopt;
  /// "none" (HGRN's language models) or "silu".
  std::string glu_activation = "none";
  /// Biases in the channel mixer.
  bool glu_bias = false;
  /// The two norms of a block: "layer", "rms" or "rms_no_weight".
  std::string norm = "layer";
  /// The norm before the head; unset = `norm`.
  std::optional<std::string> final_norm = std::nullopt;
  /// Epsilon of all norms.
  double norm_eps = 1e-5;
  /// Mode of LowerBounds; ignored by mixers without a lower bound. gla, fox, lru (gate "data"),
  /// gated-rnn and gated-linear-rnn have one only with lower_bound = true in mixer_options.
  std::string lower_bound = "cumulative";
  /// After the embedding and after each mixer and GLU, in training.
  double dropout = 0.0;
  /// Whether the head is the embedding's transpose (language models).
  bool tied = true;
  /// Multiply embeddings by sqrt(dim); unset = as `tied`.
  std::optional<bool> scale_embedding = std::nullopt;
  /// Classes of a classifier.
  std::optional<int64_t> num_classes = std::nullopt;
  /// Side of an image patch in pixels.
  std::optional<int64_t> patch_size = std::nullopt;
  /// Channels of an image.
  int64_t image_channels = 3;
  /// Spread of the normal numbers that every projection, the embedding and the head start with,
  /// biases then zero; unset = each module's own start.
  std::optional<double> init_std = std::nullopt;

  // Copies with one field changed, as LMConfig.replace() in Python makes them.
#define TIDEGATE_WITH(type, name)          \
  LMConfig with_##name(type value) const { \
    LMConfig changed = *this;              \
    changed.name = std::move(value);       \
    return changed;                        \
  }
  TIDEGATE_WITH(MixerNames, mixer)
  TIDEGATE_WITH(std::optional<int64_t>, vocab_size)
  TIDEGATE_WITH(int64_t, dim)
  TIDEGATE_WITH(int64_t, layers)
  TIDEGATE_WITH(MixerOptions, mixer_options)
  TIDEGATE_WITH(std::vector<MixerOptions>, layer_options)
  TIDEGATE_WITH(std::optional<int64_t>, glu_hidden)
  TIDEGATE_WITH(std::string, glu_activation)
  TIDEGATE_WITH(bool, glu_bias)
  TIDEGATE_WITH(std::string, norm)
  TIDEGATE_WITH(std::optional<std::string>, final_norm)
  TIDEGATE_WITH(double, norm_eps)
  TIDEGATE_WITH(std::string, lower_bound)
  TIDEGATE_WITH(double, dropout)
  TIDEGATE_WITH(bool, tied)
  TIDEGATE_WITH(std::optional<bool>, scale_embedding)
  TIDEGATE_WITH(std::optional<int64_t>, num_classes)
  TIDEGATE_WITH(std::optional<int64_t>, patch_size)
  TIDEGATE_WITH(int64_t, image_channels)
  TIDEGATE_WITH(std::optional<double>, init_std)
#undef TIDEGATE_WITH

  /// Throws c10::ValueError, naming the field, for values that cannot be: out of range, more than
  /// tidegate builds (tidegate/nn/choices.json), or a mixer's option of another type. Models call
  /// it first.
  void validate() const;

  /// The configuration with this layer's mixer and options everywhere: what Block takes.
  LMConfig of_layer(int64_t layer) const;

  /// JSON text, one field a line; the same text as Python's.
  std::string to_json() const;

  /// The reverse of to_json(); missing keys take their defaults. Throws c10::ValueError, in
  /// Python's words, when the text is not such JSON, has a key twice or an unknown one, a number
  /// beyond 64 bits, deep nesting, or a value of the wrong type (1 is not true, nor true a number);
  /// validates.
  static LMConfig from_json(const std::string& text);

  bool operator==(const LMConfig&) const = default;
};

/// The names of the available mixers.
std::vector<std::string> mixers();

/// The papers' configurations by name: the same as tidegate.models.presets() in Python, whose
/// documentation lists them.
std::map<std::string, LMConfig> presets();

}  // namespace tidegate::models
