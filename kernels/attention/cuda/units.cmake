# The units of forgetting attention on tensor cores: 16-bit types, by classes of head dimensions.
foreach(type bf16=__nv_bfloat16 f16=__half)
  foreach(unit forward/forward_kernel=Forward backward/backward_unit=Backward)
    string(REPLACE "=" ";" unit ${unit})
    list(GET unit 0 header)
    list(GET unit 1 name)
    tidegate_units(kernels/attention/cuda/${header}.cuh Attention${name}Unit
      "small_${type}, HeadDims::kSmall" "large_${type}, HeadDims::kLarge")
  endforeach()
endforeach()
# On Hopper, by types.
foreach(type bf16=__nv_bfloat16 f16=__half)
  tidegate_units(kernels/attention/cuda/hopper/forward_unit.cuh HopperForwardUnit "${type}")
  tidegate_units(kernels/attention/cuda/hopper/backward_unit.cuh HopperBackwardUnit "${type}")
endforeach()
