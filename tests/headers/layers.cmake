# SPDX-License-Identifier: BSL-1.0
# Includes point only downwards: a header includes from its own folder and from lower layers, never from a sibling folder or from above. A
# component includes only the components that its target links, so a reader of the core meets none of the others. The table of folders in
# docs/background/design.md says which folder includes which.  cmake -P layers.cmake
cmake_minimum_required(VERSION 3.25)

# From the bottom up; folders in one line are siblings. A header that stands in no folder is a layer of its own. The end of a header may
# include what gradsync::compiled holds of it: compiled_*.hpp, and the definitions that are left out then.
set(layers
    "core"
    "kernel"
    "bootstrap"
    "collective"
    "cuda"
    "nccl"
    "backend|bucket|observe|overlap|compress"
    "engine"
    "(average|average_rows|cxx14|reducer).hpp"
    "shard"
    "interop|planning|compiled.hpp"
    "compiled_tcp.hpp"
    "gradsync.hpp"
    "elastic")

# The headers of each component; all others are the core's, gradsync::gradsync. cmake/components/ has a file for each.
set(components processes devices sharding interop planning elastic etcd)
set(processes "bootstrap/|collective/(connect|engine|hierarchical_engine|in_flight|placement|process)\\.hpp|collective/messages/"
              "|collective/shared_memory/(process_engine|regions|segment)\\.hpp|backend/(tcp|mpi)\\.hpp|cxx14\\.hpp|compiled_tcp\\.hpp")
set(devices "cuda/|nccl/|backend/(nccl|staging)\\.hpp")
set(sharding "shard/|bucket/units\\.hpp")
set(interop "interop/")
set(planning "planning/")
set(elastic "elastic/")
set(etcd "bootstrap/store/etcd_")

cmake_path(SET source NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../..)
set(root ${source}/include/gradsync)
set(wrong)

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

function(component_of header result)
  set(${result} gradsync PARENT_SCOPE)
  foreach(component IN LISTS components)
    string(CONCAT headers ${${component}})
    if(header MATCHES "^(${headers})")
      set(${result} ${component} PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# As the table in design.md writes it.
function(room_of header result)
  set(${result} "*.hpp" PARENT_SCOPE)
  if(header MATCHES "^([^/]*/)")
    set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
  endif()
endfunction()

foreach(component IN LISTS components)
  file(READ ${source}/cmake/components/${component}.cmake text)
  string(REGEX MATCH "target_link_libraries\\(gradsync::${component} INTERFACE ([^)]*)\\)" found "${text}")
  string(REPLACE "gradsync::" "" links_of_${component} "${CMAKE_MATCH_1} ${component}")
  separate_arguments(links_of_${component})
endforeach()

file(GLOB_RECURSE headers RELATIVE ${root} ${root}/*.hpp)
if(NOT headers)
  message(FATAL_ERROR "no headers in ${root}")
endif()
foreach(header IN LISTS headers)
  string(REGEX REPLACE "/.*" "" folder ${header})
  layer_of(${header} layer)
  component_of(${header} component)
  room_of(${header} room)
  list(APPEND rooms ${room})
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
    if(included MATCHES "^compiled_[a-z]+\\.hpp$")
      continue()
    endif()
    string(REGEX REPLACE "/.*" "" included_folder ${included})
    layer_of(${included} included_layer)
    if(included_layer GREATER layer OR (included_layer EQUAL layer AND NOT included_folder STREQUAL folder))
      list(APPEND wrong "${header} includes ${included}, which does not lie below")
    endif()
    component_of(${included} included_component)
    if(NOT included_component STREQUAL component AND NOT included_component IN_LIST links_of_${component})
      list(APPEND wrong "${header} includes ${included}, but gradsync::${component} does not link gradsync::${included_component}")
    endif()
    room_of(${included} included_room)
    if(NOT included_room STREQUAL room)
      list(APPEND included_by_${room} ${included_room})
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

# In the table, three blanks or more end a column.
file(READ ${source}/docs/background/design.md page)
list(REMOVE_DUPLICATES rooms)
foreach(room IN LISTS rooms)
  list(REMOVE_DUPLICATES included_by_${room})
  list(REMOVE_ITEM included_by_${room} core/)
  list(SORT included_by_${room})
  list(JOIN included_by_${room} " " includes)
  string(REPLACE "*" "\\*" name "${room}")
  string(REGEX MATCH "\n    ${name} [^\n]*" row "${page}")
  string(REGEX REPLACE ".*   +" "" written "${row}")
  if(room STREQUAL "core/")
    set(includes "the standard library")
  elseif(includes STREQUAL "")
    set(includes "-")
  endif()
  if(NOT written STREQUAL includes)
    list(APPEND wrong "docs/background/design.md: the last column of ${room} says '${written}', and should say '${includes}'")
  endif()
endforeach()

if(wrong)
  list(JOIN wrong "\n  " wrong)
  message(FATAL_ERROR "Includes, or what is written about them:\n  ${wrong}")
endif()
