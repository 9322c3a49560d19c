# One case of compile_fail: the twin compiles, the mistake does not, and its diagnostics say what is expected.
# cmake -DCASE=case.cpp -DCOMPILER=g++ -DFLAGS=... -DINCLUDE=... -P check.cmake

set(command ${COMPILER} -std=c++20 -fsyntax-only ${FLAGS} -I${INCLUDE})

file(STRINGS ${CASE} expectations REGEX "^// expect: ")
if(NOT expectations)
  message(FATAL_ERROR "${CASE} has no line '// expect: <regular expression>'")
endif()

execute_process(COMMAND ${command} -Werror ${CASE} RESULT_VARIABLE result ERROR_VARIABLE diagnostics)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "the twin, which must compile, does not:\n${diagnostics}")
endif()

execute_process(COMMAND ${command} -DGRADSYNC_EXPECT_FAILURE ${CASE} RESULT_VARIABLE result ERROR_VARIABLE diagnostics)
if(result EQUAL 0)
  message(FATAL_ERROR "the mistake, which must not compile, does")
endif()
foreach(expectation IN LISTS expectations)
  string(REGEX REPLACE "^// expect: " "" expectation "${expectation}")
  if(NOT diagnostics MATCHES "${expectation}")
    message(FATAL_ERROR "expected: ${expectation}\nthe compiler said:\n${diagnostics}")
  endif()
endforeach()

file(STRINGS ${CASE} most REGEX "^// errors: [0-9]+$")
if(most)
  string(REGEX REPLACE "^// errors: " "" most "${most}")
  string(REGEX MATCHALL "error: " errors "${diagnostics}")
  list(LENGTH errors count)
  if(count GREATER most)
    message(FATAL_ERROR "at most ${most} errors were expected; the compiler gave ${count}:\n${diagnostics}")
  endif()
endif()
