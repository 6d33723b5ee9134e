# Two ways to install:
#   cmake --install   the component "cpp": library, headers and a package config, for C++ programs
#   pip               the components "cpp" and "package" into the Python package's folder: C++ programs
#                     find the former by tidegate.cmake_prefix_path; the latter is what Python loads
# Nothing that is installed names a folder of this machine but as the last place to look for torch, so
# either can be moved.
include(CMakePackageConfigHelpers)

install(TARGETS tidegate EXPORT tidegate-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
install(DIRECTORY include/tidegate ${PROJECT_BINARY_DIR}/include/tidegate
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp FILES_MATCHING PATTERN "*.h")

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tidegate)
configure_package_config_file(cmake/tidegate-config.cmake.in ${PROJECT_BINARY_DIR}/tidegate-config.cmake
  INSTALL_DESTINATION ${config_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tidegate-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(EXPORT tidegate-targets NAMESPACE tidegate:: DESTINATION ${config_dir} COMPONENT cpp)
install(FILES ${PROJECT_BINARY_DIR}/tidegate-config.cmake
              ${PROJECT_BINARY_DIR}/tidegate-config-version.cmake
              cmake/TidegateTorch.cmake
  DESTINATION ${config_dir} COMPONENT cpp)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/tidegate COMPONENT cpp)

# The build tree is such a package as well, which C++ programs find by -DCMAKE_PREFIX_PATH=build.
export(EXPORT tidegate-targets NAMESPACE tidegate:: FILE ${PROJECT_BINARY_DIR}/tidegate-targets.cmake)
file(COPY_FILE ${CMAKE_CURRENT_LIST_DIR}/TidegateTorch.cmake ${PROJECT_BINARY_DIR}/TidegateTorch.cmake
  ONLY_IF_DIFFERENT)

add_custom_target(tidegate_package DEPENDS tidegate tidegate_build_info)
if(TARGET tidegate_cpp)
  add_dependencies(tidegate_package tidegate_cpp)
  install(TARGETS tidegate_cpp LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT package EXCLUDE_FROM_ALL)
endif()
install(FILES ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/build_info.json
  DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT package EXCLUDE_FROM_ALL)
