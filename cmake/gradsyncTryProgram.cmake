# SPDX-License-Identifier: BSL-1.0
# gradsync_try_program(VARIABLE PROGRAM TARGET...)
#
# Sets VARIABLE to whether the C++ program, given as text, compiles and links with these targets. That a package was found says
# little: its headers or libraries may be missing, or of another compiler. Only a success is remembered, so that a package installed
# later is seen at the next run of CMake.

function(gradsync_try_program variable program)
  if(NOT ${variable})
    try_compile(works SOURCE_FROM_VAR program.cpp program NO_CACHE LINK_LIBRARIES ${ARGN} CXX_STANDARD 17 CXX_STANDARD_REQUIRED TRUE)
    if(works)
      set(${variable} TRUE CACHE INTERNAL "A program that uses ${ARGN} compiles and links")
    else()
      set(${variable} FALSE PARENT_SCOPE)
    endif()
  endif()
endfunction()
