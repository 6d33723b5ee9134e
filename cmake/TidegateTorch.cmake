# tidegate_find_torch([REQUIRED]): imported targets from the torch Python package, or from an
# unpacked libtorch archive. Used by tidegate's own build and, installed, by its package config.
#
# find_package(Torch) is not used: with PyPI's torch it fails where no CUDA toolkit is installed,
# for us and for every consumer, and it overwrites CMAKE_CUDA_FLAGS.
#
# Looked for, in this order:
#   TIDEGATE_TORCH_DIR                      a folder with include/ and lib/ (given by the user)
#   Python_EXECUTABLE, Python3_EXECUTABLE   the torch that this Python imports
#   TIDEGATE_TORCH_DIR_HINT                 the torch tidegate was built with (set by the package config)
#   any Python that CMake finds
#
# Sets   TIDEGATE_TORCH_ROOT, _VERSION (2.11.0), _MAJOR_MINOR (2.11), _CUDA (13.0 or empty),
#        _VARIANT (cu130 or cpu), _RPATH (folders with torch's libraries and its CUDA runtime)
# Makes  tidegate::torch        headers, c10, torch_cpu, torch
#        tidegate::torch_cuda   c10_cuda, torch_cuda (where torch has them; headers need a toolkit)
#        tidegate::torch_python libtorch_python (where torch has it)
#        tidegate::torch_openmp the libgomp that torch brings, so that no second one is loaded
include_guard(GLOBAL)

