#pragma once

#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace tessera::launch_test {

/// A fresh folder, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }
  bool empty() const;

 private:
  std::string path_;
};

/// Waits for the end of a process, with a time limit. It need not be a child of this process.
class Watched {
 public:
  explicit Watched(pid_t pid);
  ~Watched();
  Watched(const Watched&) = delete;
  /// Blocks for at most `seconds`; true if the process has ended.
  bool ended(double seconds = 5) const;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int fd_;
};

/// The `tessera` command as a child process, with its outputs in pipes and TMPDIR set to a folder
/// of its own. Every wait has a time limit and throws when it expires. The destructor kills the
/// process.
class Launched {
 public:
  using Variables = std::map<std::string, std::string>;

  struct Streams {
    int in = -1;          ///< -1: /dev/null.
    int out = -1;         ///< -1: a pipe, read as out().
    int terminal = -1;    ///< Slave of a pseudo terminal for all three streams, as controlling
                          ///< terminal of a new session.
    bool merged = false;  ///< Both outputs in one pipe, read as out().
    std::vector<std::string> front = {};  ///< The words before `tessera`.
  };

  explicit Launched(const std::vector<std::string>& arguments) : Launched(arguments, {}, {}) {}
  Launched(const std::vector<std::string>& arguments, const Variables& set, Streams streams);
  ~Launched();
  Launched(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const;
  /// Reads until `text` has occurred `times` times in both outputs together.
  void wait_for(const std::string& text, int times = 1);
  /// The numbers after every "pid=" in the output so far.
  std::vector<pid_t> pids() const;
  /// Waits for the end. Returns the exit code, or the negative number of the signal.
  int finish();

  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }
  double seconds() const;  ///< Time since the start.
  const TemporaryFolder& tmp() const { return tmp_; }

 private:
  bool read_more(double until);

  TemporaryFolder tmp_;
  pid_t pid_ = -1;
  int out_fd_ = -1, err_fd_ = -1;
  std::string out_, err_;
  double start_;
  bool waited_ = false;
};

/// The number of occurrences of `text` in `where`.
int occurrences(const std::string& where, const std::string& text);

std::string read_file(const std::string& path);

/// The arguments of `tessera run [flags] -n <ranks> sh -c <script>`.
std::vector<std::string> run_shell(int ranks, const std::string& script,
                                   std::vector<std::string> flags = {});

}  // namespace tessera::launch_test
