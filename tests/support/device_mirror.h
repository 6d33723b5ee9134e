#pragma once

// Runs scan problems of the host on a CUDA device: copies of their buffers, and params that point
// into the copies.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/common/cuda/device.h"
#include "kernels/scan/scan_cuda.h"
#include "support/lru_problem.h"
#include "support/scan_problem.h"

namespace tidegate::testing {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

inline bool no_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
}

/// While it lives, planners see no more shared memory a block than that of a small chip.
class SharedBytesLimit {
 public:
  explicit SharedBytesLimit(int bytes) { kernels::shared_bytes_limit = bytes; }
  ~SharedBytesLimit() { kernels::shared_bytes_limit = std::numeric_limits<int>::max(); }
  SharedBytesLimit(const SharedBytesLimit&) = delete;
  SharedBytesLimit& operator=(const SharedBytesLimit&) = delete;
};

/// Device memory that holds NaN (all bytes 0xff) at first.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) {
    check_cuda(cudaMalloc(&data_, bytes + 1), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0xff, bytes + 1), "cudaMemset");
  }
  ~DeviceBuffer() { (void)cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Copies of ranges of host memory, aligned as the originals are, up to 64 bytes.
class DeviceMirror {
 public:
  void add(void* host, size_t bytes) {
    auto* begin = static_cast<unsigned char*>(host);
    const size_t pad = reinterpret_cast<uintptr_t>(host) % 64;
    ranges_.push_back({begin, bytes, pad, std::make_unique<DeviceBuffer>(bytes + pad)});
    check_cuda(cudaMemcpy(ranges_.back().copy(), host, bytes, cudaMemcpyHostToDevice), "upload");
  }
  void add(TypedSeries& tensor) { add(tensor.buffer().data(), tensor.buffer().size()); }
  void add(const kernels::SequenceLayout& layout) {
    if (layout.offsets != nullptr) {
      add(const_cast<void*>(layout.offsets),
          (layout.sequences + 1) * (layout.offsets_are_int64 ? 8 : 4));
    }
  }

  /// The copy of what `host` points to; null stays null.
  template <class T>
  void translate(T*& pointer) const {
    if (pointer == nullptr) {
      return;
    }
    const auto* host = static_cast<const unsigned char*>(static_cast<const void*>(pointer));
    for (const Range& range : ranges_) {
      if (host >= range.host && host < range.host + range.bytes) {
        pointer = static_cast<T*>(static_cast<void*>(range.copy() + (host - range.host)));
        return;
      }
    }
    throw std::logic_error("a pointer to memory that has no copy on the device");
  }

  void download() const {
    for (const Range& range : ranges_) {
      check_cuda(cudaMemcpy(range.host, range.copy(), range.bytes, cudaMemcpyDeviceToHost),
                 "download");
    }
  }

 private:
  struct Range {
    unsigned char* host;
    size_t bytes;
    size_t pad;
    std::unique_ptr<DeviceBuffer> device;
    unsigned char* copy() const { return device->data() + pad; }
  };
  std::vector<Range> ranges_;
};

/// Plans, gives the plan its scratch memory (NaN at first), launches and waits.
template <class Plan, class MakePlan, class Launch>
void plan_and_launch(Plan* plan, void** workspace, MakePlan make_plan, Launch launch) {
  check_cuda(make_plan(plan), "plan");
  const DeviceBuffer scratch(plan->workspace_bytes);
  *workspace = scratch.data();
  check_cuda(launch(), "launch");
  check_cuda(cudaDeviceSynchronize(), "kernel");
}

/// Partial sums of a backward kernel, as many rows as its plan says.
class DevicePartials {
 public:
  DevicePartials(const TypedSeries& like, int64_t rows)
      : partials_(like.dtype(), 1, rows, like.columns()),
        device_(partials_.buffer().size()),
        begin_(static_cast<unsigned char*>(partials_.at(0, 0)) - partials_.buffer().data()) {}

  void* device() const { return device_.data(); }

  /// Adds the rows up into the first row of `total`; the others become zero.
  void sum_into(TypedSeries* total) {
    check_cuda(cudaMemcpy(partials_.at(0, 0), device_.data(), partials_.buffer().size() - begin_,
                          cudaMemcpyDeviceToHost),
               "download");
    const TypedSeries sums = sum_of_rows(partials_);
    for (int64_t i = 0; i < total->tokens(); ++i) {
      for (int64_t j = 0; j < total->columns(); ++j) {
        total->set(i, j, i == 0 ? sums.get(0, j) : 0);
      }
    }
  }

 private:
  TypedSeries partials_;
  DeviceBuffer device_;
  int64_t begin_;
};

/// Runs both kernels on the current device and brings all results back into the problem.
inline void run_on_device(LinearScanProblem& p, kernels::scan::TimeSplit split) {
  DeviceMirror mirror;
  for (TypedSeries* tensor :
       {&p.x, &p.a, &p.h, &p.h0, &p.h_final, &p.dh, &p.dh_final, &p.dx, &p.da, &p.dh0}) {
    mirror.add(*tensor);
  }
  mirror.add(p.forward_params().layout);
  const auto move = [&](kernels::scan::LinearScanParams& params) {
    for (kernels::TimeSeries* series : {&params.x, &params.a, &params.h}) {
      mirror.translate(series->data);
    }
    mirror.translate(params.h0);
    mirror.translate(params.h_final);
    mirror.translate(params.layout.offsets);
    params.time_split = split;
  };
  kernels::scan::LinearScanParams forward = p.forward_params();
  move(forward);
  plan_and_launch(
      &forward.plan, &forward.workspace,
      [&](auto* plan) { return kernels::scan::linear_scan_forward_plan(forward, plan); },
      [&] { return kernels::scan::linear_scan_forward(forward, nullptr); });

  kernels::scan::LinearScanBackwardParams backward = p.backward_params();
  move(backward.forward);
  for (kernels::TimeSeries* series : {&backward.dh, &backward.dx, &backward.da}) {
    mirror.translate(series->data);
  }
  backward.forward.x = backward.dx;  // unused but for its dtype
  mirror.translate(backward.dh_final);
  mirror.translate(backward.dh0);
  kernels::scan::ScanPlan sizes;
  check_cuda(kernels::scan::linear_scan_backward_plan(backward, &sizes), "plan");
  DevicePartials partials(p.da_partial, sizes.partials);
  backward.da_partial = p.shape().a_is_constant ? partials.device() : nullptr;
  plan_and_launch(
      &backward.forward.plan, &backward.forward.workspace,
      [&](auto* plan) { return kernels::scan::linear_scan_backward_plan(backward, plan); },
      [&] { return kernels::scan::linear_scan_backward(backward, nullptr); });
  mirror.download();
  if (p.shape().a_is_constant) {
    partials.sum_into(&p.da_partial);
  }
}

inline void run_on_device(HgruProblem& p, kernels::scan::TimeSplit split) {
  DeviceMirror mirror;
  for (TypedSeries* tensor : {&p.c, &p.f, &p.h, &p.gamma, &p.theta, &p.h0, &p.h_final, &p.dh,
                              &p.dh_final, &p.dc, &p.df, &p.dh0}) {
    mirror.add(*tensor);
  }
  mirror.add(p.forward_params().layout);
  const auto move = [&](kernels::scan::HgruParams& params) {
    for (kernels::TimeSeries* series : {&params.c, &params.f, &params.h}) {
      mirror.translate(series->data);
    }
    for (const void** pointer : {&params.gamma, &params.theta, &params.h0}) {
      mirror.translate(*pointer);
    }
    mirror.translate(params.h_final);
    mirror.translate(params.layout.offsets);
    params.time_split = split;
  };
  kernels::scan::HgruParams forward = p.forward_params();
  move(forward);
  plan_and_launch(
      &forward.plan, &forward.workspace,
      [&](auto* plan) { return kernels::scan::hgru_forward_plan(forward, plan); },
      [&] { return kernels::scan::hgru_forward(forward, nullptr); });

  kernels::scan::HgruBackwardParams backward = p.backward_params();
  move(backward.forward);
  for (kernels::TimeSeries* series : {&backward.dh, &backward.dc, &backward.df}) {
    mirror.translate(series->data);
  }
  mirror.translate(backward.dh_final);
  mirror.translate(backward.dh0);
  kernels::scan::ScanPlan sizes;
  check_cuda(kernels::scan::hgru_backward_plan(backward, &sizes), "plan");
  DevicePartials dgamma(p.dgamma_partial, sizes.partials);
  DevicePartials dtheta(p.dtheta_partial, sizes.partials);
  backward.dgamma_partial = p.shape().has_gamma ? dgamma.device() : nullptr;
  backward.dtheta_partial = p.shape().turns ? dtheta.device() : nullptr;
  plan_and_launch(
      &backward.forward.plan, &backward.forward.workspace,
      [&](auto* plan) { return kernels::scan::hgru_backward_plan(backward, plan); },
      [&] { return kernels::scan::hgru_backward(backward, nullptr); });
  mirror.download();
  if (p.shape().has_gamma) {
    dgamma.sum_into(&p.dgamma_partial);
  }
  if (p.shape().turns) {
    dtheta.sum_into(&p.dtheta_partial);
  }
}

inline void run_on_device(LruProblem& p, kernels::scan::TimeSplit split) {
  DeviceMirror mirror;
  for (TypedSeries* tensor : {&p.x, &p.h, &p.nu_log, &p.theta_log, &p.gamma_log, &p.h0, &p.h_final,
                              &p.dh, &p.dh_final, &p.dx, &p.dh0}) {
    mirror.add(*tensor);
  }
  mirror.add(p.forward_params().layout);
  const auto move = [&](kernels::scan::LruParams& params) {
    mirror.translate(params.x.data);
    mirror.translate(params.h.data);
    for (const void** pointer :
         {&params.nu_log, &params.theta_log, &params.gamma_log, &params.h0}) {
      mirror.translate(*pointer);
    }
    mirror.translate(params.h_final);
    mirror.translate(params.layout.offsets);
    params.time_split = split;
  };
  kernels::scan::LruParams forward = p.forward_params();
  move(forward);
  plan_and_launch(
      &forward.plan, &forward.workspace,
      [&](auto* plan) { return kernels::scan::lru_forward_plan(forward, plan); },
      [&] { return kernels::scan::lru_forward(forward, nullptr); });

  kernels::scan::LruBackwardParams backward = p.backward_params();
  move(backward.forward);
  mirror.translate(backward.dh.data);
  mirror.translate(backward.dx.data);
  mirror.translate(backward.dh_final);
  mirror.translate(backward.dh0);
  kernels::scan::ScanPlan sizes;
  check_cuda(kernels::scan::lru_backward_plan(backward, &sizes), "plan");
  DevicePartials dnu(p.dnu_partial, sizes.partials);
  DevicePartials dtheta(p.dtheta_partial, sizes.partials);
  DevicePartials dgamma(p.dgamma_partial, sizes.partials);
  backward.dnu_log_partial = dnu.device();
  backward.dtheta_log_partial = p.shape().turns ? dtheta.device() : nullptr;
  backward.dgamma_log_partial = dgamma.device();
  plan_and_launch(
      &backward.forward.plan, &backward.forward.workspace,
      [&](auto* plan) { return kernels::scan::lru_backward_plan(backward, plan); },
      [&] { return kernels::scan::lru_backward(backward, nullptr); });
  mirror.download();
  dnu.sum_into(&p.dnu_partial);
  dgamma.sum_into(&p.dgamma_partial);
  if (p.shape().turns) {
    dtheta.sum_into(&p.dtheta_partial);
  }
}

}  // namespace tidegate::testing
