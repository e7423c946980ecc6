// The folder of a run: one writer, complete checkpoints only, pruning.

#include "checkpoint/child.h"
#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Store : public StoreTest {};

TEST_F(Store, EveryRankWritesItsOwnFiles) {
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      CheckpointStore store(run_ + "/deep/down//", group);
      CheckpointWriter writer(store, world);
      if (rank == 0) {
        // One tensor at a time, in any order, with collectives in between.
        writer.begin_tensors("model.safetensors",
                             {{"w", at::kFloat, {2, 3}}, {"b", at::kBFloat16, {}}}, {{"k", "v"}});
        writer.write_tensor("model.safetensors", "b", at::scalar_tensor(2.5, at::kBFloat16));
      }
      group.barrier();
      if (rank == 0)
        writer.write_tensor("model.safetensors", "w", at::arange(6, at::kFloat).view({3, 2}).t());
      writer.add_text("random-" + std::to_string(rank) + ".json", std::string(rank, 'x'));
      EXPECT_EQ(writer.commit(), run_ + "/deep/down/step-0000000" + std::to_string(world));
      EXPECT_EQ(latest_checkpoint(store.folder()),
                run_ + "/deep/down/step-0000000" + std::to_string(world));
      Checkpoint(*latest_checkpoint(store.folder())).verify(group);
    });
    const Checkpoint checkpoint(*latest_checkpoint(run_ + "/deep/down"));
    EXPECT_EQ(checkpoint.step(), world);
    EXPECT_EQ(checkpoint.world_size(), world);
    EXPECT_EQ(checkpoint.files().size(), static_cast<size_t>(world) + 1);
    EXPECT_EQ(names_in(checkpoint.path()).size(), static_cast<size_t>(world) + 2);
    EXPECT_EQ(checkpoint.text("random-" + std::to_string(world - 1) + ".json"),
              std::string(world - 1, 'x'));
    EXPECT_TRUE(same_bits(checkpoint.load_tensor("model.safetensors", "w"),
                          at::arange(6, at::kFloat).view({3, 2}).t()));
    EXPECT_TRUE(same_bits(SafetensorsFile(checkpoint.path() + "/model.safetensors").load("b"),
                          at::scalar_tensor(2.5, at::kBFloat16)));
  }
}

TEST_F(Store, PruningKeepsTheLastAndEveryKth) {
  CheckpointStore store(run_, ProcessGroup(), {.keep_last = 2, .keep_every = 30});
  for (int64_t step = 10; step <= 100; step += 10) write(store, step);
  EXPECT_THAT(steps(), ::testing::ElementsAre(30, 60, 90, 100));
  write(store, 20);  // an older step that was just written stays
  EXPECT_THAT(steps(), ::testing::ElementsAre(20, 30, 60, 90, 100));
  write(store, 110);
  EXPECT_THAT(steps(), ::testing::ElementsAre(30, 60, 90, 100, 110));
  EXPECT_EQ(names_in(run_).size(), 6u) << "only these and the lock";
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
  // Unsound ones never count as good ones.
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 1, 0, {2, 3}), ::testing::ElementsAre(0, 2));
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 2, 0, {2, 3}), ::testing::IsEmpty());
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 1, 1, {1, 2}), ::testing::ElementsAre(1, 2));
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 2, 0, {0, 1, 2, 3}), ::testing::ElementsAre(0, 1));
  EXPECT_THAT(expired({0, 1, 2, 3}, 1, 1, 0, {1}), ::testing::ElementsAre(0, 2));
  // Best ones stay, and do not count.
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 2, 0, {}, {1}), ::testing::ElementsAre(0));
  EXPECT_THAT(expired({0, 1, 2, 3}, 3, 1, 0, {}, {2, 9}), ::testing::ElementsAre(0, 1));
}