# The folder of the torch package that PYTHON imports, or empty. -I first: inside pip's isolated
# build only -I sees the user's site-packages; without it, PYTHONPATH and the user site count too.
function(_tidegate_torch_of_python python out)
  set(code "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")
  set(found "")
  foreach(flag -I -B)
    execute_process(COMMAND ${python} ${flag} -c "${code}" OUTPUT_VARIABLE found ERROR_QUIET
                    OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(found AND EXISTS ${found}/include)
      break()
    endif()
    set(found "")
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

function(_tidegate_locate_torch out)
  set(root "")
  if(TIDEGATE_TORCH_DIR)
    set(root ${TIDEGATE_TORCH_DIR})
    if(NOT EXISTS ${root}/include/ATen/ATen.h)
      message(FATAL_ERROR "TIDEGATE_TORCH_DIR=${root} has no include/ATen/ATen.h: give the folder of the torch package or of an unpacked libtorch")
    endif()
  else()
    foreach(python IN ITEMS "${Python_EXECUTABLE}" "${Python3_EXECUTABLE}")
      if(python AND NOT root)
        _tidegate_torch_of_python(${python} root)
      endif()
    endforeach()
    if(NOT root AND TIDEGATE_TORCH_DIR_HINT AND EXISTS ${TIDEGATE_TORCH_DIR_HINT}/include/ATen/ATen.h)
      set(root ${TIDEGATE_TORCH_DIR_HINT})
    endif()
    if(NOT root AND NOT Python_EXECUTABLE)
      find_package(Python QUIET COMPONENTS Interpreter)
      if(Python_EXECUTABLE)
        _tidegate_torch_of_python(${Python_EXECUTABLE} root)
      endif()
    endif()
  endif()
  set(${out} "${root}" PARENT_SCOPE)
endfunction()

# Version and CUDA variant from torch/version.py, or libtorch's build-version. No import of torch:
# that takes seconds.
function(_tidegate_torch_version root)
  set(cuda "")
  if(EXISTS ${root}/version.py)
    file(READ ${root}/version.py text)
    string(REGEX MATCH "__version__ *= *['\"]([0-9.]+)" _ "${text}")
    set(version ${CMAKE_MATCH_1})
    if(text MATCHES "cuda[^=\n]*= *['\"]([0-9.]+)['\"]")
      set(cuda ${CMAKE_MATCH_1})
    endif()
  elseif(EXISTS ${root}/build-version)
    file(READ ${root}/build-version text)
    string(REGEX MATCH "^[0-9.]+" version "${text}")
    if(text MATCHES "\\+cu([0-9]+)([0-9])")
      set(cuda ${CMAKE_MATCH_1}.${CMAKE_MATCH_2})
    endif()
  else()
    message(FATAL_ERROR "tidegate: ${root} has neither version.py nor build-version: not a torch package")
  endif()
  string(REGEX REPLACE "[.]$" "" version "${version}")
  string(REGEX MATCH "^[0-9]+[.][0-9]+" major_minor "${version}")
  set(variant cpu)
  if(cuda)
    string(REGEX MATCH "^([0-9]+)[.]([0-9]+)" _ "${cuda}")
    set(variant cu${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  endif()
  set(TIDEGATE_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(TIDEGATE_TORCH_MAJOR_MINOR "${major_minor}" PARENT_SCOPE)
  set(TIDEGATE_TORCH_CUDA "${cuda}" PARENT_SCOPE)
  set(TIDEGATE_TORCH_VARIANT "${variant}" PARENT_SCOPE)
endfunction()

# An older torch is refused here and not after minutes of compiling; of a newer one than was tried a
# line warns. scripts/torch_versions.sh reads the list, builds and tests with each.
set(TIDEGATE_TORCH_TRIED 2.11.0 2.15.0)
function(_tidegate_check_torch_version version root)
  list(GET TIDEGATE_TORCH_TRIED 0 oldest)
  list(GET TIDEGATE_TORCH_TRIED -1 newest)
  list(JOIN TIDEGATE_TORCH_TRIED ", " tried)
  if(version VERSION_LESS oldest)
    message(FATAL_ERROR "tidegate: torch ${version} (${root}) is older than ${oldest}; tried are ${tried}")
  elseif(version VERSION_GREATER newest)
    message(STATUS "tidegate: torch ${version} is newer than any that was tried (${tried})")
  endif()
endfunction()

function(_tidegate_torch_library name root)
  if(EXISTS ${root}/lib/lib${name}.so AND NOT TARGET tidegate::lib${name})
    add_library(tidegate::lib${name} SHARED IMPORTED GLOBAL)
    set_target_properties(tidegate::lib${name} PROPERTIES
      IMPORTED_LOCATION ${root}/lib/lib${name}.so IMPORTED_SONAME lib${name}.so)
  endif()
endfunction()

# How to link the shared libstdc++, which torch's libraries use, before the compiler adds a static one: two
# in one process crash, in std::regex for one. Compilers add that by -static-libstdc++, or because they were
# moved, and their libstdc++.so is a link to nowhere; the library's own name is found then, too.
function(_tidegate_shared_libstdcxx out)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6 OUTPUT_VARIABLE found
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(library stdc++)
  if(IS_ABSOLUTE "${found}" AND EXISTS "${found}")
    set(library -l:libstdc++.so.6)
  endif()
  set(${out} ${library} PARENT_SCOPE)
endfunction()

function(_tidegate_torch_targets root)
  foreach(name c10 torch_cpu torch c10_cuda torch_cuda torch_python)
    _tidegate_torch_library(${name} ${root})
  endforeach()

  # The ABI of std::string that torch was compiled with: TorchConfig.cmake records it.
  set(abi 1)
  if(EXISTS ${root}/share/cmake/Torch/TorchConfig.cmake)
    file(READ ${root}/share/cmake/Torch/TorchConfig.cmake text)
    if(text MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
      set(abi ${CMAKE_MATCH_1})
    endif()
  endif()
  if(NOT TARGET tidegate::torch)
    add_library(tidegate::torch INTERFACE IMPORTED GLOBAL)
    target_include_directories(tidegate::torch SYSTEM INTERFACE
      ${root}/include ${root}/include/torch/csrc/api/include)
    target_compile_definitions(tidegate::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${abi})
    target_compile_features(tidegate::torch INTERFACE cxx_std_20)
    _tidegate_shared_libstdcxx(libstdcxx)
    target_link_libraries(tidegate::torch INTERFACE tidegate::libtorch tidegate::libtorch_cpu tidegate::libc10
      ${libstdcxx})
    # torch's own dependencies (cuDNN, NCCL, ...) are found by its libraries' run path, not by ours.
    target_link_options(tidegate::torch INTERFACE LINKER:--allow-shlib-undefined)
  endif()
  if(TARGET tidegate::libtorch_cuda AND NOT TARGET tidegate::torch_cuda)
    add_library(tidegate::torch_cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(tidegate::torch_cuda INTERFACE tidegate::torch tidegate::libtorch_cuda tidegate::libc10_cuda)
  endif()
  if(TARGET tidegate::libtorch_python AND NOT TARGET tidegate::torch_python)
    add_library(tidegate::torch_python INTERFACE IMPORTED GLOBAL)
    target_link_libraries(tidegate::torch_python INTERFACE tidegate::torch tidegate::libtorch_python)
  endif()
  if(NOT TARGET tidegate::torch_openmp)
    _tidegate_torch_openmp(${root})
  endif()
endfunction()

# at::parallel_for is an inline function with an OpenMP pragma: compiled without -fopenmp it runs
# on one thread; linked to another libgomp than torch's, the process has two thread pools.
function(_tidegate_torch_openmp root)
  add_library(tidegate::torch_openmp INTERFACE IMPORTED GLOBAL)
  target_compile_options(tidegate::torch_openmp INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  file(GLOB gomp ${root}/lib/libgomp*.so* ${root}/../torch.libs/libgomp*.so*)
  if(gomp)
    list(GET gomp 0 gomp)
    target_link_libraries(tidegate::torch_openmp INTERFACE ${gomp})
  else()
    target_link_options(tidegate::torch_openmp INTERFACE -fopenmp)
  endif()
endfunction()

function(tidegate_find_torch)
  cmake_parse_arguments(arg REQUIRED "" "" ${ARGN})
  _tidegate_locate_torch(root)
  if(NOT root)
    if(arg_REQUIRED)
      message(FATAL_ERROR "tidegate: no torch found by ${Python_EXECUTABLE}: 'pip install torch' there, "
        "or give another Python by -DPython_EXECUTABLE=..., or an unpacked libtorch by -DTIDEGATE_TORCH_DIR=...")
    endif()
    return()
  endif()
  file(REAL_PATH ${root} root)
  _tidegate_torch_version(${root})
  _tidegate_check_torch_version(${TIDEGATE_TORCH_VERSION} ${root})
  _tidegate_torch_targets(${root})
  # PyPI's torch keeps the CUDA runtime in a package beside its own.
  set(rpath ${root}/lib)
  if(TIDEGATE_TORCH_CUDA)
    file(GLOB runtime ${root}/../nvidia/*/lib/libcudart.so.*)
    foreach(file IN LISTS runtime)
      cmake_path(GET file PARENT_PATH folder)
      file(REAL_PATH ${folder} folder)
      list(APPEND rpath ${folder})
    endforeach()
  endif()
  list(REMOVE_DUPLICATES rpath)
  set(TIDEGATE_TORCH_RPATH "${rpath}" PARENT_SCOPE)
  set(TIDEGATE_TORCH_ROOT "${root}" PARENT_SCOPE)
  foreach(name VERSION MAJOR_MINOR CUDA VARIANT)
    set(TIDEGATE_TORCH_${name} "${TIDEGATE_TORCH_${name}}" PARENT_SCOPE)
  endforeach()
endfunction()
