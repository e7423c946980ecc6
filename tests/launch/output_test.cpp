#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <termios.h>
#include <unistd.h>

#include "launch/fd.h"
#include "launch/output/line_reader.h"
#include "launch/output/sink.h"

namespace tessera::launch {
namespace {

using testing::ElementsAre;

std::vector<std::string> lines_of(std::initializer_list<std::string> parts) {
  std::vector<std::string> lines;
  LineReader reader;
  const auto keep = [&](const std::string& line) { lines.push_back(line); };
  for (const std::string& part : parts) reader.feed(part, keep);
  reader.finish(keep);
  return lines;
}

TEST(LineReaderTest, ALineMayArriveInSeveralParts) {
  EXPECT_THAT(lines_of({"a\nb", "c\n\nd"}), ElementsAre("a", "bc", "", "d"));
  EXPECT_THAT(lines_of({}), ElementsAre());
}

TEST(LineReaderTest, AnOverwrittenLineCountsInItsLastState) {
  EXPECT_THAT(lines_of({"1%\r2%\r", "3%\r\nend\r\n"}), ElementsAre("3%", "end"));
}

TEST(LineReaderTest, OverlongLinesAreCut) {
  const auto lines = lines_of({std::string(100000, 'x') + "\n"});
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].size() + lines[1].size(), 100000u);
}

TEST(LineReaderTest, KeepsTheLastLinesAndAnUnfinishedOne) {
  LineReader reader;
  for (int i = 0; i < 50; ++i) reader.feed(std::to_string(i) + "\n", [](const std::string&) {});
  reader.feed("half", [](const std::string&) {});
  const auto last = reader.last_lines();
  EXPECT_EQ(last.size(), LineReader::kKept);
  EXPECT_EQ(last.front(), "31");
  EXPECT_EQ(last.back(), "half");
}

class SinkTest : public testing::Test {
 protected:
  SinkTest() {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_NONBLOCK), 0);
    reader_ = Fd(ends[0]);
    writer_ = Fd(ends[1]);
  }

  std::string written(Sink& sink) {
    std::string text;
    char buffer[65536];
    while (sink.wants_write()) {
      sink.write_some();
      const ssize_t got = read(reader_.get(), buffer, sizeof buffer);
      if (got > 0) text.append(buffer, got);
    }
    return text;
  }

  Fd reader_, writer_;
};

TEST_F(SinkTest, BytesPassUnchanged) {
  Sink sink(writer_.get());
  sink.pass("a\r\xff");
  sink.pass(std::string_view("\0b", 2));
  EXPECT_EQ(written(sink), std::string("a\r\xff\0b", 5));
}

TEST_F(SinkTest, ALineWaitsForTheEndOfAnUnfinishedOne) {
  Sink sink(writer_.get());
  sink.pass("loss ");
  sink.line("[rank 1] x");
  EXPECT_EQ(written(sink), "loss ");
  sink.pass("1.0\nnext");
  EXPECT_EQ(written(sink), "1.0\n[rank 1] x\nnext");
}

TEST_F(SinkTest, ALineWaitsForAtMostASecondAndAnUrgentLineNotAtAll) {
  Sink sink(writer_.get());
  sink.pass("a");
  sink.line("b");
  ASSERT_TRUE(sink.deadline());
  sink.tick(Clock::now());
  EXPECT_EQ(written(sink), "a");
  sink.tick(*sink.deadline());
  EXPECT_EQ(written(sink), "\nb\n");
  sink.pass("c");
  sink.urgent_line("d");
  EXPECT_EQ(written(sink), "c\nd\n");
}

TEST_F(SinkTest, AfterSettleALineEndsAnUnfinishedOne) {
  Sink sink(writer_.get());
  sink.pass("50%");
  sink.settle();
  EXPECT_EQ(written(sink), "50%");
  sink.line("end");
  EXPECT_EQ(written(sink), "\nend\n");
}

