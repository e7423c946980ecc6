// Groups of the C interface from a communicator of Fortran's MPI. Compile this file in your program
// with its MPI: mpicxx -std=c++20 tessera_mpi.cpp.
#include <tessera/detail/c_group.h>
#include <tessera/mpi.h>

extern "C" int tessera_group_from_mpi(MPI_Fint comm, tessera_group** group) {
  return tessera::detail::c_call(
      [&] { *group = tessera::detail::c_group(tessera::init_process_group(MPI_Comm_f2c(comm))); });
}
