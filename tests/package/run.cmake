# One way to use the package: HOW is install, find_package, add_subdirectory, fetch_content, include_path or pkg_config.
# cmake -DHOW=... -DNAME=... -DSOURCE=... -DBINARY=... -DWORK=... -DCOMPILER=... -DGENERATOR=... -DVERSION=... -P run.cmake

set(prefix ${WORK}/moved)
set(consumer ${CMAKE_CURRENT_LIST_DIR}/consumer)
set(here ${WORK}/${NAME})
file(REMOVE_RECURSE ${here})
file(MAKE_DIRECTORY ${here})

macro(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endmacro()

macro(compile_by_hand)
  run(${COMPILER} -std=c++20 ${ARGV} ${consumer}/main.cpp ${consumer}/second_unit.cpp -o ${here}/consumer)
  run(${here}/consumer)
endmacro()

if(HOW STREQUAL "install")
  run(${CMAKE_COMMAND} --install ${BINARY} --prefix ${here})
  file(REMOVE_RECURSE ${prefix})
  file(RENAME ${here} ${prefix})
elseif(HOW STREQUAL "include_path")
  compile_by_hand(-I${SOURCE}/include -pthread)
elseif(HOW STREQUAL "pkg_config")
  set(ENV{PKG_CONFIG_PATH} ${prefix}/share/pkgconfig)
  run(pkg-config --exact-version=${VERSION} gradsync)
  execute_process(COMMAND pkg-config --cflags --libs gradsync OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  compile_by_hand(${flags})
else()
  run(${CMAKE_COMMAND} -S ${consumer} -B ${here} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER} -DHOW=${HOW}
      -DGRADSYNC_SOURCE=${SOURCE} -DCMAKE_PREFIX_PATH=${prefix})
  run(${CMAKE_COMMAND} --build ${here})
  run(${here}/consumer)
endif()
