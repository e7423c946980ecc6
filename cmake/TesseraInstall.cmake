include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

install(TARGETS tessera EXPORT TesseraTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera ${PROJECT_BINARY_DIR}/include/tessera
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN "*.h")
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/TesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/TesseraConfig.cmake ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/TesseraTorch.cmake DESTINATION ${package_dir}
  COMPONENT development)

# For builds without CMake: pkg-config --cflags --libs tessera
set(tessera_pc_torch "-ltorch_cpu -lc10")
set(tessera_pc_includes "-isystem ${TESSERA_TORCH_INCLUDE}/torch/csrc/api/include")
if(TESSERA_TORCH)
  # Not for the system's: GCC does not find its own headers after -isystem /usr/include.
  string(PREPEND tessera_pc_includes "-isystem ${TESSERA_TORCH_INCLUDE} ")
  string(APPEND tessera_pc_includes " -idirafter ${TESSERA_GLOO_INCLUDE}")
  set(tessera_pc_torch
    "-L${TESSERA_TORCH}/lib -Wl,-rpath,${TESSERA_TORCH}/lib ${tessera_pc_torch}")
  set(tessera_pc_torch "-Wl,--allow-shlib-undefined ${tessera_pc_torch}")
endif()
# The prefix is known when the files are installed (cmake --install --prefix, cpack).
set(pc_template ${CMAKE_CURRENT_LIST_DIR}/tessera.pc.in)
set(pc_file ${PROJECT_BINARY_DIR}/tessera.pc)
set(CMAKE_INSTALL_PREFIX_OF_BUILD ${CMAKE_INSTALL_PREFIX})
set(CMAKE_INSTALL_PREFIX @PREFIX@)
configure_file(${pc_template} ${pc_file}.in @ONLY)
set(CMAKE_INSTALL_PREFIX ${CMAKE_INSTALL_PREFIX_OF_BUILD})
install(CODE "
  file(READ \"${pc_file}.in\" text)
  string(REPLACE \"@PREFIX@\" \"\${CMAKE_INSTALL_PREFIX}\" text \"\${text}\")
  file(WRITE \"${pc_file}\" \"\${text}\")" COMPONENT development)
install(FILES ${pc_file} DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
if(NOT TESSERA_TORCH AND PROJECT_IS_TOP_LEVEL)
  include(TesseraPackages)
endif()
