// Everything of tidegate: ops, modules, models. A program that uses one op can include its header
// alone.
#pragma once

#include "tidegate/version.h"
