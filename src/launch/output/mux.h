#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <poll.h>

#include "launch/output/console.h"
#include "launch/output/line_reader.h"
#include "launch/output/sink.h"
#include "launch/supervise/fd.h"
#include "tessera/launch.h"

namespace tessera::launch {

/// Which of a rank's bytes go where.
struct StreamPlan {
  int rank = 0;  ///< Rank 0's bytes pass unchanged, the others' lines get `[rank N] ` in front.
  int console = kBothStreams;  ///< StreamBits shown on the console.
  int files = kNoStream;       ///< StreamBits written to files, in
  std::string folder;          ///< this folder.
};

/// A world of one without log files has the launcher's own streams.
bool inherits_streams(const LaunchOptions& options);
/// The plan for a rank, but for the folder.
StreamPlan plan_streams(const LaunchOptions& options, int local_rank);
/// One pipe for both streams keeps their order, where nothing needs them apart. `merged` as
/// Console::merged().
bool shares_a_pipe(const StreamPlan& plan, bool merged);

/// Reads the output of all ranks of one attempt and hands it on to console and log files.
class Mux {
 public:
  explicit Mux(Console& console) : console_(console) {}

  /// Descriptors for the rank's standard output and error; the caller closes them once the rank is
  /// started.
  struct Ends {
    Fd out, err;  ///< `err` is empty when both streams share `out`.
  };
  /// Ranks are added in the order of their local rank. Throws UsageError when a log file cannot be
  /// made.
  Ends add_rank(const StreamPlan& plan);

  void add_polled(std::vector<pollfd>& polled);
  /// `first` points to what add_polled() added last.
  void handle(const pollfd* first);
  std::optional<Clock::time_point> deadline() const;

  /// Reads all that a rank has written so far.
  void drain(int local_rank);
  /// All ranks have ended: reads what is left and completes unfinished lines.
  void finish();
  /// The last lines of the rank's standard error, or of its standard output when it wrote no error.
  std::deque<std::string> last_lines(int local_rank) const;

 private:
  struct Stream {
    int local_rank;
    bool is_error;
    bool passed;
    std::string prefix;
    Sink* sink;  ///< Null: not on the console.
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
