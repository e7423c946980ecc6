#include "comm/rendezvous/launch_environment.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/error.h"

namespace {

using tessera::UsageError;
using tessera::comm::LaunchEnvironment;
using ::testing::AllOf;
using ::testing::HasSubstr;

LaunchEnvironment read(const std::map<std::string, std::string>& variables) {
  return tessera::comm::read_launch_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const std::map<std::string, std::string>& variables) {
  try {
    read(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchEnvironment, NothingSetIsAWorldOfOne) {
  const auto world = read({});
  EXPECT_EQ(world.size, 1);
  EXPECT_EQ(world.launcher, "none");
}

using Variables = std::map<std::string, std::string>;

Variables slurm_step(const Variables& more) {
  Variables all = {{"SLURM_PROCID", "1"},
                   {"SLURM_STEP_NUM_TASKS", "4"},
                   {"SLURM_STEP_NUM_NODES", "2"},
                   {"SLURM_JOB_ID", "1234"},
                   {"SLURM_STEP_ID", "3"}};
  for (const auto& [name, value] : more) all[name] = value;
  return all;
}

TEST(LaunchEnvironment, AStepOfSlurmOverHostsNeedsNoAddressAndPort) {
  const Variables lists = {
      {"node7", "node7"},           {"node[01-03,7],gpu5", "node01"},
      {"gpu5,node[01-03]", "gpu5"}, {"rack[2-3]-node[10,12]-ib,x", "rack2-node10-ib"},
      {"node[007]", "node007"},     {"a.b.example,c", "a.b.example"}};
  for (const auto& [list, first] : lists)
    EXPECT_EQ(read(slurm_step({{"SLURM_STEP_NODELIST", list}})).master_address, first) << list;
  const auto world = read(slurm_step({{"SLURM_NODELIST", "b"}, {"SLURM_JOB_NODELIST", "c"}}));
  EXPECT_EQ(world.master_address, "b");
  EXPECT_EQ(read(slurm_step({{"SLURM_JOB_NODELIST", "c[1-2]"}})).master_address, "c1");
  EXPECT_EQ(world.master_port, 20000 + 2343);
  EXPECT_EQ(read(slurm_step({{"SLURM_NODELIST", "b"}, {"SLURM_STEP_ID", "4"}})).master_port,
            20000 + 2344);
  EXPECT_EQ(read(slurm_step({{"SLURM_NODELIST", "b"}, {"SLURM_STEP_RESV_PORTS", "12000-12001"}}))
                .master_port,
            12000);
}

TEST(LaunchEnvironment, WhatTheUserSetsComesBeforeSlurmsVariables) {
  auto world =
      read(slurm_step({{"SLURM_NODELIST", "b[1"}, {"MASTER_ADDR", "x"}, {"MASTER_PORT", "77"}}));
  EXPECT_EQ(world.master_address, "x");
  EXPECT_EQ(world.master_port, 77);
  EXPECT_EQ(read(slurm_step({})).master_port, 0);
  world = read(slurm_step({{"SLURM_NODELIST", "b"}, {"SLURM_STEP_NUM_NODES", "1"}}));
  EXPECT_EQ(world.master_address, "") << "one host meets in a folder";
}

TEST(LaunchEnvironment, MalformedListsOfSlurmAreErrors) {
  for (const char* list : {"node[01-03", "node]1[", "node[]", "node[a-b]", "node[-3]", "node[1,]",
                           ",node1", "node[1[2]]", "no de", "node[1-2", "http://x", "n[3-1]",
                           "n[1-2-3]", "n[1,,2]", "a,", "a,,b", "a,b c", "a(x2)"}) {
    EXPECT_THAT(error_of(slurm_step({{"SLURM_STEP_NODELIST", list}})),
                AllOf(HasSubstr("SLURM_STEP_NODELIST is '"), HasSubstr(list),
                      HasSubstr("node[01-03,7],gpu5")))
        << list;
  }
  for (const char* ports : {"x", "0", "70000", "12x"})
    EXPECT_THAT(error_of(slurm_step({{"SLURM_NODELIST", "b"}, {"SLURM_STEP_RESV_PORTS", ports}})),
                AllOf(HasSubstr("SLURM_STEP_RESV_PORTS is '"), HasSubstr("12000-12001")));
  EXPECT_THAT(error_of(slurm_step({{"SLURM_NODELIST", "b"}, {"SLURM_JOB_ID", "job"}})),
              HasSubstr("SLURM_JOB_ID is 'job'; expected a number"));
}

TEST(LaunchEnvironment, EveryLauncher) {
  auto world = read({{"RANK", "3"},
                     {"WORLD_SIZE", "4"},
                     {"LOCAL_RANK", "1"},
                     {"LOCAL_WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "10.0.0.1"},
                     {"MASTER_PORT", "29500"},
                     {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                     {"TORCHELASTIC_RESTART_COUNT", "2"},
                     {"TORCHELASTIC_RUN_ID", "7"}});
  EXPECT_EQ(world.rank, 3);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 2);
  EXPECT_TRUE(world.agent_store);
  EXPECT_EQ(world.attempt, 2);
  EXPECT_EQ(world.run, "7");
  world = read({{"OMPI_COMM_WORLD_RANK", "1"},
                {"OMPI_COMM_WORLD_SIZE", "2"},
                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                {"PMIX_NAMESPACE", "job7"}});
  EXPECT_EQ(world.launcher, "Open MPI");
  EXPECT_EQ(world.job, "job7");
  world = read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(world.launcher, "PMI");
  world = read({{"SLURM_PROCID", "1"},
                {"SLURM_STEP_NUM_TASKS", "2"},
                {"SLURM_STEP_NUM_NODES", "1"},
                {"SLURM_JOB_ID", "9"},
                {"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(world.launcher, "Slurm");
  EXPECT_EQ(world.size_variable, "SLURM_STEP_NUM_TASKS");
  EXPECT_EQ(world.local_size, 2);
  EXPECT_EQ(world.job, "9.0");
}

TEST(LaunchEnvironment, SlurmOnSeveralHosts) {
  const std::map<std::string, std::string> task = {
      {"SLURM_PROCID", "5"},         {"SLURM_NTASKS", "8"},
      {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "1"},
      {"SLURM_NODEID", "1"},         {"SLURM_NNODES", "2"},
      {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_NODELIST", "node[1-2]"},
      {"SLURM_JOB_ID", "9"},         {"SLURM_STEP_ID", "3"}};
  auto world = read(task);
  EXPECT_EQ(world.rank, 5);
  EXPECT_EQ(world.size, 8);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, std::nullopt) << "tasks may lie unevenly";
  EXPECT_EQ(world.job, "9.3") << "another step of the job is another world";
  EXPECT_EQ(world.master_address, "node1") << "the first host of the step";
  auto with_address = task;
  with_address.insert({{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}});
  world = read(with_address);
  EXPECT_EQ(world.launcher, "Slurm");
  EXPECT_EQ(world.master_address, "node1");
  EXPECT_EQ(world.master_port, 29500);
  with_address.erase("MASTER_PORT");
  EXPECT_THAT(error_of(with_address), HasSubstr("MASTER_ADDR is set but MASTER_PORT is not"));
  auto wrong = task;
  wrong["SLURM_LOCALID"] = "one";
  EXPECT_THAT(error_of(wrong), HasSubstr("SLURM_LOCALID is 'one'"));
}

// For messages before a group exists: never an error, whatever the variables hold.
TEST(LaunchEnvironment, LauncherRankOfEveryLauncher) {
  const auto rank_of = [](const std::map<std::string, std::string>& variables) {
    const auto place = tessera::comm::read_launcher_rank([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
    return std::pair(place.rank, place.local_rank);
  };
  using Place = std::pair<int, std::optional<int>>;
  EXPECT_EQ(rank_of({}), Place(0, std::nullopt));
  EXPECT_EQ(rank_of({{"RANK", "3"}, {"LOCAL_RANK", "1"}, {"SLURM_PROCID", "7"}}), Place(3, 1));
  EXPECT_EQ(rank_of({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
            Place(3, 0));
  EXPECT_EQ(rank_of({{"PMI_RANK", "2"}, {"MPI_LOCALRANKID", "2"}}), Place(2, 2));
  EXPECT_EQ(rank_of({{"SLURM_PROCID", "5"}, {"SLURM_LOCALID", "1"}}), Place(5, 1));
  EXPECT_EQ(rank_of({{"PMI_RANK", "2"}}), Place(2, std::nullopt));
  EXPECT_EQ(rank_of({{"RANK", "two"}, {"LOCAL_RANK", ""}}), Place(0, std::nullopt));
}

TEST(LaunchEnvironment, TorchrunsVariablesComeFirst) {
  const auto world = read({{"RANK", "0"},
                           {"WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_RANK", "5"},
                           {"OMPI_COMM_WORLD_SIZE", "6"}});
  EXPECT_EQ(world.launcher, "torchrun");
  EXPECT_EQ(world.size, 2);
}

// The variables as Slurm 22.05 sets them.
TEST(LaunchEnvironment, ABatchScriptOfSlurmIsNotARank) {
  const auto world = read({{"SLURM_PROCID", "0"},
                           {"SLURM_NTASKS", "8"},
                           {"SLURM_LOCALID", "0"},
                           {"SLURM_NNODES", "1"},
                           {"SLURM_JOB_ID", "9"},
                           {"ENVIRONMENT", "BATCH"}});
  EXPECT_EQ(world.size, 1);
  EXPECT_EQ(world.launcher, "none");
}

TEST(LaunchEnvironment, SlurmsJobVariablesAreUsedWithoutThoseOfAStep) {
  const auto world = read({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_NNODES", "1"}});
  EXPECT_EQ(world.launcher, "Slurm");
  EXPECT_EQ(world.size, 2);
  EXPECT_EQ(world.local_size, 2);
}

TEST(LaunchEnvironment, SlurmsStepVariablesTakePrecedenceOverTheJobs) {
  const auto world = read({{"SLURM_PROCID", "1"},
                           {"SLURM_NTASKS", "8"},
                           {"SLURM_STEP_NUM_TASKS", "2"},
                           {"SLURM_LOCALID", "1"},
                           {"SLURM_NNODES", "2"},
                           {"SLURM_STEP_NUM_NODES", "1"}});
  EXPECT_EQ(world.size, 2);
  EXPECT_EQ(world.local_size, 2);
}

TEST(LaunchEnvironment, PmiVariablesOfSlurmItselfAndOfAnMpiexecInsideAStep) {
  std::map<std::string, std::string> both = {{"PMI_RANK", "1"},
                                             {"PMI_SIZE", "2"},
                                             {"PMI_JOBID", "9.0"},
                                             {"SLURM_PROCID", "1"},
                                             {"SLURM_STEP_NUM_TASKS", "2"},
                                             {"SLURM_STEP_NUM_NODES", "1"},
                                             {"SLURM_LOCALID", "1"},
                                             {"SLURM_JOB_ID", "9"},
                                             {"SLURM_STEP_ID", "0"}};
  auto world = read(both);
  EXPECT_EQ(world.launcher, "Slurm");
  EXPECT_EQ(world.local_size, 2);
  both["PMI_RANK"] = "3";
  both["PMI_SIZE"] = "4";
  world = read(both);
  EXPECT_EQ(world.launcher, "PMI");
  EXPECT_EQ(world.rank, 3);
  EXPECT_EQ(world.size, 4);
}

TEST(LaunchEnvironment, ErrorsNameTheVariable) {
  EXPECT_THAT(error_of({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is 'x'"));
  EXPECT_THAT(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK is 2; expected less than WORLD_SIZE"));
  EXPECT_THAT(error_of({{"RANK", "0"}}), HasSubstr("RANK is set but WORLD_SIZE is not"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}), HasSubstr("WORLD_SIZE is set but RANK is not"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE is '0'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}}),
              HasSubstr("MASTER_ADDR is set but MASTER_PORT is not"));
  EXPECT_THAT(
      error_of(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "99999"}}),
      HasSubstr("MASTER_PORT is '99999'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}}),
              HasSubstr("LOCAL_WORLD_SIZE is 3"));
  EXPECT_THAT(
      error_of(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "5"}, {"LOCAL_WORLD_SIZE", "2"}}),
      HasSubstr("LOCAL_RANK is 5; expected less than LOCAL_WORLD_SIZE, which is 2"));
  EXPECT_THAT(error_of({{"SLURM_PROCID", "4"}, {"SLURM_NTASKS", "4"}}),
              HasSubstr("SLURM_PROCID is 4; expected less than SLURM_NTASKS, which is 4"));
  EXPECT_THAT(
      error_of({{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "2"}}),
      HasSubstr("expected less than SLURM_STEP_NUM_TASKS, which is 2"));
}

}  // namespace
