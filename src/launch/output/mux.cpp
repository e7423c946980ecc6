#include "launch/output/mux.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/environment.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

Fd open_log(const std::string& folder, const std::string& name) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string path = folder + "/" + name;
  Fd file(error ? -1 : open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file) {
    const std::string why = error ? error.message() : std::strerror(errno);
    throw UsageError("--log-dir: " + path + ": " + why + ": expected a writable folder");
  }
  return file;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t done = write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return false;
    bytes.remove_prefix(done);
  }
  return true;
}

}  // namespace

bool inherits_streams(const LaunchOptions& options) {
  return world_size(options) == 1 && options.log_dir.empty();
}

StreamPlan plan_streams(const LaunchOptions& options, int local_rank) {
  StreamPlan plan;
  plan.rank = global_rank(options, local_rank);
  if (options.log_dir.empty()) return plan;
  const int tee = options.tee         ? options.tee->of(local_rank)
                  : options.redirects ? kNoStream
                                      : kBothStreams;
  const int redirected = options.redirects ? options.redirects->of(local_rank) : kNoStream;
  plan.files = tee | redirected;
  plan.console = kBothStreams & ~(redirected & ~tee);
  return plan;
}

bool shares_a_pipe(const StreamPlan& plan, bool merged) {
  return merged && plan.files == kNoStream && plan.console == kBothStreams;
}

Mux::Ends Mux::add_rank(const StreamPlan& plan) {
  Ends ends;
  ends.out = add_stream(plan, kStdout, console_.out());
  if (!shares_a_pipe(plan, console_.merged())) ends.err = add_stream(plan, kStderr, console_.err());
  ++ranks_;
  return ends;
}

Fd Mux::add_stream(const StreamPlan& plan, int bit, Sink& sink) {
  int pipe[2];
  if (pipe2(pipe, O_CLOEXEC) != 0)
    throw UsageError(std::string("no pipe for a rank: ") + std::strerror(errno));
  Fd reader(pipe[0]), writer(pipe[1]);
  fcntl(reader.get(), F_SETFL, O_NONBLOCK);
  Fd file;
  if (plan.files & bit) file = open_log(plan.folder, bit == kStdout ? "stdout.log" : "stderr.log");
  streams_.push_back(std::make_unique<Stream>(Stream{
      ranks_, bit == kStderr, plan.rank == 0, "[rank " + std::to_string(plan.rank) + "] ",
      plan.console & bit ? &sink : nullptr, std::move(reader), std::move(file), LineReader()}));
  return writer;
}

void Mux::add_polled(std::vector<pollfd>& polled) {
  polled_streams_.clear();
  polled_sinks_.clear();
  for (const auto& stream : streams_) {
    if (!stream->fd || (stream->sink && stream->sink->full())) continue;
    polled_streams_.push_back(stream.get());
    polled.push_back({stream->fd.get(), POLLIN, 0});
  }
  for (Sink* sink : console_.sinks()) {
    if (!sink->wants_write()) continue;
    polled_sinks_.push_back(sink);
    polled.push_back({sink->fd(), POLLOUT, 0});
  }
}

void Mux::handle(const pollfd* first) {
  for (Stream* stream : polled_streams_)
    if ((first++)->revents != 0) read_some(*stream);
  for (Sink* sink : polled_sinks_)
    if ((first++)->revents != 0) console_.write_some(*sink);
  for (Sink* sink : console_.sinks()) sink->tick(Clock::now());
}

std::optional<Clock::time_point> Mux::deadline() const {
  std::optional<Clock::time_point> first;
  for (Sink* sink : console_.sinks()) {
    const auto next = sink->deadline();
    if (next && (!first || *next < *first)) first = next;
  }
  return first;
}

bool Mux::read_some(Stream& stream) {
  char buffer[64 << 10];
  const ssize_t got = read(stream.fd.get(), buffer, sizeof buffer);
  if (got > 0) {
    take(stream, {buffer, static_cast<size_t>(got)});
    return true;
  }
  if (got == 0 || (errno != EAGAIN && errno != EINTR)) end(stream);
  return false;
}

void Mux::take(Stream& stream, std::string_view bytes) {
  if (stream.file && !write_all(stream.file.get(), bytes)) {
    console_.say("tessera: log file of " + stream.prefix +
                 "is incomplete: " + std::strerror(errno));
    stream.file.reset();
  }
  if (stream.sink && stream.passed) stream.sink->pass(bytes);
  stream.lines.feed(bytes, [&](const std::string& line) {
    if (stream.sink && !stream.passed) stream.sink->line(stream.prefix + line);
  });
  // The console's reader has ended and there is no log file: the rank gets SIGPIPE if the pipe
  // closes.
  if (stream.sink && stream.sink->reader_gone() && !stream.file) end(stream);
}

void Mux::end(Stream& stream) {
  if (!stream.fd) return;
  stream.fd.reset();
  stream.file.reset();
  stream.lines.finish([&](const std::string& line) {
    if (stream.sink && !stream.passed) stream.sink->line(stream.prefix + line);
  });
}

void Mux::drain(int local_rank) {
  // A full pipe needs fewer reads than this. More data can only come from a process that still
  // writes.
  constexpr int kReads = 32;
  for (const auto& stream : streams_) {
    if (stream->local_rank != local_rank) continue;
    for (int i = 0; i < kReads && stream->fd && read_some(*stream); ++i) {
    }
  }
}

void Mux::finish() {
  for (int local_rank = 0; local_rank < ranks_; ++local_rank) drain(local_rank);
  for (const auto& stream : streams_) end(*stream);
  for (Sink* sink : console_.sinks()) sink->settle();
}

std::deque<std::string> Mux::last_lines(int local_rank) const {
  std::deque<std::string> lines;
  for (const auto& stream : streams_) {
    if (stream->local_rank != local_rank) continue;
    auto own = stream->lines.last_lines();
    if (!own.empty()) lines = std::move(own);
  }
  return lines;
}

}  // namespace tessera::launch
