! The C interface of Tessera (tessera/c.h) for Fortran. Compile this file in your program. Arrays are
! real(8) and contiguous: x(values, samples).
module tessera
  use iso_c_binding
  implicit none
  private
  public :: tessera_step, check_tessera, group_from_environment, group_from_mpi, group_rank, &
            group_size, group_free, session_create, session_step, session_predict, &
            session_evaluate, session_steps, session_save, session_finish, session_free

  type, bind(c) :: tessera_array
    type(c_ptr) :: data = c_null_ptr
    integer(c_int32_t) :: dtype = 1  ! TESSERA_FLOAT64
    integer(c_int32_t) :: dims = 2
    type(c_ptr) :: shape = c_null_ptr
    type(c_ptr) :: strides = c_null_ptr
  end type

  type, bind(c) :: tessera_step
    integer(c_int64_t) :: step, samples
    real(c_double) :: loss, grad_norm, lr
    integer(c_int32_t) :: updated, stopped
  end type

  interface
    function group_from_environment(group) bind(c, name="tessera_group_from_environment")
      import; type(c_ptr), intent(out) :: group; integer(c_int) :: group_from_environment
    end function
    ! Of tessera_mpi.cpp, which is compiled with the program's MPI.
    function group_from_mpi(comm, group) bind(c, name="tessera_group_from_mpi")
      import; integer(c_int), value :: comm; type(c_ptr), intent(out) :: group
      integer(c_int) :: group_from_mpi
    end function
    function group_rank(group, rank) bind(c, name="tessera_group_rank")
      import; type(c_ptr), value :: group; integer(c_int), intent(out) :: rank
      integer(c_int) :: group_rank
    end function
    function group_size(group, size) bind(c, name="tessera_group_size")
      import; type(c_ptr), value :: group; integer(c_int), intent(out) :: size
      integer(c_int) :: group_size
    end function
    subroutine group_free(group) bind(c, name="tessera_group_free")
      import; type(c_ptr), value :: group
    end subroutine
    function c_session_create(config, group, session) bind(c, name="tessera_session_create")
      import; character(kind=c_char), intent(in) :: config(*); type(c_ptr), value :: group
      type(c_ptr), intent(out) :: session; integer(c_int) :: c_session_create
    end function
    function c_session_step(session, inputs, targets, done) bind(c, name="tessera_session_step")
      import; type(c_ptr), value :: session; type(tessera_array), intent(in) :: inputs, targets
      type(tessera_step), intent(out) :: done; integer(c_int) :: c_session_step
    end function
    function c_session_predict(session, inputs, outputs) bind(c, name="tessera_session_predict")
      import; type(c_ptr), value :: session; type(tessera_array), intent(in) :: inputs, outputs
      integer(c_int) :: c_session_predict
    end function
    function c_session_evaluate(session, inputs, targets, loss) &
        bind(c, name="tessera_session_evaluate")
      import; type(c_ptr), value :: session; type(tessera_array), intent(in) :: inputs, targets
      real(c_double), intent(out) :: loss; integer(c_int) :: c_session_evaluate
    end function
    function session_steps(session, steps) bind(c, name="tessera_session_steps")
      import; type(c_ptr), value :: session; integer(c_int64_t), intent(out) :: steps
      integer(c_int) :: session_steps
    end function
    function session_save(session) bind(c, name="tessera_session_save")
      import; type(c_ptr), value :: session; integer(c_int) :: session_save
    end function
    function session_finish(session) bind(c, name="tessera_session_finish")
      import; type(c_ptr), value :: session; integer(c_int) :: session_finish
    end function
    subroutine session_free(session) bind(c, name="tessera_session_free")
      import; type(c_ptr), value :: session
    end subroutine
    function last_error() bind(c, name="tessera_last_error")
      import; type(c_ptr) :: last_error
    end function
    function strlen(text) bind(c)
      import; type(c_ptr), value :: text; integer(c_size_t) :: strlen
    end function
  end interface

contains

  ! Ends the program with the text of the error, unless `code` is 0.
  subroutine check_tessera(code)
    integer(c_int), intent(in) :: code
    character(kind=c_char), pointer :: text(:)
    if (code == 0) return
    call c_f_pointer(last_error(), text, [strlen(last_error())])
    write (*, '(*(a))') text
    error stop 1
  end subroutine

  integer(c_int) function session_create(config, group, session)
    character(len=*), intent(in) :: config
    type(c_ptr), intent(in) :: group
    type(c_ptr), intent(out) :: session
    character(kind=c_char) :: text(len(config) + 1)
    integer :: i
    do i = 1, len(config)
      text(i) = config(i:i)
    end do
    text(len(config) + 1) = c_null_char
    session_create = c_session_create(text, group, session)
  end function

  function array_of(values, extents) result(array)
    real(8), intent(in), contiguous, target :: values(:, :)
    integer(c_int64_t), intent(out), target :: extents(2)
    type(tessera_array) :: array
    extents = [size(values, 2, c_int64_t), size(values, 1, c_int64_t)]
    if (size(values) > 0) array%data = c_loc(values)
    array%shape = c_loc(extents)
  end function

  integer(c_int) function session_step(session, inputs, targets, done)
    type(c_ptr), intent(in) :: session
    real(8), intent(in), contiguous, target :: inputs(:, :), targets(:, :)
    type(tessera_step), intent(out) :: done
    integer(c_int64_t), target :: of_inputs(2), of_targets(2)
    session_step = c_session_step(session, array_of(inputs, of_inputs), &
                                  array_of(targets, of_targets), done)
  end function

  integer(c_int) function session_predict(session, inputs, outputs)
    type(c_ptr), intent(in) :: session
    real(8), intent(in), contiguous, target :: inputs(:, :)
    real(8), intent(inout), contiguous, target :: outputs(:, :)
    integer(c_int64_t), target :: of_inputs(2), of_outputs(2)
    session_predict = c_session_predict(session, array_of(inputs, of_inputs), &
                                        array_of(outputs, of_outputs))
  end function

  integer(c_int) function session_evaluate(session, inputs, targets, loss)
    type(c_ptr), intent(in) :: session
    real(8), intent(in), contiguous, target :: inputs(:, :), targets(:, :)
    real(8), intent(out) :: loss
    integer(c_int64_t), target :: of_inputs(2), of_targets(2)
    session_evaluate = c_session_evaluate(session, array_of(inputs, of_inputs), &
                                          array_of(targets, of_targets), loss)
  end function

end module
