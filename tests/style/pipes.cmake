# SPDX-License-Identifier: BSL-1.0
# Where a script has pipefail, `| grep -q` and `| head` fail now and then: they end early, and SIGPIPE kills what still writes to them.
# cmake -DSOURCE=... -P pipes.cmake

file(GLOB_RECURSE files ${SOURCE}/scripts/* ${SOURCE}/.ci/* ${SOURCE}/deploy/*.sbatch ${SOURCE}/bench/peers/install ${SOURCE}/tests/models/check
     ${SOURCE}/tests/package/on_bare_machine)
set(scripts 0)
set(wrong)
foreach(file IN LISTS files)
  file(READ ${file} text)
  if(text MATCHES "\nset -[a-z]*o pipefail")
    math(EXPR scripts "${scripts} + 1")
    string(REGEX MATCHALL "\\| *(grep -[a-zA-Z]*q|head )[^\n]*" found "${text}")
    if(found)
      list(APPEND wrong "${file}: ${found}")
    endif()
  endif()
endforeach()
if(scripts LESS 15)
  message(FATAL_ERROR "only ${scripts} scripts below ${SOURCE} have pipefail: is SOURCE the project's folder?")
endif()
if(wrong)
  list(JOIN wrong "\n  " wrong)
  message(FATAL_ERROR "Use grep on a here-string, and sed -n 1p in the place of head:\n  ${wrong}")
endif()
