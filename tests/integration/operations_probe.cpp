// operations_probe CONFIG.yaml [key=value ...]
// `tessera train` with components that hang or are slow. The dataset Points, the model Line, the
// loss of Line and the hook Slow do what the config asks for, on one rank at one step.
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include "tessera/tessera.h"
#include "tessera/train/registries.h"

using namespace tessera;

void sleep_for_seconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// Has a name in stacks.
[[gnu::noinline, gnu::visibility("default")]] void spin_for_ever() {
  for (;;) asm volatile("");
}

/// Until malloc() fails; then spins as OpenBLAS does when it gets no memory.
__attribute__((noinline)) void spin_without_memory() {
  const rlimit limit{1, 1};
  ::setrlimit(RLIMIT_AS, &limit);
  for (size_t bytes = 1 << 20; bytes >= 16; bytes /= 2) {
    while (std::malloc(bytes) != nullptr) {
    }
  }
  spin_for_ever();
}

bool hangs_on(int64_t rank) {
  const char* own = std::getenv("RANK");  // not set without a launcher
  return own != nullptr && std::to_string(rank) == own;
}

struct Points : Dataset {
  struct Options {
    int64_t rank = -1, sample = -1;
    void read(OptionReader& keys) {
      keys.read("rank", rank, "rank that hangs");
      keys.read("sample", sample, "sample that it hangs in");
    }
  };
  explicit Points(const Options& chosen) : options(chosen) {}
  int64_t size() const override { return 100'000; }
  std::string describe() const override { return "points"; }
  [[gnu::noinline, gnu::visibility("default")]] Batch get(
      const std::vector<int64_t>& samples) const override {
    const bool mine = hangs_on(options.rank);
    for (const auto sample : samples)
      while (mine && sample == options.sample) sleep_for_seconds(1);
    const auto x = torch::tensor(samples, torch::kFloat).sin().unsqueeze(1);
    return {x, 2 * x, {}};
  }
  Options options;
};

struct LineImpl : torch::nn::Module {
  struct Options {
    int64_t rank = -1, step = -1;
    double slow = 0;
    std::string how = "spin", parameter = "weight", buffer;
    void read(OptionReader& keys) {
      keys.read("rank", rank, "rank that hangs");
      keys.read("step", step, "step in which it hangs");
      keys.read("slow", slow, "seconds of a forward");
      keys.read_choice("how", how, {"spin", "exhaust"}, "how it hangs");
      keys.read("parameter", parameter, "name of the parameter");
      keys.read("buffer", buffer, "name of a buffer");
    }
  };
  explicit LineImpl(const Options& chosen) : options(chosen) {
    const auto name = options.parameter == "bytes" ? "w\xff" : options.parameter;
    weight = register_parameter(name, torch::zeros({1, 1}));
    if (!options.buffer.empty()) register_buffer(options.buffer, torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    for (double slept = 0; slept < options.slow; slept += 0.01) sleep_for_seconds(0.01);
    const bool mine = hangs_on(options.rank);
    if (torch::GradMode::is_enabled() && mine && calls++ == options.step)
      options.how == "spin" ? spin_for_ever() : spin_without_memory();
    return x.matmul(weight);
  }
  Options options;
  int64_t calls = 0;
  at::Tensor weight;
};
TORCH_MODULE(Line);

struct Slow : RunHook {
  double step = 0, save = 0;
  void after_step(RunState&) override { sleep_for_seconds(step); }
  std::string state() const override {
    sleep_for_seconds(save);
    return "";
  }
};

int main(int argc, char** argv) {
  registry::datasets().add<Points>("Points");
  registry::models().add<Line>("Line");
  registry::losses().add("square", [](const at::Tensor& output, const Batch& batch) -> Losses {
    return {{"loss", (output - batch.targets).square().mean()}};
  });
  registry::hooks().add("Slow", [](OptionReader& options) {
    double step = 0, save = 0;
    options.read("step", step, "seconds after each step");
    options.read("save", save, "seconds in each checkpoint");
    options.finish();
    return [=]() -> std::shared_ptr<RunHook> {
      auto hook = std::make_shared<Slow>();
      hook->step = step;
      hook->save = save;
      return hook;
    };
  });
  return train_main(argc, argv);
}
