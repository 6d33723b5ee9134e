#include "benchmarks/models/split.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "benchmarks/models/measure.h"

namespace tidegate::benchmarks {
namespace {

using torch::autograd::profiler::KinetoEvent;
using torch::profiler::impl::ActivityType;

constexpr double kNano = 1e-9;

bool contains(std::string_view name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return name.find(part) != std::string_view::npos; });
}

double& time_of(StepSplit& split, Kind kind) {
  switch (kind) {
    case Kind::kProducts:
      return split.products;
    case Kind::kAttention:
      return split.attention;
    case Kind::kOurs:
      return split.ours;
    case Kind::kOptimizer:
      return split.optimizer;
    default:
      return split.rest;
  }
}

/// Kernels of one stream do not overlap, so that their durations add up.
StepSplit split_of_kernels(const std::vector<KinetoEvent>& events) {
  StepSplit split;
  for (const KinetoEvent& event : events) {
    if (event.deviceType() == c10::kCPU) continue;
    time_of(split, kind_of_kernel(event.name())) += kNano * static_cast<double>(event.durationNs());
  }
  return split;
}

/// Ops call ops: one that says nothing of its kind has its caller's, and the time of each is its
/// own without that of those it calls.
StepSplit split_of_ops(const std::vector<KinetoEvent>& events) {
  std::map<uint64_t, std::vector<const KinetoEvent*>> threads;
  for (const KinetoEvent& event : events) {
    if (event.deviceType() == c10::kCPU) threads[event.startThreadId()].push_back(&event);
  }
  StepSplit split;
  struct Open {
    uint64_t end;
    Kind kind;
  };
  for (auto& [thread, calls] : threads) {
    std::stable_sort(calls.begin(), calls.end(), [](const KinetoEvent* a, const KinetoEvent* b) {
      return a->startNs() != b->startNs() ? a->startNs() < b->startNs() : a->endNs() > b->endNs();
    });
    std::vector<Open> open;
    for (const KinetoEvent* call : calls) {
      while (!open.empty() && open.back().end <= call->startNs()) open.pop_back();
      const Kind own = kind_of_op(call->name());
      const Kind above = open.empty() ? Kind::kNone : open.back().kind;
      const Kind kind = own == Kind::kNone ? above : own;
      const double seconds = kNano * static_cast<double>(call->durationNs());
      time_of(split, kind) += seconds;
      if (!open.empty()) time_of(split, above) -= seconds;
      open.push_back({call->endNs(), kind});
    }
  }
  return split;
}

}  // namespace

Kind kind_of_kernel(const std::string& name) {
  if (contains(name, {"tidegate"})) {
    return contains(name, {"adamw"}) ? Kind::kOptimizer : Kind::kOurs;
  }
  if (contains(name, {"flash", "fmha", "cudnn"})) return Kind::kAttention;
  if (contains(name, {"gemm", "cutlass", "nvjet", "xmma", "cublas", "splitK"})) {
    return Kind::kProducts;
  }
  return contains(name, {"Adam", "adam"}) ? Kind::kOptimizer : Kind::kNone;
}

Kind kind_of_op(const std::string& name) {
  if (name.rfind("tidegate::", 0) == 0 && !contains(name, {"adamw_"})) return Kind::kOurs;
  for (const char* product : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}) {
    if (name == product) return Kind::kProducts;
  }
  if (name.rfind("aten::_scaled_dot_product", 0) == 0) return Kind::kAttention;
  return contains(name, {"adamw_"}) ? Kind::kOptimizer : Kind::kNone;
}

StepSplit split_of(c10::Device device, double seconds, const std::function<void()>& step) {
  namespace profiler = torch::autograd::profiler;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities{device.is_cpu() ? ActivityType::CPU : ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  Stopwatch watch(device);
  watch.mark();
  step();
  watch.mark();
  const double profiled = watch.spans().front();
  const auto result = profiler::disableProfiler();
  StepSplit split =
      device.is_cpu() ? split_of_ops(result->events()) : split_of_kernels(result->events());
  const double known = split.products + split.attention + split.ours + split.optimizer + split.rest;
  // Looking at every op makes a step on the CPU longer; kernels take as long as ever.
  split.idle = std::max(0.0, (device.is_cpu() ? profiled : seconds) - known);
  return split;
}

Speeds measure_speeds(c10::Device device, bool is_bf16) {
  const int64_t side = device.is_cpu() ? 768 : 8192;
  const int64_t numbers = int64_t{1} << (device.is_cpu() ? 24 : 28);
  const auto options = at::TensorOptions(device).dtype(is_bf16 ? torch::kBFloat16 : torch::kFloat);
  const at::Tensor a = at::randn({side, side}, options), b = at::randn({side, side}, options);
  at::Tensor product = at::empty({side, side}, options);
  const at::Tensor from = at::empty({numbers}, at::TensorOptions(device).dtype(torch::kFloat));
  at::Tensor to = at::empty_like(from);
  const auto fastest = [&](const auto& work) {
    double best = 1e30;
    for (int i = 0; i < 5; ++i) {
      Stopwatch watch(device);
      watch.mark();
      work();
      watch.mark();
      best = std::min(best, watch.spans().front());
    }
    return best;
  };
  Speeds speeds;
  const double cube = static_cast<double>(side) * static_cast<double>(side * side);
  speeds.operations = 2 * cube / fastest([&] { at::mm_out(product, a, b); });
  speeds.bytes = 8.0 * static_cast<double>(numbers) / fastest([&] { to.copy_(from); });
  return speeds;
}

}  // namespace tidegate::benchmarks
