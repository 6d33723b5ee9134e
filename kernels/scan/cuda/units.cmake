# The units of the scans: an op for a type of its data. Double precision is scanned sequentially, and
# float32 has few kernels, so these share a unit; so do the two 16-bit types where that makes no unit
# longer than hgru's.
tidegate_units(kernels/scan/cuda/hgru/hgru.cuh HgruKernels
  "f32_f64=float|double" bf16=__nv_bfloat16 f16=__half)
set(real_types "f32_f64=float|double" "bf16_f16=__nv_bfloat16|__half")
tidegate_units(kernels/scan/cuda/lru/lru.cuh LruKernels ${real_types})
tidegate_units(kernels/scan/cuda/wkv4/wkv4.cuh Wkv4Kernels ${real_types})
tidegate_units(kernels/scan/cuda/linear_scan/linear_scan.cuh LinearScanKernels
  "f32_f64=float|double" "c64_c128=Complex<float>|Complex<double>" "bf16_f16=__nv_bfloat16|__half")
