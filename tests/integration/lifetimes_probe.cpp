// lifetimes_probe: a rank that trains two steps with an object of the library and ends.
// From the environment, because an object may be made before main():
//   PROBE_BACKEND   auto, tcp, gloo
//   PROBE_OBJECT    group, zero, ddp, fsdp, distributed, local_sgd, store, join, loader;
//                   several with commas between them
//   PROBE_LIFETIME  local, static, filled (a global that main() fills), early (made before main()),
//                   leaked, exit (a local while exit() is called); a child is forked, ends with
//                   what it has inherited, and the parent goes on: fork_exit, fork__exit,
//                   fork_return, fork_use
//   PROBE_LOCALE    grouping: a global locale that writes 12.5 as 1.2,5; else a name for
//   setlocale() PROBE_WORLDS    how many worlds are made, one after the other, before the one that
//   is used PROBE_GONE      the rendezvous folder is removed before the group is split PROBE_NOISE
//   how many MB each rank prints before it trains
// Each rank prints "done RANK" and makes the file PROBE_DONE with its rank at the end.
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <locale>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include "tessera/tessera.h"

using namespace tessera;

namespace {

std::string given(const char* name, const std::string& otherwise = "") {
  const char* const value = std::getenv(name);
  return value ? value : otherwise;
}

struct German : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\1"; }  // not "\3": pids may be small
};

bool set_locale() {
  const auto name = given("PROBE_LOCALE");
  if (name == "grouping") std::locale::global(std::locale(std::locale(), new German));
  else if (!name.empty() && !std::setlocale(LC_ALL, name.c_str())) std::_Exit(9);
  return true;
}
const bool locale_is_set = set_locale();

[[noreturn]] void give_up(const std::string& text) {
  std::fprintf(stderr, "probe: %s\n", text.c_str());
  std::_Exit(8);
}

/// Objects of the library that are destroyed in reverse order.
struct Held {
  std::optional<ProcessGroup> world;
  std::vector<std::shared_ptr<void>> objects;
  std::vector<std::function<void()>> steps;
  std::vector<Work> under_way;
  void step_twice() {
    for (int i = 0; i < 2; ++i)
      for (const auto& step : steps) step();
  }
  ~Held() {
    steps.clear();
    while (!objects.empty()) objects.pop_back();
  }
};

torch::nn::Sequential model() {
  return torch::nn::Sequential(torch::nn::Linear(40, 40), torch::nn::ReLU(),
                               torch::nn::Linear(40, 40));
}

template <class Object>
Object& keep(Held& held, std::shared_ptr<Object> object) {
  held.objects.push_back(object);
  return *object;
}

torch::Tensor input() { return torch::ones({4, 40}); }

struct Numbers : Dataset {
  int64_t size() const override { return 100; }
  std::string describe() const override { return "numbers"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    return {torch::tensor(samples, torch::kFloat), torch::tensor(samples, torch::kFloat), {}};
  }
};

void add_object(Held& held, const std::string& object) {
  auto& world = *held.world;
  const auto adamw = default_optimizers().factory("AdamW", {{"lr", 1e-3}});
  if (object == "group") {
    auto& group = keep(held, std::make_shared<ProcessGroup>(world.split(0).value()));
    held.steps.push_back([&] {
      group.barrier();
      // Each group has a thread now, and work under way when the process forks.
      held.under_way.push_back(world.all_reduce_async(torch::ones({1 << 20})));
      held.under_way.push_back(group.all_reduce_async(torch::ones({7})));
    });
  } else if (object == "store") {
    const auto folder = given("PROBE_FOLDER");
    auto& store = keep(held, std::make_shared<CheckpointStore>(folder, world));
    // Ends with a writer that has not committed, so that its files are unfinished.
    held.steps.push_back([&, n = int64_t{0}, open = std::shared_ptr<CheckpointWriter>()]() mutable {
      if (open) (void)open->commit();
      open = std::make_shared<CheckpointWriter>(store, n++);
      open->add_tensors("w" + std::to_string(world.rank()) + ".safetensors",
                        {{"w", torch::ones({9})}});
    });
  } else if (object == "loader") {
    auto& loader = keep(
        held, std::make_shared<BatchLoader>(
                  std::make_shared<Numbers>(), [](int64_t i) { return std::vector<int64_t>{i}; }, 0,
                  50, BatchLoaderOptions{.threads = 2}));
    held.steps.push_back([&] {
      (void)loader.next();
      world.barrier();
    });
  } else if (object == "fsdp") {
    auto net = model();
    auto& fsdp =
        keep(held, std::make_shared<FullyShardedDataParallel<torch::nn::Sequential>>(
                       net, world, FullyShardedDataParallelOptions{.wrap_policy = wrap_leaves()}));
    std::shared_ptr<torch::optim::Optimizer> made =
        adamw({torch::optim::OptimizerParamGroup(fsdp.parameters())});
    auto& optimizer = keep(held, made);
    held.steps.push_back([&] {
      fsdp(input()).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    });
  } else if (object == "distributed") {
    auto& net = keep(held, std::make_shared<torch::nn::Sequential>(model()));
    auto& optimizer =
        keep(held, std::make_shared<DistributedOptimizer>(
                       *net, world, adamw, DistributedOptimizerOptions{.reduce_method = "mean"}));
    held.steps.push_back([&] {
      net->forward(input()).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    });
  } else if (object == "zero") {
    auto& net = keep(held, std::make_shared<torch::nn::Sequential>(model()));
    auto& zero = keep(held, std::make_shared<ZeroRedundancyOptimizer>(
                                *net, world, adamw,
                                ZeroRedundancyOptimizerOptions{.overlap = Overlap::background}));
    held.steps.push_back([&] {  // ends with gathers under way
      net->forward(input()).square().mean().backward();
      zero.step();
      zero.zero_grad();
    });
  } else {
    using Ddp = DistributedDataParallel<torch::nn::Sequential>;
    const auto overlap = object == "ddp" ? Overlap::background : Overlap::backward;
    auto& ddp = keep(held, std::make_shared<Ddp>(model(), world, Ddp::Options{.overlap = overlap}));
    auto& net = keep(held, std::make_shared<torch::nn::Sequential>(ddp.module()));
    auto& optimizer = keep(
        held, std::make_shared<FusedAdamW>(net->parameters(), torch::optim::AdamWOptions(1e-2)));
    LocalSgd* local = nullptr;
    if (object == "local_sgd")
      local =
          &keep(held, std::make_shared<LocalSgd>(world, parameter_shards(named_parameters(*net)),
                                                 LocalSgdOptions{.sync_every = 1}));
    const auto once = [&, local] {
      ddp(input()).square().mean().backward();
      optimizer.step();
      if (local) local->step();
      optimizer.zero_grad();
    };
    if (object != "join") held.steps.push_back(once);
    else
      held.steps.push_back([&, once] {
        join({ddp}, {}, [&](JoinLoop& iteration) {
          for (int i = 0; i <= world.rank(); ++i) {
            iteration.next();
            once();
          }
        });
      });
  }
}

