# Helpers shared by the folders.
include_guard(GLOBAL)

# The shared C++ library by its own name. A toolchain that has objects of its static twin for what an
# older shared one lacks would otherwise put a second set of locale facets into our library, and
# printing a number would crash beside torch's.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
  OUTPUT_VARIABLE tidegate_libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)

# tidegate_folder_executable(NAME FOLDER LIBRARY...): FOLDER/*.cpp and *.cu -> bin/NAME, nothing when
# there are none. Files with "cuda" in their name are compiled in CUDA builds only.
function(tidegate_folder_executable name folder)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp ${folder}/*.cu)
  if(NOT TIDEGATE_WITH_CUDA)
    list(FILTER sources EXCLUDE REGEX "/[^/]*cuda[^/]*$")
    list(FILTER sources EXCLUDE REGEX "[.]cu$")
  endif()
  if(NOT sources)
    return()
  endif()
  add_executable(${name} ${sources})
  tidegate_target_defaults(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARGN})
  if(tidegate IN_LIST ARGN)
    tidegate_use_torch_headers(${name})
  endif()
  if(TIDEGATE_WITH_CUDA)
    target_link_libraries(${name} PRIVATE CUDA::cudart)
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${TIDEGATE_CUDA_ARCHITECTURES}")
  endif()
endfunction()

# tidegate_compile_quickly(TARGET): for programs whose time goes into the library and into torch, not
# into what is compiled here.
function(tidegate_compile_quickly target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
endfunction()

# Where torch and its CUDA runtime (13's, 12's package) lie beside the Python package, from a folder of
# that package.
set(TIDEGATE_PACKAGE_RPATH
  "$ORIGIN/../../torch/lib;$ORIGIN/../../nvidia/cu13/lib;$ORIGIN/../../nvidia/cuda_runtime/lib")

# Warnings, and a run path that is transitive (DT_RPATH): with DT_RUNPATH a program would find
# libtidegate.so but not what it needs in turn. A library has one path for the build tree, an
# installed prefix and the Python package alike, so nothing is rewritten when it is installed: CMake
# would pad the shorter of two paths with empty entries, and those mean the current folder.
function(tidegate_target_defaults target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags LINKER:--no-as-needed)
  get_target_property(type ${target} TYPE)
  if(NOT type STREQUAL STATIC_LIBRARY AND IS_ABSOLUTE "${tidegate_libstdcxx}")
    target_link_libraries(${target} PRIVATE ${tidegate_libstdcxx})
  endif()
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX BUILD_RPATH "${TIDEGATE_TORCH_RPATH}")
  if(type MATCHES "SHARED_LIBRARY|MODULE_LIBRARY")
    set_target_properties(${target} PROPERTIES
      BUILD_WITH_INSTALL_RPATH ON
      INSTALL_RPATH_USE_LINK_PATH ON
      INSTALL_RPATH "$ORIGIN;${TIDEGATE_PACKAGE_RPATH};${TIDEGATE_TORCH_RPATH}")
  endif()
endfunction()

# torch's headers, parsed once: they are 10 to 15 of the 15 to 25 seconds that a unit above the wall
# would take. A unit still includes what it uses; -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON shows whether
# it does.
#
# A compiler accepts precompiled headers only with the very options that they were made with. So the
# library and the programs agree on these: OpenMP, position-independent code of the one kind that
# both can use (CMake's own choice is -fPIC for one and -fPIE for the other), no macro of their own.
add_library(tidegate_torch_headers OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/torch_headers.cpp)
target_link_libraries(tidegate_torch_headers PRIVATE tidegate::torch tidegate::torch_openmp)
target_precompile_headers(tidegate_torch_headers PRIVATE
  <ATen/core/Tensor.h>
  <torch/csrc/autograd/custom_function.h>
  <torch/library.h>
  <torch/nn/cloneable.h>
  <torch/nn/modules/embedding.h>
  <torch/nn/modules/linear.h>)

# tidegate_use_torch_headers(TARGET): TARGET, which links tidegate::torch, has them. Its sources are
# compiled up to forty of a folder at a time: g++ takes 5 seconds for even an empty unit that has
# these headers, to read them and for the templates that their inline functions use. So a folder's files have no two
# things of one name, not even in anonymous namespaces. Who edits one file over and over configures
# with TIDEGATE_UNITY=OFF.
option(TIDEGATE_UNITY "Compile the files above the wall several at a time (CMake's UNITY_BUILD)" ON)
function(tidegate_use_torch_headers target)
  target_link_libraries(${target} PRIVATE tidegate::torch_openmp)
  target_precompile_headers(${target} REUSE_FROM tidegate_torch_headers)
  _tidegate_one_code_model(${target})
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TIDEGATE_UNITY} UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  set(folder_before "")
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    if(NOT folder STREQUAL folder_before)
      set(folder_before ${folder})
      set(count 0)
    endif()
    math(EXPR group "${count} / 40")
    math(EXPR count "${count} + 1")
    cmake_path(GET folder FILENAME name)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name}_${group})
  endforeach()
endfunction()

function(_tidegate_one_code_model target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF DEFINE_SYMBOL "")
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-fPIC> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIC>)
endfunction()

tidegate_target_defaults(tidegate_torch_headers)
_tidegate_one_code_model(tidegate_torch_headers)
