#pragma once

// Which kernels belong to which params: what Launch (launch.h) calls for them.

#include "kernels/attention/forgetting_attention.h"
#include "kernels/gla/gla.h"
#include "kernels/rnn/rnn.h"
#include "kernels/scan/scan.h"
#include "kernels/scan/wkv4.h"
#include "src/ops/launch.h"

#ifdef TIDEGATE_WITH_CUDA
#include "kernels/attention/forgetting_attention_cuda.h"
#include "kernels/gla/gla_cuda.h"
#include "kernels/rnn/rnn_cuda.h"
#include "kernels/scan/scan_cuda.h"
#endif

namespace tidegate::ops {

template <>
inline constexpr KernelSet<kernels::scan::LinearScanParams>
    kKernelSet<kernels::scan::LinearScanParams> = {
        &kernels::scan::linear_scan_unsupported, &kernels::scan::linear_scan_plan_cpu,
        &kernels::scan::linear_scan_forward_cpu,
        TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_forward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_forward)};

template <>
inline constexpr KernelSet<kernels::scan::LinearScanBackwardParams>
    kKernelSet<kernels::scan::LinearScanBackwardParams> = {
        &kernels::scan::linear_scan_unsupported, &kernels::scan::linear_scan_plan_cpu,
        &kernels::scan::linear_scan_backward_cpu,
        TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::scan::linear_scan_backward)};

template <>
inline constexpr KernelSet<kernels::scan::HgruParams> kKernelSet<kernels::scan::HgruParams> = {
    &kernels::scan::hgru_unsupported, &kernels::scan::hgru_plan_cpu,
    &kernels::scan::hgru_forward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_forward)};

template <>
inline constexpr KernelSet<kernels::scan::HgruBackwardParams>
    kKernelSet<kernels::scan::HgruBackwardParams> = {
        &kernels::scan::hgru_unsupported, &kernels::scan::hgru_plan_cpu,
        &kernels::scan::hgru_backward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::scan::hgru_backward)};

template <>
inline constexpr KernelSet<kernels::scan::LruParams> kKernelSet<kernels::scan::LruParams> = {
    &kernels::scan::lru_unsupported, &kernels::scan::lru_plan_cpu, &kernels::scan::lru_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_forward)};

template <>
inline constexpr KernelSet<kernels::scan::LruBackwardParams>
    kKernelSet<kernels::scan::LruBackwardParams> = {
        &kernels::scan::lru_unsupported, &kernels::scan::lru_plan_cpu,
        &kernels::scan::lru_backward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::scan::lru_backward)};

template <>
inline constexpr KernelSet<kernels::scan::Wkv4Params> kKernelSet<kernels::scan::Wkv4Params> = {
    &kernels::scan::wkv4_unsupported, &kernels::scan::wkv4_plan_cpu,
    &kernels::scan::wkv4_forward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_forward)};

template <>
inline constexpr KernelSet<kernels::scan::Wkv4BackwardParams>
    kKernelSet<kernels::scan::Wkv4BackwardParams> = {
        &kernels::scan::wkv4_unsupported, &kernels::scan::wkv4_plan_cpu,
        &kernels::scan::wkv4_backward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::scan::wkv4_backward)};

template <>
inline constexpr KernelSet<kernels::gla::GlaParams> kKernelSet<kernels::gla::GlaParams> = {
    &kernels::gla::gla_unsupported, &kernels::gla::gla_plan_cpu, &kernels::gla::gla_forward_cpu,
    TIDEGATE_CUDA_KERNEL(&kernels::gla::gla_forward_plan),
    TIDEGATE_CUDA_KERNEL(&kernels::gla::gla_forward)};

template <>
inline constexpr KernelSet<kernels::gla::GlaBackwardParams>
    kKernelSet<kernels::gla::GlaBackwardParams> = {
        &kernels::gla::gla_unsupported, &kernels::gla::gla_plan_cpu,
        &kernels::gla::gla_backward_cpu, TIDEGATE_CUDA_KERNEL(&kernels::gla::gla_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::gla::gla_backward)};

template <>
inline constexpr KernelSet<kernels::rnn::GatedRnnParams> kKernelSet<kernels::rnn::GatedRnnParams> =
    {&kernels::rnn::gated_rnn_unsupported, &kernels::rnn::gated_rnn_plan_cpu,
     &kernels::rnn::gated_rnn_forward_cpu,
     TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_forward_plan),
     TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_forward)};

template <>
inline constexpr KernelSet<kernels::rnn::GatedRnnBackwardParams>
    kKernelSet<kernels::rnn::GatedRnnBackwardParams> = {
        &kernels::rnn::gated_rnn_unsupported, &kernels::rnn::gated_rnn_plan_cpu,
        &kernels::rnn::gated_rnn_backward_cpu,
        TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::rnn::gated_rnn_backward)};

template <>
inline constexpr KernelSet<kernels::attention::ForgettingAttentionParams>
    kKernelSet<kernels::attention::ForgettingAttentionParams> = {
        &kernels::attention::forgetting_attention_unsupported,
        &kernels::attention::forgetting_attention_plan_cpu,
        &kernels::attention::forgetting_attention_forward_cpu,
        TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_forward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_forward)};

template <>
inline constexpr KernelSet<kernels::attention::ForgettingAttentionBackwardParams>
    kKernelSet<kernels::attention::ForgettingAttentionBackwardParams> = {
        &kernels::attention::forgetting_attention_unsupported,
        &kernels::attention::forgetting_attention_backward_plan_cpu,
        &kernels::attention::forgetting_attention_backward_cpu,
        TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_backward_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_backward)};

template <>
inline constexpr KernelSet<kernels::attention::ForgettingAttentionStepParams>
    kKernelSet<kernels::attention::ForgettingAttentionStepParams> = {
        &kernels::attention::forgetting_attention_step_unsupported,
        &kernels::attention::forgetting_attention_step_plan_cpu,
        &kernels::attention::forgetting_attention_step_cpu,
        TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_step_plan),
        TIDEGATE_CUDA_KERNEL(&kernels::attention::forgetting_attention_step)};

}  // namespace tidegate::ops
