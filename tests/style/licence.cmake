# SPDX-License-Identifier: BSL-1.0
# Every source file names the licence in one of its first two lines (the first is a script's interpreter).
# cmake -DSOURCE=... -P licence.cmake

set(patterns)
foreach(folder IN ITEMS include tests bench examples cmake packaging)
  foreach(kind IN ITEMS *.hpp *.cpp *.h *.cuh *.cu *.py *.cmake CMakeLists.txt *.in)
    list(APPEND patterns ${SOURCE}/${folder}/${kind})
  endforeach()
endforeach()
file(GLOB_RECURSE files ${patterns} ${SOURCE}/scripts/* ${SOURCE}/.ci/* ${SOURCE}/tests/package/on_bare_machine)
list(FILTER files EXCLUDE REGEX "/(__pycache__|test_package/build)/")
list(LENGTH files count)
if(count LESS 500)
  message(FATAL_ERROR "only ${count} source files below ${SOURCE}: is SOURCE the project's folder?")
endif()

set(without)
foreach(file IN ITEMS ${files} ${SOURCE}/CMakeLists.txt)
  file(STRINGS ${file} lines LIMIT_COUNT 2)
  if(NOT lines MATCHES "SPDX-License-Identifier: BSL-1\\.0")
    file(RELATIVE_PATH file ${SOURCE} ${file})
    list(APPEND without ${file})
  endif()
endforeach()
if(without)
  list(JOIN without "\n  " without)
  message(FATAL_ERROR "Add the line 'SPDX-License-Identifier: BSL-1.0' to the top of:\n  ${without}")
endif()
