# SPDX-License-Identifier: BSL-1.0
# Includes point only downwards: a header includes from its own folder and from lower layers, never from a sibling
# folder or from above. cmake -DINCLUDE=.../include -P layers.cmake

# From the bottom up; folders in one line are siblings. A header that stands in no folder is a layer of its own. The end of a header may
# include what gradsync::compiled holds of it: compiled_*.hpp, and the definitions that are left out then.
set(layers
    "core"
    "kernel|plan"
    "bootstrap"
    "collective"
    "cuda|simulation"
    "nccl"
    "backend|bucket|observe|overlap|compress"
    "engine"
    "(average|average_rows|cxx14|reducer).hpp"
    "shard"
    "interop|compiled.hpp"
    "compiled_tcp.hpp"
    "gradsync.hpp")

function(layer_of header result)
  string(REGEX REPLACE "/.*" "" folder ${header})
  set(height 0)
  foreach(layer IN LISTS layers)
    if(header MATCHES "^(${layer})$" OR folder MATCHES "^(${layer})$")
      set(${result} ${height} PARENT_SCOPE)
      return()
    endif()
    math(EXPR height "${height} + 1")
  endforeach()
  message(FATAL_ERROR "include/gradsync/${folder} has no place in the layers: give it one in tests/headers/layers.cmake")
endfunction()

set(root ${INCLUDE}/gradsync)
set(wrong)
file(GLOB_RECURSE headers RELATIVE ${root} ${root}/*.hpp)
if(NOT headers)
  message(FATAL_ERROR "no headers in ${root}: give INCLUDE as an absolute path")
endif()
foreach(header IN LISTS headers)
  string(REGEX REPLACE "/.*" "" folder ${header})
  layer_of(${header} layer)
  cmake_path(GET header PARENT_PATH parent)
  file(STRINGS ${root}/${header} includes REGEX "^ *# *include +(\"|<gradsync/)")
  foreach(line IN LISTS includes)
    if(line MATCHES "<gradsync/(.*)>")
      set(included ${CMAKE_MATCH_1})
    elseif(line MATCHES "\"(.*)\"")
      cmake_path(SET included NORMALIZE "${parent}/${CMAKE_MATCH_1}")
      if(parent STREQUAL "")
        set(included ${CMAKE_MATCH_1})
      endif()
    endif()
    string(REGEX REPLACE "/.*" "" included_folder ${included})
    layer_of(${included} included_layer)
    if(included MATCHES "^compiled_[a-z]+\\.hpp$")
      continue()
    endif()
    if(included_layer GREATER layer OR (included_layer EQUAL layer AND NOT included_folder STREQUAL folder))
      list(APPEND wrong "${header} includes ${included}")
    endif()
  endforeach()
endforeach()

# The lowest layer stands on the standard library and on POSIX alone.
file(GLOB headers RELATIVE ${root} ${root}/core/*.hpp)
foreach(header IN LISTS headers)
  file(STRINGS ${root}/${header} includes REGEX "^ *# *include +<")
  foreach(line IN LISTS includes)
    if(NOT line MATCHES "<([a-z_]+|(fcntl|pthread|sys/stat|time|unistd)\\.h)>")
      list(APPEND wrong "${header}: ${line}")
    endif()
  endforeach()
endforeach()
if(wrong)
  list(JOIN wrong "\n  " wrong)
  message(FATAL_ERROR "includes that do not point downwards:\n  ${wrong}")
endif()
