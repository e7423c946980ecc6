// What torch_files_test.py needs of the library:
//
//   torch_file_probe weights IN OUT [KEY]      reads weights and writes them again
//   torch_file_probe state IN OUT NAME…        the same for an optimizer's state
//   torch_file_probe train WEIGHTS STATE OUT_WEIGHTS OUT_STATE
//       AdamW over a Linear(3, 2): one more step with the gradient 1, state through a C++ optimizer
//   torch_file_probe open FILE…
//       reads weights; prints for each file the growth of its greatest memory in KiB and its CPU
//       time in ms
//   torch_file_probe libtorch                  prints the version of libtorch
//   torch_file_probe measure                   the same of a known load: 64 MiB, at least 100 ms
//
// Without arguments it runs the commands that it reads: fork_server.h.

#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>

#include <sys/resource.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/version.h>

#include "harness/fork_server.h"
#include "tessera/error.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim/torch_optimizer_state.h"
#include "tessera/weights/torch_file.h"

namespace {

using Words = std::vector<std::string>;

std::vector<std::pair<std::string, at::Tensor>> tensors_of(const tessera::TorchFile& file) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& entry : file.entries()) tensors.emplace_back(entry.name, file.load(entry.name));
  return tensors;
}

void train(const Words& words) {
  torch::nn::Linear model(3, 2);
  tessera::load_state_dict(*model, tensors_of(tessera::TorchFile(words[2], "model")));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.5));
  const auto named = tessera::named_parameters(*model);
  std::vector<std::string> names;
  for (const auto& [name, parameter] : named) names.push_back(name);
  tessera::load_state_dict(optimizer, named,
                           tessera::load_torch_optimizer_state(words[3], names, "optimizer"));
  for (const auto& [name, parameter] : named) parameter.mutable_grad() = at::ones_like(parameter);
  optimizer.step();
  tessera::save_torch_file(words[4], tessera::state_dict(*model));
  tessera::save_torch_optimizer_state(tessera::state_dict(optimizer, named), words[5]);
}

/// The greatest memory since the last call, in KiB.
int64_t peak_kib() {
  std::ifstream status("/proc/self/status");
  int64_t peak = 0;
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) peak = std::stoll(line.substr(6));
  std::ofstream("/proc/self/clear_refs") << "5";
  return peak;
}

/// CPU time of this process, all threads. Unlike the clock's it does not depend on the load of the
/// machine.
double cpu_ms() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& time) {
    return 1e3 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_usec);
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

/// Prints memory and time of `work`, and the text that it returns.
void measure(const std::function<std::string()>& work) {
  peak_kib();
  const int64_t before = peak_kib();
  const double begin = cpu_ms();
  const std::string text = work();
  const double took = cpu_ms() - begin;
  std::cout << peak_kib() - before << " " << took << " " << text << "\n";
}

std::string open(const std::string& path) {
  try {
    tensors_of(tessera::TorchFile(path));
    return "read";
  } catch (const tessera::UsageError& error) {
    return error.what();
  }
}

std::string known_load() {
  std::vector<char> memory(64 << 20);
  std::memset(memory.data(), 1, memory.size());
  for (const double begin = cpu_ms(); cpu_ms() - begin < 100;) {
  }
  return "load " + std::to_string(memory.back());
}

void run(const Words& words) {
  if (words[1] == "weights") {
    tessera::save_torch_file(
        words[3], tensors_of(tessera::TorchFile(words[2], words.size() > 4 ? words[4] : "")));
  } else if (words[1] == "state") {
    tessera::save_torch_optimizer_state(
        tessera::load_torch_optimizer_state(words[2], {words.begin() + 4, words.end()}), words[3]);
  } else if (words[1] == "train") {
    train(words);
  } else if (words[1] == "libtorch") {
    std::cout << TORCH_VERSION << "\n";
  } else if (words[1] == "measure") {
    measure(known_load);
  } else {
    for (size_t i = 2; i < words.size(); ++i) measure([&] { return open(words[i]); });
  }
}

int command(int argc, char** argv) {
  try {
    run({argv, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return argc > 1 ? command(argc, argv) : tessera::testing::serve(command);
}
