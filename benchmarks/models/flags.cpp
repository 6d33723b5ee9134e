#include "benchmarks/models/flags.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>

namespace tidegate::benchmarks {

const char kUsage[] =
    R"(bench_models: training steps and decoding of every mixer beside Transformers of as many parameters.
On one device: training on several GPUs is Python's, benchmarks/distributed.py.

  --device cpu|cuda        where (cuda where torch sees one)
  --size tiny|small|125m|360m|756m   (small on the CPU, 360m on a GPU)
  --dim 512, --layers 6    another width and depth than the size's
  --precision fp32|bf16    bf16: autocast in training, bf16 weights in decoding (bf16 on a GPU)
  --recompute none|norms|blocks  what the backward pass computes again (none)
  --residual auto|bf16     the residual stream in training (auto: as the embedding)
  --contexts 256,1024      context lengths, divisors of the tokens
  --tokens 4096            of a training step, and held by the batch that decodes
  --mixers hgrn,fox        which; the ratios need "transformer" (all)
  --rounds 2               times that every mixer has its turn, every second time in reverse order
  --steps 5                timed steps of training in a round, after one that is not timed
  --decode-tokens 32       tokens decoded a sequence; 0: no decoding
  --seconds 5              of one measurement; where steps take longer, fewer are timed
  --json PATH              the results, written anew after every row
  --commit ID              for the JSON
  --list                   prints the mixers and the sizes
)";

namespace {

using Values = std::map<std::string, std::string>;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

int64_t integer(const std::string& flag, const std::string& text, int64_t least) {
  int64_t value = least - 1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  TORCH_CHECK_VALUE(is_number && value >= least, flag, ": expected an integer >= ", least,
                    "; got '", text, "'");
  return value;
}

// "--name value" and "--name=value".
Values values_of(const std::vector<std::string>& arguments) {
  const std::vector<std::string> known = {
      "--device", "--size",   "--dim",       "--layers",        "--precision", "--contexts",
      "--tokens", "--mixers", "--steps",     "--decode-tokens", "--seconds",   "--rounds",
      "--json",   "--commit", "--recompute", "--residual"};
  Values values;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const size_t equals = arguments[i].find('=');
    const std::string name = arguments[i].substr(0, equals);
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(), "'", name,
                      "' is unknown; available: ", joined(known));
    if (equals != std::string::npos) {
      values[name] = arguments[i].substr(equals + 1);
    } else {
      TORCH_CHECK_VALUE(i + 1 < arguments.size(), name, ": expected a value; got none");
      values[name] = arguments[++i];
    }
  }
  return values;
}

std::string choice(const Values& values, const std::string& flag,
                   const std::vector<std::string>& allowed, const std::string& fallback) {
  const auto found = values.find(flag);
  if (found == values.end()) return fallback;
  TORCH_CHECK_VALUE(std::find(allowed.begin(), allowed.end(), found->second) != allowed.end(), flag,
                    ": expected one of ", joined(allowed), "; got '", found->second, "'");
  return found->second;
}

std::vector<std::string> chosen_mixers(const std::string& text) {
  const std::vector<std::string> known = ordered_mixers(), given = split(text);
  for (const std::string& name : given) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(), "--mixers: '",
                      name, "' is unknown; available: ", joined(known));
  }
  TORCH_CHECK_VALUE(!given.empty(), "--mixers: expected at least one of ", joined(known));
  return given;
}

}  // namespace

Flags parse_flags(const std::vector<std::string>& arguments) {
  Flags flags;
  const auto has = [&](const char* flag) {
    return std::find(arguments.begin(), arguments.end(), flag) != arguments.end();
  };
  flags.help = has("--help");
  flags.list = has("--list");
  if (flags.help || flags.list) return flags;
  const Values values = values_of(arguments);
  const auto given = [&](const char* flag) { return values.count(flag) == 1; };
  const bool has_cuda = torch::cuda::is_available();
  const bool is_cuda =
      choice(values, "--device", {"cpu", "cuda"}, has_cuda ? "cuda" : "cpu") == "cuda";
  TORCH_CHECK_VALUE(!is_cuda || has_cuda,
                    "--device: expected cpu, since torch sees no CUDA device");
  Setup& setup = flags.setup;
  if (is_cuda) setup.device = c10::Device(c10::kCUDA, 0);
  setup.is_bf16 =
      choice(values, "--precision", {"fp32", "bf16"}, is_cuda ? "bf16" : "fp32") == "bf16";
  flags.size = find_size(given("--size") ? values.at("--size") : is_cuda ? "360m" : "small");
  if (given("--dim") || given("--layers")) {
    flags.size.name = "custom";  // no preset has it
    if (given("--dim")) flags.size.dim = integer("--dim", values.at("--dim"), 8);
    if (given("--layers")) flags.size.layers = integer("--layers", values.at("--layers"), 1);
    TORCH_CHECK_VALUE(flags.size.dim % 8 == 0, "--dim: expected a multiple of 8; got ",
                      flags.size.dim);
  }
  setup.tokens =
      given("--tokens") ? integer("--tokens", values.at("--tokens"), 1) : flags.size.tokens;
  flags.contexts = flags.size.contexts;
  if (given("--contexts")) {
    flags.contexts.clear();
    for (const std::string& text : split(values.at("--contexts"))) {
      flags.contexts.push_back(integer("--contexts", text, 2));
    }
  }
  for (const int64_t context : flags.contexts) {
    TORCH_CHECK_VALUE(setup.tokens % context == 0, "--contexts: expected divisors of --tokens ",
                      setup.tokens, "; got ", context);
  }
  flags.mixers = given("--mixers") ? chosen_mixers(values.at("--mixers")) : ordered_mixers();
  if (given("--steps")) setup.steps = integer("--steps", values.at("--steps"), 1);
  if (given("--decode-tokens")) {
    setup.decode_tokens = integer("--decode-tokens", values.at("--decode-tokens"), 0);
  }
  if (given("--seconds")) {
    setup.seconds = static_cast<double>(integer("--seconds", values.at("--seconds"), 0));
  }
  if (given("--rounds")) flags.rounds = integer("--rounds", values.at("--rounds"), 1);
  setup.recompute = choice(values, "--recompute", {"none", "norms", "blocks"}, "none");
  setup.has_narrow_residual = choice(values, "--residual", {"auto", "bf16"}, "auto") == "bf16";
  TORCH_CHECK_VALUE(setup.is_bf16 || !setup.has_narrow_residual,
                    "--residual: expected auto with --precision fp32; got 'bf16'");
  if (given("--json")) flags.json = values.at("--json");
  if (given("--commit")) flags.commit = values.at("--commit");
  return flags;
}

}  // namespace tidegate::benchmarks
