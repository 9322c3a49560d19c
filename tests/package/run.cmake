# SPDX-License-Identifier: BSL-1.0
# One way to use the package: HOW is install, find_package, add_subdirectory, fetch_content, include_path, single_header
# or pkg_config. FLAGS go to the compiler; COMPONENTS are asked for, and a program of each is built and run.
# cmake -DHOW=... -DNAME=... -DSOURCE=... -DBINARY=... -DWORK=... -DCOMPILER=... -DGENERATOR=... -DVERSION=...
#       [-DFLAGS=...] [-DCOMPONENTS=...] -P run.cmake

set(prefix ${WORK}/moved)
set(consumer ${CMAKE_CURRENT_LIST_DIR}/consumer)
set(here ${WORK}/${NAME})
file(REMOVE_RECURSE ${here})
file(MAKE_DIRECTORY ${here})

macro(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endmacro()

macro(compile_by_hand)
  run(${COMPILER} -std=c++20 ${FLAGS} ${ARGV} ${consumer}/main.cpp ${consumer}/second_unit.cpp -o ${here}/consumer)
  run(${here}/consumer)
endmacro()

if(HOW STREQUAL "install")
  run(${CMAKE_COMMAND} --install ${BINARY} --prefix ${here})
  file(REMOVE_RECURSE ${prefix})
  file(RENAME ${here} ${prefix})
elseif(HOW STREQUAL "include_path")
  compile_by_hand(-I${SOURCE}/include -pthread)
elseif(HOW STREQUAL "single_header")
  file(MAKE_DIRECTORY ${here}/gradsync)
  run(${SOURCE}/scripts/single-header -o ${here}/gradsync/gradsync.hpp)
  compile_by_hand(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I${here} -pthread)
elseif(HOW STREQUAL "pkg_config")
  set(ENV{PKG_CONFIG_PATH} ${prefix}/share/pkgconfig)
  run(pkg-config --exact-version=${VERSION} gradsync)
  execute_process(COMMAND pkg-config --cflags --libs gradsync OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  compile_by_hand(${flags})
else()
  list(JOIN COMPONENTS "," components) # a list would fall apart on its way
  run(${CMAKE_COMMAND} -S ${consumer} -B ${here} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER} -DHOW=${HOW}
      -DGRADSYNC_SOURCE=${SOURCE} -DCMAKE_PREFIX_PATH=${prefix} -DCOMPONENTS=${components})
  run(${CMAKE_COMMAND} --build ${here})
  run(${here}/consumer)
  foreach(component IN LISTS COMPONENTS)
    run(${CMAKE_COMMAND} -E env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ${here}/consumer_${component})
  endforeach()
endif()
