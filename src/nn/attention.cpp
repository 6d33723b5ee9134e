#include "tidegate/nn/attention.h"

#include <algorithm>
#include <vector>

#include "src/nn/common.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

AttentionOptions resolve(AttentionOptions options) {
  check_positive("Attention", "dim", options.dim());
  options.num_heads(options.num_heads().value_or(std::max<int64_t>(options.dim() / 64, 1)));
  const int64_t heads = *options.num_heads();
  check_positive("Attention", "num_heads", heads);
  TORCH_CHECK_VALUE(options.dim() % heads == 0,
                    "Attention: num_heads: expected a divisor of dim=", options.dim(), "; got ",
                    heads);
  check_choice("Attention", "preset", options.preset(), {"llama"});
  TORCH_CHECK_VALUE(options.rope().value_or(1.0) > 0,
                    "Attention: rope: expected a positive number; got ", *options.rope());
  const int64_t width = options.dim() / heads;
  TORCH_CHECK_VALUE(!options.rope() || width % 2 == 0,
                    "Attention: num_heads: expected an even number of channels a head, which rope "
                    "turns in pairs; got ",
                    width);
  if (options.window()) check_positive("Attention", "window", *options.window());
  return options;
}

at::TensorOptions integers(const Tensor& like) { return like.options().dtype(torch::kLong); }

// Packed tokens [1, total, H, D] as [count, longest, H, D], zeros after each end, which causal
// queries before them do not see.
Tensor padded(const Tensor& x, const Tensor& rows, const Tensor& steps, int64_t count,
              int64_t longest) {
  const Tensor out = at::zeros({count, longest, x.size(2), x.size(3)}, x.options());
  return out.index_put({rows, steps}, x[0]);
}

}  // namespace

AttentionImpl::AttentionImpl(const AttentionOptions& given) : options(resolve(given)) { reset(); }

void AttentionImpl::reset() {
  const int64_t dim = options.dim();
  in_proj = register_module("in_proj", make_linear(dim, 3 * dim, false, options.placement()));
  out_proj = register_module("out_proj", make_linear(dim, dim, false, options.placement()));
  if (!UndrawnGuard::is_active()) reset_parameters();
}

void AttentionImpl::reset_parameters() {
  reset_linear(in_proj);
  reset_linear(out_proj);
}

MixerState AttentionImpl::init_state(int64_t batch, std::optional<torch::Device> device,
                                     std::optional<torch::ScalarType> dtype,
                                     std::optional<int64_t> capacity) const {
  TORCH_CHECK_VALUE(capacity,
                    "Attention: capacity: expected the number of tokens to come; got None");
  const Tensor& weight = out_proj->weight;
  const auto where = at::TensorOptions(dtype.value_or(weight.scalar_type()))
                         .device(device.value_or(weight.device()));
  const std::vector<int64_t> shape = {batch, *capacity, num_heads(), head_dim()};
  return {at::zeros(shape, where), at::zeros(shape, where),
          at::zeros({batch}, where.dtype(torch::kLong))};
}

std::tuple<Tensor, MixerState> AttentionImpl::forward(const Tensor& x, const MixerState& state,
                                                      const OptionalTensor& gamma,
                                                      const OptionalTensor& given_bounds) {
  const OptionalTensor cu_seqlens = normalized(given_bounds);
  check_mixer_input("Attention", x, options.dim());
  refuse_gamma(gamma);
  if (!state.empty()) check_state(state, cu_seqlens ? cu_seqlens->numel() - 1 : x.size(0));
  auto qkv = project(x);
  Tensor rows, steps, added;
  if (cu_seqlens) {
    const Tensor bounds = cu_seqlens->to(x.device(), torch::kLong);
    added = bounds.diff();
    rows = at::repeat_interleave(added);
    steps = at::arange(x.size(1), integers(x)) - bounds.index({rows});
    const int64_t longest = added.numel() > 0 ? added.max().item<int64_t>() : 0;
    for (Tensor& part : qkv) part = padded(part, rows, steps, added.numel(), longest);
  } else {
    added = at::full({x.size(0)}, x.size(1), integers(x));
  }
  const Tensor past = state.empty() ? at::zeros_like(added) : state.at(2);
  const Tensor positions = past.unsqueeze(1) + at::arange(qkv[0].size(1), integers(x));
  const Tensor q = rotated(qkv[0], positions), k = rotated(qkv[1], positions);
  MixerState next;
  if (!state.empty()) next = extended(state, k, qkv[2], positions, added, rows, steps);
  Tensor o = next.empty() ? attend(q, k, qkv[2], {}) : attend(q, next[0], next[1], positions);
  if (rows.defined()) o = o.index({rows, steps}).unsqueeze(0);
  return {apply_linear(out_proj, o.flatten(-2)), next};
}

