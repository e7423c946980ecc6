// file_operations [--most N] [--part I N] [WORD …]
// Makes each file operation of the library's writers and readers fail, transfer fewer bytes, or end
// the process, one after the other, and checks afterwards that what was complete before is still
// there. Each attempt is a forked process with one or two ranks as threads. --most: at most N
// operations for each kind of failure and rank, evenly spread. --part: only each N-th scenario,
// from I on, which is 0 to N-1. WORD: only scenarios with it in their names. Exit code 1 after
// findings.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/store/run_folder.h"
#include "faults/failing_files.h"
#include "harness/ranks.h"
#include "tessera/checkpoint_store.h"
#include "tessera/detail/write_file.h"
#include "tessera/optim/optimizer_state_file.h"
#include "tessera/save_weights.h"
#include "tessera/step/agreement.h"
#include "tessera/weights/torch_file.h"
#include "tessera/weights/weights.h"
#include "tessera/weights/weights_tools.h"
#include "train/report/log_files.h"

namespace {

using namespace tessera;
namespace fs = std::filesystem;
using testing::run_ranks;

constexpr int kSeconds = 60;  // bound of one attempt

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void expect(bool condition, const std::string& what) {
  if (!condition) throw Failed(what);
}

// What is written: tensors, each with its version in all elements.

constexpr int64_t kTensors = 3, kElements = 50;

at::Tensor tensor_of(int64_t version, int64_t i) {
  return at::arange(kElements, at::kLong).add(1000 * version + 100 * i);
}

int64_t version_in(const std::function<at::Tensor(int64_t)>& load) {
  const int64_t version = load(0)[0].item<int64_t>() / 1000;
  for (int64_t i = 0; i < kTensors; ++i)
    expect(at::equal(load(i), tensor_of(version, i)), "the tensors are of several versions");
  return version;
}

std::vector<SafetensorsSpec> specs() {
  std::vector<SafetensorsSpec> all;
  for (int64_t i = 0; i < kTensors; ++i)
    all.push_back({"t" + std::to_string(i), at::kLong, {kElements}});
  return all;
}

std::vector<std::pair<std::string, at::Tensor>> tensors_of(int64_t version) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (int64_t i = 0; i < kTensors; ++i)
    all.emplace_back("t" + std::to_string(i), tensor_of(version, i));
  return all;
}

// Scenarios

struct Place {
  ProcessGroup group;
  std::string folder;  // that of the rank's host
};

struct Scenario {
  std::string name;
  std::vector<int> hosts;  // of the ranks
  std::string lacks;
  std::function<void(const Place&)> prepare, act;
  /// The version that a reader finds, before anything else is done. Throws if there is none.
  std::function<int64_t(const Place&)> found;
  /// Writes version 3, as the next start does, and throws if anything is left behind.
  std::function<void(const Place&)> again;
  int64_t after = 2;   // the version after an undisturbed act
  bool reads = false;  // act changes nothing
};

std::string run_of(const Place& place) { return place.folder + "/run"; }

void write_step(const Place& place, int64_t step, int64_t version, int keep_last) {
  CheckpointStore store(run_of(place), place.group, {.keep_last = keep_last});
  CheckpointWriter writer(store, step);
  const int rank = place.group.rank();
  if (rank == 0) writer.add_tensors("weights.safetensors", tensors_of(version));
  writer.add_text("rank-" + std::to_string(rank), std::to_string(version));
  StateSlice slice{{"w", {2 * kElements}, 0, 2 * kElements}, {}};
  if (place.group.size() == 2) slice.begin = rank * (slice.numel = kElements);
  slice.state.tensors["m"] = at::full({slice.numel}, version, at::kLong);
  writer.add_slices({slice});
  writer.commit();
}

int64_t read_step(const Place& place, const std::string& path) {
  const Checkpoint checkpoint(path, place.group);
  checkpoint.verify(place.group);
  int64_t version = 0;
  checkpoint.read_together([&] {
    version = version_in([&](int64_t i) {
      return checkpoint.load_tensor("weights.safetensors", "t" + std::to_string(i));
    });
    for (int rank = 0; rank < checkpoint.world_size(); ++rank)
      expect(checkpoint.text("rank-" + std::to_string(rank)) == std::to_string(version),
             "a text is of another version");
    const auto slices = checkpoint.load_slices({{"w", {2 * kElements}, 0, 2 * kElements}});
    expect(slices[0].state.tensors.at("m").eq(version).all().item<bool>(),
           "slices are of another version");
  });
  return version;
}

