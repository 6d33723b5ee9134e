#pragma once

// What a unit of norms instantiates: both directions, since a unit costs more by its headers than
// by one of them.

#include "kernels/norm/cuda/norm_backward.cuh"
#include "kernels/norm/cuda/norm_forward.cuh"