std::shared_ptr<Held> make() {
  torch::set_num_threads(1);
  ProcessGroupOptions options;
  options.timeout = std::chrono::seconds(20);
  const auto backend = given("PROBE_BACKEND", "auto");
  if (backend != "auto") options.backend = backend == "tcp" ? Backend::TCP : Backend::Gloo;
  for (int i = std::atoi(given("PROBE_WORLDS", "0").c_str()); i > 0; --i)
    init_process_group(options).barrier();
  auto held = std::make_shared<Held>();
  held->world = init_process_group(options);
  if (!given("PROBE_GONE").empty()) {
    held->world->barrier();
    if (held->world->rank() == 0) std::filesystem::remove_all(given("TESSERA_RENDEZVOUS"));
    held->world->barrier();
    auto sum = torch::ones({1});
    held->world->split(0).value().all_reduce(sum);
    if (sum.item<float>() != held->world->size()) give_up("wrong sum in the split group");
  }
  const std::string line(999, 'x');
  for (int i = std::atoi(given("PROBE_NOISE", "0").c_str()) * 1000; i > 0; --i)
    std::puts(line.c_str());
  std::istringstream objects(given("PROBE_OBJECT", "group"));
  for (std::string object; std::getline(objects, object, ',');) add_object(*held, object);
  held->step_twice();
  return held;
}

/// The parent goes on after its child has ended with what it had inherited.
void go_on(Held& held, pid_t child) {
  int status = 0;
  for (int i = 0; ::waitpid(child, &status, WNOHANG) == 0; ++i) {
    if (i == 1000) give_up("the child does not end");
    ::usleep(10'000);
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    give_up("status of the child: " + std::to_string(status));
  for (auto& work : held.under_way) work.wait();
  held.under_way.clear();
  held.step_twice();
  auto sum = torch::ones({3});
  held.world->all_reduce(sum);
  if (sum[2].item<float>() != held.world->size()) give_up("wrong sum");
}

void done(Held& held) {
  for (auto& work : held.under_way) work.wait();
  held.under_way.clear();
  held.world->barrier();
  std::ifstream statistics("/proc/self/status");
  std::string peak;
  for (std::string line; std::getline(statistics, line);)
    if (line.starts_with("VmRSS")) peak = line;
  std::printf("done %d on %s %s\n", held.world->rank(), held.world->backend_name().c_str(),
              peak.c_str());
  std::fflush(stdout);
  std::ofstream(given("PROBE_DONE", "/dev/null") +
                (given("PROBE_DONE").empty() ? "" : given("RANK")));
}

std::shared_ptr<Held> filled;
std::shared_ptr<Held> early = given("PROBE_LIFETIME") == "early" ? make() : nullptr;

/// A child that uses the group gets an error at once.
void use_in_child(Held& held) {
  try {
    held.world->barrier();
  } catch (const UsageError& error) {
    if (std::string(error.what()).find("forked") != std::string::npos) std::exit(0);
  }
  std::_Exit(7);
}

int run(const std::string& lifetime) {
  if (lifetime == "early") {
    done(*early);
    return 0;
  }
  if (lifetime == "static") {
    static auto held = make();
    done(*held);
    return 0;
  }
  if (lifetime == "leaked") {
    done(**new std::shared_ptr<Held>(make()));
    return 0;
  }
  filled = make();
  if (lifetime == "filled") {
    done(*filled);
    return 0;
  }
  auto held = filled;
  if (!lifetime.starts_with("fork_")) {
    filled.reset();
    done(*held);
    if (lifetime == "exit") std::exit(0);
    return lifetime == "local" ? 0 : 6;
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(8);
    if (lifetime == "fork_exit") std::exit(0);
    if (lifetime == "fork__exit") ::_exit(0);
    if (lifetime == "fork_use") use_in_child(*held);
    return lifetime == "fork_return" ? 0 : 6;
  }
  go_on(*held, child);
  done(*held);
  return 0;
}

}  // namespace

int main() {
  try {
    return run(given("PROBE_LIFETIME", "local"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "probe: %s\n", error.what());
    return 5;
  }
}
