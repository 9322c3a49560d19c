# SPDX-License-Identifier: BSL-1.0
# gradsync_try_program(VARIABLE PROGRAM TARGET...)
#
# Sets VARIABLE to whether the C++ program, given as text, compiles and links with these targets. That a package was found says
# little: its headers or libraries may be missing, or of another compiler. Nothing is cached: packages come and go between two runs.

function(gradsync_try_program variable program)
  try_compile(works SOURCE_FROM_VAR program.cpp program NO_CACHE LINK_LIBRARIES ${ARGN} CXX_STANDARD 17 CXX_STANDARD_REQUIRED TRUE)
  set(${variable} ${works} PARENT_SCOPE)
endfunction()