int64_t read_latest(const Place& place) {
  const auto path = latest_sound_checkpoint(run_of(place), place.group);
  expect(path.has_value(), "there is no checkpoint");
  return read_step(place, *path);
}

void nothing_left(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    expect(name[0] != '.' || name == ".lock", "left behind: " + entry.path().string());
  }
}

void settled(const Place& place) {
  ProcessGroup(place.group).barrier();
  nothing_left(place.folder);
}

Scenario commit(std::string name, std::vector<int> hosts, bool same_step, std::string lacks) {
  const auto step = [same_step](int64_t version) { return same_step ? 0 : version; };
  return {std::move(name),
          std::move(hosts),
          std::move(lacks),
          [=](const Place& place) { write_step(place, step(1), 1, 1); },
          [=](const Place& place) { write_step(place, step(2), 2, 1); },
          [=](const Place& place) {
            return same_step ? read_step(place, run_of(place) + "/step-00000000")
                             : read_latest(place);
          },
          [=](const Place& place) {
            write_step(place, step(3), 3, 1);
            settled(place);
          }};
}

Scenario reading(std::vector<int> hosts) {
  return {"a checkpoint is read and verified",
          std::move(hosts),
          "",
          [](const Place& place) { write_step(place, 1, 1, 1); },
          [](const Place& place) {
            try {
              read_latest(place);
            } catch (const CheckpointDamagedError& error) {
              std::printf("a sound checkpoint is called damaged: %s\n", error.what());
              std::fflush(stdout);
              ::_exit(9);
            }
          },
          read_latest,
          [](const Place& place) { write_step(place, 3, 3, 1); },
          1,
          true};
}

void write_weights_to(const Place& place, const std::string& path, int64_t version) {
  save_weights(place.group, path, specs(), [&](size_t i, int to) {
    return place.group.rank() == to ? tensor_of(version, static_cast<int64_t>(i)) : at::Tensor();
  });
}

int64_t read_weights(const std::string& path) {
  const Weights weights(path);
  return version_in([&](int64_t i) { return weights.load("t" + std::to_string(i)); });
}

Scenario weights(const std::string& name, std::vector<int> hosts, const std::string& file) {
  const auto write = [file](int64_t version) {
    return [file, version](const Place& place) {
      write_weights_to(place, place.folder + "/" + file, version);
    };
  };
  return {name,
          std::move(hosts),
          "",
          write(1),
          write(2),
          [file](const Place& place) { return read_weights(place.folder + "/" + file); },
          [file](const Place& place) {
            write_weights_to(place, place.folder + "/" + file, 3);
            settled(place);
          }};
}

/// Hugging Face's libraries read model.safetensors where there is an index, too.
Scenario weights_over_one_file() {
  auto scenario = weights("a folder of weights replaces model.safetensors", {0, 0}, "w/");
  scenario.prepare = [](const Place& place) {
    if (place.group.rank() != 0) return;
    fs::create_directory(place.folder + "/w");
    save_safetensors(place.folder + "/w/model.safetensors", tensors_of(1));
  };
  scenario.found = [](const Place& place) {
    const std::string one = place.folder + "/w/model.safetensors";
    return read_weights(fs::exists(one) ? one : place.folder + "/w/");
  };
  return scenario;
}

/// model.safetensors has version 1, and an index beside it version 2.
Scenario weights_are_read() {
  auto scenario = weights("a folder of weights is read", {0}, "w/");
  scenario.prepare = [](const Place& place) {
    write_weights_to(place, place.folder + "/w/", 2);
    save_safetensors(place.folder + "/w/model.safetensors", tensors_of(1));
  };
  scenario.act = [](const Place& place) {
    if (read_weights(place.folder + "/w/") == 1) return;
    std::printf("the index is read\n");
    std::fflush(stdout);
    ::_exit(9);
  };
  scenario.after = 1;
  scenario.reads = true;
  return scenario;
}