TEST_F(Store, ACheckpointWithNaNOrInfinityIsMarkedAndReplacesNoSoundOne) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    CheckpointStore store(run_, group, {.keep_last = 1});
    const auto write = [&](int64_t step, const at::Tensor& of_rank_1) {
      CheckpointWriter writer(store, step);
      const at::Tensor mask = at::full({3, 3}, -INFINITY).triu(1);
      if (rank == 0) {
        writer.add_tensors("w.safetensors", {{"mask", mask}, {"whole", at::arange(3)}});
      } else {
        StateSlice slice{{"weight", {4}, 0, 4}, {}};
        slice.state.tensors["momentum"] = of_rank_1;
        writer.add_slices({slice});
      }
      return writer.commit();
    };
    EXPECT_EQ(Checkpoint(write(1, at::ones({4}))).unsound(), "");
    const Checkpoint bad(write(2, at::tensor({1.f, NAN, INFINITY, NAN})));
    const std::string text =
        "optimizer-00001-of-00002.safetensors: weight/momentum: NaN in 2 and infinity in 1 of "
        "4 "
        "elements\n";
    EXPECT_EQ(bad.unsound(), text);
    EXPECT_EQ(bad.text("unsound.txt"), text);
    bad.verify(group);
    EXPECT_EQ(latest_checkpoint(run_), run_ + "/step-00000002");
    EXPECT_EQ(latest_sound_checkpoint(run_), run_ + "/step-00000001");
    group.barrier();
    write(3, at::full({4}, 1e38f));  // the sum overflows, no element does
    EXPECT_EQ(latest_sound_checkpoint(run_), run_ + "/step-00000003");
    EXPECT_THAT(store::committed_steps(run_), ::testing::ElementsAre(3));
    group.barrier();
    CheckpointWriter writer(store, 4);
    if (rank == 0) writer.add_text("unsound.txt", "");
    EXPECT_THAT(thrown_by([&] { writer.commit(); }), HasSubstr("expected another name"));
  });
}

