#pragma once

// From a dtype that is known when the program runs to a type that is known when it is compiled.

#include "kernels/common/dtype.h"

namespace tidegate::kernels {

/// visit.template operator()<Real>() with the type of the state beside real data of `dtype`.
template <class Visit>
auto with_state_type(DType dtype, Visit visit) {
  return dtype == DType::kFloat64 ? visit.template operator()<double>()
                                  : visit.template operator()<float>();
}

}  // namespace tidegate::kernels
