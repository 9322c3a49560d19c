# SPDX-License-Identifier: BSL-1.0
# A program compiles the loops of the element types that it names, and of no others: those of all types take half as long again. Each loop for
# AVX clears the upper halves of the registers at its end, at every level of optimisation: otherwise it slows down its caller.
#
#   cmake -DCOMPILER=g++ -DINCLUDE=include -DPROGRAM=examples/quick_start.cpp -P loops.cmake    # a program that names f32 alone

execute_process(COMMAND ${COMPILER} -std=c++20 -O0 -g0 -S -o - -I${INCLUDE} ${PROGRAM} OUTPUT_VARIABLE assembly COMMAND_ERROR_IS_FATAL ANY)
foreach(type IN ITEMS RegisterSumIf RegisterSumId StorageFloat)
  string(REGEX MATCH "\n(_Z[A-Za-z0-9_]*${type}[A-Za-z0-9_]*):" found "${assembly}")
  if(type STREQUAL "RegisterSumIf" AND NOT found)
    message(FATAL_ERROR "${PROGRAM} has no loop over f32: this test looks for names that the loops no longer have")
  elseif(found AND NOT type STREQUAL "RegisterSumIf")
    message(FATAL_ERROR "${PROGRAM} compiles a loop over a type that it does not name: ${CMAKE_MATCH_1}; does a header make a BufferView "
                        "from a DType where typed_view would do?")
  endif()
endforeach()
string(REGEX MATCHALL "\n_Z[A-Za-z0-9_]*run_avx[A-Za-z0-9_]*:" for_avx "${assembly}")
string(REGEX MATCHALL "vzeroupper" clears "${assembly}")
list(LENGTH for_avx functions)
list(LENGTH clears count)
if(count LESS functions)
  message(FATAL_ERROR "${functions} functions are compiled for AVX, but ${count} vzeroupper end them: see kernel/isa.hpp")
endif()
