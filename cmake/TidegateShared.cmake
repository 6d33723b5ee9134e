# What C++ and Python must agree on is written once, in JSON files of the Python package, which reads
# them when it is imported. The library holds them as headers, made here, so that it needs no file
# when it runs:
#   python/tidegate/nn/choices.json      -> tidegate/choices.h       what options can be, and limits
#   python/tidegate/models/presets.json  -> tidegate/presets_json.h  the papers' configurations
include_guard(GLOBAL)

# The C++ declaration of one entry of choices.json: a list of names, or a number.
function(_tidegate_choice name json out)
  set(constant k)
  string(REPLACE "_" ";" words ${name})
  foreach(word IN LISTS words)
    string(SUBSTRING ${word} 0 1 first)
    string(SUBSTRING ${word} 1 -1 rest)
    string(TOUPPER ${first} first)
    string(APPEND constant ${first}${rest})
  endforeach()
  string(JSON type TYPE "${json}" ${name})
  string(JSON value GET "${json}" ${name})
  if(type STREQUAL "ARRAY")
    string(REGEX REPLACE "^\\[[ \n]*(.*[^ \n])[ \n]*\\]$" "{\\1}" value "${value}")
    string(REGEX REPLACE "[ \n]+" " " value "${value}")
    set(declaration "std::initializer_list<const char*> ${constant} = ${value}")
  else()
    set(declaration "int64_t ${constant} = ${value}")
  endif()
  set(${out} "inline constexpr ${declaration};\n" PARENT_SCOPE)
endfunction()

# tidegate_shared_headers(FOLDER): writes both headers below FOLDER.
function(tidegate_shared_headers folder)
  set(choices_file ${PROJECT_SOURCE_DIR}/python/tidegate/nn/choices.json)
  set(presets_file ${PROJECT_SOURCE_DIR}/python/tidegate/models/presets.json)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${choices_file} ${presets_file})

  file(READ ${choices_file} json)
  set(declarations "")
  string(JSON count LENGTH "${json}")
  math(EXPR last "${count} - 1")
  foreach(i RANGE ${last})
    string(JSON name MEMBER "${json}" ${i})
    _tidegate_choice(${name} "${json}" declaration)
    string(APPEND declarations "${declaration}")
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/tidegate/choices.h @ONLY CONTENT
"// Generated from python/tidegate/nn/choices.json by cmake/TidegateShared.cmake.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace tidegate {

@declarations@
}  // namespace tidegate
")

  file(READ ${presets_file} json)
  file(CONFIGURE OUTPUT ${folder}/tidegate/presets_json.h @ONLY CONTENT
"// Generated from python/tidegate/models/presets.json by cmake/TidegateShared.cmake.
#pragma once

namespace tidegate::models {

inline constexpr char kPresetsJson[] = R\"json(@json@)json\";

}  // namespace tidegate::models
")
endfunction()
