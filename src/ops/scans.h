#pragma once

// What hgru, lru_scan and linear_scan share: data and h of [B, T, D], states of [N, D], and, where
// numbers are complex, [Re | Im] of twice the width.

#include <ATen/core/Tensor.h>

#include "src/ops/checks.h"
#include "src/ops/kernel_sets.h"
#include "src/ops/results.h"
#include "src/ops/views.h"

namespace tidegate::ops {

/// Dtype and shape of the data, with a time axis or, in a step, without; it is [Re | Im] where
/// `phase` is given, an argument called `phase_name`. Returns D.
c10::SymInt check_scan_data(const Reference& data, const char* phase_name,
                            const OptionalTensor& phase, bool step);

/// Offsets and the initial state. Returns N.
c10::SymInt check_scan_states(const Reference& data, const OptionalTensor& cu_seqlens,
                              const OptionalTensor& h0, bool complex);

/// What a backward op is given beside the forward op's arguments; of a packed or padded batch of
/// `sequences`.
void check_scan_gradients(const Reference& data, const at::Tensor& h, const at::Tensor& dh,
                          const OptionalTensor& dh_final, bool complex,
                          const c10::SymInt& sequences);

/// Runs the forward kernel: it writes `h` [B, T, ..] and `h_final` [N, ..], which may be the
/// params' h0 when T = 1.
template <class Params>
void run_scan(const char* op, Params params, const at::Tensor& h, const at::Tensor& h_final) {
  params.h = time_series(h);
  params.h_final = h_final.data_ptr();
  Launch<Params>(op, &params, h).run();
}

/// Fills in what the backward kernels of all scans read and write beside what is the op's own.
template <class Params>
void set_scan_gradients(const at::Tensor& h, const at::Tensor& dh, const OptionalTensor& dh_final,
                        const at::Tensor& dh0, KernelInputs* read, Params* params) {
  params->forward.h = read->rows(h);
  params->dh = read->rows(dh);
  params->dh_final = read->state(dh_final);
  params->dh0 = dh0.data_ptr();
}

}  // namespace tidegate::ops
