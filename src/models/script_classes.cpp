// The engine for Python: torch.classes.tidegate, which libtidegate.so brings with it and which is
// tied to no version of Python, unlike tidegate._cpp. python/tidegate/models/engine.py uses it.

#include <torch/custom_class.h>
#include "tidegate/models/causal_lm.h"
#include "tidegate/models/decoder.h"

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "src/models/generation.h"
#include "src/models/sampling.h"
#include "src/nn/common.h"

namespace tidegate::models {
namespace {

using torch::Tensor;

/// A CausalLM whose parameters are those of a Python one: the same memory.
struct SharedCausalLM : torch::CustomClassHolder {
  SharedCausalLM(const std::string& config, const std::vector<std::string>& names,
                 const std::vector<Tensor>& tensors) {
    const Unrecorded unrecorded;
    const nn::UndrawnGuard undrawn;
    model = CausalLM(LMConfig::from_json(config), nn::Placement{torch::kCPU, std::nullopt});
    std::map<std::string, Tensor> own;
    for (const auto& item : model->named_parameters()) own.emplace(item.key(), item.value());
    for (const auto& item : model->named_buffers()) own.emplace(item.key(), item.value());
    TORCH_CHECK_VALUE(own.size() == names.size(), "CausalLM: expected ", own.size(),
                      " tensors of its configuration; got ", names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const auto found = own.find(names[i]);
      TORCH_CHECK_VALUE(found != own.end() && found->second.sizes() == tensors[i].sizes(),
                        "CausalLM: tensor '", names[i], "' has no place in the configuration");
      const Tensor shared = tensors[i].detach();
      found->second.set_data(shared);
      // What trains the Python parameter in place counts here, too.
      if (!found->second.is_inference() && !shared.is_inference()) {
        found->second.unsafeGetTensorImpl()->set_version_counter(
            shared.unsafeGetTensorImpl()->version_counter());
      }
    }
    model->eval();
  }

  /// As CausalLM's residual_dtype: a torch.dtype comes as its number.
  void set_residual_dtype(std::optional<int64_t> dtype) {
    model->residual_dtype.reset();
    if (dtype) model->residual_dtype = static_cast<at::ScalarType>(*dtype);
  }

  CausalLM model{nullptr};
};

/// A generate() in progress.
struct RunningGeneration : torch::CustomClassHolder {
  RunningGeneration(c10::intrusive_ptr<SharedCausalLM> given, const Tensor& ids,
                    const GenerateOptions& options)
      : model(std::move(given)), generation(*model->model, ids, options) {}

  c10::intrusive_ptr<SharedCausalLM> model;
  Generation generation;
};

c10::intrusive_ptr<RunningGeneration> start(
    const c10::intrusive_ptr<SharedCausalLM>& model, const Tensor& ids,
    const std::optional<Tensor>& lengths, int64_t max_new_tokens, double temperature,
    std::optional<int64_t> top_k, std::optional<double> top_p, std::optional<double> min_p,
    double repetition_penalty, std::optional<int64_t> eos, std::optional<int64_t> seed) {
  return c10::make_intrusive<RunningGeneration>(model, ids,
                                                GenerateOptions(max_new_tokens)
                                                    .temperature(temperature)
                                                    .top_k(top_k)
                                                    .top_p(top_p)
                                                    .min_p(min_p)
                                                    .repetition_penalty(repetition_penalty)
                                                    .eos(eos)
                                                    .seed(seed)
                                                    .lengths(lengths.value_or(Tensor())));
}

/// Draws the tokens of sequences whose steps somebody else makes.
struct RowSampler : torch::CustomClassHolder {
  RowSampler(int64_t count, int64_t vocab, at::Device device, double temperature,
             std::optional<int64_t> top_k, std::optional<double> top_p, std::optional<double> min_p,
             double repetition_penalty, int64_t seed, const std::optional<Tensor>& seen)
      : rows(count, vocab, /*stops=*/0, /*window=*/1, /*log_probs=*/false, device) {
    check_sampling("CausalLM.generate", temperature, top_k, top_p, min_p, repetition_penalty);
    RowSettings one;
    one.temperature = temperature;
    one.top_k = top_k.value_or(0);
    one.top_p = top_p.value_or(1.0);
    one.min_p = min_p.value_or(0.0);
    one.penalty = repetition_penalty;
    one.seed = seed;
    one.limit = std::numeric_limits<int64_t>::max();
    std::vector<RowSettings> settings(static_cast<size_t>(count), one);
    for (int64_t b = 0; b < count; ++b) settings[static_cast<size_t>(b)].stream = b;
    if (seen) rows.make_seen();
    rows.write(0, settings, seen.value_or(Tensor()));
  }

  /// logits `[count, vocab]` -> int64 `[count]`.
  Tensor sample(const Tensor& logits) {
    rows.sample(logits.stride(-1) == 1 ? logits : logits.contiguous(), logits.size(0));
    return rows.ids.clone();
  }

  SampledRows rows;
};

/// A Decoder. Options of a sequence come as lists: numbers {temperature, top_p, min_p,
/// repetition_penalty}; integers {top_k, 0: none; seed; stream; max_new_tokens, 0: none; stop ids}.
struct RunningDecoder : torch::CustomClassHolder {
  using Numbers = std::vector<double>;
  using Integers = std::vector<int64_t>;

