# The units of the scans: every op for every type of its data, each compiled by itself.
set(real_types f32=float f64=double bf16=__nv_bfloat16 f16=__half)
tidegate_units(kernels/scan/cuda/hgru_family.cuh HgruFamily ${real_types})
tidegate_units(kernels/scan/cuda/lru_family.cuh LruFamily ${real_types})
tidegate_units(kernels/scan/cuda/wkv4_family.cuh Wkv4Family ${real_types})
tidegate_units(kernels/scan/cuda/linear_scan_family.cuh LinearScanFamily ${real_types}
  c64=Complex<float> c128=Complex<double>)
