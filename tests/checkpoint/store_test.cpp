// The run's folder: one writer, complete or not there, pruned by rule; an error on one rank is an error on all.

#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>

#include "checkpoint/run_folder.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class Store : public StoreTest {
 protected:
  std::string write(const CheckpointStore& store, int64_t step) {
    CheckpointWriter writer(store, step);
    writer.add_text("step.txt", std::to_string(step));
    return writer.commit();
  }

  std::vector<int64_t> steps() const { return store::committed_steps(run_); }
};

/// A process that runs `body`, and says over a pipe what it returned.
class Child {
 public:
  explicit Child(const std::function<std::string()>& body) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      std::string said;
      try {
        at::set_num_threads(1);  // after a fork libtorch makes its pool anew, on one thread
        said = body();
      } catch (const std::exception& error) {
        said = error.what();
      }
      said += '\n';
      if (::write(ends[1], said.data(), said.size()) < 0) ::_exit(1);
      ::pause();
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~Child() {
    kill();
    ::close(out_);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string line() const {
    std::string text;
    for (char c = 0; ::read(out_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
};

TEST_F(Store, RanksWriteTheirOwnFilesAndAllOfThemAreThere) {
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      CheckpointStore store(run_ + "/deep/down//", group);
      CheckpointWriter writer(store, world);
      if (rank == 0) {
        // Weights bigger than memory: one by one, in any order, with collectives between them.
        writer.begin_tensors("model.safetensors", {{"w", at::kFloat, {2, 3}}, {"b", at::kBFloat16, {}}}, {{"k", "v"}});
        writer.write_tensor("model.safetensors", "b", at::scalar_tensor(2.5, at::kBFloat16));
      }
      group.barrier();
      if (rank == 0) writer.write_tensor("model.safetensors", "w", at::arange(6, at::kFloat).view({3, 2}).t());
      writer.add_text("random-" + std::to_string(rank) + ".json", std::string(rank, 'x'));
      EXPECT_EQ(writer.commit(), run_ + "/deep/down/step-0000000" + std::to_string(world));
      EXPECT_EQ(latest_checkpoint(store.folder()), run_ + "/deep/down/step-0000000" + std::to_string(world));
      Checkpoint(*latest_checkpoint(store.folder())).verify(group);
    });
    const Checkpoint checkpoint(*latest_checkpoint(run_ + "/deep/down"));
    EXPECT_EQ(checkpoint.step(), world);
    EXPECT_EQ(checkpoint.world_size(), world);
    EXPECT_EQ(checkpoint.files().size(), static_cast<size_t>(world) + 1);
    EXPECT_EQ(names_in(checkpoint.path()).size(), static_cast<size_t>(world) + 2);
    EXPECT_EQ(checkpoint.text("random-" + std::to_string(world - 1) + ".json"), std::string(world - 1, 'x'));
    EXPECT_TRUE(
        same_bits(checkpoint.load_tensor("model.safetensors", "w"), at::arange(6, at::kFloat).view({3, 2}).t()));
    EXPECT_TRUE(same_bits(SafetensorsFile(checkpoint.path() + "/model.safetensors").load("b"),
                          at::scalar_tensor(2.5, at::kBFloat16)));
  }
}

TEST_F(Store, PruningKeepsTheLastAndEveryKth) {
  CheckpointStore store(run_, ProcessGroup(), {.keep_last = 2, .keep_every = 30});
  for (int64_t step = 10; step <= 100; step += 10) write(store, step);
  EXPECT_THAT(steps(), ::testing::ElementsAre(30, 60, 90, 100));
  write(store, 20);  // an older step, after going back: it stays
  EXPECT_THAT(steps(), ::testing::ElementsAre(20, 30, 60, 90, 100));
  write(store, 110);
  EXPECT_THAT(steps(), ::testing::ElementsAre(30, 60, 90, 100, 110));
  EXPECT_EQ(names_in(run_).size(), 6u) << "nothing but these and the lock";
}

TEST(Pruning, Rules) {
  using store::expired;
  EXPECT_THAT(expired({}, 0, 1, 0), ::testing::IsEmpty());
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 1, 0), ::testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 4, 0), ::testing::IsEmpty());
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 9, 0), ::testing::IsEmpty());
  EXPECT_THAT(expired({0, 1, 2, 3}, 1, 1, 0), ::testing::ElementsAre(0, 2));
  EXPECT_THAT(expired({0, 1, 2, 3, 4, 5}, 5, 1, 2), ::testing::ElementsAre(1, 3));
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 1, 1), ::testing::IsEmpty());
}

TEST(FolderNames, OnlyOursCount) {
  EXPECT_EQ(store::step_name(120), "step-00000120");
  EXPECT_EQ(store::step_of_name("step-00000120"), 120);
  EXPECT_EQ(store::step_of_name("step-123456789012"), 123456789012);
  for (const char* name : {"step-120", "step-", "step-000000120", "step-0000012x", "step--0000012", "xstep-00000120",
                           "step-00000120~", ""}) {
    EXPECT_EQ(store::step_of_name(name), std::nullopt) << name;
  }
  EXPECT_TRUE(store::is_partial_name(store::partial_name(7)));
  EXPECT_NE(store::partial_name(7), store::partial_name(7));
  for (const char* name : {".step-00000120", "step-00000120.partial-1", ".step-1.partial-1", ".partial-1", ""}) {
    EXPECT_FALSE(store::is_partial_name(name)) << name;
  }
}

