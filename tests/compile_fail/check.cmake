# SPDX-License-Identifier: BSL-1.0
# One file of compile_fail: the twin compiles; each mistake does not, and the diagnostics say what is expected.
# cmake -DCASE=case.cpp -DCOMPILER=g++ -DFLAGS=... -DINCLUDE=-I... [-DPRECOMPILED=all.hpp] -P check.cmake

set(command ${COMPILER} -std=c++20 -fsyntax-only ${FLAGS} ${INCLUDE})

# What compilers print before a diagnostic to say where it is.
set(place "^(In file included from .*| +from .*|.*: (In|At) .*|.*: +(required|recursively required) .*|.*: +in .constexpr. expansion of .*)$")

file(STRINGS ${CASE} header REGEX "^// (expect|errors|flags)[ 0-9]*: ")
list(TRANSFORM header REPLACE "^// expect: " "// expect 1: ") # a lone mistake has number 1
set(mistakes)
foreach(line IN LISTS header)
  if(line MATCHES "^// expect ([0-9]+): ")
    list(APPEND mistakes ${CMAKE_MATCH_1})
  endif()
endforeach()
list(REMOVE_DUPLICATES mistakes)
if(NOT mistakes)
  message(FATAL_ERROR "${CASE} has no line '// expect: <regular expression>'")
endif()

set(precompiled)
if(PRECOMPILED)
  set(precompiled -include ${PRECOMPILED}) # this takes half of the time
endif()
execute_process(COMMAND ${command} ${precompiled} -Werror ${CASE} RESULT_VARIABLE result ERROR_VARIABLE diagnostics)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "the twin, which must compile, does not:\n${diagnostics}")
endif()

foreach(number IN LISTS mistakes)
  set(expectations)
  set(flags)
  set(most)
  foreach(line IN LISTS header)
    string(REGEX REPLACE "^// [a-z]+[ 0-9]*: " "" text "${line}")
    if(line MATCHES "^// expect ${number}: ")
      list(APPEND expectations "${text}")
    elseif(line MATCHES "^// errors: ")
      set(most ${text})
    elseif(line MATCHES "^// flags: ")
      separate_arguments(flags UNIX_COMMAND "${text}")
    endif()
  endforeach()

  if(flags) # the header was compiled without them
    set(precompiled)
  endif()
  execute_process(COMMAND ${command} ${precompiled} -DGRADSYNC_EXPECT_FAILURE=${number} ${flags} ${CASE} RESULT_VARIABLE result ERROR_VARIABLE diagnostics)
  if(result EQUAL 0)
    message(FATAL_ERROR "mistake ${number}, which must not compile, does")
  endif()

  # The first diagnostic says it, and nothing but its place comes before.
  string(REGEX REPLACE ";" "," lines "${diagnostics}")
  string(REPLACE "\n" ";" lines "${lines}")
  set(first)
  foreach(line IN LISTS lines)
    if(line MATCHES ": (fatal )?error: ")
      set(first "${line}")
      break()
    elseif(NOT line MATCHES "${place}")
      message(FATAL_ERROR "mistake ${number}: this line comes before the first error:\n${line}\nthe compiler said:\n${diagnostics}")
    endif()
  endforeach()
  list(GET expectations 0 expectation)
  if(NOT first MATCHES "${expectation}")
    message(FATAL_ERROR "mistake ${number}: expected as the first error: ${expectation}\nit is: ${first}\nthe compiler said:\n${diagnostics}")
  endif()
  foreach(expectation IN LISTS expectations)
    if(NOT diagnostics MATCHES "${expectation}")
      message(FATAL_ERROR "mistake ${number}: expected: ${expectation}\nthe compiler said:\n${diagnostics}")
    endif()
  endforeach()

  if(most)
    string(REGEX MATCHALL "error: " errors "${diagnostics}")
    list(LENGTH errors count)
    if(count GREATER most)
      message(FATAL_ERROR "mistake ${number}: at most ${most} errors were expected; the compiler gave ${count}:\n${diagnostics}")
    endif()
  endif()
endforeach()
