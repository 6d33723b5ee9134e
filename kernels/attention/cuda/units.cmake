# The units of forgetting attention on tensor cores: 16-bit types, by classes of head dimensions.
foreach(type bf16=__nv_bfloat16 f16=__half)
  foreach(unit forward/forward_kernel=AttentionForward backward/backward_unit=AttentionBackward
          hopper/hopper_forward=HopperForward)
    string(REPLACE "=" ";" unit ${unit})
    list(GET unit 0 header)
    list(GET unit 1 name)
    tidegate_units(kernels/attention/cuda/${header}.cuh ${name}Unit
      "small_${type}, HeadDims::kSmall" "large_${type}, HeadDims::kLarge")
  endforeach()
endforeach()