TEST_F(Store, TheLatestIsTheHighestCommittedStep) {
  EXPECT_EQ(latest_checkpoint(run_), std::nullopt);
  CheckpointStore store(run_);
  EXPECT_EQ(latest_checkpoint(run_), std::nullopt);
  write(store, 9);
  write(store, 123456789);
  write(store, 10);
  for (const char* name : {"step-999999999.old", ".step-99999999.partial-1", "step-9999999999x"})
    fs::create_directory(run_ + "/" + name);
  put_contents(run_ + "/step-99999999", "a file");
  EXPECT_EQ(latest_checkpoint(run_), run_ + "/step-123456789");
  EXPECT_EQ(Checkpoint(*latest_checkpoint(run_)).step(), 123456789);
  EXPECT_THROW(latest_checkpoint(run_ + "/step-99999999"), Error) << "not a folder";
}

TEST_F(Store, TheSameStepAgainReplaces) {
  CheckpointStore store(run_);
  write(store, 5);
  CheckpointWriter writer(store, 5);
  writer.add_text("new.txt", "new");
  EXPECT_EQ(Checkpoint(run_ + "/step-00000005").text("step.txt"), "5") << "until commit";
  writer.commit();
  EXPECT_EQ(Checkpoint(run_ + "/step-00000005").text("new.txt"), "new");
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000005"}));
  EXPECT_THAT(usage_error([&] { writer.commit(); }), HasSubstr("done"));
  EXPECT_THAT(usage_error([&] { writer.add_text("late", ""); }), HasSubstr("after commit"));
}

TEST_F(Store, LeftoversOfDeadRunsGoAtOpening) {
  fs::create_directories(run_ + "/.step-00000003.partial-0123/deeper");
  put_contents(run_ + "/.step-00000003.partial-0123/model.safetensors", "half");
  fs::create_directories(run_ + "/.step-3.partial-mine");
  put_contents(run_ + "/notes.txt", "keep");
  CheckpointStore store(run_);
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", ".step-3.partial-mine", "notes.txt"}));
}

TEST_F(Store, ASecondWriterIsRefusedUntilTheFirstIsGone) {
  auto open = [&] { return CheckpointStore(run_).folder(); };
  Child first([&] {
    static std::optional<CheckpointStore> held;  // until the end of the process
    held.emplace(run_);
    return std::string("open");
  });
  ASSERT_EQ(first.line(), "open");
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  EXPECT_THAT(usage_error(open),
              AllOf(HasSubstr(run_), HasSubstr("pid " + std::to_string(first.pid())), HasSubstr(host)));
  Child second([&] { return open(); });
  EXPECT_THAT(second.line(), HasSubstr("pid " + std::to_string(first.pid())));
  first.kill();
  {
    CheckpointStore mine(run_);
    EXPECT_THAT(usage_error(open), HasSubstr("pid " + std::to_string(::getpid())));
    fs::remove(run_ + "/.lock");  // a lock that somebody removed is a new one's business
    const CheckpointStore copy = mine;
    mine = CheckpointStore(base_ + "/other");
    EXPECT_EQ(copy.folder(), run_);
  }
  EXPECT_EQ(open(), run_);
}

TEST_F(Store, AWriterKeepsTheLock) {
  std::optional<CheckpointStore> store(run_);
  CheckpointWriter writer(*store, 1);
  store.reset();
  EXPECT_THAT(usage_error([&] { CheckpointStore{run_}; }), HasSubstr("is being written by pid"));
  writer.commit();
}

TEST_F(Store, OptionsAndFoldersThatWillNotDo) {
  EXPECT_THAT(usage_error([&] { CheckpointStore(run_, {}, {.keep_last = 0}); }), HasSubstr("keep_last is 0"));
  EXPECT_THAT(usage_error([&] { CheckpointStore(run_, {}, {.keep_every = -1}); }), HasSubstr("keep_every is -1"));
  EXPECT_THAT(usage_error([&] { CheckpointStore(""); }), HasSubstr("empty"));
  put_contents(base_ + "/file", "");
  EXPECT_THAT(usage_error([&] { CheckpointStore(base_ + "/file"); }), HasSubstr(base_ + "/file is not a folder"));
  EXPECT_THAT(usage_error([&] { CheckpointStore(base_ + "/file/run"); }), HasSubstr(base_ + "/file/run"));
  CheckpointStore store(run_);
  EXPECT_THAT(usage_error([&] { CheckpointWriter(store, -1); }), HasSubstr("step is -1"));
  EXPECT_EQ(names_in(run_), std::set<std::string>{".lock"});
}

/// Adds of one rank that fail, and what must be in the text besides the rank.
struct Failure {
  std::function<void(CheckpointWriter&)> add;
  std::string text;
};

