# Compiles each of UNITS alone with COMPILER, FLAGS and -Werror; names those that fail.
# cmake -DCOMPILER=clang++ -DFLAGS=... -DUNITS=... -DINCLUDE=... [-DSYSTEM=FOLDER...] -P check.cmake

set(system)
foreach(folder IN LISTS SYSTEM)
  list(APPEND system -isystem ${folder})
endforeach()
set(failed)
foreach(unit IN LISTS UNITS)
  execute_process(COMMAND ${COMPILER} -std=c++20 -fsyntax-only ${FLAGS} -Werror -I${INCLUDE} ${system} ${unit}
                  RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    cmake_path(GET unit STEM stem)
    list(APPEND failed ${stem})
  endif()
endforeach()
if(failed)
  list(JOIN failed "\n  " failed)
  message(FATAL_ERROR "do not compile alone with ${COMPILER}:\n  ${failed}")
endif()
