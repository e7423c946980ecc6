! A solver of 2-D advection that learns its closure while it runs. u_t + a u_x + b u_y = 0 on a
! periodic square, each rank with rows of its own. The first-order upwind scheme smears the
! solution; the model learns the scheme's error per step from the five values of its stencil, where
! that error is large: another number of points on each rank. Then the solver uses it.
!   mpirun -n 4 advection
program advection
  use iso_c_binding
  use mpi
  use tessera
  implicit none
  integer, parameter :: n = 48, steps = 600
  real(8), parameter :: pi = acos(-1d0), h = 2 * pi / n, a = 1d0, b = 0.5d0, dt = 0.25d0 * h
  character(len=*), parameter :: config = &
      "model: {type: MLP, inputs: 5, outputs: 1, hidden: [24, 24], dtype: float64}" // new_line('a') // &
      "loss: {type: mse}" // new_line('a') // &
      "optimizer: {type: AdamW, lr: 1.0e-2, weight_decay: 0.0}" // new_line('a') // &
      "parallel: {type: ZeroRedundancyOptimizer}" // new_line('a') // &
      "train: {clip_grad_norm: 1.0}"
  type(c_ptr) :: group, session
  type(tessera_step) :: done
  real(8), allocatable :: u(:, :), stencils(:, :), closure(:, :), chosen(:, :), targets(:, :)
  real(8) :: t, largest, loss, with, without
  integer :: rank, ranks, first, rows, step, ierr
  logical, allocatable :: large(:)

  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
  call check_tessera(group_from_mpi(MPI_COMM_WORLD, group))
  call check_tessera(session_create(config, group, session))
  first = rank * n / ranks
  rows = (rank + 1) * n / ranks - first
  allocate (u(0:n + 1, 0:rows + 1), stencils(5, n * rows), closure(1, n * rows), large(n * rows))

  do step = 0, steps - 1
    t = 0.05d0 * step
    call fill(u, t)
    call stencil_of(u, stencils)
    call error_of_upwind(t, stencils, closure)
    largest = maxval(abs(closure))
    call MPI_Allreduce(MPI_IN_PLACE, largest, 1, MPI_DOUBLE_PRECISION, MPI_MAX, MPI_COMM_WORLD, ierr)
    large = abs(closure(1, :)) > 0.1d0 * largest
    chosen = columns(stencils, large)
    targets = columns(closure, large) * 10  ! of the order of one
    call check_tessera(session_step(session, chosen, targets, done))
    if (rank == 0 .and. mod(step + 1, 200) == 0) &
        print '(a, i0, a, es12.5, a, i0, a)', "step ", done%step, ", loss ", done%loss, ", ", done%samples, " samples"
  end do

  t = 3.3d0  ! a time that was not trained
  call fill(u, t)
  call stencil_of(u, stencils)
  deallocate (targets)
  allocate (targets(1, n * rows))
  call error_of_upwind(t, stencils, targets)
  without = mean_square(targets)
  call check_tessera(session_predict(session, stencils, closure))
  with = mean_square(targets - closure / 10)
  targets = targets * 10
  call check_tessera(session_evaluate(session, stencils, targets, loss))
  if (rank == 0) print '(a, es12.5, a, es12.5)', "error of a step: upwind ", sqrt(without), ", with the closure ", sqrt(with)
  call check_tessera(session_finish(session))
  call session_free(session)
  call group_free(group)
  call MPI_Finalize(ierr)
  if (.not. (with < without / 4 .and. abs(loss - 100 * with) < 1d-6 * loss + 1d-12)) error stop 2

contains

  pure real(8) function exact(x, y, t)
    real(8), intent(in) :: x, y, t
    exact = sin(x - a * t) * cos(2 * (y - b * t)) + 0.5d0 * cos(3 * (x - a * t) + y - b * t)
  end function

  ! The field at time t: own rows; the rows beside them come from the neighbours.
  subroutine fill(u, t)
    real(8), intent(out) :: u(0:, 0:)
    real(8), intent(in) :: t
    integer :: i, j, up, down, status(MPI_STATUS_SIZE)
    do j = 1, rows
      do i = 0, n + 1
        u(i, j) = exact(i * h, (first + j) * h, t)
      end do
    end do
    up = modulo(rank + 1, ranks)
    down = modulo(rank - 1, ranks)
    call MPI_Sendrecv(u(:, rows), n + 2, MPI_DOUBLE_PRECISION, up, 0, u(:, 0), n + 2, &
                      MPI_DOUBLE_PRECISION, down, 0, MPI_COMM_WORLD, status, ierr)
    call MPI_Sendrecv(u(:, 1), n + 2, MPI_DOUBLE_PRECISION, down, 1, u(:, rows + 1), n + 2, &
                      MPI_DOUBLE_PRECISION, up, 1, MPI_COMM_WORLD, status, ierr)
  end subroutine

  subroutine stencil_of(u, stencils)
    real(8), intent(in) :: u(0:, 0:)
    real(8), intent(out) :: stencils(:, :)
    integer :: i, j
    do j = 1, rows
      do i = 1, n
        stencils(:, (j - 1) * n + i) = [u(i, j), u(i - 1, j), u(i + 1, j), u(i, j - 1), u(i, j + 1)]
      end do
    end do
  end subroutine

  ! What a step of the upwind scheme misses, in units of h.
  subroutine error_of_upwind(t, stencils, missed)
    real(8), intent(in) :: t, stencils(:, :)
    real(8), intent(inout) :: missed(:, :)
    integer :: i, j, k
    do j = 1, rows
      do i = 1, n
        k = (j - 1) * n + i
        missed(1, k) = (exact(i * h, (first + j) * h, t + dt) - stencils(1, k) + &
                        dt / h * (a * (stencils(1, k) - stencils(2, k)) + &
                                  b * (stencils(1, k) - stencils(4, k)))) / h
      end do
    end do
  end subroutine

  function columns(from, wanted) result(chosen)
    real(8), intent(in) :: from(:, :)
    logical, intent(in) :: wanted(:)
    real(8), allocatable :: chosen(:, :)
    integer :: k, next
    allocate (chosen(size(from, 1), count(wanted)))
    next = 0
    do k = 1, size(wanted)
      if (.not. wanted(k)) cycle
      next = next + 1
      chosen(:, next) = from(:, k)
    end do
  end function

  real(8) function mean_square(values)
    real(8), intent(in) :: values(:, :)
    real(8) :: sums(2)
    sums = [sum(values**2), real(size(values), 8)]
    call MPI_Allreduce(MPI_IN_PLACE, sums, 2, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, ierr)
    mean_square = sums(1) / sums(2)
  end function

end program
