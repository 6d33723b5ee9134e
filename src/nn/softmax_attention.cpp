#include "tidegate/nn/softmax_attention.h"
#include "tidegate/ops/forgetting_attention.h"
#include "tidegate/ops/init.h"
#include "tidegate/ops/rotary.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/nn/attention_append.h"
#include "src/nn/common.h"
#include "src/nn/states.h"
#include "src/nn/step_products.h"
#include "src/ops/checks.h"

namespace tidegate::nn {
namespace {

using torch::Tensor;
using OptionalTensor = std::optional<torch::Tensor>;

constexpr int64_t kGrows = -1;  // in place of a fixed capacity
constexpr int64_t kFirstCapacity = 64;

Tensor per_token(const Tensor& x, const TokenLayout& layout) { return x.index({layout.rows()}); }

// The largest of the lengths, 0 of none. Waits for the device.
int64_t longest(const Tensor& lengths) {
  return lengths.numel() > 0 ? lengths.max().item<int64_t>() : 0;
}

// cos and sin [B or 1, T, half] of positions [B or 1, T] times theta^(-i / half), in fp32, or fp64
// for x in fp64.
std::pair<Tensor, Tensor> rotary_angles(const Tensor& x, const Tensor& positions, int64_t half,
                                        double theta) {
  const auto where =
      x.options().dtype(x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
  const Tensor exponents = at::arange(half, where) / -half;
  const Tensor angles = positions.unsqueeze(-1).to(where.dtype()) * at::pow(theta, exponents);
  return {angles.cos(), angles.sin()};
}

// a_t x_{t-1} + (1 - a_t) x_t (Forgetting Transformer, eq. 14): x [B, T, H, D], a [B, T, H], x
// before each sequence's first token [N, H, D], undefined = zero.
Tensor shifted(const Tensor& x, const Tensor& mix, const TokenLayout& layout,
               const Tensor& carried) {
  Tensor before = x;
  if (x.size(1) > 0) before = at::constant_pad_nd(x.slice(1, 0, -1), {0, 0, 0, 0, 1, 0});
  if (layout.is_packed() || carried.defined()) {
    const Tensor is_first = (layout.steps() == 0).unsqueeze(-1).unsqueeze(-1);
    before = carried.defined()
                 ? at::where(is_first, per_token(carried, layout).to(x.scalar_type()), before)
                 : before.masked_fill(is_first, 0.0);
  }
  const Tensor wide = widen(x);
  return (wide + mix.unsqueeze(-1) * (widen(before) - wide)).to(x.scalar_type());
}

// The last x [B, T, H, D] of each sequence [N, H, D]; of an empty one what came before.
Tensor last_of(const Tensor& x, const TokenLayout& layout, const Tensor& carried) {
  if (x.size(1) == 0) return carried.clone();
  const Tensor ends = x.flatten(0, 1).index({(layout.bounds().slice(0, 1) - 1).clamp_min(0)});
  const Tensor is_there = (layout.lengths() > 0).unsqueeze(-1).unsqueeze(-1);
  return at::where(is_there, ends, carried.to(x.scalar_type()));
}

// Without the first `count` tokens of each sequence.
AttentionState dropped(AttentionState state, const Tensor& count) {
  const Tensor steps = at::arange(state.capacity(), integers(count)) + count.unsqueeze(1);
  const Tensor rows = at::arange(count.numel(), integers(count)).unsqueeze(1);
  const Tensor places = steps.clamp_max(std::max<int64_t>(state.capacity() - 1, 0));
  for (Tensor* cache : {&state.k, &state.v, &state.gates}) *cache = cache->index({rows, places});
  state.lengths = state.lengths - count.to(state.lengths.scalar_type());
  return state;
}

Tensor enlarged(const Tensor& cache, int64_t size) {
  std::vector<int64_t> more = cache.sizes().vec();
  more[1] = size - cache.size(1);
  return at::cat({cache, at::zeros(more, cache.options())}, 1);
}

}  // namespace

TokenLayout::TokenLayout(const char* owner, const Tensor& x, const OptionalTensor& cu_seqlens)
    : batch_(x.size(0)), time_(x.size(1)), count_(x.size(0)), integers_(integers(x)) {
  if (!cu_seqlens) return;
  bounds_ = ops::packed_bounds({owner, "x", x}, *cu_seqlens);
  count_ = bounds_.numel() - 1;
}

Tensor TokenLayout::arange(int64_t size) const { return at::arange(size, integers_); }

Tensor TokenLayout::bounds() const { return is_packed() ? bounds_ : arange(batch_ + 1) * time_; }

Tensor TokenLayout::lengths() const {
  return is_packed() ? bounds_.diff() : at::full({batch_}, time_, integers_);
}

Tensor TokenLayout::rows() const {
  if (!is_packed()) return arange(batch_).unsqueeze(1);
  // Empty sequences own no token: of equal bounds the last one counts.
  const Tensor after =
      at::searchsorted(bounds_, arange(time_), /*out_int32=*/false, /*right=*/true);
  return (after - 1).unsqueeze(0);
}

Tensor TokenLayout::steps() const {
  const Tensor tokens = arange(time_).unsqueeze(0);
  return is_packed() ? tokens - bounds_.index({rows()}) : tokens;
}

AttentionState::AttentionState(const MixerState& tensors)
    : k(tensors.at(0)),
      v(tensors.at(1)),
      gates(tensors.at(2)),
      lengths(tensors.at(3)),
      seen(tensors.at(4)),
      last_k(tensors.at(5)),
      last_v(tensors.at(6)),
      room(tensors.at(7)) {}

void SoftmaxAttention::register_projections(torch::nn::Module& module) {
  const auto& s = switches_;
  const int64_t kv_dim = s.num_kv_heads * s.head_dim;
  std::vector<int64_t> rows{s.dim, kv_dim, kv_dim};
  if (s.output_gate) rows.push_back(s.dim);
  in_proj = module.register_module("in_proj", make_linear(s.dim, rows, false, s.placement));
  if (s.kv_shift) {
    shift_proj = module.register_module(
        "shift_proj", make_linear(s.dim, {s.num_kv_heads, s.num_kv_heads}, false, s.placement));
  }
}

Norm SoftmaxAttention::make_qk_norm(int64_t heads) const {
  const auto& s = switches_;
  return Norm(NormOptions(s.head_dim)
                  .kind("rms")
                  .eps(s.qk_norm_eps)
                  .heads(s.qk_norm_shared ? 1 : heads)
                  .device(s.placement.device)
                  .dtype(s.placement.dtype));
}

void SoftmaxAttention::register_outputs(torch::nn::Module& module) {
  const auto& s = switches_;
  if (s.qk_norm) {
    q_norm = module.register_module("q_norm", make_qk_norm(s.num_heads));
    k_norm = module.register_module("k_norm", make_qk_norm(s.num_kv_heads));
  }
  if (s.output_norm) {
    const auto norm_options = NormOptions(s.head_dim)
                                  .kind("rms")
                                  .eps(s.norm_eps)
                                  .heads(s.num_heads)
                                  .device(s.placement.device)
                                  .dtype(s.placement.dtype);
    output_norm = module.register_module("output_norm", Norm(norm_options));
  }
  out_proj = module.register_module("out_proj", make_linear(s.dim, s.dim, false, s.placement));
}

void SoftmaxAttention::reset_parameters() {
  reset_linear(in_proj);
  if (shift_proj) reset_linear(shift_proj);
  reset_gate();
  for (Norm* norm : {&q_norm, &k_norm, &output_norm}) {
    if (*norm) (*norm)->reset_parameters();
  }
  reset_linear(out_proj);
}

MixerState SoftmaxAttention::init_state(int64_t batch, std::optional<torch::Device> device,
                                        std::optional<torch::ScalarType> dtype,
                                        std::optional<int64_t> capacity) const {
  check_sizes(switches_.owner, batch, capacity);
  const Tensor& weight = out_proj->weight;
  const auto where = at::TensorOptions(dtype.value_or(weight.scalar_type()))
                         .device(device.value_or(weight.device()));
  const auto wide = where.dtype(wide_dtype(c10::typeMetaToScalarType(where.dtype())));
  const auto& s = switches_;
  const int64_t size = capacity.value_or(0);
  const std::vector<int64_t> cache = {batch, size, s.num_kv_heads, s.head_dim};
  const std::vector<int64_t> last = {batch, s.kv_shift ? s.num_kv_heads : 0, s.head_dim};
  return {at::zeros(cache, where),
          at::zeros(cache, where),
          at::zeros({batch, size, gate_heads()}, wide),
          at::zeros({batch}, where.dtype(torch::kInt)),
          at::zeros({batch}, where.dtype(torch::kLong)),
          at::zeros(last, where),
          at::zeros(last, where),
          at::tensor({int64_t{0}, capacity.value_or(kGrows)}, torch::kLong)};
}

void SoftmaxAttention::check_gamma(const OptionalTensor& gamma) const {
  refuse_gamma(switches_.owner, gamma, ", since it has no lower bound");
}

AttentionState SoftmaxAttention::checked(const MixerState& state, int64_t sequences) const {
  const auto& s = switches_;
  TORCH_CHECK_VALUE(state.size() == AttentionState::kTensors, s.owner, ": state: expected the ",
                    AttentionState::kTensors, " tensors of an AttentionState; got ", state.size());
  const Tensor& k = state[0];
  const bool fits = k.dim() == 4 && k.size(0) == sequences && k.size(2) == s.num_kv_heads &&
                    k.size(3) == s.head_dim;
  TORCH_CHECK_VALUE(fits, s.owner, ": state: expected keys [", sequences, ", capacity, ",
                    s.num_kv_heads, ", ", s.head_dim, "]; got ", shape_text(k));
  const int64_t last_heads = s.kv_shift ? s.num_kv_heads : 0;
  const auto data = k.scalar_type();
  const auto check = [&](const char* name, size_t place, at::IntArrayRef shape, auto dtype) {
    check_state_tensor(s.owner, name, state[place], shape, dtype);
    const bool is_room = place == 7;
    const auto where = is_room ? torch::Device(torch::kCPU) : k.device();
    TORCH_CHECK_VALUE(state[place].device() == where, s.owner, ": state", name, ": expected ",
                      where, is_room ? ", where it is read" : ", as its keys", "; got ",
                      state[place].device());
  };
  check(": v", 1, k.sizes(), data);
  check(": gates", 2, {sequences, k.size(1), gate_heads()}, wide_dtype(data));
  check(": lengths", 3, {sequences}, torch::kInt);
  check(": seen", 4, {sequences}, torch::kLong);
  check(": last_k", 5, {sequences, last_heads, s.head_dim}, data);
  check(": last_v", 6, {sequences, last_heads, s.head_dim}, data);
  check(": room", 7, {2}, torch::kLong);
  return AttentionState(state);
}

Tensor SoftmaxAttention::unreachable(const AttentionState& state) const {
  if (!switches_.window) return {};
  return (state.lengths - (*switches_.window - 1)).clamp_min(0);
}

bool SoftmaxAttention::drop_unreachable(const MixerState& tensors) const {
  const AttentionState state(tensors);
  const Tensor count = unreachable(state);
  if (!count.defined()) return false;
  const AttentionState left = dropped(state, count);
  for (auto tensor :
       {&AttentionState::k, &AttentionState::v, &AttentionState::gates, &AttentionState::lengths}) {
    (state.*tensor).copy_(left.*tensor);
  }
  return true;
}

// The state, or a copy of it, with memory for `added` more tokens a sequence: where there is some
// left, by dropping tokens that are unreachable, by growing.
AttentionState SoftmaxAttention::with_room(const AttentionState& given, const Tensor& added) const {
  AttentionState state = given;
  int64_t needed = longest(state.lengths + added);
  const int64_t capacity = state.capacity();
  if (const Tensor count = needed > capacity ? unreachable(state) : Tensor(); count.defined()) {
    state = dropped(state, count);
    needed = longest(state.lengths + added);
  }
  if (needed <= capacity) return state;
  TORCH_CHECK_VALUE(
      state.room[1].item<int64_t>() == kGrows, switches_.owner, ": state: expected room for ",
      needed, " tokens, which init_state() and prefill() make by their capacity; got ", capacity);
  const int64_t size = std::max({needed, 2 * capacity, kFirstCapacity});
  for (Tensor* cache : {&state.k, &state.v, &state.gates}) *cache = enlarged(*cache, size);
  return state;
}

void SoftmaxAttention::check_room(const MixerState& tensors, int64_t batch) const {
  const AttentionState state = checked(tensors, batch);
  const int64_t capacity = state.capacity(), fixed = state.room[1].item<int64_t>();
  if (fixed == kGrows || state.room[0].item<int64_t>() < capacity) return;
  // Where no token can be dropped, the next one has no place.
  with_room(state, at::ones({}, integers(state.lengths)));
}

// with_room() for one token, in place. Looks at the device only where room may be short.
void SoftmaxAttention::make_room(AttentionState& state) const {
  if (state.room[0].item<int64_t>() < state.capacity()) return;
  const AttentionState found = with_room(state, at::ones({}, integers(state.lengths)));
  for (auto tensor :
       {&AttentionState::k, &AttentionState::v, &AttentionState::gates, &AttentionState::lengths}) {
    if (!(state.*tensor).is_same(found.*tensor)) (state.*tensor).set_(found.*tensor);
  }
  state.room[0].fill_(longest(state.lengths));
}

SoftmaxAttention::Operands SoftmaxAttention::operands(
    const Tensor& x, const TokenLayout& layout, const std::optional<AttentionState>& state) const {
  const auto& s = switches_;
  const int64_t kv_dim = s.num_kv_heads * s.head_dim;
  std::vector<int64_t> rows = {s.dim, kv_dim, kv_dim};
  if (s.output_gate) rows.push_back(s.dim);
  const auto parts = apply_linear(in_proj, x).split_with_sizes(rows, -1);
  const auto in_heads = [&](size_t i) { return parts[i].unflatten(-1, {-1, s.head_dim}); };
  Operands out;
  out.q = in_heads(0);
  out.k = in_heads(1);
  out.v = in_heads(2);
  if (s.output_gate) out.g = parts[3];
  if (s.kv_shift) {
    const auto mixes = at::sigmoid(widen(apply_linear(shift_proj, x))).chunk(2, -1);
    const Tensor carried_k = state ? state->last_k : Tensor();
    const Tensor carried_v = state ? state->last_v : Tensor();
    if (state) {
      out.last_k = last_of(out.k, layout, carried_k);
      out.last_v = last_of(out.v, layout, carried_v);
    }
    out.k = shifted(out.k, mixes[0], layout, carried_k);
    out.v = shifted(out.v, mixes[1], layout, carried_v);
  }
  if (s.qk_norm) {
    // Norm::forward is no const member; it changes nothing.
    out.q = q_norm.ptr()->forward(out.q);
    out.k = k_norm.ptr()->forward(out.k);
  }
  if (s.rope) {
    Tensor positions = layout.steps();
    if (state) positions = positions + per_token(state->seen, layout);
    const auto [cos, sin] = rotary_angles(out.q, positions, s.head_dim / 2, *s.rope);
    out.q = rotary(out.q, cos, sin);
    out.k = rotary(out.k, cos, sin);
  }
  return out;
}

std::tuple<Tensor, MixerState> SoftmaxAttention::forward(const Tensor& x, const MixerState& state,
                                                         const OptionalTensor& gamma,
                                                         const OptionalTensor& cu_seqlens) {
  check_mixer_input(switches_.owner, x, switches_.dim, in_proj->weight);
  check_gamma(gamma);
  const TokenLayout layout(switches_.owner, x, normalized(cu_seqlens));
  std::optional<AttentionState> before;
  if (!state.empty()) before = checked(state, layout.count());
  Operands parts = operands(x, layout, before);
  parts.log_f = training_log_gate(x, gamma);
  if (!before) return {output(attend(parts, layout), parts.g), {}};
  const AttentionState after = extended(*before, parts, layout);
  // Where nothing was read before, the keys are the new ones.
  const bool is_fresh = before->room[0].item<int64_t>() == 0;
  const Tensor o = is_fresh ? attend(parts, layout) : attend_state(parts.q, after, layout);
  return {output(o, parts.g), after.tensors()};
}

Tensor SoftmaxAttention::step(const Tensor& x, const MixerState& state,
                              const OptionalTensor& gamma) {
  return advance(x, nullptr, state, gamma);
}

Tensor SoftmaxAttention::mix_residual_step(NormImpl& norm, const Tensor& x, const MixerState& state,
                                           const OptionalTensor& gamma) {
  return advance(x, &norm, state, gamma);
}

Tensor SoftmaxAttention::advance(const Tensor& x, NormImpl* norm, const MixerState& tensors,
                                 const OptionalTensor& gamma) {
  const std::string name = std::string(switches_.owner) + ".step";
  check_mixer_input(name.c_str(), x, switches_.dim, in_proj->weight, /*time=*/false);
  check_gamma(gamma);
  AttentionState state = checked(tensors, x.size(0));
  for (const Tensor& part : tensors) check_own_memory(name + ": state", part);
  refuse_gradients(name, dynamic_cast<const torch::nn::Module&>(*this), {x, state.k, state.v});
  make_room(state);
  Tensor g;
  Tensor q = can_append_token(x, state) ? append_by_kernel(x, norm, state, gamma, &g) : Tensor();
  if (!q.defined()) {
    q = append_by_ops(norm == nullptr ? x : norm->forward(x), state, gamma, &g);
  }
  state.room[0].add_(1);
  const Tensor o = attend_step(q, state);
  if (norm == nullptr) return output(o, g).select(1, 0);
  return step_product(gated(o, g).select(1, 0), out_proj, {.residual = x});
}

// The queries [B, 1, H, D] of the token that the state then holds, and the output gate's logits
// [B, 1, dim]; undefined, with the state as it was, where the kernel does not take it.
Tensor SoftmaxAttention::append_by_kernel(const Tensor& x, NormImpl* norm, AttentionState& state,
                                          const OptionalTensor& gamma, Tensor* gate) {
  const auto& s = switches_;
  StepProjection project = [&](const torch::nn::Linear& linear) { return apply_linear(linear, x); };
  AppendedToken token;
  if (norm == nullptr) {
    token.projected = project(in_proj);
    if (s.kv_shift) token.mixes = project(shift_proj);
  } else {  // all of them by one product
    StepProduct around = {.norm = norm};
    for (const torch::nn::Linear& linear : {shift_proj, gate_proj}) {
      if (linear) around.more.push_back(linear->weight);
    }
    const Tensor all = step_product(x, in_proj, around);
    const int64_t rows = in_proj->weight.size(0), mixes = 2 * s.num_kv_heads;
    token.projected = all.narrow(1, 0, rows);
    if (s.kv_shift) token.mixes = all.narrow(1, rows, mixes);
    project = [all, first = rows + (s.kv_shift ? mixes : 0)](const torch::nn::Linear& linear) {
      return all.narrow(1, first, linear->weight.size(0));
    };
  }
  if (s.qk_norm) {
    token.q_norm = q_norm.get();
    token.k_norm = k_norm.get();
  }
  token.theta = s.rope.value_or(0.0);
  token.gate = token_gate(project, normalized(gamma));
  const Tensor q = append_token(token, state, s.num_heads);
  if (q.defined() && s.output_gate) {
    *gate = token.projected.narrow(-1, token.projected.size(-1) - s.dim, s.dim).unsqueeze(1);
  }
  return q.defined() ? q.unsqueeze(1) : q;
}

Tensor SoftmaxAttention::append_by_ops(const Tensor& given, AttentionState& state,
                                       const OptionalTensor& gamma, Tensor* gate) {
  const Tensor x = given.unsqueeze(1);
  const TokenLayout layout(switches_.owner, x, std::nullopt);
  Operands parts = operands(x, layout, state);
  parts.log_f = log_gate(x, gamma);
  const Tensor rows = at::arange(x.size(0), integers(x));
  const Tensor places = state.lengths.to(torch::kLong);
  const auto put = [&](Tensor& cache, const Tensor& fresh) {
    cache.index_put_({rows, places}, fresh.select(1, 0).to(cache.scalar_type()));
  };
  put(state.k, parts.k);
  put(state.v, parts.v);
  if (parts.log_f.defined()) put(state.gates, parts.log_f);
  if (switches_.kv_shift) {
    state.last_k.copy_(parts.last_k);
    state.last_v.copy_(parts.last_v);
  }
  state.lengths.add_(1);
  state.seen.add_(1);
  *gate = parts.g;
  return parts.q;
}

// The state with the new tokens in it.
AttentionState SoftmaxAttention::extended(const AttentionState& before, const Operands& x,
                                          const TokenLayout& layout) const {
  AttentionState state = with_room(before, layout.lengths());
  const Tensor rows = layout.rows().expand({x.k.size(0), x.k.size(1)});
  const Tensor places = per_token(state.lengths, layout).to(torch::kLong) + layout.steps();
  const auto put = [&](Tensor& cache, const Tensor& fresh) {
    cache = cache.index_put({rows, places}, fresh.to(cache.scalar_type()));
  };
  put(state.k, x.k);
  put(state.v, x.v);
  if (x.log_f.defined()) put(state.gates, x.log_f);
  state.lengths = state.lengths + layout.lengths().to(state.lengths.scalar_type());
  state.seen = state.seen + layout.lengths();
  if (switches_.kv_shift) {
    state.last_k = x.last_k.to(state.k.scalar_type());
    state.last_v = x.last_v.to(state.k.scalar_type());
  }
  state.room = at::tensor({longest(state.lengths), state.room[1].item<int64_t>()}, torch::kLong);
  return state;
}

// Norm and gate of o [B, T, H, D], with its heads side by side.
Tensor SoftmaxAttention::gated(Tensor o, const Tensor& g) const {
  if (output_norm) {
    const Tensor gate = g.defined() ? g.unflatten(-1, {o.size(-2), o.size(-1)}) : g;
    o = output_norm.ptr()->forward_gated(o, gate, switches_.output_activation);
    return o.flatten(-2);
  }
  o = o.flatten(-2);
  if (g.defined()) {
    o = o * (switches_.output_activation == "sigmoid" ? at::sigmoid(g) : at::silu(g));
  }
  return o;
}

// The gate and norm of the output, and the output projection.
Tensor SoftmaxAttention::output(const Tensor& o, const Tensor& g) const {
  return apply_linear(out_proj, gated(o, g));
}

Tensor SoftmaxAttention::attend_by_op(const Operands& x, const TokenLayout& layout,
                                      std::optional<double> prune) const {
  const auto type = x.v.scalar_type();
  const OptionalTensor cu_seqlens =
      layout.is_packed() ? OptionalTensor(layout.bounds()) : std::nullopt;
  return std::get<0>(forgetting_attention(x.q.to(type), x.k.to(type), x.v, x.log_f,
                                          /*scale=*/std::nullopt, switches_.window, cu_seqlens,
                                          /*cu_seqlens_k=*/std::nullopt, prune));
}

Tensor SoftmaxAttention::attend_state_by_op(const Tensor& q, const AttentionState& state,
                                            const Tensor& gates, const TokenLayout& layout,
                                            std::optional<double> prune) const {
  // Sequences hold different numbers of tokens: they are packed, end to end.
  const Tensor lengths = state.lengths.to(torch::kLong);
  const Tensor bounds = at::constant_pad_nd(lengths.cumsum(0), {1, 0});
  const Tensor rows = at::repeat_interleave(lengths);
  const Tensor steps = at::arange(rows.numel(), rows.options()) - bounds.index({rows});
  const auto held = [&](const Tensor& cache) { return cache.index({rows, steps}).unsqueeze(0); };
  const Tensor queries = q.flatten(0, 1).unsqueeze(0).to(state.k.scalar_type());
  return std::get<0>(forgetting_attention(queries, held(state.k), held(state.v), held(gates),
                                          /*scale=*/std::nullopt, switches_.window, layout.bounds(),
                                          bounds, prune))
      .view(q.sizes());
}

}  // namespace tidegate::nn
