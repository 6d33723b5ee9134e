#include "src/models/inputs.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "src/nn/shape_text.h"
#include "src/ops/checks.h"
#include "tidegate/models/block.h"

namespace tidegate::models {
namespace {

using at::Tensor;

// Whether values of `t` can be looked at for nothing.
bool can_be_read(const Tensor& t) {
  return t.is_cpu() && !t.unsafeGetTensorImpl()->is_python_dispatch() &&
         !t.key_set().has(c10::DispatchKey::FuncTorchBatched);
}

std::string python_dtype(const Tensor& t) { return "torch." + ops::dtype_name(t.scalar_type()); }

void check_range(const char* owner, const char* name, const Tensor& t, int64_t end,
                 const std::string& expected) {
  if (!can_be_read(t) || t.numel() == 0) return;
  const auto [lowest, highest] = at::aminmax(t);
  const int64_t least = lowest.item().toLong(), most = highest.item().toLong();
  TORCH_CHECK_VALUE(least >= 0 && most < end, owner, ": ", name, ": expected ", expected, "; got ",
                    least < 0 ? least : most);
}

}  // namespace

void check_ids(const char* owner, const Tensor& ids, std::optional<int64_t> vocab_size,
               const std::string& dims) {
  TORCH_CHECK_VALUE(ids.defined(), owner, ": ids: expected an int32 or int64 tensor [", dims,
                    "]; got an undefined one");
  const auto dtype = ids.scalar_type();
  const bool fits = ids.dim() == std::count(dims.begin(), dims.end(), ',') + 1 &&
                    (dtype == at::kInt || dtype == at::kLong);
  TORCH_CHECK_VALUE(fits, owner, ": ids: expected int32 or int64 [", dims, "]; got ",
                    python_dtype(ids), " ", nn::shape_text(ids));
  if (!vocab_size) return;
  check_range(owner, "ids", ids, *vocab_size,
              "0 to below vocab_size=" + std::to_string(*vocab_size));
}

void check_labels(const char* owner, const Tensor& labels, at::IntArrayRef shape,
                  const std::string& like, int64_t end) {
  TORCH_CHECK_VALUE(at::isIntegralType(labels.scalar_type(), /*includeBool=*/false), owner,
                    ": labels: expected int64; got ", python_dtype(labels));
  TORCH_CHECK_VALUE(labels.sizes() == shape, owner, ": labels: expected ", like, ", ",
                    nn::shape_text(shape), "; got ", nn::shape_text(labels));
  if (!can_be_read(labels)) return;
  check_range(owner, "labels", labels.masked_select(labels != -100), end,
              "-100, or 0 to below " + std::to_string(end));
}

void refuse_own_labels(const char* owner, const Tensor& ids, const Tensor& labels) {
  bool same = labels.is_same(ids);
  if (!same && can_be_read(labels) && can_be_read(ids) && ids.size(1) > 0) {
    const int64_t last = ids.size(1) - 1;
    const bool varies = (ids.narrow(1, 1, last) != ids.narrow(1, 0, last)).any().item<bool>();
    same = varies && at::equal(labels, ids.to(labels.scalar_type()));
  }
  TORCH_CHECK_VALUE(!same, owner,
                    ": labels: expected what each position should predict; got ids themselves: "
                    "labels=\"next\" predicts the token that follows");
}

void check_positions(const char* owner, const Tensor& positions, const Tensor& ids) {
  TORCH_CHECK_VALUE(positions.dim() == 2 && positions.size(0) == ids.size(0), owner,
                    ": positions: expected [B=", ids.size(0), ", P]; got ",
                    nn::shape_text(positions));
  TORCH_CHECK_VALUE(positions.scalar_type() == at::kLong, owner,
                    ": positions: expected int64; got ", python_dtype(positions));
  check_range(owner, "positions", positions, ids.size(1),
              "0 to below T=" + std::to_string(ids.size(1)));
}

}  // namespace tidegate::models
