#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "tessera/train.h"
#include "train/interruption.h"
#include "train/train_fixture.h"

// What a signal asks of a run, and what the run that goes on makes up for.

namespace tessera {
namespace {

TEST(Signals, ARepeatAtOnceIsTheSameStop) {
  train::handle_signals();
  std::raise(SIGTERM);
  std::raise(SIGTERM);
  std::raise(SIGINT);
  EXPECT_EQ(train::stop_requested(), SIGTERM);
  request_stop(0);
}

TEST(Signals, ALaterOneEndsTheProcess) {
  const auto stop_twice = [] {
    train::handle_signals();
    std::raise(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    std::raise(SIGINT);
    _exit(0);
  };
  EXPECT_EXIT(stop_twice(), ::testing::ExitedWithCode(130), "");
}

}  // namespace
}  // namespace tessera
