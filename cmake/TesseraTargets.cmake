# tessera_layer(NAME SOURCES … [LIBRARIES …] [NO_TORCH])
#   adds one folder of src/ as an object library, which becomes part of libtessera.
# tessera_optimized(FILES … [OPTIONS …])
#   compiles files of the folder with options of their own.
# tessera_test(NAME SOURCES … [LABELS …] [TIMEOUT s] [LIBRARIES …] [ARGS …] [NO_TORCH])
#   adds one test program and one ctest entry.
include_guard(GLOBAL)

# Time is spent in libtorch and in the files of tessera_optimized(). All else compiles a quarter faster
# with -O1.
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
# For preset dev, where a changed file is compiled alone and quickly.
set(CMAKE_CXX_FLAGS_DEV "-O1 -g1 -DNDEBUG")
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# libtessera exports what include/ declares: each public header says so by a pragma.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
add_compile_definitions(XXH_NAMESPACE=tessera_)  # its functions are in src/comm/base/xxhash.cpp
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(-fno-semantic-interposition)
endif()
# Sums and updates have the same bits on all processors: a * b + c is rounded twice, also by those that
# have an instruction for it.
add_compile_options(-ffp-contract=off)

if(TESSERA_SANITIZE)
  # -O1 halves the compile time and leaves readable stacks.
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1 -O1)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Instrumented code gives false alarms, as GCC's manual says. The thread sanitizer knows no fences: the
    # only one, in src/data/mapped_file.cpp, orders what it does not see.
    add_compile_options(-Wno-maybe-uninitialized -Wno-tsan)
  endif()
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
endif()

# A wheel has headers of its own fmt, which do not fit the system's spdlog: the system's fmt comes
# first.
if(TESSERA_TORCH AND EXISTS ${TESSERA_TORCH_INCLUDE}/fmt)
  find_path(TESSERA_FMT_INCLUDE fmt/format.h REQUIRED)
  mark_as_advanced(TESSERA_FMT_INCLUDE)
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/system-fmt)
  file(CREATE_LINK ${TESSERA_FMT_INCLUDE}/fmt ${CMAKE_BINARY_DIR}/system-fmt/fmt SYMBOLIC)
  include_directories(BEFORE SYSTEM ${CMAKE_BINARY_DIR}/system-fmt)
endif()

function(tessera_common target)
  target_include_directories(${target} PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/include)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-unused-parameter)
  # GCC 12 reports overlaps in std::string's operator+ that do not exist (GCC bug 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

# The torch headers are parsed once, for tessera_pch; all other targets reuse the result.
# GCC instantiates the templates that a precompiled header has used once more for each source:
# 7.5 s with <torch/torch.h>, 4 s with these.
set(TESSERA_PCH tessera_pch)
set(TESSERA_PCH_HEADERS
  <torch/types.h> <torch/nn/module.h> <torch/optim/optimizer.h> <torch/autograd.h> <torch/utils.h>
  <string> <vector> <memory> <functional> <map> <unordered_map>)
function(tessera_pch target)
  if(NOT TARGET ${TESSERA_PCH})
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/pch.cpp CONTENT "")
    add_library(${TESSERA_PCH} OBJECT ${PROJECT_BINARY_DIR}/pch.cpp)
    tessera_common(${TESSERA_PCH})
    target_link_libraries(${TESSERA_PCH} PRIVATE Tessera::torch Threads::Threads)
    target_precompile_headers(${TESSERA_PCH} PRIVATE
      ${TESSERA_PCH_HEADERS})
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    # A precompiled header can only be used by code that is compiled with the same -fPIC.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${TESSERA_PCH})
endfunction()

# For files with loops over elements, bytes or tries: compiled one by one with OPTIONS, default -O2. GCC
# reads a precompiled header only with the same -O.
function(tessera_optimized)
  cmake_parse_arguments(A "" "" "OPTIONS" ${ARGN})
  if(NOT A_OPTIONS)
    set(A_OPTIONS -O2)
  endif()
  set_source_files_properties(${A_UNPARSED_ARGUMENTS} PROPERTIES
    COMPILE_OPTIONS "${A_OPTIONS}" SKIP_PRECOMPILE_HEADERS ON)
