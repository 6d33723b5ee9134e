# Two ways to install:
#   cmake --install          library, headers and a package config, for C++ programs
#   the component "package"  what pip puts into the Python package: libraries under tidegate/lib
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

add_custom_target(tidegate_package DEPENDS tidegate tidegate_build_info)
set(package_targets tidegate)
if(TARGET tidegate_cpp)
  add_dependencies(tidegate_package tidegate_cpp)
  list(APPEND package_targets tidegate_cpp)
endif()
install(TARGETS ${package_targets} LIBRARY DESTINATION tidegate/lib COMPONENT package EXCLUDE_FROM_ALL)
install(FILES ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/build_info.json
  DESTINATION tidegate/lib COMPONENT package EXCLUDE_FROM_ALL)
