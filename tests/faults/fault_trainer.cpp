// fault_trainer CONFIG.yaml …
// The trainer with a hook, a model and a dataset that fail on purpose on one rank.
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>

#include <fcntl.h>
#include <signal.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include "tessera/tessera.h"

namespace {

int this_rank() {
  const char* rank = std::getenv("RANK");
  return rank == nullptr ? 0 : std::atoi(rank);
}

/// Tells the test when the fault began, in seconds of CLOCK_MONOTONIC.
void announce() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  std::fprintf(stderr, "fault at %lld.%09ld\n", static_cast<long long>(now.tv_sec), now.tv_nsec);
  std::fflush(stderr);
}

/// Where a fault happens: on one rank, after a number of steps, and only if the file `once`, which
/// is then made, does not exist.
struct Place {
  int64_t at = -1, rank = 1;
  std::string once;

  void read(tessera::OptionReader& keys) {
    keys.read("at", at, "steps done before the fault; -1: never");
    keys.read("rank", rank, "the rank with the fault");
    keys.read("once", once, "file that is made by the fault and prevents another one");
  }
  bool here(int64_t step) const { return step == at && this_rank() == rank && not_yet(); }
  /// True unless the file `once` exists, which is made.
  bool not_yet() const {
    if (once.empty()) return true;
    const int file = ::open(once.c_str(), O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0) ::close(file);
    return file >= 0;
  }
};

/// Writes NaN to this rank's first shard of a parameter, as an update would.
void write_nan(tessera::ModelWrapper& model) {
  const torch::NoGradGuard no_grad;
  for (const auto& shard : model.shards()) {
    if (shard.numel == 0) continue;
    shard.tensor.view({-1})[0] = NAN;
    return;
  }
}

/// Changes the last bit of one element that other ranks hold too.
void flip_bit(tessera::ModelWrapper& model) {
  const torch::NoGradGuard no_grad;
  const at::Tensor element = model.replicas().front().second.view({-1})[0];
  element.fill_(std::nextafter(element.item<float>(), 1e9F));
}

