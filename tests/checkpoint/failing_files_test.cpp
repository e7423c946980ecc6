// File operations that fail while checkpoints and weights are written and read. The program
// file_operations tries all of them; these are the rules, one by one.

#include "faults/failing_files.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <sstream>

#include <fcntl.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include "checkpoint/child.h"
#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"
#include "tessera/detail/folders.h"
#include "tessera/detail/write_file.h"
#include "tessera/save_weights.h"
#include "tessera/weights/weights.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The lines that the library logs meanwhile.
class Logged {
 public:
  Logged() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  ~Logged() { spdlog::set_default_logger(before_); }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::shared_ptr<spdlog::logger> before_;
};

class FailingFiles : public StoreTest {
 protected:
  ~FailingFiles() override {
    failing_files_begin("", "", 0, false);
    failing_files_lack("");
  }
  /// Operation number `at` of `body` fails. Returns the number of operations.
  long fail(const std::string& how, long at, const std::function<void()>& body) {
    failing_files_begin(base_.c_str(), how.c_str(), at, false);
    body();
    const long count = failing_files_count();
    failing_files_begin("", "", 0, false);
    return count;
  }
  static std::string error_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
  /// Sets the time of the last change to `hours` ago.
  static void make_old(const std::string& path, int hours) {
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(hours));
  }
};

const std::string kStep0 = "/step-00000000";

TEST_F(FailingFiles, AReplacedCheckpointIsThereIfTheSecondRenameFailsOrNeverComes) {
  CheckpointStore store(run_);
  write(store, 0);
  failing_files_lack("exchange");
  const auto renames = [&](long at, const std::function<void()>& body) {
    return fail("rename:EIO", at, body);
  };
  std::string error;
  const long count = renames(0, [&] {
    CheckpointWriter undisturbed(store, 0);
    undisturbed.add_text("step.txt", "0");
    undisturbed.commit();
  });
  ASSERT_GT(count, 3);
  int named =
      0;  // failures of the renames that give the new one its name: the first is tried alone
  for (long at = 1; at <= count; ++at) {
    CheckpointWriter again(store, 0);
    again.add_text("step.txt", "new " + std::to_string(at));
    renames(at, [&] { error = error_of([&] { again.commit(); }); });
    named += error.find("renaming it to " + run_ + kStep0) != error.npos;
    Checkpoint(run_ + kStep0).verify();
    store::settle_replaced(run_);  // so that the next attempt has one version to keep
  }
  EXPECT_EQ(named, 2);
  {
    CheckpointWriter writer(store, 0);
    writer.add_text("step.txt", "new");
    writer.commit();
  }
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000000"}));
  // As after a kill between the two renames.
  fs::rename(run_ + kStep0, run_ + "/.step-00000000.replaced-01");
  EXPECT_EQ(Checkpoint(run_ + kStep0).text("step.txt"), "new");
  EXPECT_THAT(steps(), ElementsAre(0));
  run_ranks(2, [&](ProcessGroup group, int) {
    const Checkpoint checkpoint(run_ + kStep0, group);
    checkpoint.verify(group);
    EXPECT_EQ(checkpoint.text("step.txt"), "new");
  });
  store = CheckpointStore(base_ + "/other");
  const CheckpointStore next(run_);
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000000"}));
  EXPECT_EQ(Checkpoint(run_ + kStep0).text("step.txt"), "new");
}

TEST_F(FailingFiles, ASystemThatFailsOnceWhileReadingIsTriedAgain) {
  write(CheckpointStore(run_), 1);
  save_safetensors(base_ + "/w.safetensors", {{"t", at::ones(2)}});
  const auto read = [&] {
    Checkpoint(*latest_checkpoint(run_)).verify();
    EXPECT_TRUE(Weights(base_ + "/w.safetensors").load("t").eq(1).all().item<bool>());
  };
  for (const char* how : {"EIO", "ESTALE", "EMFILE"}) {
    const long count = fail(how, 0, read);
    ASSERT_GE(count, 6) << how;
    for (long at = 1; at <= count; ++at)
      fail(how, at, [&] { EXPECT_EQ(error_of(read), "") << how << " at " << at; });
  }
}

