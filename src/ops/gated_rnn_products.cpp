#include "src/ops/gated_rnn_products.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tidegate::ops {
namespace {

/// A state to start from, which the caller may overwrite.
at::Tensor initial(const at::Tensor& state, const at::Tensor& data, const at::Tensor& w) {
  return state.defined() ? state.clone() : at::zeros({data.size(0), data.size(2)}, w.options());
}

}  // namespace

void walk_by_products(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& h0, const GatedRnnResults& results) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor state = initial(h0, x, w);
  for (int64_t t = 0; t < x.size(1); ++t) {
    const at::Tensor a = at::addmm(z.select(1, t).to(w.scalar_type()), state, w.t());
    const at::Tensor entering = at::sigmoid(a.neg()).mul_(x.select(1, t));
    state = at::addcmul(entering, at::sigmoid(a), state);
    results.h.select(1, t).copy_(state);
    if (results.logits.defined()) {
      results.logits.select(1, t).copy_(a);
    }
  }
  results.h_final.copy_(state);
}

void walk_back_by_products(const at::Tensor& dh, const at::Tensor& dh_final, const at::Tensor& x,
                           const at::Tensor& w, const at::Tensor& logits, const at::Tensor& h,
                           const at::Tensor& h0, const GatedRnnGradients& results) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor carry = initial(dh_final, x, w);
  for (int64_t t = x.size(1) - 1; t >= 0; --t) {
    const at::Tensor a = logits.select(1, t);
    const at::Tensor open = at::sigmoid(a);
    const at::Tensor before = t > 0 ? h.select(1, t - 1).to(w.scalar_type()) : initial(h0, x, w);
    const at::Tensor grad = carry.add_(dh.select(1, t));
    const at::Tensor entering = at::sigmoid(a.neg()).mul_(grad);
    const at::Tensor da = before.sub(x.select(1, t)).mul_(open).mul_(entering);
    results.dz.select(1, t).copy_(da);
    results.dx.select(1, t).copy_(entering);
    results.h_before.select(1, t).copy_(before);
    carry = at::addmm(open.mul(grad), da, w);
  }
  results.dh0.copy_(carry);
}

}  // namespace tidegate::ops
