// How rows of several tensors are found with few divisions: with_merged_rows of norm.h and glu.h.

#include <algorithm>
#include <initializer_list>

#include "kernels/norm/glu.h"
#include "kernels/norm/norm.h"

namespace tidegate::kernels::norm {
namespace {

/// Whether `outer` steps of one dimension are the continuation of `inner` steps of the next.
bool continues(int64_t outer, int64_t outer_stride, int64_t inner, int64_t inner_stride) {
  return outer == 1 || inner == 1 || outer_stride == inner * inner_stride;
}

template <class Params>
void merge(Params& p, std::initializer_list<HeadSeries*> all) {
  const auto every = [&](auto fits) {
    return std::all_of(all.begin(), all.end(),
                       [&](const HeadSeries* s) { return s->data == nullptr || fits(*s); });
  };
  // Time into heads, twice: what comes first moves up.
  for (int i = 0; i < 2; ++i) {
    if (every([&](const HeadSeries& s) {
          return continues(p.time, s.stride_t, p.heads, s.stride_h);
        })) {
      for (HeadSeries* s : all) {
        s->stride_h = p.heads == 1 ? s->stride_t : s->stride_h;
        s->stride_t = s->stride_b;
      }
      p.heads *= p.time;
      p.time = p.batch;
      p.batch = 1;
    }
  }
  if (every([&](const HeadSeries& s) {
        return continues(p.batch, s.stride_b, p.time, s.stride_t);
      })) {
    for (HeadSeries* s : all) {
      s->stride_t = p.time == 1 ? s->stride_b : s->stride_t;
    }
    p.time *= p.batch;
    p.batch = 1;
  }
}

}  // namespace

NormParams with_merged_rows(NormParams p) {
  merge(p, {&p.x, &p.addend, &p.gate, &p.y, &p.sum});
  return p;
}

NormBackwardParams with_merged_rows(NormBackwardParams p) {
  NormParams& f = p.forward;
  f.addend.data = f.sum.data = nullptr;
  merge(f, {&f.x, &f.gate, &f.y, &p.dy, &p.dsum, &p.dx, &p.daddend, &p.dgate});
  return p;
}

GluParams with_merged_rows(GluParams p) {
  merge(p, {&p.x, &p.y});
  return p;
}

GluBackwardParams with_merged_rows(GluBackwardParams p) {
  merge(p.forward, {&p.forward.x, &p.forward.y, &p.dy, &p.dx});
  return p;
}

}  // namespace tidegate::kernels::norm
