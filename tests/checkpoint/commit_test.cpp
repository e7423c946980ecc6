// Commits that fail: an error on one rank is thrown on all, and older checkpoints do not change.

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include "checkpoint/child.h"
#include "checkpoint/store/run_folder.h"
#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Commit : public StoreTest {};

/// A call of one rank that fails, and a part of the expected error text.
struct Failure {
  std::function<void(CheckpointWriter&)> add;
  std::string text;
};

TEST_F(Commit, AnErrorOnOneRankIsAnErrorOnAll) {
  const std::vector<Failure> failures = {
      {[](auto& writer) { writer.add_text("a/b", ""); }, "\"a/b\""},
      {[](auto& writer) { writer.add_text("manifest.json", ""); }, "manifest.json"},
      {[](auto& writer) { writer.add_text(".hidden", ""); }, ".hidden"},
      {[](auto& writer) { writer.add_text("x", ""), writer.add_text("x", ""); },
       "/x is added twice"},
      {[](auto& writer) {
         writer.add_tensors("t", {{"u", at::Tensor()}});
       },
       "\"u\" is undefined"},
      {[](auto& writer) { writer.add_slices({}), writer.add_slices({}); }, "added twice"},
      {[](auto& writer) {
         writer.begin_tensors("t", {{"u", at::kFloat, {2}}});
       },
       "not written: \"u\""},
      {[](auto& writer) { writer.write_tensor("t", "u", at::ones(2)); }, "t was not begun"},
      {[](auto& writer) {
         writer.begin_tensors("t", {{"u", at::kFloat, {2}}}),
             writer.write_tensor("t", "u", at::ones(3));
       },
       "declared as Float [2]"},
  };
  run_ranks(1, [&](ProcessGroup group, int) {
    CheckpointStore store(run_, group);
    write(store, 1);
  });
  for (const int world : {1, 3}) {
    for (const auto& failure : failures) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        CheckpointStore store(run_, group);
        CheckpointWriter writer(store, 2);
        writer.add_text("good-" + std::to_string(rank), "good");
        if (rank == world - 1) failure.add(writer);
        writer.add_text("after-" + std::to_string(rank), "good");
        const auto message = usage_error([&] { writer.commit(); });
        EXPECT_THAT(message, HasSubstr(failure.text));
        if (world > 1) EXPECT_THAT(message, HasSubstr("rank 2: "));
        group.barrier();
        if (rank == 0)
          EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000001"}))
              << failure.text;
      });
    }
  }
  Checkpoint(*latest_checkpoint(run_)).verify();
}

TEST_F(Commit, RanksThatContradictEachOtherAreErrorsOnAll) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    CheckpointStore store(run_, group);
    {
      CheckpointWriter writer(store, 1);
      writer.add_text("same", std::string(rank, 'x'));
      EXPECT_THAT(usage_error([&] { writer.commit(); }),
                  HasSubstr("same is written by ranks 0 and 1"));
    }
    EXPECT_THAT(usage_error([&] { CheckpointWriter(store, 1 + rank); }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("the step is 2 here")));
    { CheckpointWriter left(store, 4); }
    group.barrier();
    if (rank == 0)
      EXPECT_EQ(names_in(run_), std::set<std::string>{".lock"})
          << "a writer without commit leaves no files";
  });
}

TEST_F(Commit, AWriteErrorOnOneRankIsAnErrorOnAll) {
  const std::string run = run_;
  // The limit on file size fails in the middle of a file, as a full disk does.
  Child child([run] {
    ::signal(SIGXFSZ, SIG_IGN);
    std::string said;
    run_ranks(2, [&](ProcessGroup group, int rank) {
      CheckpointStore store(run, group);
      {
        CheckpointWriter writer(store, 1);
        writer.add_text("good-" + std::to_string(rank), "good");
        writer.commit();
      }
      if (rank == 0) {
        const rlimit limit{65536, 65536};
        ::setrlimit(RLIMIT_FSIZE, &limit);
      }
      group.barrier();
      CheckpointWriter writer(store, 2);
      if (rank == 1) writer.add_tensors("big.safetensors", {{"w", at::ones({100000})}});
      const std::string message = usage_error([&] { writer.commit(); });
      group.barrier();
      if (rank == 0) said = message;
    });
    std::string left;
    for (const auto& name : names_in(run)) left += name + " ";
    return said + " | " + left;
  });
  const auto text = child.line();
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1: "), HasSubstr("/big.safetensors: writing"),
                          HasSubstr("File too large"), HasSubstr("| .lock step-00000001 ")));
  Checkpoint(*latest_checkpoint(run_)).verify();
}

TEST_F(Commit, AFolderThatDisappearsIsAnErrorOnAll) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    CheckpointStore store(run_, group);
    CheckpointWriter writer(store, 1);
    if (rank == 0) writer.add_text("here", "");
    group.barrier();
    if (rank == 1) {
      for (const auto& name : names_in(run_))
        if (store::is_partial_name(name)) fs::remove_all(run_ + "/" + name);
    }
    group.barrier();
    if (rank == 1) writer.add_text("gone", "");
    writer.commit();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error),
                AllOf(HasSubstr("rank 1: "), HasSubstr("/gone"), HasSubstr("does not exist")));
}

TEST_F(Commit, AFileInPlaceOfTheCheckpointIsNotReplaced) {
  CheckpointStore store(run_);
  put_contents(run_ + "/step-00000001", "mine");
  EXPECT_THAT(usage_error([&] { write(store, 1); }),
              AllOf(HasSubstr("step-00000001"), HasSubstr("Not a directory")));
  EXPECT_EQ(contents_of(run_ + "/step-00000001"), "mine");
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000001"}));
}

/// Root ignores permissions, so tests of permissions run as the user nobody.
std::string as_nobody(const std::string& base, const std::function<void()>& body) {
  fs::permissions(base, fs::perms::all);
  const Child child([&]() -> std::string {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return "setuid";
    body();
    return "nothing thrown";
  });
  return child.line();
}

TEST_F(Commit, AFailedPruningIsALineInTheLogAndNoError) {
  const std::string log = base_ + "/log.txt";
  const auto text = as_nobody(base_, [&] {
    spdlog::set_default_logger(spdlog::basic_logger_mt("test", log));
    CheckpointStore store(run_, ProcessGroup(), {.keep_last = 1});
    write(store, 1);
    fs::create_directory(run_ + "/step-00000001/locked");
    put_contents(run_ + "/step-00000001/locked/file", "");
    fs::permissions(run_ + "/step-00000001/locked", fs::perms::owner_read);
    write(store, 2);
    spdlog::default_logger()->flush();
  });
  EXPECT_EQ(text, "nothing thrown");
  EXPECT_THAT(contents_of(log),
              AllOf(HasSubstr("step 2 is committed, but pruning"),
                    HasSubstr(".step-00000001.partial-"), HasSubstr("Permission denied")));
  EXPECT_THAT(steps(), ::testing::ElementsAre(2));
  Checkpoint(run_ + "/step-00000002").verify();
  for (const auto& name : names_in(run_))
    if (store::is_partial_name(name))
      fs::permissions(run_ + "/" + name + "/locked", fs::perms::owner_all);
}

TEST_F(Commit, AFolderWithoutWritePermissionIsAnError) {
  const auto text = as_nobody(base_, [&] {
    fs::create_directory(run_);
    fs::permissions(run_, fs::perms::owner_read | fs::perms::owner_exec);
    CheckpointStore{run_};
  });
  EXPECT_THAT(text, AllOf(HasSubstr(run_ + ": cannot be written"), HasSubstr("Permission denied")));
}

}  // namespace
}  // namespace tessera