void await(const std::string& file) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (::access(file.c_str(), F_OK) != 0) {
    if (std::chrono::steady_clock::now() > deadline)
      throw tessera::UsageError("Fault: no file " + file + " within 60 s");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

struct Fault : tessera::RunHook {
  Place place;
  std::string kind, request, hold;
  int64_t value = 0, time_out = 0;

  void before_run(tessera::RunState& state) override {
    tessera::ProcessGroup group = state.model->group();
    if (time_out > 0) group.set_timeout(std::chrono::milliseconds(time_out));
  }
  std::string state() const override {
    const bool signals = kind == "signal_while_saving", sleeps = kind == "sleep_while_saving";
    if ((signals || sleeps) && this_rank() == place.rank && place.not_yet()) {
      announce();
      if (signals) ::raise(static_cast<int>(value));
      else std::this_thread::sleep_for(std::chrono::milliseconds(value));
    }
    return "";
  }
  void after_step(tessera::RunState& state) override {
    if (!request.empty() && ::unlink((request + std::to_string(this_rank())).c_str()) == 0) {
      announce();
      write_nan(*state.model);
    }
    const bool here = place.here(state.step);
    if (here) announce();
    if (kind == "nan" && state.step == place.at) {  // every rank has the shards of its own
      if (here) write_nan(*state.model);
      state.model->publish_shards();
    }
    if (!hold.empty() && state.step == place.at) await(hold);
    if (!here) return;
    if (kind == "signal") ::raise(static_cast<int>(value));
    if (kind == "signal_launcher") {
      ::kill(::getppid(), static_cast<int>(value));
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the others wait in step `at`
    }
    if (kind == "exit") std::_Exit(static_cast<int>(value));
    if (kind == "throw") throw tessera::UsageError("a hook of the program failed");
    if (kind == "terminate") std::terminate();
    if (kind == "late") std::this_thread::sleep_for(std::chrono::milliseconds(value));
    if (kind == "flip") flip_bit(*state.model);
  }
};

struct NetImpl : torch::nn::Module {
  struct Options {
    int64_t width = 16, wider_on = -1;
    void read(tessera::OptionReader& keys) {
      keys.read("width", width, "hidden units");
      keys.read("wider_on", wider_on, "rank with one hidden unit more; -1: none");
    }
  };
  explicit NetImpl(const Options& options) {
    const int64_t width = options.width + (this_rank() == options.wider_on ? 1 : 0);
    one = register_module("one", torch::nn::Linear(3, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    two = register_module("two", torch::nn::Linear(width, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return two(norm(one(x)).tanh()); }

  torch::nn::Linear one{nullptr}, two{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

/// 1200 samples of numbers, with faults that the options choose.
struct Samples : tessera::Dataset {
  struct Options {
    int64_t nan_at = -1, gradient_at = -1, spike_at = -1, throw_at = -1, fewer_on = -1;
    void read(tessera::OptionReader& keys) {
      keys.read("nan_at", nan_at, "sample with a NaN");
      keys.read("gradient_at", gradient_at, "sample with a gradient of NaN");
      keys.read("spike_at", spike_at, "sample with a large loss");
      keys.read("throw_at", throw_at, "sample that cannot be read");
      keys.read("fewer_on", fewer_on, "rank whose batches lack the last row");
    }
  };
  explicit Samples(const Options& chosen) : options(chosen) {}
  int64_t size() const override { return 1200; }
  std::string describe() const override { return "samples with faults"; }
  tessera::Batch get(const std::vector<int64_t>& samples) const override {
    auto i = torch::tensor(samples, torch::kLong);
    if (i.numel() > 1 && this_rank() == options.fewer_on) i = i.slice(0, 0, i.numel() - 1);
    if (i.eq(options.throw_at).any().item<bool>())
      throw tessera::UsageError("sample " + std::to_string(options.throw_at) + " is unreadable");
    const at::Tensor x = torch::stack({i.sin(), i.cos(), (i * 0.3).sin()}, 1);
    x.select(1, 0).masked_fill_(i.eq(options.nan_at), NAN);
    tessera::Batch batch{x, i.sin().gt(0).to(torch::kLong), {}};
    batch.extra["gradient"] = i.eq(options.gradient_at);
    batch.extra["spike"] = i.eq(options.spike_at);
    return batch;
  }
  Options options;
};

/// Cross entropy. A sample marked "gradient" adds zero with a gradient of NaN.
tessera::Losses faulty_loss(const at::Tensor& output, const tessera::Batch& batch) {
  at::Tensor loss = torch::nn::functional::cross_entropy(output, batch.targets);
  const at::Tensor rows = output.index({batch.extra.at("gradient")});
  if (rows.numel() > 0) loss = loss + (rows * 0).sqrt().sum();
  return {{"loss", loss + 1000 * batch.extra.at("spike").sum()}};
}

}  // namespace

int main(int argc, char** argv) {
  tessera::registry::models().add<Net>("Net");
  tessera::registry::datasets().add<Samples>("Samples");
  tessera::registry::losses().add("faulty", faulty_loss);
  tessera::registry::hooks().add("Fault", [](tessera::OptionReader& options) {
    Fault fault;
    fault.place.read(options);
    options.read("do", fault.kind,
                 "signal, signal_launcher, signal_while_saving, sleep_while_saving, exit, throw, "
                 "terminate, late, nan, flip or none");
    options.read(
        "request", fault.request,
        "when the file of this name and the rank's number appears, the rank removes it and "
        "writes NaN to its parameters");
    options.read("hold", fault.hold,
                 "all ranks wait after `at` steps until the file of this name exists");
    options.read("value", fault.value, "signal, exit code or milliseconds");
    options.read("time_out", fault.time_out, "of the run, not of its start, in ms; 0: as it is");
    options.finish();
    return
        [fault]() -> std::shared_ptr<tessera::RunHook> { return std::make_shared<Fault>(fault); };
  });
  return tessera::train_main(argc, argv);
}
