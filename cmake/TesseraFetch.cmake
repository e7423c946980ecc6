# TESSERA_FETCH_DEPENDENCIES: the libraries that Tessera needs besides libtorch and OpenSSL, for
# machines where they cannot be installed. They are the source archives of Debian 12, by name and
# SHA-256, and are linked statically into libtessera. FETCHCONTENT_SOURCE_DIR_NAME (CMake's) takes a
# folder with the sources of one of them instead.
include_guard(GLOBAL)
include(FetchContent)

set(TESSERA_FETCH_MIRROR "" CACHE STRING
    "Debian mirror for TESSERA_FETCH_DEPENDENCIES, such as http://HOST/debian; empty: apt's")
set(fetch_mirror "${TESSERA_FETCH_MIRROR}")
if(NOT fetch_mirror)
  file(GLOB apt_files /etc/apt/sources.list /etc/apt/sources.list.d/*)
  foreach(file IN LISTS apt_files)
    file(STRINGS ${file} lines REGEX "^ *(URIs:|deb ).*https?://[^ ]*/debian/?( |$)")
    foreach(line IN LISTS lines)
      if(NOT fetch_mirror)
        string(REGEX REPLACE ".*(https?://[^ ]*/debian)/?( .*)?$" "\\1" fetch_mirror "${line}")
      endif()
    endforeach()
  endforeach()
endif()

# tessera_fetch(NAME POOL_FILE SHA256 …): sources below MIRROR/pool/main. With ${package} behind it,
# find_package(NAME) finds them.
function(tessera_fetch name file sha256)
  string(TOUPPER ${name} upper)
  if(NOT fetch_mirror AND NOT FETCHCONTENT_SOURCE_DIR_${upper})
    message(FATAL_ERROR
      "Tessera: TESSERA_FETCH_DEPENDENCIES is on, TESSERA_FETCH_MIRROR is not set, and apt has no "
      "mirror of Debian; expected one: -DTESSERA_FETCH_MIRROR=http://HOST/debian")
  endif()
  FetchContent_Declare(${name} URL ${fetch_mirror}/pool/main/${file} URL_HASH SHA256=${sha256}
                       DOWNLOAD_EXTRACT_TIMESTAMP OFF ${ARGN})
endfunction()

set(package OVERRIDE_FIND_PACKAGE)
tessera_fetch(fmt f/fmtlib/fmtlib_9.1.0+ds1.orig.tar.gz
              84ce1c2d0be3a9863935137969dcec6970125caac032f82474640bfc81463583 ${package})
tessera_fetch(spdlog s/spdlog/spdlog_1.10.0+ds.orig.tar.xz
              620ca6842b5c21014470bd42eb4716024674214fb973b5ffa3aaea33310ad327 ${package})
tessera_fetch(yaml-cpp y/yaml-cpp/yaml-cpp_0.7.0+dfsg.orig.tar.xz
              dc63708605404e0b963e0ca3a9619d1c8270eda2839603e6fa0384e5e51e5312 ${package})
tessera_fetch(nlohmann_json n/nlohmann-json3/nlohmann-json3_3.11.2.orig.tar.gz
              d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273 ${package})
tessera_fetch(CLI11 c/cli11/cli11_2.1.2+ds.orig.tar.xz
              8143d20b688e98ccce8e24562d3b68e5f47c12e896c42c7ca8553dbde5bed55d ${package})
tessera_fetch(xxhash x/xxhash/xxhash_0.8.1.orig.tar.gz
              3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c)
tessera_fetch(gloo g/gloo/gloo_0.0~git20220518.5b14351.orig.tar.xz
              957acbb83b4c034dd36c60fcbbcbf6948a1429479d0ed79169abae7d0049b804)

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)  # the projects below take these variables as their options
set(BUILD_SHARED_LIBS OFF)
set(SPDLOG_FMT_EXTERNAL ON)
foreach(off IN ITEMS YAML_CPP_BUILD_TESTS YAML_CPP_BUILD_TOOLS YAML_CPP_BUILD_CONTRIB
        YAML_CPP_INSTALL JSON_BuildTests JSON_Install FMT_INSTALL FMT_TEST FMT_DOC SPDLOG_INSTALL
        CLI11_BUILD_TESTS CLI11_BUILD_EXAMPLES CLI11_BUILD_DOCS CLI11_INSTALL)
  set(${off} OFF)
endforeach()
# libtorch has Gloo, of which only the headers are needed; xxHash is one header.
foreach(name IN ITEMS xxhash gloo)
  FetchContent_GetProperties(${name})
  if(NOT ${name}_POPULATED)
    FetchContent_Populate(${name})
  endif()
endforeach()
set(XXHASH_INCLUDE_DIR ${xxhash_SOURCE_DIR} CACHE PATH "Folder of xxhash.h" FORCE)
if(EXISTS ${gloo_SOURCE_DIR}/gloo/config.h.in AND NOT EXISTS ${gloo_SOURCE_DIR}/gloo/config.h)
  set(GLOO_VERSION_MAJOR 0)
  set(GLOO_VERSION_MINOR 5)
  set(GLOO_VERSION_PATCH 0)
  set(GLOO_HAVE_TRANSPORT_TCP ON)
  configure_file(${gloo_SOURCE_DIR}/gloo/config.h.in ${gloo_SOURCE_DIR}/gloo/config.h)
endif()
set(TESSERA_GLOO_INCLUDE ${gloo_SOURCE_DIR} CACHE PATH "Folder of gloo/algorithm.h" FORCE)
FetchContent_MakeAvailable(fmt spdlog yaml-cpp nlohmann_json CLI11)
# Their headers are not ours to warn about.
set_target_properties(fmt spdlog yaml-cpp nlohmann_json CLI11 PROPERTIES SYSTEM ON)
set(TESSERA_FMT_INCLUDE ${fmt_SOURCE_DIR}/include CACHE PATH "Folder of fmt/format.h" FORCE)
