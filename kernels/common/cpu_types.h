#pragma once

// From dtype codes to types, for the per-ISA units (see cpu_simd.h about what those may include).

#include "kernels/common/cpu_simd.h"
#include "kernels/common/dtype.h"

namespace tidegate::kernels::TIDEGATE_ISA {
namespace {

template <class T>
struct TypeTag {
  using Type = T;
};

/// Calls body(R{}, E{}, G{}) with the tags of the state's, the data's and the gate's types.
template <class Body>
void with_real_types(DType data, DType gate, Body body) {
  switch (data) {
    case DType::kFloat64:
      return body(TypeTag<double>{}, TypeTag<double>{}, TypeTag<double>{});
    case DType::kBFloat16:
      return gate == data ? body(TypeTag<float>{}, TypeTag<BFloat16>{}, TypeTag<BFloat16>{})
                          : body(TypeTag<float>{}, TypeTag<BFloat16>{}, TypeTag<float>{});
    case DType::kFloat16:
      return gate == data ? body(TypeTag<float>{}, TypeTag<Float16>{}, TypeTag<Float16>{})
                          : body(TypeTag<float>{}, TypeTag<Float16>{}, TypeTag<float>{});
    default:
      return body(TypeTag<float>{}, TypeTag<float>{}, TypeTag<float>{});
  }
}

}  // namespace
}  // namespace tidegate::kernels::TIDEGATE_ISA
