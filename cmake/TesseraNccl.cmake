# TESSERA_WITH_NCCL compiles nccl_backend.cpp, which uses libtorch's ProcessGroupNCCL. It needs a
# libtorch with CUDA, the headers of the CUDA toolkit, and nccl.h. The packages of a wheel have both.
if(TESSERA_TORCH)
  find_library(TESSERA_TORCH_CUDA_LIBRARY torch_cuda PATHS ${TESSERA_TORCH}/lib NO_DEFAULT_PATH)
else()
  find_library(TESSERA_TORCH_CUDA_LIBRARY torch_cuda)
endif()
if(NOT TESSERA_TORCH_CUDA_LIBRARY)
  message(FATAL_ERROR
    "TESSERA_WITH_NCCL: the libtorch of ${TESSERA_TORCH_CPU_LIBRARY} was built without CUDA (it "
    "has no libtorch_cuda); set TESSERA_TORCH to a wheel's torch folder that has it, or leave "
    "TESSERA_WITH_NCCL off")
endif()
find_package(CUDAToolkit QUIET)
file(GLOB wheel_cuda_headers ${TESSERA_TORCH}/../nvidia/cu*/include
  ${TESSERA_TORCH}/../nvidia/cuda_runtime/include)
# A wheel's packages have cuda_runtime.h; the headers that it includes come with a compiler.
find_path(TESSERA_CUDA_INCLUDE crt/host_defines.h
  HINTS ${wheel_cuda_headers} ${CUDAToolkit_INCLUDE_DIRS})
if(NOT TESSERA_CUDA_INCLUDE)
  message(FATAL_ERROR
    "TESSERA_WITH_NCCL: crt/host_defines.h was not found; install the CUDA toolkit's headers, or set "
    "TESSERA_CUDA_INCLUDE to their folder")
endif()
find_path(TESSERA_NCCL_INCLUDE nccl.h
  HINTS ${TESSERA_TORCH}/../nvidia/nccl/include ${TESSERA_CUDA_INCLUDE})
if(NOT TESSERA_NCCL_INCLUDE)
  message(FATAL_ERROR
    "TESSERA_WITH_NCCL: nccl.h was not found; install NCCL's headers, or set TESSERA_NCCL_INCLUDE "
    "to their folder")
endif()
set_property(GLOBAL APPEND PROPERTY TESSERA_LAYER_LIBRARIES ${TESSERA_TORCH_CUDA_LIBRARY})
# For tests, which link this layer alone.
target_link_libraries(tessera_comm INTERFACE ${TESSERA_TORCH_CUDA_LIBRARY})
mark_as_advanced(TESSERA_TORCH_CUDA_LIBRARY TESSERA_CUDA_INCLUDE TESSERA_NCCL_INCLUDE)

set_source_files_properties(device/nccl_backend.cpp PROPERTIES
  SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON COMPILE_DEFINITIONS USE_C10D_NCCL)
target_include_directories(tessera_comm SYSTEM PRIVATE
  ${TESSERA_NCCL_INCLUDE} ${TESSERA_CUDA_INCLUDE})
