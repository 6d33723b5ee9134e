#include "tidegate/models/config.h"

namespace tidegate::models {
namespace {

// Papers: HGRN (NeurIPS 2023), HGRN2 (COLM 2024), FoT: Forgetting Transformer (ICLR 2025).
LMConfig hgrn_language_model() {
  return {.mixer = "hgrn",
          .vocab_size = 50265,
          .dim = 512,
          .layers = 6,
          .glu_hidden = 1024,
          .glu_bias = true,
          .dropout = 0.1};
}

LMConfig real_language_model(int64_t expand, int64_t glu_hidden) {
  LMConfig config = hgrn_language_model();
  config.mixer_options = {{"complex", false}};
  if (expand != 1) config.mixer_options.emplace_back("expand", expand);
  config.glu_hidden = glu_hidden;
  return config;
}

// The larger models follow the published training code: no biases, RMSNorm without weight, and the
// gate after the norm; of all choices this one gives HGRN2's 379M to the printed unit.
LMConfig pile_model(int64_t layers, int64_t dim) {
  return {.mixer = "hgrn",
          .vocab_size = 50272,
          .dim = dim,
          .layers = layers,
          .mixer_options = {{"preset", "official"}, {"bias", false}, {"norm", "rms_no_weight"}},
          .glu_hidden = 2 * dim,
          .norm = "rms_no_weight",
          .dropout = 0.1};
}

LMConfig hgrn2_language_model() {
  LMConfig config = hgrn_language_model();
  config.mixer = "hgrn2";
  config.mixer_options = {{"num_heads", int64_t{4}}};
  config.glu_hidden = 1365;
  return config;
}

// As with HGRN, the larger models follow the published training code: preset "official".
LMConfig hgrn2_pile_model(int64_t layers, int64_t dim) {
  return {.mixer = "hgrn2",
          .vocab_size = 50272,
          .dim = dim,
          .layers = layers,
          .mixer_options = {{"num_heads", dim / 128}, {"preset", "official"}},
          .glu_hidden = (8 * dim + 767) / 768 * 256,
          .norm = "rms_no_weight",
          .dropout = 0.1};
}

LMConfig hgrn2_fla_model() {
  return {.mixer = "hgrn2",
          .vocab_size = 50257,
          .dim = 1536,
          .layers = 24,
          .mixer_options = {{"num_heads", int64_t{12}}, {"preset", "fla"}},
          .glu_hidden = 4096,
          .glu_activation = "silu",
          .norm = "rms",
          .tied = false};
}

LMConfig transformer_model() {
  return {.mixer = "transformer",
          .vocab_size = 50272,
          .dim = 1024,
          .layers = 26,
          .mixer_options = {{"num_heads", int64_t{8}}, {"rope", 10000.0}},
          .glu_hidden = 2816,
          .glu_activation = "silu",
          .norm = "rms",
          .dropout = 0.1};
}

// FoT, section 4.1 and appendix B: the LLaMA frame, untied, RMSNorm as flash-linear-attention has
// it. The GLUs are 8/3 of the width, and 7/3 of it where an output gate takes the rest, rounded up
// to a multiple of 256.
LMConfig fox_model(const std::string& mixer, int64_t dim, int64_t layers, int64_t heads) {
  const int64_t hidden = (mixer.ends_with("-pro") ? 7 : 8) * dim / 3;
  return {.mixer = mixer,
          .vocab_size = 50257,
          .dim = dim,
          .layers = layers,
          .mixer_options = {{"num_heads", heads}},
          .glu_hidden = (hidden + 255) / 256 * 256,
          .glu_activation = "silu",
          .norm = "rms",
          .norm_eps = 1e-6,
          .tied = false,
          .init_std = 0.02};
}

// HGRN1 with an expanded state in the frame of HGRN2's 385M model. Table 3 prints n and the
// parameters; the ranks, like the projection in krp, follow from them.
LMConfig pese_model(const char* expansion, int64_t expand, int64_t rank = 0) {
  MixerOptions options = {{"expansion", expansion}, {"expand", expand}};
  if (rank != 0) options.emplace_back("rank", rank);
  options.emplace_back("bias", false);
  options.emplace_back("norm", "rms_no_weight");
  return {.mixer = "hgrn",
          .vocab_size = 50272,
          .dim = 1024,
          .layers = 26,
          .mixer_options = options,
          .glu_hidden = 2816,
          .norm = "rms_no_weight",
          .dropout = 0.1};
}

LMConfig image_model(int64_t dim) {
  return {.mixer = "hgrn",
          .vocab_size = std::nullopt,
          .dim = dim,
          .layers = 12,
          .mixer_options = {{"bidirectional", true}},
          .glu_hidden = 2 * dim,
          .glu_activation = "silu",
          .glu_bias = true,
          .final_norm = "rms_no_weight",
          .num_classes = 1000,
          .patch_size = 14};
}

LMConfig demo_model() {
  return {.mixer = "hgrn",
          .vocab_size = 256,
          .dim = 256,
          .layers = 4,
          .mixer_options = {{"complex", false}},
          .glu_hidden = 512,
          .glu_activation = "silu"};
}

}  // namespace

std::map<std::string, LMConfig> presets() {
  return {
      {"hgrn-44m", hgrn_language_model()},
      {"hgrn-real-d", real_language_model(1, 1536)},
      {"hgrn-real-2d", real_language_model(2, 768)},
      {"hgrn-150m", pile_model(15, 768)},
      {"hgrn-350m", pile_model(24, 1024)},
      {"hgrn-379m", pile_model(24, 1024)},
      {"hgrn-1b", pile_model(18, 2048)},
      {"hgrn2-44m", hgrn2_language_model()},
      {"hgrn2-150m", hgrn2_pile_model(15, 768)},
      {"hgrn2-385m", hgrn2_pile_model(26, 1024)},
      {"hgrn2-1b", hgrn2_pile_model(18, 2048)},
      {"hgrn2-2.9b", hgrn2_pile_model(36, 2560)},
      {"hgrn2-756m", hgrn2_fla_model()},
      {"transformer-386m", transformer_model()},
      {"transformer-756m", fox_model("transformer", 1536, 24, 12)},
      {"fox-757m", fox_model("fox", 1536, 24, 12)},
      {"transformer-pro-757m", fox_model("transformer-pro", 1536, 24, 12)},
      {"fox-pro-758m", fox_model("fox-pro", 1536, 24, 12)},
      {"transformer-360m", fox_model("transformer", 1024, 24, 16)},
      {"fox-360m", fox_model("fox", 1024, 24, 8)},
      {"transformer-pro-360m", fox_model("transformer-pro", 1024, 24, 16)},
      {"fox-pro-360m", fox_model("fox-pro", 1024, 24, 8)},
      {"transformer-125m", fox_model("transformer", 768, 12, 12)},
      {"fox-125m", fox_model("fox", 768, 12, 6)},
      {"transformer-pro-125m", fox_model("transformer-pro", 768, 12, 12)},
      {"fox-pro-125m", fox_model("fox-pro", 768, 12, 6)},
      {"pese-lr-4", pese_model("lr", 4, 204)},
      {"pese-lr-8", pese_model("lr", 8, 114)},
      {"pese-glt-4", pese_model("glt", 4)},
      {"pese-glti-4", pese_model("glti", 4)},
      {"pese-krp-4", pese_model("krp", 4)},
      {"pese-kp-4", pese_model("kp", 4)},
      {"hgrn-vit-tiny", image_model(192)},
      {"hgrn-vit-small", image_model(384)},
      {"demo", demo_model()},
  };
}

}  // namespace tidegate::models