TEST_F(SinkTest, AGoneReaderIsDetected) {
  signal(SIGPIPE, SIG_IGN);
  Sink sink(writer_.get());
  reader_.reset();
  sink.line("x");
  sink.write_some();
  EXPECT_TRUE(sink.closed());
  EXPECT_TRUE(sink.reader_gone());
  EXPECT_EQ(sink.take_error(), 0);
  sink.line("y");
  EXPECT_FALSE(sink.wants_write());
}

TEST_F(SinkTest, AFullDiskIsNotAGoneReaderAndIsReportedOnce) {
  const Fd full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  Sink sink(full.get());
  sink.line("x");
  sink.write_some();
  EXPECT_TRUE(sink.closed());
  EXPECT_FALSE(sink.reader_gone());
  EXPECT_EQ(sink.take_error(), ENOSPC);
  EXPECT_EQ(sink.take_error(), 0);
  sink.line("y");
  EXPECT_FALSE(sink.wants_write());
}

TEST_F(SinkTest, OutputIsDroppedWhenNobodyReadsAndALineSaysHowMuch) {
  Sink sink(writer_.get(), "command");
  const std::string block = std::string(999, 'x') + "\n";
  size_t passed = 0;
  for (; !sink.full(); passed += block.size()) sink.pass(block);
  ASSERT_GT(passed, 1u << 20);
  const auto end = *sink.deadline();
  EXPECT_LE(end - Clock::now(), std::chrono::seconds(1));
  sink.tick(end);
  EXPECT_FALSE(sink.full()) << "the ranks go on";
  sink.pass(block);
  sink.line("dropped");
  sink.urgent_line("kept");
  const std::string text = written(sink);
  EXPECT_EQ(text.size() - passed, text.size() - text.find("kept\n")) << "the queue, then the rest";
  EXPECT_EQ(
      text.substr(passed),
      "kept\ncommand: 1008 bytes of output are missing here, because the output was not read\n");
  sink.line("again");
  EXPECT_EQ(written(sink), "again\n");
}

TEST_F(SinkTest, ASlowReaderLosesNothing) {
  Sink sink(writer_.get());
  while (!sink.full()) sink.pass(std::string(1000, 'x'));
  const auto end = *sink.deadline();
  char buffer[65536];
  for (int i = 0; i < 17; ++i) {  // 68 KiB
    sink.write_some();
    ASSERT_EQ(read(reader_.get(), buffer, sizeof buffer), 4096);
  }
  sink.tick(end);
  EXPECT_TRUE(sink.full());
  EXPECT_GT(*sink.deadline(), end);
}

TEST(TerminalSinkTest, AWriteNeverBlocks) {
  int master, slave;
  ASSERT_EQ(openpty(&master, &slave, nullptr, nullptr, nullptr), 0);
  Sink sink(slave);
  sink.pass(std::string(1 << 20, 'x') + "\n");
  alarm(20);  // a write that blocks would never end
  for (int i = 0; i < 1000; ++i) sink.write_some();
  alarm(0);
  EXPECT_TRUE(sink.pending());
  EXPECT_FALSE(sink.wants_write()) << "there is a pause before the next try";
  close(slave);
  close(master);
}

TEST(TerminalSinkTest, AProgressBarIsDrawnAgainBelowALine) {
  int master, slave;
  ASSERT_EQ(openpty(&master, &slave, nullptr, nullptr, nullptr), 0);
  termios raw;
  tcgetattr(slave, &raw);
  cfmakeraw(&raw);
  tcsetattr(slave, TCSANOW, &raw);
  Sink sink(slave);
  ASSERT_TRUE(sink.terminal());
  sink.pass("old\n10%\r20%\r");
  sink.line("[rank 1] x");
  const std::string expected = "old\n10%\r20%\r\r\x1b[K[rank 1] x\n20%\r";
  while (sink.wants_write()) sink.write_some();
  std::string text;
  char buffer[4096];
  while (text.size() < expected.size()) {
    const ssize_t got = read(master, buffer, sizeof buffer);
    ASSERT_GT(got, 0);
    text.append(buffer, got);
  }
  EXPECT_EQ(text, expected);
  close(slave);
  close(master);
}

}  // namespace
}  // namespace tessera::launch
