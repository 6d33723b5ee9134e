// wkv4_step: one token of wkv4, whose state it overwrites.

#include "src/ops/op.h"
#include "src/ops/results.h"
#include "src/ops/wkv4.h"
#include "tidegate/ops/wkv4.h"

namespace tidegate::ops {
namespace {

struct Wkv4Step {
  static constexpr std::string_view kSchema =
      "wkv4_step(Tensor w, Tensor u, Tensor k, Tensor v, Tensor(a!) state) -> Tensor";
  static constexpr std::string_view kData = "k";
  static constexpr auto& kCasts = kWkv4Casts;

  const at::Tensor &w, &u, &k, &v;
  at::Tensor& state;

  at::Tensor kernel() const;
  at::Tensor meta() const;
};

at::Tensor Wkv4Step::meta() const {
  const Reference data{kOpName<Wkv4Step>, "k", k};
  check_wkv4_tensors(data, *this, 2, "[B, D]");
  check_step_state(data, state, "[B, 3, D]", {k.sym_size(0), 3, k.sym_size(1)});
  return new_like(k);
}

at::Tensor Wkv4Step::kernel() const {
  at::Tensor o = meta();
  check_wkv4_rates(kOpName<Wkv4Step>, w);
  const at::Tensor key = k.unsqueeze(1), value = v.unsqueeze(1);
  const OptionalTensor own = contiguous_as(state, state_dtype(k.scalar_type())), padded;
  const struct {
    const at::Tensor &w, &u, &k, &v;
    const OptionalTensor &state, &cu_seqlens;
  } token{w, u, key, value, own, padded};
  run_wkv4(kOpName<Wkv4Step>, token, o.unsqueeze(1), *own, at::Tensor());
  write_back(kOpName<Wkv4Step>, *own, state);
  return o;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tidegate, m) { register_step<Wkv4Step>(m); }

}  // namespace tidegate::ops

namespace tidegate {

at::Tensor wkv4_step(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                     const at::Tensor& v, at::Tensor state) {
  return ops::call_public<ops::Wkv4Step>(w, u, k, v, state);
}

}  // namespace tidegate
