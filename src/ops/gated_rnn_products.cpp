#include "src/ops/gated_rnn_products.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "src/ops/checks.h"

namespace tidegate::ops {
namespace {

/// A state to start from, which the caller may overwrite.
at::Tensor initial_carry(const at::Tensor& state, const at::Tensor& data, const at::Tensor& w) {
  return state.defined() ? state.clone() : at::zeros({data.size(0), data.size(2)}, w.options());
}

/// What the gate's logits `a` become: s(a) and s(-a), each with its own digits (`pos`, `neg`), and
/// lambda and 1 - lambda (`open`, `shut`). `part` = 1 - gamma, undefined where there is no gamma.
struct ProductGates {
  at::Tensor pos, neg, open, shut;

  ProductGates(const at::Tensor& a, const at::Tensor& gamma, const at::Tensor& part)
      : pos(at::sigmoid(a)), neg(at::sigmoid(a.neg())), open(pos), shut(neg) {
    if (gamma.defined()) {
      shut = neg.mul(part);
      open = at::where(a.lt(0), at::addcmul(gamma, part, pos), at::rsub(shut, 1));
    }
  }
};

at::Tensor one_minus_bound(const at::Tensor& gamma) {
  return gamma.defined() ? at::rsub(gamma, 1) : at::Tensor();
}

/// Tokens of a product with float32 sums, whose roundings add up: more are several products.
constexpr int64_t kTokensAProduct = int64_t{1} << 22;

}  // namespace

void scan_by_products(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& gamma, const at::Tensor& h0,
                      const GatedRnnResults& results) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor part = one_minus_bound(gamma);
  at::Tensor state = initial_carry(h0, x, w);
  for (int64_t t = 0; t < x.size(1); ++t) {
    const at::Tensor a = at::addmm(z.select(1, t).to(w.scalar_type()), state, w.t());
    const ProductGates gates(a, gamma, part);
    state = at::addcmul(gates.shut.mul(x.select(1, t)), gates.open, state);
    results.h.select(1, t).copy_(state);
    if (results.logits.defined()) {
      results.logits.select(1, t).copy_(a);
    }
  }
  results.h_final.copy_(state);
}

void scan_back_by_products(const at::Tensor& dh, const at::Tensor& dh_final, const at::Tensor& x,
                           const at::Tensor& w, const at::Tensor& gamma, const at::Tensor& logits,
                           const at::Tensor& h, const at::Tensor& h0,
                           const GatedRnnGradients& results) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor part = one_minus_bound(gamma);
  at::Tensor carry = initial_carry(dh_final, x, w);
  at::Tensor bound_grads;  // over many tokens, float32 would round too often
  if (gamma.defined()) {
    bound_grads = at::zeros_like(results.bound_grads, at::kDouble);
  }
  for (int64_t t = x.size(1) - 1; t >= 0; --t) {
    const at::Tensor a = logits.select(1, t);
    const ProductGates gates(a, gamma, part);
    const at::Tensor before =
        t > 0 ? h.select(1, t - 1).to(w.scalar_type()) : initial_carry(h0, x, w);
    const at::Tensor grad = carry.add_(dh.select(1, t));
    const at::Tensor bound_term = before.sub(x.select(1, t)).mul_(gates.neg).mul_(grad);
    const at::Tensor da = bound_term.mul(gates.pos);
    if (gamma.defined()) {
      da.mul_(part);
      bound_grads.add_(bound_term);
    }
    results.dz.select(1, t).copy_(da);
    results.dx.select(1, t).copy_(gates.shut.mul(grad));
    results.h_before.select(1, t).copy_(before);
    carry = at::addmm(gates.open.mul(grad), da, w);
  }
  results.dh0.copy_(carry);
  if (gamma.defined()) {
    results.bound_grads.copy_(bound_grads);
  }
}

at::Tensor matrix_gradient(const at::Tensor& dz, const at::Tensor& h_before, const at::Tensor& w) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType data = h_before.scalar_type();
  const at::ScalarType wide = state_dtype(data);
  const at::Tensor da = dz.flatten(0, 1);
  const at::Tensor h = h_before.flatten(0, 1);
  if (h.is_cuda() && wide != data) {  // 16-bit products with float32 sums
    if (h.size(0) <= kTokensAProduct) {
      const at::Tensor narrow = da.to(data).t();
      return w.scalar_type() == data ? at::mm(narrow, h) : at::mm(narrow, h, wide);
    }
    at::Tensor sum = at::zeros_like(w, wide);
    for (int64_t begin = 0; begin < h.size(0); begin += kTokensAProduct) {
      const int64_t tokens = std::min(kTokensAProduct, h.size(0) - begin);
      sum.add_(at::mm(da.narrow(0, begin, tokens).to(data).t(), h.narrow(0, begin, tokens), wide));
    }
    return sum.to(w.scalar_type());
  }
  return at::mm(da.to(wide).t(), h.to(wide)).to(w.scalar_type());
}

}  // namespace tidegate::ops
