# TESSERA_WITH_MPI compiles mpi_mailbox.cpp, which uses libtorch's ProcessGroupMPI. Neither Debian's
# libtorch nor the wheels contain it: a libtorch built from source with USE_MPI is needed. Its header
# is always installed, so the check below is for the symbol.
include(CheckCXXSourceCompiles)
find_package(MPI REQUIRED COMPONENTS CXX)

set(CMAKE_REQUIRED_LIBRARIES ${TESSERA_TORCH_CPU_LIBRARY} ${TESSERA_C10_LIBRARY})
set(CMAKE_REQUIRED_LINK_OPTIONS -Wl,--allow-shlib-undefined)
check_cxx_source_compiles("
  #include <vector>
  namespace c10d { struct ProcessGroupMPI { static void createProcessGroupMPI(std::vector<int>); }; }
  int main() { c10d::ProcessGroupMPI::createProcessGroupMPI({}); }" TESSERA_TORCH_HAS_MPI)
unset(CMAKE_REQUIRED_LIBRARIES)
unset(CMAKE_REQUIRED_LINK_OPTIONS)
if(NOT TESSERA_TORCH_HAS_MPI)
  message(FATAL_ERROR
    "TESSERA_WITH_MPI: ${TESSERA_TORCH_CPU_LIBRARY} was built without MPI (it lacks "
    "c10d::ProcessGroupMPI); set TESSERA_TORCH to a libtorch built from source with USE_MPI=1, or "
    "leave TESSERA_WITH_MPI off (programs under mpirun do not need it: they read their ranks from "
    "Open MPI's variables)")
endif()

set_source_files_properties(p2p/mpi_mailbox.cpp PROPERTIES
  SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON COMPILE_DEFINITIONS USE_C10D_MPI)
target_link_libraries(tessera_comm PRIVATE MPI::MPI_CXX)
