#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <poll.h>

#include "launch/fd.h"
#include "launch/output/console.h"
#include "launch/output/line_reader.h"
#include "launch/output/sink.h"
#include "tessera/launch.h"

namespace tessera::launch {

/// The destinations of a rank's output.
struct StreamPlan {
  int rank = 0;  ///< Rank 0's bytes pass unchanged; other ranks' lines get the prefix `[rank N] `.
  int console = kBothStreams;  ///< StreamBits that go to the console.
  int files = kNoStream;       ///< StreamBits that go to log files.
  std::string folder;          ///< Folder of the log files.
};

/// True if the rank inherits the launcher's streams: a world of one rank without log files.
bool inherits_streams(const LaunchOptions& options);
/// The plan for a rank, except the folder.
StreamPlan plan_streams(const LaunchOptions& options, int local_rank);
/// True if both streams of the rank go through one pipe, which keeps their order. Possible if they
/// have the same destination. `merged`: see Console::merged().
bool shares_a_pipe(const StreamPlan& plan, bool merged);

/// Reads the output of all ranks of one attempt and passes it on to the console and to log files.
class Mux {
 public:
  explicit Mux(Console& console) : console_(console) {}

  /// Descriptors of the rank's standard output and error. The caller closes them when the rank has
  /// started.
  struct Ends {
    Fd out, err;  ///< `err` is empty when both streams share `out`.
  };
  /// Adds a rank; call it in the order of the local ranks. Throws UsageError if a log file cannot
  /// be created.
  Ends add_rank(const StreamPlan& plan);

  /// Appends the descriptors to poll.
  void add_polled(std::vector<pollfd>& polled);
  /// Handles the events of poll(). `first`: the first entry that add_polled() appended last.
  void handle(const pollfd* first);
  /// The latest time for the next handle(), even without an event; nullopt: no limit.
  std::optional<Clock::time_point> deadline() const;

  /// Reads everything that a rank has written so far.
  void drain(int local_rank);
  /// Reads the remaining output and completes unfinished lines; call it when all ranks have ended.
  void finish();
  /// The last lines of the rank's standard error, or of its standard output if it wrote no errors.
  std::deque<std::string> last_lines(int local_rank) const;

 private:
  struct Stream {
    int local_rank;
    bool is_error;
    bool passed;
    std::string prefix;
    Sink* sink;  ///< Null if the stream does not go to the console.
    Fd fd, file;
    LineReader lines;
  };

  Fd add_stream(const StreamPlan& plan, int bit, Sink& sink);
  bool read_some(Stream& stream);
  void take(Stream& stream, std::string_view bytes);
  void end(Stream& stream);

  Console& console_;
  int ranks_ = 0;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> polled_streams_;
  std::vector<Sink*> polled_sinks_;
};

}  // namespace tessera::launch