/// The files beside weights, such as config.json.
Scenario other_files() {
  const auto from = [](const Place& place, int64_t version) {
    return place.folder + "/from-" + std::to_string(version);
  };
  const auto copy = [from](int64_t version) {
    return [from, version](const Place& place) {
      copy_other_files(from(place, version), place.folder);
    };
  };
  return {"files beside a folder of weights are copied",
          {0},
          "",
          [=](const Place& place) {
            for (const int64_t version : {1, 2, 3}) {
              fs::create_directory(from(place, version));
              write_file(from(place, version) + "/config.json",
                         std::string(static_cast<size_t>(1000 * version), 'x'));
            }
            copy(1)(place);
          },
          copy(2),
          [](const Place& place) {
            const auto size = static_cast<int64_t>(fs::file_size(place.folder + "/config.json"));
            expect(size > 0 && size % 1000 == 0, "the file is cut");
            return size / 1000;
          },
          [=](const Place& place) {
            copy(3)(place);
            settled(place);
          }};
}

Scenario optimizer_file() {
  const auto write = [](int64_t version) {
    return [version](const Place& place) {
      OptimizerStateDict dict;
      dict.groups.emplace_back().parameters = {"w"};
      for (int64_t i = 0; i < kTensors; ++i)
        dict.state["w"].tensors["t" + std::to_string(i)] = tensor_of(version, i);
      save_optimizer_state(dict, place.folder + "/o.safetensors");
    };
  };
  return {"a file of optimizer state is replaced",
          {0},
          "",
          write(1),
          write(2),
          [](const Place& place) {
            const auto dict = load_optimizer_state(place.folder + "/o.safetensors");
            return version_in(
                [&](int64_t i) { return dict.state.at("w").tensors.at("t" + std::to_string(i)); });
          },
          [=](const Place& place) {
            write(3)(place);
            settled(place);
          }};
}

Scenario text_file() {
  const auto write = [](int64_t version) {
    return [version](const Place& place) {
      check_writable(place.folder + "/log");
      write_file(place.folder + "/log", std::string(static_cast<size_t>(1000 * version), 'x'));
    };
  };
  return {"a text file, such as a log of a run that resumes, is replaced",
          {0},
          "",
          write(1),
          write(2),
          [](const Place& place) {
            const auto size = static_cast<int64_t>(fs::file_size(place.folder + "/log"));
            expect(size % 1000 == 0, "the file is cut");
            return size / 1000;
          },
          [=](const Place& place) {
            write(3)(place);
            settled(place);
          }};
}

/// Version 1 has 10 lines, version 2 has 5, and version 3 has 3.
Scenario log_of_a_run() {
  const auto path = [](const Place& place) { return place.folder + "/log.jsonl"; };
  const auto keep = [path](int64_t lines) {
    return [path, lines](const Place& place) { train::keep_log_before(path(place), lines); };
  };
  return {"the log of a run that resumes, a file of lines, is cut",
          {0},
          "",
          [path](const Place& place) {
            std::string text;
            for (int64_t step = 0; step < 10; ++step)
              text += fmt::format("{{\"step\": {}, \"more\": \"{:900}\"}}\n", step, "");
            write_file(path(place), text);
          },
          keep(5),
          [path](const Place& place) {
            const auto text = read_file("log", path(place));
            const auto lines = std::count(text.begin(), text.end(), '\n');
            expect(lines == 10 || lines == 5 || lines == 3, "the log is cut");
            return lines == 10 ? 1 : lines == 5 ? 2 : 3;
          },
          [=](const Place& place) {
            keep(3)(place);
            settled(place);
          }};
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (const auto& [where, hosts] : std::vector<std::pair<std::string, std::vector<int>>>{
           {"", {0}}, {" by two ranks", {0, 0}}, {" on two hosts", {0, 1}}}) {
    all.push_back(commit("a checkpoint is written" + where, hosts, false, ""));
    all.push_back(commit("a checkpoint is replaced" + where, hosts, true, ""));
    all.push_back(commit("a checkpoint is replaced without RENAME_EXCHANGE" + where, hosts, true,
                         "exchange"));
    all.push_back(commit("a checkpoint is written without flock" + where, hosts, false, "flock"));
  }
  all.push_back(reading({0}));
  all.push_back(reading({0, 0}));
  all.back().name += " by two ranks";
  all.push_back(reading({0, 1}));
  all.back().name += " on two hosts";
  all.push_back(weights("a folder of weights is replaced", {0}, "w/"));
  all.push_back(weights("a folder of weights is replaced by two ranks", {0, 0}, "w/"));
  all.push_back(weights_over_one_file());
  all.push_back(weights_are_read());
  all.push_back(other_files());
  all.push_back(weights("a safetensors file is replaced", {0, 0}, "w.safetensors"));
  all.push_back(weights("a file for torch.load is replaced", {0, 0}, "w.pt"));
  all.push_back(optimizer_file());
  all.push_back(text_file());
  all.push_back(log_of_a_run());
  return all;
}

