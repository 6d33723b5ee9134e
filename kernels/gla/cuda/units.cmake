# The units of gated linear attention on tensor cores: 16-bit types, by what the gate is given as.
foreach(type bf16=__nv_bfloat16 f16=__half)
  tidegate_units(kernels/gla/cuda/backward/tensor_backward.cuh TensorBackwardUnit ${type})
  tidegate_units(kernels/gla/cuda/forward/tensor_forward.cuh TensorForwardUnit
    "log_decay_${type}, GateKind::kLogDecay" "logit_${type}, GateKind::kLogit")
endforeach()