endfunction()

function(tessera_layer name)
  cmake_parse_arguments(A "NO_TORCH" "" "SOURCES;LIBRARIES" ${ARGN})
  add_library(tessera_${name} OBJECT ${A_SOURCES})
  tessera_common(tessera_${name})
  if(NOT A_NO_TORCH)
    target_link_libraries(tessera_${name} PRIVATE Tessera::torch)
    tessera_pch(tessera_${name})
  endif()
  set_target_properties(tessera_${name} PROPERTIES
    UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE 32)
  target_link_libraries(tessera_${name} PRIVATE Threads::Threads ${A_LIBRARIES})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS tessera_${name})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYER_LIBRARIES ${A_LIBRARIES})
endfunction()

function(tessera_test name)
  cmake_parse_arguments(A "NO_TORCH" "TIMEOUT" "SOURCES;LABELS;LIBRARIES;ARGS" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_executable(${name} ${A_SOURCES})
  tessera_common(${name})
  set_target_properties(${name} PROPERTIES
    UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE 16)
  target_compile_options(${name} PRIVATE -Wno-dangling-else)  # from GoogleTest's macros
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  if(NOT A_NO_TORCH)
    target_link_libraries(${name} PRIVATE Tessera::torch)
    tessera_pch(${name})
  endif()
  target_link_libraries(${name} PRIVATE
    GTest::gtest GTest::gmock GTest::gtest_main Threads::Threads ${A_LIBRARIES})
  tessera_add_test(${name} ${name} "${A_ARGS}" "${A_TIMEOUT}" "${A_LABELS}")
  set_target_properties(${name} PROPERTIES TESSERA_TIMEOUT "${A_TIMEOUT}" TESSERA_LABELS "${A_LABELS}")
endfunction()

# One ctest entry. BLAS computes in one thread: the ranks of a test are threads themselves, and on a
# busy machine BLAS threads that wait for each other cost ten times the computation. Besides, MKL rounds
# by the number of its threads, and references are computed on the main thread. A filter that no test
# matches is a failure.
# scripts/run_tests.sh gives ctest three slots for each core. A test that computes has two, as here; one
# that mostly waits sets PROCESSORS 1. Of a test that lasts more than half a minute COST has the
# seconds: these start first, so that none of them is left alone at the end. Sanitizers and an emulator
# get four times as long.
function(tessera_add_test name target args timeout labels)
  if(TESSERA_SANITIZE OR CMAKE_CROSSCOMPILING)
    math(EXPR timeout "4 * ${timeout}")
  endif()
  add_test(NAME ${name} COMMAND ${target} ${args})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${timeout} LABELS "${labels}" PROCESSORS 2
                       ENVIRONMENT "OPENBLAS_NUM_THREADS=1;MKL_NUM_THREADS=1;MKL_CBWR=COMPATIBLE"
                       FAIL_REGULAR_EXPRESSION "Running 0 tests")
endfunction()

# tessera_test_shards(PROGRAM SUFFIX FILTER …)  splits the ctest entry of a test program: PROGRAM_SUFFIX
# runs the tests that match FILTER (as --gtest_filter), and PROGRAM runs all tests that match the
# positive part of no FILTER.
function(tessera_test_shards name)
  get_target_property(timeout ${name} TESSERA_TIMEOUT)
  get_target_property(labels ${name} TESSERA_LABELS)
  set(others "")
  set(arguments ${ARGN})
  while(arguments)
    list(POP_FRONT arguments suffix filter)
    tessera_add_test(${name}_${suffix} ${name} "--gtest_filter=${filter}" "${timeout}" "${labels}")
    string(REGEX REPLACE ":?-.*" "" positive "${filter}")
    list(APPEND others ${positive})
  endwhile()
  list(JOIN others ":" others)
  set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=-${others}")
endfunction()