TEST_F(FailingFiles, AnErrorOfTheSystemWhileReadingIsNotDamage) {
  write(CheckpointStore(run_), 1);
  const auto read = [&] {
    const Checkpoint checkpoint(*latest_checkpoint(run_));
    checkpoint.verify();
  };
  for (const std::string how : {"EIO", "EMFILE"}) {
    const long count = fail(how, 0, read);
    for (long at = 1; at < count; at += 3) {
      fail(how + "+", at, [&] {
        try {
          read();
          ADD_FAILURE() << "nothing thrown by " << how << " from " << at;
        } catch (const CheckpointDamagedError& error) {
          ADD_FAILURE() << how << " from " << at << ": " << error.what();
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr(how == "EIO" ? "Input/output" : "Too many open"));
        }
      });
    }
  }
  run_ranks(2, [&](ProcessGroup group, int rank) {
    const Checkpoint checkpoint(*latest_checkpoint(run_), group);
    if (rank == 1) failing_files_begin(base_.c_str(), "pread:EIO+", 1, false);
    try {
      const Checkpoint other(checkpoint.path(), group);
      ADD_FAILURE() << "nothing thrown";
    } catch (const CheckpointDamagedError& error) {
      ADD_FAILURE() << error.what();
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1: "), HasSubstr("Input/output error")));
    }
  });
  failing_files_begin("", "", 0, false);
  put_contents(run_ + "/step-00000001/step.txt", "2");
  run_ranks(2, [&](ProcessGroup group, int) {
    const Checkpoint checkpoint(*latest_checkpoint(run_), group);
    EXPECT_THROW(checkpoint.verify(group), CheckpointDamagedError);
  });
}

TEST_F(FailingFiles, AFailedSyncOfTheFolderSaysThatTheCheckpointIsCommitted) {
  CheckpointStore store(run_, ProcessGroup(), {.keep_last = 9});
  const long count = fail("fsync:EIO", 0, [&] { write(store, 1); });
  std::string error;
  fail("fsync:EIO", count, [&] { error = usage_error([&] { write(store, 2); }); });
  EXPECT_THAT(error, AllOf(HasSubstr("step 2 is committed"), HasSubstr("loss of power"),
                           HasSubstr("Input/output error")));
  EXPECT_THAT(steps(), ElementsAre(1, 2));
  Checkpoint(run_ + "/step-00000002").verify();
}

TEST_F(FailingFiles, AFileSystemWithoutLocksIsALineInTheLog) {
  failing_files_lack("flock");
  const Logged log;
  CheckpointStore store(run_);
  EXPECT_THAT(log.text(), AllOf(HasSubstr(run_ + "/.lock"), HasSubstr("has no locks"),
                                HasSubstr("Function not implemented")));
  write(store, 1);
  Checkpoint(*latest_checkpoint(run_)).verify();
}

TEST_F(FailingFiles, WithoutLocksASecondRunLeavesTheFirstOnesFilesAndTheFirstNoticesIt) {
  failing_files_lack("flock");
  CheckpointStore first(run_);
  write(first, 1);
  CheckpointWriter writer(first, 2);
  writer.add_text("step.txt", "2");
  const auto partial = [&] {
    std::string found;
    for (const auto& name : names_in(run_))
      if (store::is_partial_name(name)) found = run_ + "/" + name;
    return found;
  };
  const std::string mine = partial();
  ASSERT_TRUE(fs::exists(mine + "/step.txt"));
  // As the name of a process of another host.
  put_contents(run_ + "/.lock", "pid 1 on another-host\n");
  CheckpointStore second(run_);
  EXPECT_TRUE(fs::exists(mine + "/step.txt"));
  put_contents(run_ + "/.lock", "pid 1 on another-host\n");
  EXPECT_THAT(usage_error([&] { writer.commit(); }),
              AllOf(HasSubstr(".lock was removed or changed"), HasSubstr("nothing was committed")));
  EXPECT_THAT(steps(), ElementsAre(1));
}

