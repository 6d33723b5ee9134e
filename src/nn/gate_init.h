// The options gate_init and gumbel_gate of the gated modules.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tidegate::nn {

// What specs such as "chrono:512" are read by. std::regex would do it in a line, and take seconds
// to compile and a hundred symbols of this library.

/// At least one part, which may be empty.
std::vector<std::string_view> split_at_colons(std::string_view text);

enum class PlainNumber : uint8_t { kWhole, kUnsigned, kSigned };

/// Whether text is one to nine digits; but for kWhole with a point and one to nine more, if it has
/// one; of kSigned with a minus before them, if it has one.
bool is_plain_number(std::string_view text, PlainNumber kind = PlainNumber::kUnsigned);

/// What gate_init asks for.
struct GateInit {
  std::string kind;
  int64_t t_max;
  double alpha;
  double tau;

  /// Writes the bias `[S]` of a gate that reads `dim` channels.
  void draw(const at::Tensor& bias, int64_t dim) const;
};

/// What `text` means for a gate of `channels` channels. Throws c10::ValueError naming what is
/// expected, `also` before the rest.
GateInit parse_gate_init(const char* owner, const std::string& text, int64_t channels,
                         const char* also = "");

/// Throws c10::ValueError unless tau is unset or above zero.
void check_gumbel_gate(const char* owner, std::optional<double> tau);

/// Checks both options of a gate, which depends on the data if `has_data`; else None alone fits.
/// needed: what makes it so, "gate='data'".
void check_gate_options(const char* owner, bool has_data, const char* needed,
                        const std::optional<std::string>& gate_init,
                        std::optional<double> gumbel_gate, int64_t channels);

/// Gate logits f with fresh logistic noise a step and element: (f + logit u) / tau, u uniform on
/// (0, 1), from the default generator of f's device (arXiv 1806.02988).
at::Tensor gumbel_gate(const at::Tensor& f, double tau);

}  // namespace tidegate::nn
