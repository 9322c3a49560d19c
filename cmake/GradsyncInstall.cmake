# SPDX-License-Identifier: BSL-1.0
# Installation: headers, `find_package(gradsync)` and `pkg-config gradsync`. All of it is independent of the
# architecture, so it stands under share/; all of it is relocatable.

include(CMakePackageConfigHelpers)

set(gradsync_config_dir ${CMAKE_INSTALL_DATADIR}/cmake/gradsync)
set(gradsync_pc_dir ${CMAKE_INSTALL_DATADIR}/pkgconfig)

install(DIRECTORY include/gradsync DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*.cu"
        PATTERN "compiled*.cpp")
install(TARGETS gradsync EXPORT gradsyncTargets)
install(EXPORT gradsyncTargets NAMESPACE gradsync:: DESTINATION ${gradsync_config_dir})

configure_package_config_file(cmake/gradsyncConfig.cmake.in gradsyncConfig.cmake
                              INSTALL_DESTINATION ${gradsync_config_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break.
write_basic_package_version_file(gradsyncConfigVersion.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gradsyncConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/gradsyncConfigVersion.cmake
        DESTINATION ${gradsync_config_dir})
install(DIRECTORY cmake/components DESTINATION ${gradsync_config_dir}) # with them, whatever is installed here
install(FILES cmake/FindNCCL.cmake cmake/gradsyncTryProgram.cmake DESTINATION ${gradsync_config_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/gradsync)

file(RELATIVE_PATH gradsync_pc_to_prefix /prefix/${gradsync_pc_dir} /prefix)
string(REGEX REPLACE "/$" "" gradsync_pc_to_prefix "${gradsync_pc_to_prefix}")
configure_file(cmake/gradsync.pc.in gradsync.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gradsync.pc DESTINATION ${gradsync_pc_dir})