Tensor AttentionImpl::step(const Tensor& x, const MixerState& state, const OptionalTensor& gamma) {
  const torch::NoGradGuard no_grad;
  check_mixer_input("Attention.step", x, options.dim(), /*time=*/false);
  refuse_gamma(gamma);
  check_state(state, x.size(0));
  Tensor lengths = state[2];
  // Elsewhere looking would wait for the device.
  if (lengths.is_cpu()) check_room(state, lengths + 1);
  const Tensor positions = lengths.unsqueeze(1);
  auto qkv = project(x);
  for (Tensor& part : qkv) part = part.unsqueeze(1);
  const Tensor q = rotated(qkv[0], positions), k = rotated(qkv[1], positions);
  const Tensor rows = at::arange(x.size(0), integers(x));
  Tensor keys = state[0], values = state[1];
  keys.index_put_({rows, lengths}, k.select(1, 0).to(keys.scalar_type()));
  values.index_put_({rows, lengths}, qkv[2].select(1, 0).to(values.scalar_type()));
  const Tensor o = attend(q, keys, values, positions);
  lengths.add_(1);
  return apply_linear(out_proj, o.select(1, 0).flatten(-2));
}

void AttentionImpl::refuse_gamma(const OptionalTensor& gamma) const {
  TORCH_CHECK_VALUE(!normalized(gamma),
                    "Attention: gamma: expected None, since it has no lower bound; got a tensor");
}

void AttentionImpl::check_state(const MixerState& state, int64_t sequences) const {
  TORCH_CHECK_VALUE(state.size() == 3, "Attention: state: expected keys, values and lengths; got ",
                    state.size(), " tensors");
  const Tensor& k = state[0];
  const bool fits =
      k.dim() == 4 && k.size(0) == sequences && k.size(2) == num_heads() && k.size(3) == head_dim();
  TORCH_CHECK_VALUE(fits, "Attention: state: expected keys [", sequences, ", capacity, ",
                    num_heads(), ", ", head_dim(), "]; got ", shape_text(k));
}

void AttentionImpl::check_room(const MixerState& state, const Tensor& lengths) const {
  const int64_t needed = lengths.numel() > 0 ? lengths.max().item<int64_t>() : 0;
  TORCH_CHECK_VALUE(needed <= state[0].size(1), "Attention: state: expected room for ", needed,
                    " tokens, which init_state() and prefill() make by their capacity; got ",
                    state[0].size(1));
}

// q, k, v [..., H, D]: views of one matrix product.
std::vector<Tensor> AttentionImpl::project(const Tensor& x) const {
  return apply_linear(in_proj, x).unflatten(-1, {3, num_heads(), head_dim()}).unbind(-3);
}

// x [B, T, H, D] turned by its positions [B or 1, T].
Tensor AttentionImpl::rotated(const Tensor& x, const Tensor& positions) const {
  if (!options.rope()) return x;
  const Tensor wide = widen(x);
  const int64_t half = head_dim() / 2;
  const Tensor exponents = at::arange(half, wide.options()) / -half;
  const Tensor angles =
      (positions.unsqueeze(-1).to(wide.scalar_type()) * at::pow(*options.rope(), exponents))
          .unsqueeze(-2);
  const Tensor cos = angles.cos(), sin = angles.sin();
  const auto parts = wide.chunk(2, -1);
  return at::cat({parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin}, -1)
      .to(x.scalar_type());
}

// The state with the new tokens' keys and values [N, P, H, D] in it; rows and steps: which of them
// are tokens, undefined = all.
MixerState AttentionImpl::extended(const MixerState& state, const Tensor& k, const Tensor& v,
                                   const Tensor& positions, const Tensor& added, Tensor rows,
                                   Tensor steps) const {
  check_room(state, state[2] + added);
  if (!rows.defined()) {
    rows = at::arange(k.size(0), integers(k)).unsqueeze(1).expand_as(positions).flatten();
    steps = at::arange(k.size(1), integers(k)).repeat({k.size(0)});
  }
  const Tensor places = positions.index({rows, steps});
  const auto put = [&](const Tensor& cache, const Tensor& fresh) {
    return cache.index_put({rows, places}, fresh.index({rows, steps}).to(cache.scalar_type()));
  };
  return {put(state[0], k), put(state[1], v), state[2] + added};
}

// Attention of q [N, P, H, D] over k, v [N, S, H, D]. positions [N, P]: of the queries, where the
// keys are a state's; undefined: queries and keys are the same tokens.
Tensor AttentionImpl::attend(const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& positions) const {
  OptionalTensor mask;
  if (positions.defined() || options.window()) {
    const Tensor here =
        positions.defined() ? positions : at::arange(q.size(1), integers(q)).unsqueeze(0);
    const Tensor back = here.unsqueeze(-1) - at::arange(k.size(1), integers(q));
    mask = (back >= 0).unsqueeze(1);
    if (options.window()) mask = *mask & (back < *options.window()).unsqueeze(1);
  }
  return at::scaled_dot_product_attention(q.to(k.scalar_type()).transpose(1, 2), k.transpose(1, 2),
                                          v.transpose(1, 2), mask, /*dropout_p=*/0.0,
                                          /*is_causal=*/!mask)
      .transpose(1, 2);
}

void AttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "tidegate::nn::Attention(dim=" << options.dim() << ", num_heads=" << num_heads()
         << ", preset=" << options.preset() << ")";
}

}  // namespace tidegate::nn
