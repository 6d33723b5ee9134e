// The models of the comparison: every mixer in the frame of one Transformer, with as many
// parameters as it has.
#pragma once

#include "tidegate/models/config.h"

#include <cstdint>
#include <string>
#include <vector>

namespace tidegate::benchmarks {

/// The Transformer that the others are compared with.
inline constexpr char kBaseline[] = "transformer";

/// What a size is timed on where nothing else is asked for.
struct Size {
  const char* name;
  int64_t dim, layers, vocab_size;
  std::vector<int64_t> contexts;
  int64_t tokens;  // a step
};

/// The sizes by name, smallest first; find_size() throws c10::ValueError for another.
const std::vector<Size>& sizes();
const Size& find_size(const std::string& name);

/// All mixers, baselines and forgetting attention first, the sequential one last.
std::vector<std::string> ordered_mixers();

/// A model over `mixer`. Where the package has a preset of this mixer and size, that; otherwise the
/// Transformer's with another mixer, and a GLU as wide as makes the parameters equal.
models::LMConfig config_of(const Size& size, const std::string& mixer);

/// Trainable parameters of a model. Allocates nothing.
int64_t parameter_count(const models::LMConfig& config);

/// Heads of attention, from the mixer's options.
int64_t heads_of(const models::LMConfig& config);

}  // namespace tidegate::benchmarks
