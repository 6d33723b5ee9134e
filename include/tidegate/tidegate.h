// Everything of tidegate: ops, modules, models. A program that uses one op can include its header
// alone.
#pragma once

#include <tidegate/models/block.h>
#include <tidegate/models/causal_lm.h>
#include <tidegate/models/classifiers.h>
#include <tidegate/models/config.h>
#include <tidegate/models/safetensors.h>
#include <tidegate/nn/attention.h>
#include <tidegate/nn/expansion.h>
#include <tidegate/nn/gated_linear_attention.h>
#include <tidegate/nn/gated_linear_rnn.h>
#include <tidegate/nn/glu.h>
#include <tidegate/nn/hgru.h>
#include <tidegate/nn/hgru2.h>
#include <tidegate/nn/init.h>
#include <tidegate/nn/lower_bounds.h>
#include <tidegate/nn/module.h>
#include <tidegate/nn/norm.h>
#include <tidegate/nn/token_mixer.h>
#include <tidegate/ops/gated_linear_attention.h>
#include <tidegate/ops/hgrn2.h>
#include <tidegate/ops/hgru.h>
#include <tidegate/ops/init.h>
#include <tidegate/ops/linear_scan.h>
#include <tidegate/version.h>
