# SPDX-License-Identifier: BSL-1.0
# gradsync_packages_of(RESULT FILE): the packages, other than the standard library, whose headers FILE includes, itself or through headers of
# this project: cuda, nccl, nvtx, mpi, boost_mpi, eigen, torch, curl.

set(gradsync_package_headers "cuda=^(cuda|cublas)[a-zA-Z0-9_]*\\.h$" "nccl=^nccl\\.h$" "nvtx=^nvtx3/" "mpi=^mpi\\.h$" "boost_mpi=^boost/mpi"
                             "eigen=^Eigen/" "torch=^(torch|ATen|c10)/" "curl=^curl/")

function(gradsync_packages_of result file)
  get_property(known GLOBAL PROPERTY "gradsync_packages_of:${file}" SET)
  if(NOT known)
    set_property(GLOBAL PROPERTY "gradsync_packages_of:${file}" "") # ends a walk in a circle
    set(packages)
    cmake_path(GET file PARENT_PATH folder)
    file(STRINGS ${file} lines REGEX "^ *# *include +[\"<]")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^[^\"<]*[\"<]([^\">]*).*$" "\\1" included "${line}")
      foreach(root IN ITEMS ${folder} ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/examples)
        if(EXISTS ${root}/${included} AND NOT IS_DIRECTORY ${root}/${included})
          cmake_path(SET header NORMALIZE ${root}/${included})
          gradsync_packages_of(more ${header})
          list(APPEND packages ${more})
          break()
        endif()
      endforeach()
      foreach(package IN LISTS gradsync_package_headers)
        string(REGEX MATCH "^([a-z_]+)=(.*)$" package "${package}")
        set(name ${CMAKE_MATCH_1})
        if(included MATCHES "${CMAKE_MATCH_2}")
          list(APPEND packages ${name})
        endif()
      endforeach()
    endforeach()
    list(REMOVE_DUPLICATES packages)
    set_property(GLOBAL PROPERTY "gradsync_packages_of:${file}" "${packages}")
  endif()
  get_property(packages GLOBAL PROPERTY "gradsync_packages_of:${file}")
  set(${result} "${packages}" PARENT_SCOPE)
endfunction()