TEST_F(FailingFiles, FilesOfAnotherHostsRunAreRemovedWhenTheyHaveNotChangedForAnHour) {
  for (const int hours : {0, 2}) {
    const std::string partial = run_ + "/.step-00000003.partial-0123";
    fs::create_directories(partial);
    put_contents(partial + "/model.safetensors", "half");
    put_contents(run_ + "/.place-0123-1", "");
    put_contents(run_ + "/.lock", "pid 1 on another-host\n");
    for (const auto& path : {partial + "/model.safetensors", partial, run_ + "/.place-0123-1"})
      make_old(path, hours);
    const CheckpointStore store(run_);
    EXPECT_EQ(fs::exists(partial), hours == 0);
    EXPECT_EQ(fs::exists(run_ + "/.place-0123-1"), hours == 0);
  }
}

TEST_F(FailingFiles, TemporaryFilesOfAProcessThatEndedAreRemoved) {
  const std::string path = base_ + "/w.safetensors";
  const auto temporary = [&] {
    int count = 0;
    for (const auto& name : names_in(base_)) count += name.rfind(".tessera-", 0) == 0;
    return count;
  };
  Child child([&] {
    static std::optional<SafetensorsWriter> writer;  // until the end of the process
    writer.emplace(path, std::vector<SafetensorsSpec>{{"t", at::kFloat, {2}}});
    return std::string("open");
  });
  ASSERT_EQ(child.line(), "open");
  ASSERT_EQ(temporary(), 1);
  write_file(base_ + "/log", "text");
  EXPECT_EQ(temporary(), 1) << "its writer still runs";
  child.kill();
  write_file(base_ + "/log", "text");
  EXPECT_EQ(temporary(), 0);
  const std::string foreign = base_ + "/.tessera-" + own_host() + "-2@1-0-5.tmp";
  for (const int hours : {0, 2}) {
    put_contents(foreign, "");
    make_old(foreign, hours);
    write_file(base_ + "/log", "text");
    EXPECT_EQ(fs::exists(foreign), hours == 0);
  }
}

TEST_F(FailingFiles, NewFoldersAreSyncedInTheirParents) {
  const long count = fail("fsync:EIO", 0, [&] { EXPECT_FALSE(make_folder(base_ + "/a/b/c/")); });
  EXPECT_GE(count, 3);
  for (long at = 1; at <= count; ++at) {
    const std::string top = base_ + "/" + std::to_string(at);
    fail("fsync:EIO", at, [&] { EXPECT_EQ(make_folder(top + "/b/c/"), std::errc::io_error); });
  }
  EXPECT_FALSE(make_folder(base_));
  put_contents(base_ + "/file", "");
  EXPECT_TRUE(make_folder(base_ + "/file"));
}

void save(const std::string& path, double value) {
  save_weights(ProcessGroup(), path, {{"t", at::kFloat, {2}}, {"u", at::kFloat, {2}}},
               [&](size_t, int) { return at::full({2}, value); }, {.max_shard_bytes = 8});
}

double saved(const std::string& path) {
  const Weights weights(path);
  EXPECT_TRUE(at::equal(weights.load("t"), weights.load("u")));
  return weights.load("t")[0].item<double>();
}

TEST_F(FailingFiles, ASaveOfWeightsThatFailsLeavesTheFormerOne) {
  const std::string path = base_ + "/w/";
  save(path, 1);
  const auto count = fail("EIO", 0, [&] { save(path, 1); });
  int former = 0;
  for (long at = 1; at <= count; ++at) {
    std::string error;
    fail("EIO", at, [&] { error = error_of([&] { save(path, 2); }); });
    const double now = saved(path);
    ASSERT_TRUE(now == 2 || (now == 1 && !error.empty())) << at << ": " << now << " " << error;
    former += now == 1;
    save(path, 1);
    ASSERT_EQ(names_in(path).size(), 3) << at;
  }
  EXPECT_GT(former, 10);
}

