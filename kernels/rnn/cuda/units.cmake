# The units of the gated RNN whose matrix is on the chip: by the largest width, whether the matrix is
# of 16-bit numbers, and whether blocks exchange through memory instead of being a cluster.
tidegate_units(kernels/rnn/cuda/on_chip/on_chip_family.cuh OnChipFamily
  "up_to_512=128, false, false|256, false, false|512, false, false"
  "large=512, true, false|1024, false, false"
  "exchange=512, false, true|512, true, true")
