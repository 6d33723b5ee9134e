# The units of the scans: every op for every type of its data, each compiled by itself.
set(real_types f32=float f64=double bf16=__nv_bfloat16 f16=__half)
tidegate_units(kernels/scan/cuda/hgru/hgru.cuh HgruKernels ${real_types})
tidegate_units(kernels/scan/cuda/lru/lru.cuh LruKernels ${real_types})
tidegate_units(kernels/scan/cuda/wkv4/wkv4.cuh Wkv4Kernels ${real_types})
tidegate_units(kernels/scan/cuda/linear_scan/linear_scan.cuh LinearScanKernels ${real_types}
  c64=Complex<float> c128=Complex<double>)
