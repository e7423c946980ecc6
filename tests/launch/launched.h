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

/// A process that can be waited for, with a bound, also when it is not our child.
class Watched {
 public:
  explicit Watched(pid_t pid);
  ~Watched();
  Watched(const Watched&) = delete;
  /// True when it has ended within the time.
  bool ended(double seconds = 5) const;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int fd_;
};

/// The `tessera` command as a child process: outputs in pipes, TMPDIR a folder of its own. Every
/// wait has a bound; an expired one is an exception, and the process is killed at the end.
class Launched {
 public:
  using Variables = std::map<std::string, std::string>;

  struct Streams {
    int in = -1;          ///< -1: /dev/null.
    int out = -1;         ///< -1: a pipe, read as out().
    int terminal = -1;    ///< Slave of a pseudo terminal for all three streams, as controlling
                          ///< terminal of a new session.
    bool merged = false;  ///< Both outputs in one pipe, read as out().
  };

  explicit Launched(const std::vector<std::string>& arguments) : Launched(arguments, {}, {}) {}
  Launched(const std::vector<std::string>& arguments, const Variables& set, Streams streams);
  ~Launched();
  Launched(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const;
  /// Reads until the text has occurred `times` times in either output.
  void wait_for(const std::string& text, int times = 1);
  /// The numbers behind every "pid=" in the output so far.
  std::vector<pid_t> pids() const;
  /// Waits for the end; its exit code, or minus its signal.
  int finish();

  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }
  double seconds() const;  ///< Since the start.
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

/// How often `text` occurs in `where`.
int occurrences(const std::string& where, const std::string& text);

std::string read_file(const std::string& path);

/// `tessera run -n <ranks> sh -c <script>`, with further flags in front.
std::vector<std::string> run_shell(int ranks, const std::string& script,
                                   std::vector<std::string> flags = {});

}  // namespace tessera::launch_test
