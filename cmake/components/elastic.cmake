# SPDX-License-Identifier: BSL-1.0
# The component elastic: the headers of gradsync/elastic/. Jobs that lose ranks and get others for them.

if(NOT TARGET gradsync::elastic)
  add_library(gradsync::elastic INTERFACE IMPORTED GLOBAL)
  target_link_libraries(gradsync::elastic INTERFACE gradsync::gradsync gradsync::processes)
endif()
