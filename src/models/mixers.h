// The token mixers by name.
#pragma once

#include "tidegate/models/config.h"
#include "tidegate/nn/module.h"
#include "tidegate/nn/token_mixer.h"

#include <memory>
#include <string>

namespace tidegate::models {

/// Throws c10::ValueError for a mixer that is not available, an option it does not have, and a
/// value of another type than the option's.
void check_mixer_options(const std::string& mixer, const MixerOptions& options);

/// Whether a mixer has the option `depth`: where its layer stands.
bool takes_depth(const std::string& mixer);

/// The mixer that the configuration of one layer names, of its width, with its options; a
/// TokenMixer too.
std::shared_ptr<torch::nn::Module> make_mixer(const LMConfig& config,
                                              const nn::Placement& placement);

}  // namespace tidegate::models
