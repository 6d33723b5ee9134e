# Helpers shared by the folders.
include_guard(GLOBAL)

# Warnings, and a run path that is transitive (DT_RPATH): with DT_RUNPATH a program would find
# libtidegate.so but not what it needs in turn.
function(tidegate_target_defaults target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags LINKER:--no-as-needed)
  set_target_properties(${target} PROPERTIES
    LINKER_LANGUAGE CXX
    BUILD_RPATH "${TIDEGATE_TORCH_RPATH}"
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib;$ORIGIN/../../nvidia/cu13/lib;${TIDEGATE_TORCH_RPATH}")
endfunction()
