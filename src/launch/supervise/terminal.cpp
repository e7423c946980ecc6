// The members of Supervisor for the job control of a shell. Ranks have process groups of their own,
// so the terminal's signals and input reach them only through the launcher.
#include <signal.h>
#include <unistd.h>

#include "launch/supervise/supervisor.h"

namespace tessera::launch {

void Supervisor::suspend() {
  take_terminal();
  signal_all(SIGTSTP);
  around_.console.flush(-1);
  raise(SIGSTOP);
  signal_all(SIGCONT);
}

void Supervisor::serve_terminal() {
  if (ranks_.empty() || global_rank(around_.options, 0) != 0 || !isatty(0)) return;
  const Child& first = ranks_.front().child;
  const int stopped_by = ranks_.front().exit ? 0 : first.stop_signal();
  if (stopped_by == SIGTSTP && terminal_given_) return suspend();
  if (stopped_by != SIGTTIN && stopped_by != SIGTTOU) return;
  // Rank 0 tried to use the terminal. It gets the terminal if the launcher has it. Otherwise all
  // ranks stop, like a background job of a shell.
  if (tcgetpgrp(0) != getpgrp()) return suspend();
  tcsetpgrp(0, first.pid());
  terminal_given_ = true;
  first.signal_group(SIGCONT);
}

void Supervisor::take_terminal() {
  if (!terminal_given_) return;
  terminal_given_ = false;
  sigset_t output, former;
  sigemptyset(&output);
  sigaddset(&output, SIGTTOU);
  sigprocmask(SIG_BLOCK, &output, &former);
  tcsetpgrp(0, getpgrp());
  sigprocmask(SIG_SETMASK, &former, nullptr);
}

}  // namespace tessera::launch
