// JSON text that people and other programs wrote, read strictly; no torch.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>

namespace tidegate::models {

/// Keeps the order of the keys.
using Json = nlohmann::ordered_json;

/// What is wrong with a JSON text, in one line of printable ASCII that begins "not valid JSON: ".
class JsonError : public std::runtime_error {
 public:
  explicit JsonError(const std::string& what) : std::runtime_error("not valid JSON: " + what) {}
};

/// The value of `text`, in time that grows with its length alone. Stricter than JSON: a key that an
/// object has twice, a number beyond 64 bits and more than kMaxJsonDepth lists and objects in one
/// another are JsonErrors too. parse_json() in python/tidegate/models/_json.py
/// refuses the same.
Json parse_json(const std::string& text);

/// Where the first byte is that cannot be UTF-8; unset where all can.
std::optional<size_t> first_byte_not_utf8(const std::string& text);

/// A value as error messages show it, in Python's words, so that both languages say the same: None,
/// True, 3, 1e-05, 'text' (in ASCII, cut where it is long), "a list", "a dictionary".
std::string shown(bool value);
std::string shown(int64_t value);
std::string shown(double value);
std::string shown(const std::string& value);
std::string shown(const Json& value);

}  // namespace tidegate::models
