// Checkpoints of hosts that do not share the folder: each host has a folder of its own with the
// files of its ranks. Ranks with different folders stand for the hosts.

#include "checkpoint/store_fixture.h"
#include "harness/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kElements = 1000;

class Hosts : public StoreTest {
 protected:
  std::string folder_of(int host) const { return base_ + "/host-" + std::to_string(host); }

  /// Runs one rank for each entry of `hosts` with the folder of that host.
  void on(const std::vector<int>& hosts,
          const std::function<void(ProcessGroup, const std::string& folder)>& body) const {
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) { body(group, folder_of(hosts[rank])); });
  }

  static at::Tensor whole(int64_t step) { return at::arange(step, step + kElements, at::kDouble); }

  static void save(CheckpointStore& store, ProcessGroup group, int64_t step) {
    const int rank = group.rank();
    const int64_t share = kElements / group.size(), begin = rank * share;
    const int64_t numel = rank + 1 == group.size() ? kElements - begin : share;
    CheckpointWriter writer(store, step);
    StateSlice slice{{"w", {kElements}, begin, numel}, {}};
    slice.state.tensors["m"] = whole(step).narrow(0, begin, numel);
    writer.add_slices({slice});
    writer.add_tensors("part-" + std::to_string(rank) + ".safetensors",
                       {{"t", at::full({5}, rank)}});
    if (rank == 0) writer.add_text("state.json", std::to_string(step));
    writer.commit();
  }

  /// Every rank reads everything from wherever it is.
  static void expect_complete(const std::string& path, ProcessGroup group, int64_t step,
                              int writers) {
    const Checkpoint checkpoint(path, group);
    EXPECT_EQ(checkpoint.step(), step);
    checkpoint.verify(group);
    checkpoint.read_together([&] {
      EXPECT_EQ(checkpoint.text("state.json"), std::to_string(step));
      const auto slices = checkpoint.load_slices({{"w", {kElements}, 0, kElements}});
      EXPECT_TRUE(same_bits(slices[0].state.tensors.at("m"), whole(step)));
      // Ranks read different amounts.
      for (int file = 0; file < writers && file <= group.rank(); ++file) {
        const auto name = "part-" + std::to_string(file) + ".safetensors";
        EXPECT_TRUE(at::equal(checkpoint.load_tensor(name, "t"), at::full({5}, file)));
      }
    });
  }

  std::string step_of(int host, int64_t step) const {
    return folder_of(host) + "/" + store::step_name(step);
  }
};

TEST_F(Hosts, EachHostKeepsItsPartAndEveryRankReadsAll) {
  on({0, 0, 1, 2}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group, {.keep_last = 2});
    EXPECT_FALSE(store.shared());
    EXPECT_EQ(store.leads(), group.rank() != 1);
    for (const int64_t step : {1, 2, 3}) save(store, group, step);
  });
  for (const int host : {0, 1, 2}) {
    EXPECT_EQ(names_in(folder_of(host)),
              (std::set<std::string>{".lock", "step-00000002", "step-00000003"}));
    EXPECT_EQ(fs::exists(step_of(host, 3) + "/part-1.safetensors"), host == 0);
    EXPECT_EQ(fs::exists(step_of(host, 3) + "/part-3.safetensors"), host == 2);
  }
  // Other numbers of ranks, and other placements.
  for (const auto& hosts : std::vector<std::vector<int>>{
           {0, 0, 1, 2}, {0, 1, 2}, {2, 1, 0}, {2, 0, 1, 1, 2}, {1, 0, 2, 0}}) {
    on(hosts, [&](ProcessGroup group, const std::string& folder) {
      const auto latest = latest_checkpoint(folder, group);
      ASSERT_EQ(latest, folder + "/step-00000003");
      expect_complete(*latest, group, 3, 4);
    });
  }
  // A host that wrote nothing reads everything over the group.
  on({0, 1, 2, 7}, [&](ProcessGroup group, const std::string& folder) {
    expect_complete(*latest_checkpoint(folder, group), group, 3, 4);
  });
}