// Attempts

/// Runs `body` on the scenario's ranks.
void on_ranks(const Scenario& scenario, const std::string& base,
              const std::function<void(const Place&)>& body) {
  const auto ranks = static_cast<int>(scenario.hosts.size());
  const auto each = [&](ProcessGroup group, int rank) {
    body({std::move(group), base + "/host-" + std::to_string(scenario.hosts[rank])});
  };
  if (std::count(scenario.hosts.begin(), scenario.hosts.end(), 0) == ranks) run_ranks(ranks, each);
  else testing::run_ranks_on(scenario.hosts, each);
}

/// The result of a process: "" after success, what it says, or how it ended.
std::string in_process(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    at::set_num_threads(1);  // the thread pool of libtorch does not survive a fork
    spdlog::set_level(spdlog::level::off);
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = std::string("error: ") + error.what();
    }
    std::printf("%s", text.c_str());
    std::fflush(stdout);
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char part[4096];
  for (;;) {
    pollfd ready{ends[0], POLLIN, 0};
    if (::poll(&ready, 1, kSeconds * 1000) != 1) {
      ::kill(pid, SIGKILL);
      text += "hangs";
      break;
    }
    const ssize_t got = ::read(ends[0], part, sizeof part);
    if (got <= 0) break;
    text.append(part, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (WIFSIGNALED(status)) return text + "signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return text + "exit " + std::to_string(WEXITSTATUS(status));
  return text;
}

struct Totals {
  long operations = 0, tried = 0, findings = 0;
};

class Campaign {
 public:
  Campaign(std::string base, long most) : base_(std::move(base)), most_(most) {}

  void run(const Scenario& scenario) {
    fs::remove_all(base_);
    for (const int host : scenario.hosts)
      fs::create_directories(base_ + "/good/host-" + std::to_string(host));
    const std::string prepared = in_process([&] {
      on_ranks(scenario, base_ + "/good", scenario.prepare);
      return std::string();
    });
    if (!prepared.empty()) return find(scenario, "it cannot be prepared", prepared);
    for (int rank = 0; rank < static_cast<int>(scenario.hosts.size()); ++rank) {
      std::map<std::string, long> counts;  // of the operations that a failure can be done to
      for (size_t number = 0; number < kHow.size(); ++number) {
        const auto& [how, like] = kHow[number];
        if (counts.count(like) == 0) counts[like] = count(scenario, rank, like);
        run(scenario, rank, how, counts[like], number);
      }
    }
  }

  Totals totals;

 private:
  /// Each kind of failure, and one that can be done to the same operations.
  static constexpr std::array<std::pair<const char*, const char*>, 9> kHow{{{"kill", "EIO"},
                                                                            {"EIO", "EIO"},
                                                                            {"EIO+", "EIO"},
                                                                            {"ENOSPC", "ENOSPC"},
                                                                            {"ENOSPC+", "ENOSPC"},
                                                                            {"ESTALE", "EIO"},
                                                                            {"EMFILE", "EMFILE"},
                                                                            {"EINTR", "EINTR"},
                                                                            {"short", "short"}}};

  long count(const Scenario& scenario, int rank, const std::string& how) {
    const std::string counted = attempt(scenario, rank, how, 0);
    if (counted.find("done") == counted.npos)
      find(scenario, "it fails undisturbed, rank " + std::to_string(rank), counted);
    return std::strtol(counted.c_str(), nullptr, 10);
  }

  /// `number`: of the kind, so that each begins with another operation.
  void run(const Scenario& scenario, int rank, const std::string& how, long count, size_t number) {
    totals.operations += count;
    const long step = std::max(1L, (count + most_ - 1) / most_);
    const long first =
        step * static_cast<long>(2 * number + 1) / static_cast<long>(2 * kHow.size());
    for (long at = 1 + first; at <= count; at += step) {
      const std::string where = how + " at operation " + std::to_string(at) + " of " +
                                std::to_string(count) + " of rank " + std::to_string(rank);
      const std::string result = attempt(scenario, rank, how, at);
      ++totals.tried;
      const bool done = result.find("done") != result.npos;
      const bool harmless = how == "EINTR" || how == "short";
      const bool killed = result == "signal 9" && how == "kill";
      const bool error = result.find("error: ") != result.npos && how != "kill" && !harmless;
      if (!done && !killed && !error) find(scenario, where, result);
      const std::string state = in_process([&] {
        check(scenario, done);
        return std::string();
      });
      if (!state.empty()) find(scenario, where, state + "; the attempt: " + result);
    }
  }

  /// "N done", where N is the number of operations, or what went wrong.
  std::string attempt(const Scenario& scenario, int rank, const std::string& how, long at) {
    fs::remove_all(base_ + "/work");
    fs::copy(base_ + "/good", base_ + "/work", fs::copy_options::recursive);
    return in_process([&] {
      failing_files_lack(scenario.lacks.c_str());
      on_ranks(scenario, base_ + "/work", [&](const Place& place) {
        if (place.group.rank() == rank)
          failing_files_begin((base_ + "/work").c_str(), how.c_str(), at, false);
        scenario.act(place);
      });
      const long count = failing_files_count();
      failing_files_begin("", "", 0, false);
      return std::to_string(count) + " done";
    });
  }

  void check(const Scenario& scenario, bool done) {
    if (scenario.lacks != "flock") failing_files_lack(scenario.lacks.c_str());
    const auto base = base_ + "/work";
    on_ranks(scenario, base, [&](const Place& place) {
      const int64_t version = scenario.found(place);
      expect(version == scenario.after || (!done && version == 1),
             "a reader finds version " + std::to_string(version));
    });
    if (scenario.reads) return;
    on_ranks(scenario, base, scenario.again);
    on_ranks(scenario, base, [&](const Place& place) {
      expect(scenario.found(place) == 3, "the next save is not found");
    });
  }

  void find(const Scenario& scenario, const std::string& where, const std::string& what) {
    ++totals.findings;
    std::printf("finding: %s: %s: %s\n", scenario.name.c_str(), where.c_str(), what.c_str());
    std::fflush(stdout);
  }

  std::string base_;
  long most_;
};

}  // namespace