  RunningDecoder(c10::intrusive_ptr<SharedCausalLM> given, int64_t max_batch, int64_t capacity,
                 int64_t max_stop_ids, int64_t prompt_chunk, bool log_probs, bool invariant)
      : model(std::move(given)),
        decoder(model->model, DecoderOptions(max_batch)
                                  .capacity(capacity)
                                  .max_stop_ids(max_stop_ids)
                                  .prompt_chunk(prompt_chunk)
                                  .log_probs(log_probs)
                                  .invariant(invariant)) {}

  static SequenceOptions options(const Numbers& numbers, const Integers& integers) {
    SequenceOptions out;
    out.temperature(numbers.at(0)).top_p(numbers.at(1)).min_p(numbers.at(2));
    out.repetition_penalty(numbers.at(3)).seed(integers.at(1)).stream(integers.at(2));
    if (integers.at(0) > 0) out.top_k(integers[0]);
    if (integers.at(3) > 0) out.max_new_tokens(integers[3]);
    return out.stop_ids({integers.begin() + 4, integers.end()});
  }

  std::vector<int64_t> add(const std::vector<Tensor>& prompts, const std::vector<Numbers>& numbers,
                           const std::vector<Integers>& integers) {
    std::vector<SequenceOptions> all;
    for (size_t i = 0; i < numbers.size(); ++i) all.push_back(options(numbers[i], integers.at(i)));
    return decoder.add(prompts, all);
  }

  /// int64 `[tokens, 3]`: slot, token, whether it is the sequence's last; fp64 `[tokens]`: their
  /// log-probabilities.
  std::tuple<Tensor, Tensor> steps(int64_t asked) {
    const std::vector<DecodedToken> tokens = decoder.steps(asked);
    const auto count = static_cast<int64_t>(tokens.size());
    Tensor integers = at::empty({count, 3}, at::kLong), log_probs = at::empty({count}, at::kDouble);
    for (int64_t i = 0; i < count; ++i) {
      const DecodedToken& one = tokens[static_cast<size_t>(i)];
      int64_t* const row = integers.data_ptr<int64_t>() + 3 * i;
      row[0] = one.slot;
      row[1] = one.token;
      row[2] = one.is_last ? 1 : 0;
      log_probs.data_ptr<double>()[i] = one.log_prob;
    }
    return {integers, log_probs};
  }

  c10::Dict<std::string, Tensor> save_prefix(int64_t slot) const {
    c10::Dict<std::string, Tensor> out;
    for (const auto& [name, tensor] : decoder.save_prefix(slot)) out.insert(name, tensor);
    return out;
  }

  int64_t load_prefix(const c10::Dict<std::string, Tensor>& saved, const Tensor& prompt,
                      const Numbers& numbers, const Integers& integers) {
    TensorMap tensors;
    for (const auto& item : saved) tensors.emplace(item.key(), item.value());
    return decoder.load_prefix(tensors, prompt, options(numbers, integers));
  }

  c10::intrusive_ptr<SharedCausalLM> model;
  Decoder decoder;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.class_<RunningGeneration>("Generation")
      .def("advance",
           [](const c10::intrusive_ptr<RunningGeneration>& self) {
             return self->generation.advance();
           })
      .def("tokens", [](const c10::intrusive_ptr<RunningGeneration>& self) {
        return self->generation.tokens();
      });
  m.class_<SharedCausalLM>("CausalLM")
      .def(torch::init<std::string, std::vector<std::string>, std::vector<Tensor>>())
      .def("set_residual_dtype", &SharedCausalLM::set_residual_dtype)
      .def("start", &start);
  m.class_<RowSampler>("RowSampler")
      .def(torch::init<int64_t, int64_t, at::Device, double, std::optional<int64_t>,
                       std::optional<double>, std::optional<double>, double, int64_t,
                       std::optional<Tensor>>())
      .def("sample", [](const c10::intrusive_ptr<RowSampler>& self, const Tensor& logits) {
        return self->sample(logits);
      });
  m.class_<RunningDecoder>("Decoder")
      .def(torch::init<c10::intrusive_ptr<SharedCausalLM>, int64_t, int64_t, int64_t, int64_t, bool,
                       bool>())
      .def("add", &RunningDecoder::add)
      .def("load_prefix", &RunningDecoder::load_prefix)
      .def("fork",
           [](const c10::intrusive_ptr<RunningDecoder>& self, int64_t slot,
              const std::vector<double>& numbers, const std::vector<int64_t>& integers) {
             return self->decoder.fork(slot, RunningDecoder::options(numbers, integers));
           })
      .def("steps", &RunningDecoder::steps)
      .def("end", [](const c10::intrusive_ptr<RunningDecoder>& self,
                     int64_t slot) { self->decoder.end(slot); })
      .def("remove", [](const c10::intrusive_ptr<RunningDecoder>& self,
                        int64_t slot) { self->decoder.remove(slot); })
      .def("save_prefix", &RunningDecoder::save_prefix)
      .def("active",
           [](const c10::intrusive_ptr<RunningDecoder>& self) { return self->decoder.active(); })
      .def("taken",
           [](const c10::intrusive_ptr<RunningDecoder>& self) { return self->decoder.taken(); });
}

}  // namespace tidegate::models