TEST_F(Hosts, AFileThatIsOnNoHostIsNamedWithItsWriter) {
  on({0, 1}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    save(store, group, 1);
  });
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const auto missing =
      AllOf(HasSubstr("step-00000001/"), HasSubstr("no host of this group has the file"),
            HasSubstr(std::string("(rank 1 on host ") + host + " wrote it)"));
  on({0, 0}, [&](ProcessGroup group, const std::string& folder) {
    EXPECT_THAT(usage_error([&] { Checkpoint(*latest_checkpoint(folder, group), group); }),
                missing);
  });
  EXPECT_THAT(usage_error([&] { Checkpoint(step_of(0, 1)); }),
              AllOf(HasSubstr("the file is missing"), HasSubstr("(rank 1 on host ")));
  fs::remove(step_of(1, 1) + "/part-1.safetensors");
  on({0, 1}, [&](ProcessGroup group, const std::string& folder) {
    EXPECT_THAT(usage_error([&] { Checkpoint(*latest_checkpoint(folder, group), group); }),
                AllOf(missing, HasSubstr("/part-1.safetensors")));
  });
}

TEST_F(Hosts, ACheckpointThatOneHostHasNotRenamedIsPassedOver) {
  on({0, 1}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    for (const int64_t step : {1, 2}) save(store, group, step);
  });
  // As after a kill between the renames of host 0 and host 1.
  fs::rename(step_of(1, 2), folder_of(1) + "/" + store::partial_name(2));
  on({1, 0}, [&](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    EXPECT_EQ(latest_checkpoint(folder, group), folder + "/step-00000001");
    expect_complete(*latest_sound_checkpoint(folder, group), group, 1, 2);
    save(store, group, 2);
    EXPECT_EQ(latest_checkpoint(folder, group), folder + "/step-00000002");
    expect_complete(*latest_checkpoint(folder, group), group, 2, 2);
  });
  // The same after step 2 was written again, and only one host has the new one.
  const auto copy = base_ + "/old";
  fs::copy(step_of(1, 2), copy, fs::copy_options::recursive);
  on({0, 1}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    save(store, group, 2);
  });
  fs::remove_all(step_of(1, 2));
  fs::rename(copy, step_of(1, 2));
  on({0, 1}, [&](ProcessGroup group, const std::string& folder) {
    EXPECT_EQ(latest_checkpoint(folder, group), folder + "/step-00000001");
    EXPECT_THAT(usage_error([&] { Checkpoint(folder + "/step-00000002", group); }),
                HasSubstr("ranks 0 and 1 have different ones"));
  });
}

TEST_F(Hosts, AReplacementThatOneHostHasNotMadeLeavesTheFormerCheckpoint) {
  const auto save_two = [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    save(store, group, 2);
  };
  on({0, 1}, save_two);
  for (const int host : {0, 1})
    fs::copy(step_of(host, 2), base_ + "/old-" + std::to_string(host), fs::copy_options::recursive);
  on({0, 1}, save_two);
  // As after a kill between the renames of host 0 and host 1.
  const std::string former = "/.step-00000002.replaced-01";
  fs::rename(base_ + "/old-0", folder_of(0) + former);
  fs::remove_all(step_of(1, 2));
  fs::rename(base_ + "/old-1", step_of(1, 2));
  for (const bool writes : {false, true}) {
    on({0, 1}, [&](ProcessGroup group, const std::string& folder) {
      std::optional<CheckpointStore> store;
      if (writes) store.emplace(folder, group);
      EXPECT_EQ(latest_checkpoint(folder, group), folder + "/step-00000002");
      expect_complete(folder + "/step-00000002", group, 2, 2);
      const Checkpoint checkpoint(folder + "/step-00000002", group);
      EXPECT_EQ(checkpoint.path(), group.rank() == 0 ? folder + former : step_of(1, 2));
    });
  }
  on({0, 1}, save_two);
  for (const int host : {0, 1})
    EXPECT_EQ(names_in(folder_of(host)), (std::set<std::string>{".lock", "step-00000002"}));
}

