# The units of norms: the dtype of the data and, beside it, that of the residual stream, of which
# float32 may stand beside 16-bit data.
tidegate_units(kernels/norm/cuda/norm_kernels.cuh NormKernels "f32=float, float"
  "bf16_f16=__nv_bfloat16, __nv_bfloat16|__nv_bfloat16, float|__half, __half|__half, float")
