# Defines the imported target Tessera::torch from one of two libtorch installations:
#   - the system's (Debian: libtorch-dev), when TESSERA_TORCH is empty;
#   - the package folder of a PyTorch wheel (…/site-packages/torch) or an unpacked libtorch, when
#     TESSERA_TORCH names it.
# Both are used in the same way: headers, libtorch_cpu, libc10. The library libtorch itself is not
# linked: it has no code, and it loads the CUDA libraries, where it was built with them, into every
# process (240 MiB per rank with PyTorch 2.15's wheel). TESSERA_WITH_NCCL links those that it needs.
# NDEBUG is always defined, because the layout of at::RecordFunction depends on it and every release
# of libtorch is built with it.
include_guard(GLOBAL)

set(TESSERA_TORCH "" CACHE PATH
    "Folder of the torch package (include/, lib/); empty: the system's libtorch")

# A project that has called find_package(Torch) keeps its libtorch: a wheel's or an unpacked one's is
# taken here too, unless this is an installed Tessera, which belongs to the libtorch that it was built
# with. The location of c10 is known in either case.
set(_torch_found "")
if(TARGET c10)
  get_target_property(_torch_configurations c10 IMPORTED_CONFIGURATIONS)
  if(_torch_configurations)
    list(TRANSFORM _torch_configurations PREPEND IMPORTED_LOCATION_)
  else()
    set(_torch_configurations "")
  endif()
  foreach(_property IN ITEMS IMPORTED_LOCATION ${_torch_configurations})
    if(NOT _torch_found)
      get_target_property(_torch_found c10 ${_property})
    endif()
  endforeach()
endif()
if(_torch_found AND NOT TESSERA_TORCH AND NOT TESSERA_INSTALLED)
  cmake_path(GET _torch_found PARENT_PATH _torch_root)
  cmake_path(GET _torch_root PARENT_PATH _torch_root)
  if(EXISTS ${_torch_root}/include/torch/csrc/autograd/variable.h)
    set(TESSERA_TORCH ${_torch_root} CACHE PATH "Folder of the torch package" FORCE)
  endif()
endif()

if(TESSERA_TORCH)
  find_path(TESSERA_TORCH_INCLUDE torch/csrc/autograd/variable.h
    PATHS ${TESSERA_TORCH}/include NO_DEFAULT_PATH REQUIRED)
  set(_torch_hints PATHS ${TESSERA_TORCH}/lib NO_DEFAULT_PATH)
else()
  find_path(TESSERA_TORCH_INCLUDE torch/csrc/autograd/variable.h REQUIRED)
  set(_torch_hints "")
endif()
find_library(TESSERA_TORCH_CPU_LIBRARY torch_cpu ${_torch_hints} REQUIRED)
find_library(TESSERA_C10_LIBRARY c10 ${_torch_hints} REQUIRED)
# Two libtorches in one program would be two sets of all classes and globals.
if(_torch_found)
  file(REAL_PATH ${_torch_found} _torch_theirs)
  file(REAL_PATH ${TESSERA_C10_LIBRARY} _torch_ours)
  if(NOT _torch_theirs STREQUAL _torch_ours)
    message(FATAL_ERROR
      "Tessera: this project found the libtorch of ${_torch_theirs}, and Tessera is built with that "
      "of ${_torch_ours}; expected one libtorch: build Tessera with it (-DTESSERA_TORCH=FOLDER), or "
      "let find_package(Torch) find it (CMAKE_PREFIX_PATH)")
  endif()
endif()
# Where the system has a libtorch too, find_package(Torch) of a wheel takes parts of it, unless
# CMAKE_PREFIX_PATH names the wheel.
if(Torch_FOUND)
  file(REAL_PATH ${TESSERA_C10_LIBRARY} _torch_ours)
  cmake_path(GET _torch_ours PARENT_PATH _torch_lib)
  foreach(_torch_part IN ITEMS
          "${TORCH_LIBRARY}" "${c10_LIBRARY}" "${TORCH_INSTALL_PREFIX}/lib/libc10.so")
    if(EXISTS "${_torch_part}")
      file(REAL_PATH "${_torch_part}" _torch_theirs)
      cmake_path(GET _torch_theirs PARENT_PATH _torch_theirs)
      if(NOT _torch_theirs STREQUAL _torch_lib)
        message(FATAL_ERROR
          "Tessera: find_package(Torch) has taken parts of two libtorches: ${_torch_part} and "
          "${_torch_ours}; expected one libtorch: for that of a wheel "
          "-DCMAKE_PREFIX_PATH='FOLDER/share/cmake;FOLDER' with the folder of the torch package")
      endif()
    endif()
  endforeach()
endif()
# PyTorch's wheels up to 2.5 have the old C++ ABI of std::string. Linking would fail much later, with
# thousands of undefined references.
file(STRINGS ${TESSERA_C10_LIBRARY} _torch_strings REGEX "NSt7__cxx1112basic_string" LIMIT_COUNT 1)
if(NOT _torch_strings)
  message(FATAL_ERROR
    "Tessera: ${TESSERA_C10_LIBRARY} was built with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0); "
    "expected a libtorch with the new one: PyTorch's wheel 2.6 or newer, or the unpacked libtorch "
    "whose name has cxx11-abi")
endif()
find_path(TESSERA_GLOO_INCLUDE gloo/algorithm.h REQUIRED)
mark_as_advanced(
  TESSERA_TORCH_INCLUDE TESSERA_TORCH_CPU_LIBRARY TESSERA_C10_LIBRARY TESSERA_GLOO_INCLUDE)

set(_torch_version unknown)
if(EXISTS ${TESSERA_TORCH_INCLUDE}/torch/headeronly/version.h)
  file(STRINGS ${TESSERA_TORCH_INCLUDE}/torch/headeronly/version.h _torch_lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
elseif(EXISTS ${TESSERA_TORCH_INCLUDE}/torch/csrc/api/include/torch/version.h)
  file(STRINGS ${TESSERA_TORCH_INCLUDE}/torch/csrc/api/include/torch/version.h _torch_lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
endif()
if(_torch_lines)
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2"
         _torch_version "${_torch_lines}")
endif()
set(TESSERA_TORCH_VERSION ${_torch_version})

if(NOT TARGET Tessera::torch)
  add_library(Tessera::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(Tessera::torch SYSTEM INTERFACE
    ${TESSERA_TORCH_INCLUDE} ${TESSERA_TORCH_INCLUDE}/torch/csrc/api/include)
  # A wheel has no gloo headers: the system's are searched after torch's own folders.
  target_compile_options(Tessera::torch INTERFACE -idirafter ${TESSERA_GLOO_INCLUDE})
  target_compile_definitions(Tessera::torch INTERFACE USE_C10D_GLOO)
  target_compile_options(Tessera::torch INTERFACE -DNDEBUG)
  target_link_libraries(Tessera::torch INTERFACE
    ${TESSERA_TORCH_CPU_LIBRARY} ${TESSERA_C10_LIBRARY})
  if(TESSERA_TORCH)
    # The wheel's libraries find their dependencies by run paths, which the linker does not follow.
    target_link_options(Tessera::torch INTERFACE
      -Wl,--allow-shlib-undefined -Wl,-rpath,${TESSERA_TORCH}/lib)
  endif()
endif()
message(STATUS "libtorch ${TESSERA_TORCH_VERSION}: ${TESSERA_TORCH_CPU_LIBRARY}")