TEST_F(Hosts, ARenameThatFailsOnOneHostIsUndoneOnTheOthers) {
  on({0, 1, 1}, [&](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    for (const int64_t step : {1, 2}) save(store, group, step);
    group.barrier();
    if (group.rank() == 1) put_contents(folder + "/step-00000003", "mine");
    group.barrier();
    EXPECT_THAT(usage_error([&] { save(store, group, 3); }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("step-00000003")));
    group.barrier();
    if (group.rank() == 1) fs::remove(folder + "/step-00000003");
    group.barrier();
    EXPECT_EQ(names_in(folder), (std::set<std::string>{".lock", "step-00000001", "step-00000002"}));
    expect_complete(*latest_checkpoint(folder, group), group, 2, 3);
    save(store, group, 3);
    expect_complete(*latest_checkpoint(folder, group), group, 3, 3);
  });
}

TEST_F(Hosts, DamageOnOneHostIsAnErrorOnAll) {
  on({0, 1}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    save(store, group, 1);
  });
  const std::string file = step_of(1, 1) + "/part-1.safetensors";
  put_byte(file, fs::file_size(file) - 1, 'x');
  on({0, 1}, [&](ProcessGroup group, const std::string& folder) {
    const Checkpoint checkpoint(folder + "/step-00000001", group);
    EXPECT_THAT(usage_error([&] { checkpoint.verify(group); }),
                AllOf(HasSubstr("rank 1: "), HasSubstr("part-1.safetensors"),
                      HasSubstr("does not match its digest")));
    // Rank 0 gets the damaged bytes from rank 1.
    EXPECT_THAT(usage_error([&] {
                  checkpoint.read_together([&] {
                    if (group.rank() == 0) checkpoint.load_tensor("part-1.safetensors", "t");
                  });
                }),
                AllOf(HasSubstr("rank 0: "), HasSubstr("does not match its digest")));
    if (group.rank() == 0)
      EXPECT_THAT(usage_error([&] { checkpoint.load_tensor("part-1.safetensors", "t"); }),
                  AllOf(HasSubstr("part-1.safetensors"), HasSubstr("read_together()")));
    // A file that vanishes while the checkpoint is open.
    group.barrier();
    if (group.rank() == 1) fs::remove(file);
    group.barrier();
    EXPECT_THAT(usage_error([&] {
                  checkpoint.read_together([&] {
                    if (group.rank() == 0) checkpoint.load_tensor("part-1.safetensors", "t");
                  });
                }),
                AllOf(HasSubstr("part-1.safetensors"), HasSubstr("on rank 1 failed"),
                      HasSubstr("No such file")));
  });
}

TEST_F(Hosts, AnUnsoundCheckpointIsMarkedOnEveryHost) {
  on({0, 1}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    save(store, group, 1);
    CheckpointWriter writer(store, 2);
    if (group.rank() == 1) writer.add_tensors("bad.safetensors", {{"t", at::full({2}, NAN)}});
    writer.commit();
    EXPECT_EQ(latest_sound_checkpoint(folder, group), folder + "/step-00000001");
    EXPECT_THAT(unsound_tensors(folder + "/step-00000002"), HasSubstr("bad.safetensors: t: NaN"));
    Checkpoint(folder + "/step-00000002", group).verify(group);
  });
}

TEST_F(Hosts, ASecondWriterOfAnyHostsFolderIsRefused) {
  on({0, 1}, [](ProcessGroup group, const std::string& folder) {
    CheckpointStore store(folder, group);
    group.barrier();
    if (group.rank() == 1)
      EXPECT_THAT(usage_error([&] { CheckpointStore{folder}; }), HasSubstr("is being written by"));
    group.barrier();
  });
}

}  // namespace
}  // namespace tessera
