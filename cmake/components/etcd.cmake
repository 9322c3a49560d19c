# SPDX-License-Identifier: BSL-1.0
# The component etcd: gradsync::etcd, which programs that include gradsync/bootstrap/store/etcd_store.hpp link.

include(${CMAKE_CURRENT_LIST_DIR}/processes.cmake)
find_package(CURL 7.66 QUIET)
if(NOT CURL_FOUND)
  set(gradsync_missing "libcurl (Debian: apt-get install libcurl4-openssl-dev; elsewhere set CURL_ROOT)")
elseif(NOT TARGET gradsync::etcd)
  add_library(gradsync::etcd INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::etcd INTERFACE gradsync::gradsync gradsync::processes CURL::libcurl)
endif()
