#include "tidegate/models/config.h"

#include <nlohmann/json.hpp>

#include "tidegate/presets_json.h"

namespace tidegate::models {

std::map<std::string, LMConfig> presets() {
  const auto all = nlohmann::ordered_json::parse(kPresetsJson);  // outlives the loop over it
  std::map<std::string, LMConfig> found;
  for (const auto& [name, fields] : all.items()) {
    found.emplace(name, LMConfig::from_json(fields.dump()));
  }
  return found;
}

}  // namespace tidegate::models
