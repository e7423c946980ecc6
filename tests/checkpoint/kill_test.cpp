// A run that is killed at any moment leaves a valid checkpoint: the last one that it reported, or
// the next one. Also if its ranks have folders of their own, as on hosts that share no disk.

#include <chrono>
#include <csignal>
#include <random>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#include "checkpoint/store/run_folder.h"
#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing;

/// The folder of a rank: one for both, or one for each.
struct Folders {
  std::string run;
  bool shared = true;

  std::string of(int rank) const { return shared ? run : run + "-" + std::to_string(rank); }
  int count() const { return shared ? 1 : 2; }
};

class Kill : public StoreTest, public ::testing::WithParamInterface<bool> {};

at::Tensor weights_of(int64_t step) { return at::arange(step, step + 16, at::kLong); }

StateSlice slice_of(int64_t step, int rank) {
  StateSlice slice{{"w", {16}, rank * 8, 8}, {}};
  slice.state.tensors["m"] = weights_of(step).narrow(0, rank * 8, 8).to(at::kDouble);
  slice.state.scalars["step"] = step;
  return slice;
}

/// Commits step after step on two ranks and reports each step to `out`. Never returns.
[[noreturn]] void train(const Folders& folders, int64_t from, int out) {
  try {
    at::set_num_threads(1);  // the thread pool of libtorch does not survive a fork
    run_ranks(2, [&](ProcessGroup group, int rank) {
      CheckpointStore store(folders.of(rank), group, {.keep_last = 2, .keep_every = 50});
      for (int64_t step = from;; ++step) {
        CheckpointWriter writer(store, step);
        if (rank == 0) writer.add_tensors("model.safetensors", {{"w", weights_of(step)}});
        writer.add_text("rank-" + std::to_string(rank), std::to_string(step));
        writer.add_slices({slice_of(step, rank)});
        writer.commit();
        if (rank == 0 && ::write(out, &step, sizeof step) != sizeof step) ::_exit(3);
      }
    });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  ::_exit(2);
}

/// Checks the checkpoint of `step` on the given ranks' group.
void expect_complete(const std::string& path, ProcessGroup group, int64_t step) {
  const Checkpoint checkpoint(path, group);
  checkpoint.verify(group);
  ASSERT_EQ(checkpoint.step(), step);
  checkpoint.read_together([&] {
    EXPECT_TRUE(same_bits(checkpoint.load_tensor("model.safetensors", "w"), weights_of(step)));
    for (const int rank : {0, 1})
      EXPECT_EQ(checkpoint.text("rank-" + std::to_string(rank)), std::to_string(step));
    const auto state = checkpoint.load_slices({{"w", {16}, 0, 16}})[0].state;
    EXPECT_TRUE(same_bits(state.tensors.at("m"), weights_of(step).to(at::kDouble)));
    EXPECT_TRUE(same_bits(state.scalars.at("step"), ScalarValue(step)));
  });
}

/// The newest complete step, after checking every checkpoint that all folders have and opening the
/// folders for writing, which removes what was left.
int64_t newest_step(const Folders& folders, int& killed_half_way) {
  int64_t newest = 0;
  run_ranks(folders.count(), [&](ProcessGroup group, int rank) {
    const std::string folder = folders.of(rank);
    const auto latest = latest_checkpoint(folder, group);
    ASSERT_TRUE(latest);
    const int64_t step = *store::step_of_name(fs::path(*latest).filename().string());
    ASSERT_NO_FATAL_FAILURE(expect_complete(*latest, group, step));
    for (const auto& text : group.all_gather_bytes("")) ASSERT_TRUE(text.empty());
    for (const int64_t other : store::committed_steps(folders.of(0)))
      if (other < step &&
          fs::exists(folders.of(folders.count() - 1) + "/" + store::step_name(other)))
        ASSERT_NO_FATAL_FAILURE(
            expect_complete(folder + "/" + store::step_name(other), group, other));
    if (rank == 0) {
      for (const auto& name : names_in(folder)) killed_half_way += store::is_partial_name(name);
      newest = step;
    }
    const CheckpointStore store(folder, group);
    for (const auto& name : names_in(folder)) ASSERT_FALSE(store::is_partial_name(name)) << name;
  });
  return newest;
}

using Clock = std::chrono::steady_clock;

/// A process that trains from step `from` on.
class TrainProcess {
 public:
  TrainProcess(const Folders& folders, int64_t from) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) train(folders, from, ends[1]);
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~TrainProcess() {
    if (pid_ > 0) kill();
    ::close(out_);
  }
  /// The next step that it reports; 0 if it has ended or reports nothing for 20 s.
  int64_t report() const {
    pollfd ready{out_, POLLIN, 0};
    int64_t step = 0;
    return ::poll(&ready, 1, 20000) == 1 && ::read(out_, &step, sizeof step) == sizeof step ? step
                                                                                            : 0;
  }
  /// Returns false if the process had ended by itself.
  bool kill() {
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFSIGNALED(status);
  }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
};

TEST_P(Kill, AtRandomMomentsLeavesTheLastCommittedCheckpoint) {
  const Folders folders{run_, GetParam()};
  int killed_half_way = 0;
  // Measures how long a start and a commit take, so that the kills are spread over both.
  Clock::duration start, commit;
  int64_t next = 1;
  {
    const auto began = Clock::now();
    TrainProcess process(folders, next);
    ASSERT_EQ(process.report(), 1);
    const auto first = Clock::now();
    while (next < 11) ASSERT_EQ(process.report(), ++next);
    start = first - began;
    commit = (Clock::now() - first) / 10;
    ASSERT_TRUE(process.kill());
    next = newest_step(folders, killed_half_way) + 1;
  }
  std::mt19937 random(2026);
  const int64_t first = next;
  for (int round = 0; round < 100; ++round) {
    TrainProcess process(folders, next);
    int64_t reported = next - 1;
    const bool wait = round % 4 != 0;
    if (wait) ASSERT_GT(reported = process.report(), 0) << "it ended by itself";
    const double part = std::uniform_real_distribution<double>(0, 1.3)(random);
    std::this_thread::sleep_for(part * std::chrono::duration<double>(wait ? commit : start));
    ASSERT_TRUE(process.kill()) << "it ended by itself";
    for (int64_t step; (step = process.report()) > 0;) reported = step;

    const int64_t step = newest_step(folders, killed_half_way);
    ASSERT_GE(step, reported);
    ASSERT_LE(step, reported + 1);
    next = step + 1;
  }
  EXPECT_GT(next - first, 50);
  EXPECT_GT(killed_half_way, 10) << "no kill happened while a checkpoint was written";
}

INSTANTIATE_TEST_SUITE_P(Folders, Kill, ::testing::Bool(),
                         [](const auto& chosen) { return chosen.param ? "Shared" : "OfEachRank"; });

}  // namespace
}  // namespace tessera
