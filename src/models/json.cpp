#include "src/models/json.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "src/models/file_io.h"
#include "tidegate/choices.h"

namespace tidegate::models {
namespace {

// Messages quote what was given, which can be as long as a file.
constexpr size_t kLongestNumber = 40;
constexpr size_t kLongestString = 80;
constexpr size_t kLongestProblem = 200;

std::string cut(const std::string& text, size_t length) {
  return text.size() <= length ? text : text.substr(0, length) + "...";
}

// The events of nlohmann's parser as a value. Not its own builder: with a callback, which is what
// could see a key twice, that one looks through the whole parent after each child; and it nests as
// deeply as the text says, which dump() and the destructor then follow by recursion.
class Builder {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  Json take() { return std::move(root_); }

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(number_integer_t value) { return add(value); }
  bool number_unsigned(number_unsigned_t value) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      refuse_number(std::to_string(value));
    }
    return add(value);
  }
  bool number_float(number_float_t value, const string_t& text) {
    // The parser turns an integer that does not fit into a rounded floating-point number.
    if (text.find_first_of(".eE") == std::string::npos) refuse_number(text);
    return add(value);
  }
  bool string(string_t& value) { return add(std::move(value)); }
  bool binary(binary_t&) { return false; }  // JSON text has none
  bool start_object(size_t) {
    open(Json::object());
    keys_.emplace_back();
    return true;
  }
  bool key(string_t& name) {
    if (!keys_.back().insert(name).second) throw JsonError("key " + shown(name) + " is twice");
    // Behind the last one: ordered_map's own insertion looks for the key among all others.
    Json::object_t::Container& items = open_.back()->get_ref<Json::object_t&>();
    items.emplace_back(std::move(name), Json());
    value_ = &items.back().second;
    return true;
  }
  bool end_object() {
    keys_.pop_back();
    open_.pop_back();
    return true;
  }
  bool start_array(size_t) {
    open(Json::array());
    return true;
  }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t, const std::string& token, const nlohmann::detail::exception& error) {
    constexpr int kNumberOverflow = 406;
    if (error.id == kNumberOverflow) refuse_number(token);
    throw JsonError(cut(printable(error.what()), kLongestProblem));
  }

 private:
  [[noreturn]] static void refuse_number(const std::string& text) {
    throw JsonError("expected numbers of at most 64 bits; got " + cut(text, kLongestNumber));
  }

  Json& place() {
    if (open_.empty()) return root_;
    if (open_.back()->is_object()) return *value_;
    return open_.back()->get_ref<Json::array_t&>().emplace_back();
  }

  bool add(Json value) {
    place() = std::move(value);
    return true;
  }

  void open(Json container) {
    if (open_.size() == static_cast<size_t>(kMaxJsonDepth)) {
      throw JsonError("nested more than " + std::to_string(kMaxJsonDepth) + " levels deep");
    }
    Json& held = place();
    held = std::move(container);
    open_.push_back(&held);
  }

  Json root_;
  // The containers that are not at their end, from the outermost on. None of them moves while it is
  // open: its parent takes no further child before it is closed.
  std::vector<Json*> open_;
  std::vector<std::unordered_set<std::string>> keys_;
  Json* value_ = nullptr;  // of the key that was read last
};

bool is_continuation(const std::string& text, size_t at, unsigned char low, unsigned char high) {
  const auto byte = at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
  return byte >= low && byte <= high;
}

// The length of the character that begins at `at`; 0 where none does. The bounds of the second byte
// rule out surrogates, longer spellings than needed, and code points that there are not.
size_t character_length(const std::string& text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (!is_continuation(text, at + 1, low, high)) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (!is_continuation(text, at + i, 0x80, 0xbf)) return 0;
  }
  return length;
}

uint32_t code_point(const std::string& text, size_t at, size_t length) {
  const auto lead = static_cast<unsigned char>(text[at]);
  if (length == 1) return lead;
  uint32_t code = lead & (0xffu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    code = code << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3fu);
  }
  return code;
}

// A character as Python's ascii() has it.
std::string escaped(uint32_t code, char quote) {
  if (code == '\t') return "\\t";
  if (code == '\n') return "\\n";
  if (code == '\r') return "\\r";
  const auto as_char = static_cast<char>(code);
  if (code == '\\' || (code < 0x80 && as_char == quote)) return std::string("\\") + as_char;
  if (code >= 0x20 && code < 0x7f) return std::string(1, as_char);
  const char* format = code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x";
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, format, static_cast<unsigned>(code));
  return buffer;
}

}  // namespace

Json parse_json(const std::string& text) {
  // The parser takes a zero byte for the end, and passes over a mark of the byte order.
  if (text.find('\0') != std::string::npos) throw JsonError("a zero byte");
  if (text.starts_with("\xef\xbb\xbf")) throw JsonError("a byte order mark at the beginning");
  Builder builder;
  Json::sax_parse(text, &builder);
  return builder.take();
}

std::optional<size_t> first_byte_not_utf8(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

std::string shown(bool value) { return value ? "True" : "False"; }

std::string shown(int64_t value) { return std::to_string(value); }

std::string shown(double value) {
  if (value != value) return "nan";
  if (value - value != 0.0) return value > 0.0 ? "inf" : "-inf";
  char buffer[64];
  const auto write = [&](std::chars_format format) {
    return std::string(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  };
  // The fewest digits that name it; with an exponent where Python's repr() has one.
  const std::string scientific = write(std::chars_format::scientific);
  int exponent = 0;
  const char* digits = scientific.c_str() + scientific.find('e') + 1;
  std::from_chars(digits + (*digits == '+'), scientific.c_str() + scientific.size(), exponent);
  if (exponent < -4 || exponent >= 16) return scientific;
  const std::string fixed = write(std::chars_format::fixed);
  return fixed.find('.') == std::string::npos ? fixed + ".0" : fixed;
}

std::string shown(const std::string& value) {
  std::string text;
  std::vector<uint32_t> codes;
  size_t at = 0;
  while (at < value.size() && codes.size() < kLongestString) {
    const size_t length = character_length(value, at);
    const auto byte = static_cast<unsigned char>(value[at]);
    codes.push_back(length == 0 ? byte : code_point(value, at, length));
    at += std::max<size_t>(length, 1);
  }
  const auto holds = [&](char c) {
    return std::find(codes.begin(), codes.end(), static_cast<uint32_t>(c)) != codes.end();
  };
  const char quote = holds('\'') && !holds('"') ? '"' : '\'';
  for (const uint32_t code : codes) text += escaped(code, quote);
  return quote + text + quote + (at < value.size() ? "..." : "");
}

std::string shown(const Json& value) {
  if (value.is_null()) return "None";
  if (value.is_boolean()) return shown(value.get<bool>());
  if (value.is_number_integer()) return shown(value.get<int64_t>());
  if (value.is_number()) return shown(value.get<double>());
  if (value.is_string()) return shown(value.get_ref<const std::string&>());
  return value.is_array() ? "a list" : "a dictionary";
}

}  // namespace tidegate::models
