#include "tidegate/models/config.h"

#include <nlohmann/json.hpp>

#include "tidegate/presets_json.h"

namespace tidegate::models {

std::map<std::string, LMConfig> presets() {
  std::map<std::string, LMConfig> found;
  for (const auto& [name, fields] : nlohmann::ordered_json::parse(kPresetsJson).items()) {
    found.emplace(name, LMConfig::from_json(fields.dump()));
  }
  return found;
}

}  // namespace tidegate::models