int main(int argc, char** argv) {
  long most = 1'000'000;
  long part = 0, parts = 1;
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--most" && i + 1 < argc) {
      most = std::atol(argv[++i]);
    } else if (word == "--part" && i + 2 < argc) {
      part = std::atol(argv[++i]);
      parts = std::max(1L, std::atol(argv[++i]));
    } else {
      words.push_back(word);
    }
  }
  at::set_num_threads(1);
  std::string base = (fs::exists("/dev/shm") ? "/dev/shm" : fs::temp_directory_path().string()) +
                     "/tessera-files-XXXXXX";
  if (::mkdtemp(base.data()) == nullptr) return 2;
  Campaign campaign(base, std::max(1L, most));
  int chosen = 0;
  long number = 0;
  for (const auto& scenario : scenarios()) {
    if (number++ % parts != part) continue;
    const bool wanted = std::any_of(words.begin(), words.end(), [&](const auto& word) {
      return scenario.name.find(word) != scenario.name.npos;
    });
    if (!words.empty() && !wanted) continue;
    ++chosen;
    const Totals before = campaign.totals;
    campaign.run(scenario);
    std::printf("%s: %ld of %ld operations tried, %ld findings\n", scenario.name.c_str(),
                campaign.totals.tried - before.tried,
                campaign.totals.operations - before.operations,
                campaign.totals.findings - before.findings);
    std::fflush(stdout);
  }
  fs::remove_all(base);
  std::printf("%ld of %ld operations tried in %d scenarios, %ld findings\n", campaign.totals.tried,
              campaign.totals.operations, chosen, campaign.totals.findings);
  return chosen == 0 ? 2 : campaign.totals.findings > 0 ? 1 : 0;
}
