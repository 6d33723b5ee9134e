# The units of forgetting attention on tensor cores, by classes of head dimensions; on Hopper alone,
# of all. A unit has both 16-bit types, which share the headers.
foreach(unit forward/forward_kernel=Forward backward/backward_unit=Backward)
  string(REPLACE "=" ";" unit ${unit})
  list(GET unit 0 header)
  list(GET unit 1 name)
  tidegate_units(kernels/attention/cuda/${header}.cuh Attention${name}Unit
    "small=__nv_bfloat16, HeadDims::kSmall|__half, HeadDims::kSmall"
    "large=__nv_bfloat16, HeadDims::kLarge|__half, HeadDims::kLarge")
endforeach()
tidegate_units(kernels/attention/cuda/forward/single_tile_kernel.cuh AttentionSingleTileForwardUnit
  "bf16_f16=__nv_bfloat16|__half")
tidegate_units(kernels/attention/cuda/hopper/forward_unit.cuh HopperForwardUnit
  "bf16_f16=__nv_bfloat16|__half")
tidegate_units(kernels/attention/cuda/hopper/backward_unit.cuh HopperBackwardUnit
  "bf16_f16=__nv_bfloat16|__half")
