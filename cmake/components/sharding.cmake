# SPDX-License-Identifier: BSL-1.0
# The component sharding: the headers of gradsync/shard/.

if(NOT TARGET gradsync::sharding)
  add_library(gradsync::sharding INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::sharding INTERFACE gradsync::gradsync)
endif()