TEST_F(FailingFiles, AFormerModelFileCountsUntilItIsRemovedAndItsRemovalIsSynced) {
  const std::string path = base_ + "/w/", one = path + "model.safetensors";
  const auto former = [&] { save_safetensors(one, {{"t", at::ones(2)}, {"u", at::ones(2)}}); };
  save(path, 1);
  former();
  const long removals = fail("unlink:EIO", 0, [&] { save(path, 2); });
  EXPECT_EQ(removals, 3) << "of the file and the two parts";
  for (long at = 1; at <= removals; ++at) {
    former();
    std::string error;
    fail("unlink:EIO", at, [&] { error = error_of([&] { save(path, 3); }); });
    EXPECT_THAT(error, HasSubstr("the new weights are written, but removing this file"));
    EXPECT_EQ(fs::exists(one), at == 1);
    EXPECT_EQ(saved(path), at == 1 ? 1 : 3);
  }
  former();
  const long syncs = fail("fsync:EIO", 0, [&] { save(path, 4); });
  former();
  std::string error;
  fail("fsync:EIO", syncs, [&] { error = error_of([&] { save(path, 5); }); });
  EXPECT_THAT(error, AllOf(HasSubstr("the new weights are written"), HasSubstr("loss of power")));
  EXPECT_FALSE(fs::exists(one));
  EXPECT_EQ(saved(path), 5);
}

TEST_F(FailingFiles, AFileThatCannotBeLookedAtIsNotPassedOverForAnother) {
  const std::string path = base_ + "/w/";
  save(path, 2);
  save_safetensors(path + "model.safetensors", {{"t", at::ones(2)}, {"u", at::ones(2)}});
  double value = 0;
  const auto read = [&] { value = saved(path); };
  const long count = fail("stat:EIO", 0, read);
  EXPECT_EQ(value, 1);
  for (long at = 1; at <= count; ++at) {
    std::string error;
    fail("stat:EIO+", at, [&] { error = error_of(read); });
    EXPECT_THAT(error, HasSubstr("Input/output error")) << at;
  }
}

TEST_F(FailingFiles, AnInterruptedListOrRemovalOfAFolderGoesOn) {
  const std::string folder = base_ + "/outer";
  const auto make = [&] {
    fs::create_directories(folder + "/inner");
    write_file(folder + "/inner/file", "text");
  };
  std::error_code error;
  std::vector<std::string> names;
  const auto list = [&] { names = detail::names_in(folder, error); };
  const auto remove = [&] { error = detail::remove_all(folder); };
  make();
  const long listed = fail("EINTR", 0, list), removed = fail("EINTR", 0, remove);
  ASSERT_GT(listed, 0);
  ASSERT_GT(removed, 0);
  for (long at = 1; at <= std::max(listed, removed); ++at) {
    make();
    fail("EINTR", at, list);
    EXPECT_FALSE(error) << error.message();
    EXPECT_THAT(names, ElementsAre("inner"));
    fail("EINTR", at, remove);
    EXPECT_FALSE(error) << error.message();
    EXPECT_FALSE(fs::exists(folder)) << at;
  }
}

TEST_F(FailingFiles, ALineIsWrittenWhollyOrItsErrorIsKnown) {
  const std::string path = base_ + "/log";
  for (const auto& how : {"write:EINTR", "write:short", "write:ENOSPC"}) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "we"),
                                                               &std::fclose);
    bool whole = false;
    EXPECT_GT(fail(how, 1, [&] { whole = write_through(file.get(), "first line\n"); }), 0) << how;
    if (how == std::string("write:ENOSPC")) {
      EXPECT_FALSE(whole);
      continue;
    }
    EXPECT_TRUE(whole && write_through(file.get(), "second line\n")) << how;
    EXPECT_EQ(read_file("test", path), "first line\nsecond line\n") << how;
  }
}

}  // namespace
}  // namespace tessera
