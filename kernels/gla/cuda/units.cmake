# The units of gated linear attention on tensor cores, by what the gate is given as. A unit has both
# 16-bit types, which share the headers.
tidegate_units(kernels/gla/cuda/backward/tensor_backward.cuh TensorBackwardUnit
  "bf16_f16=__nv_bfloat16|__half")
tidegate_units(kernels/gla/cuda/forward/tensor_forward.cuh TensorForwardUnit
  "log_decay=__nv_bfloat16, GateKind::kLogDecay|__half, GateKind::kLogDecay"
  "logit=__nv_bfloat16, GateKind::kLogit|__half, GateKind::kLogit")
