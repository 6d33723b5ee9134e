#include "benchmarks/machine_context.h"

int main(int argc, char** argv) { return tidegate::testing::run_benchmarks(argc, argv); }
