// The one unit of the target that precompiles torch's headers (cmake/TidegateTargets.cmake): CMake
// wants a source in every target.