TEST(FolderNames, OnlyExactNamesAreRecognized) {
  EXPECT_EQ(store::step_name(120), "step-00000120");
  EXPECT_EQ(store::step_of_name("step-00000120"), 120);
  EXPECT_EQ(store::step_of_name("step-123456789012"), 123456789012);
  for (const char* name : {"step-120", "step-", "step-000000120", "step-0000012x", "step--0000012",
                           "xstep-00000120", "step-00000120~", ""})
    EXPECT_EQ(store::step_of_name(name), std::nullopt) << name;
  EXPECT_TRUE(store::is_partial_name(store::partial_name(7)));
  EXPECT_NE(store::partial_name(7), store::partial_name(7));
  for (const char* name :
       {".step-00000120", "step-00000120.partial-1", ".step-1.partial-1", ".partial-1", ""})
    EXPECT_FALSE(store::is_partial_name(name)) << name;
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

TEST_F(Store, CommittingAStepAgainReplacesIt) {
  CheckpointStore store(run_);
  write(store, 5);
  CheckpointWriter writer(store, 5);
  writer.add_text("new.txt", "new");
  EXPECT_EQ(Checkpoint(run_ + "/step-00000005").text("step.txt"), "5") << "until commit";
  writer.commit();
  EXPECT_EQ(Checkpoint(run_ + "/step-00000005").text("new.txt"), "new");
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000005"}));
  EXPECT_THAT(usage_error([&] { writer.commit(); }), HasSubstr("has committed"));
  EXPECT_THAT(usage_error([&] { writer.add_text("late", ""); }), HasSubstr("after commit"));
}

TEST_F(Store, OpeningRemovesUnfinishedCheckpoints) {
  fs::create_directories(run_ + "/.step-00000003.partial-0123/deeper");
  put_contents(run_ + "/.step-00000003.partial-0123/model.safetensors", "half");
  fs::create_directories(run_ + "/.step-3.partial-mine");
  put_contents(run_ + "/notes.txt", "keep");
  CheckpointStore store(run_);
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", ".step-3.partial-mine", "notes.txt"}));
}

TEST_F(Store, ASecondWriterIsRefusedUntilTheFirstHasEnded) {
  auto open = [&] { return CheckpointStore(run_).folder(); };
  Child first([&] {
    static std::optional<CheckpointStore> held;  // until the end of the process
    held.emplace(run_);
    return std::string("open");
  });
  ASSERT_EQ(first.line(), "open");
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  EXPECT_THAT(
      usage_error(open),
      AllOf(HasSubstr(run_), HasSubstr("pid " + std::to_string(first.pid())), HasSubstr(host)));
  Child second([&] { return open(); });
  EXPECT_THAT(second.line(), HasSubstr("pid " + std::to_string(first.pid())));
  first.kill();
  {
    CheckpointStore mine(run_);
    EXPECT_THAT(usage_error(open), HasSubstr("pid " + std::to_string(::getpid())));
    fs::remove(run_ + "/.lock");  // a new lock file does not depend on the removed one
    const CheckpointStore copy = mine;
    mine = CheckpointStore(base_ + "/other");
    EXPECT_EQ(copy.folder(), run_);
  }
  EXPECT_EQ(open(), run_);
}

TEST_F(Store, ALockThatIsSomebodysFileIsRefusedAndLeftAlone) {
  fs::create_directories(run_);
  const auto file = base_ + "/thesis.txt", lock = run_ + "/.lock";
  put_contents(file, "all of it");
  fs::create_symlink(file, lock);
  EXPECT_THAT(usage_error([&] { CheckpointStore{run_}; }),
              AllOf(HasSubstr(lock), HasSubstr("is a symbolic link")));
  fs::remove(lock);
  fs::create_hard_link(file, lock);
  EXPECT_THAT(usage_error([&] { CheckpointStore{run_}; }),
              HasSubstr("is a file with another name"));
  fs::remove(lock);
  fs::create_directory(lock);
  EXPECT_ANY_THROW(CheckpointStore{run_});
  EXPECT_EQ(contents_of(file), "all of it");
}

TEST_F(Store, ARemovedLockIsNoticedBeforeTheCommit) {
  CheckpointStore store(run_);
  CheckpointWriter first(store, 1);
  first.commit();
  fs::remove(run_ + "/.lock");
  CheckpointStore other(run_);  // now two runs have the folder
  CheckpointWriter second(store, 2);
  EXPECT_THAT(
      usage_error([&] { second.commit(); }),
      AllOf(HasSubstr(run_ + "/.lock was removed or changed"), HasSubstr("nothing was committed")));
  EXPECT_EQ(names_in(run_), (std::set<std::string>{".lock", "step-00000001"}));
  CheckpointWriter(other, 3).commit();
}

TEST_F(Store, AWriterKeepsTheLock) {
  std::optional<CheckpointStore> store(run_);
  CheckpointWriter writer(*store, 1);
  store.reset();
  EXPECT_THAT(usage_error([&] { CheckpointStore{run_}; }), HasSubstr("is being written by pid"));
  writer.commit();
}

TEST_F(Store, InvalidOptionsAndFoldersAreRefused) {
  EXPECT_THAT(usage_error([&] { CheckpointStore(run_, {}, {.keep_last = 0}); }),
              HasSubstr("keep_last is 0"));
  EXPECT_THAT(usage_error([&] { CheckpointStore(run_, {}, {.keep_every = -1}); }),
              HasSubstr("keep_every is -1"));
  EXPECT_THAT(usage_error([&] { CheckpointStore(""); }), HasSubstr("empty"));
  put_contents(base_ + "/file", "");
  EXPECT_THAT(usage_error([&] { CheckpointStore(base_ + "/file"); }),
              HasSubstr(base_ + "/file is not a folder"));
  EXPECT_THAT(usage_error([&] { CheckpointStore(base_ + "/file/run"); }),
              HasSubstr(base_ + "/file/run"));
  CheckpointStore store(run_);
  EXPECT_THAT(usage_error([&] { CheckpointWriter(store, -1); }), HasSubstr("step is -1"));
  EXPECT_EQ(names_in(run_), std::set<std::string>{".lock"});
}

}  // namespace
}  // namespace tessera
