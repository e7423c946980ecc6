// A run that is killed at any moment leaves a checkpoint that loads: the last one that it reported, or the next.

#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#include <csignal>
#include <random>
#include <thread>

#include "checkpoint/run_folder.h"

namespace tessera {
namespace {

using namespace tessera::testing;

class Kill : public StoreTest {};

at::Tensor weights_of(int64_t step) { return at::arange(step, step + 16, at::kLong); }

StateSlice slice_of(int64_t step, int rank) {
  StateSlice slice{"w", {16}, rank * 8, 8, {}};
  slice.state.tensors["m"] = weights_of(step).narrow(0, rank * 8, 8).to(at::kDouble);
  slice.state.scalars["step"] = step;
  return slice;
}

/// Commits step after step, on two ranks, and says so. Never returns.
[[noreturn]] void train(const std::string& run, int64_t from, int out) {
  try {
    at::set_num_threads(1);  // after a fork libtorch makes its pool anew, on one thread
    run_ranks(2, [&](ProcessGroup group, int rank) {
      CheckpointStore store(run, group, {.keep_last = 2, .keep_every = 50});
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

void expect_complete(const std::string& path, int64_t step) {
  const Checkpoint checkpoint(path);
  checkpoint.verify();
  ASSERT_EQ(checkpoint.step(), step);
  EXPECT_TRUE(same_bits(checkpoint.load_tensor("model.safetensors", "w"), weights_of(step)));
  for (const int rank : {0, 1}) EXPECT_EQ(checkpoint.text("rank-" + std::to_string(rank)), std::to_string(step));
  const auto state = checkpoint.load_slices({{"w", {16}, 0, 16}})[0].state;
  EXPECT_TRUE(same_bits(state.tensors.at("m"), weights_of(step).to(at::kDouble)));
  EXPECT_TRUE(same_bits(state.scalars.at("step"), ScalarValue(step)));
}

TEST_F(Kill, AtRandomMomentsLeavesTheNewestCommittedOne) {
  std::mt19937 random(2026);
  int64_t next = 1;
  int killed_half_way = 0;
  for (int round = 0; round < 100; ++round) {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = ::fork();
    if (pid == 0) train(run_, next, ends[1]);
    ::close(ends[1]);
    // Half of them die before the first commit of their own, with some luck.
    int64_t reported = next - 1;
    pollfd ready{ends[0], POLLIN, 0};
    if (round % 2 == 0) {
      ASSERT_EQ(::poll(&ready, 1, 20000), 1);
      ASSERT_EQ(::read(ends[0], &reported, sizeof reported), static_cast<ssize_t>(sizeof reported))
          << "the child ended by itself";
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int>(0, 20000)(random)));
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself";
    for (int64_t step = 0; ::read(ends[0], &step, sizeof step) == sizeof step;) reported = step;
    ::close(ends[0]);

    const auto latest = latest_checkpoint(run_);
    if (!latest) {
      ASSERT_EQ(reported, 0) << "nothing is there";
      continue;
    }
    const int64_t step = *store::step_of_name(fs::path(*latest).filename().string());
    ASSERT_GE(step, reported);
    ASSERT_LE(step, reported + 1);
    ASSERT_NO_FATAL_FAILURE(expect_complete(*latest, step));
    for (const int64_t other : store::committed_steps(run_))
      ASSERT_NO_FATAL_FAILURE(expect_complete(run_ + "/" + store::step_name(other), other));
    for (const auto& name : names_in(run_)) killed_half_way += store::is_partial_name(name);
    {
      const CheckpointStore store(run_);
      for (const auto& name : names_in(run_)) ASSERT_FALSE(store::is_partial_name(name)) << name;
    }
    next = step + 1;
  }
  EXPECT_GT(next, 50);
  EXPECT_GT(killed_half_way, 10) << "the kills did not hit the writing";
}

}  // namespace
}  // namespace tessera
