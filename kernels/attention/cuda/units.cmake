# The units of forgetting attention on tensor cores: 16-bit types, by classes of head dimensions.
foreach(type bf16=__nv_bfloat16 f16=__half)
  foreach(direction forward=Forward backward=Backward)
    string(REPLACE "=" ";" direction ${direction})
    list(GET direction 0 file)
    list(GET direction 1 name)
    tidegate_units(kernels/attention/cuda/${file}/${file}_unit.cuh Attention${name}Unit
      "small_${type}, HeadDims::kSmall" "large_${type}, HeadDims::kLarge")
  endforeach()
endforeach()