TEST_F(Store, AnErrorOnOneRankIsAnErrorOnAll) {
  const std::vector<Failure> failures = {
      {[](auto& writer) { writer.add_text("a/b", ""); }, "\"a/b\""},
      {[](auto& writer) { writer.add_text("manifest.json", ""); }, "manifest.json"},
      {[](auto& writer) { writer.add_text(".hidden", ""); }, ".hidden"},
      {[](auto& writer) { writer.add_text("x", ""), writer.add_text("x", ""); }, "/x is added twice"},
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
         writer.begin_tensors("t", {{"u", at::kFloat, {2}}}), writer.write_tensor("t", "u", at::ones(3));
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
        if (rank == 0) EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000001"})) << failure.text;
      });
    }
  }
  Checkpoint(*latest_checkpoint(run_)).verify();
}

TEST_F(Store, RanksThatDoNotFitTogether) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    CheckpointStore store(run_, group);
    {
      CheckpointWriter writer(store, 1);
      writer.add_text("same", std::string(rank, 'x'));
      EXPECT_THAT(usage_error([&] { writer.commit(); }), HasSubstr("same is written by ranks 0 and 1"));
    }
    EXPECT_THAT(usage_error([&] { CheckpointWriter(store, 1 + rank); }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("step 2 here")));
    { CheckpointWriter left(store, 4); }
    group.barrier();
    if (rank == 0)
      EXPECT_EQ(names_in(run_), std::set<std::string>{".lock"}) << "writers that nobody committed leave nothing";
  });
  const auto errors = run_ranks_catching(
      2, [&](ProcessGroup group, int rank) { CheckpointStore store(rank == 0 ? run_ : base_ + "/elsewhere", group); });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error),
                AllOf(HasSubstr("rank 1: "), HasSubstr("elsewhere"), HasSubstr("all ranks must see")));
}

TEST_F(Store, ADiskThatRefusesIsAnErrorOnAll) {
  const std::string run = run_;
  // A file bigger than the process may write: as a full disk, half-way through the file.
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
  const auto said = child.line();
  EXPECT_THAT(said, AllOf(HasSubstr("rank 1: "), HasSubstr("/big.safetensors: writing"), HasSubstr("File too large"),
                          HasSubstr("| .lock step-00000001 ")));
  Checkpoint(*latest_checkpoint(run_)).verify();
}

TEST_F(Store, AFolderThatGoesAwayIsAnErrorOnAll) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    CheckpointStore store(run_, group);
    CheckpointWriter writer(store, 1);
    if (rank == 0) writer.add_text("here", "");
    group.barrier();
    if (rank == 1) {
      for (const auto& name : names_in(run_)) {
        if (store::is_partial_name(name)) fs::remove_all(run_ + "/" + name);
      }
    }
    group.barrier();
    if (rank == 1) writer.add_text("gone", "");
    writer.commit();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), AllOf(HasSubstr("rank 1: "), HasSubstr("/gone"), HasSubstr("does not exist")));
}

TEST_F(Store, AFileInPlaceOfTheCheckpointIsNotReplaced) {
  CheckpointStore store(run_);
  put_contents(run_ + "/step-00000001", "mine");
  EXPECT_THAT(usage_error([&] { write(store, 1); }), AllOf(HasSubstr("step-00000001"), HasSubstr("Not a directory")));
  EXPECT_EQ(contents_of(run_ + "/step-00000001"), "mine");
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000001"}));
}

/// Root may do everything, so what a folder's permissions refuse is tried as nobody.
std::string as_nobody(const std::string& base, const std::function<void()>& body) {
  fs::permissions(base, fs::perms::all);
  const Child child([&]() -> std::string {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return "setuid";
    body();
    return "nothing thrown";
  });
  return child.line();
}

TEST_F(Store, APruningThatFailsSaysThatTheCheckpointIsThere) {
  const auto said = as_nobody(base_, [&] {
    CheckpointStore store(run_, ProcessGroup(), {.keep_last = 1});
    write(store, 1);
    fs::create_directory(run_ + "/step-00000001/locked");
    put_contents(run_ + "/step-00000001/locked/file", "");
    fs::permissions(run_ + "/step-00000001/locked", fs::perms::owner_read);
    write(store, 2);
  });
  EXPECT_THAT(said, AllOf(HasSubstr("step 2 is committed, but pruning"), HasSubstr(".step-00000001.partial-"),
                          HasSubstr("Permission denied")));
  EXPECT_THAT(steps(), ::testing::ElementsAre(2));
  Checkpoint(run_ + "/step-00000002").verify();
  for (const auto& name : names_in(run_)) {
    if (store::is_partial_name(name)) fs::permissions(run_ + "/" + name + "/locked", fs::perms::owner_all);
  }
}

TEST_F(Store, AFolderThatCannotBeWritten) {
  const auto said = as_nobody(base_, [&] {
    fs::create_directory(run_);
    fs::permissions(run_, fs::perms::owner_read | fs::perms::owner_exec);
    CheckpointStore{run_};
  });
  EXPECT_THAT(said, AllOf(HasSubstr(run_ + ": cannot be written"), HasSubstr("Permission denied")));
}

}  // namespace
}  // namespace tessera
