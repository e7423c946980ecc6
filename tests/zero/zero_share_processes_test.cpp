#include <array>
#include <cstring>
#include <fstream>
#include <memory>

#include <malloc.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "comm/child.h"
#include "harness/temporary_folder.h"
#include "zero/zero_harness.h"

// Option share_parameters in real processes: the host's memory has the parameters once.

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr int64_t kMebi = 1 << 20, kStacked = 16, kStackedBytes = kStacked * 4 * kMebi;
constexpr int kProcesses = 2;

struct StackedImpl : torch::nn::Module {
  StackedImpl() {
    for (int64_t i = 0; i < kStacked; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false))));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Stacked);

int64_t proportional_set_size() {
  ::malloc_trim(0);
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  while (file >> word) {
    int64_t kilobytes = 0;
    if (word == "Pss:" && file >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

struct MeasuredProcess {
  int64_t pss, counted;
  double sum;  // of the parameters
};

MeasuredProcess train_in_process(ProcessGroup group, int rank, bool share) {
  at::set_num_threads(1);
  const int64_t before = proportional_set_size();
  torch::manual_seed(1);
  Stacked net;
  ZeroOptions options;
  options.share_parameters = share;
  Zero zero(*net, group, factory("SGD"), options);
  for (int step = 0; step < 2; ++step) {
    loss_of(net(at::ones({2, 1024}) * (rank + 1))).backward();
    zero.step();
    zero.zero_grad();
  }
  group.barrier();
  MeasuredProcess measured{proportional_set_size() - before, zero.memory().parameters, 0};
  group.barrier();
  for (const auto& parameter : net->parameters())
    measured.sum += parameter.to(at::kDouble).sum().item<double>();
  group.barrier();
  return measured;
}

/// What each rank measures in a process of its own.
std::array<MeasuredProcess, kProcesses> train_processes(bool share) {
  TemporaryFolder folder;
  auto* const results = static_cast<MeasuredProcess*>(
      ::mmap(nullptr, kProcesses * sizeof(MeasuredProcess), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  {
    std::vector<std::unique_ptr<Child>> children;
    for (int rank = 0; rank < kProcesses; ++rank) {
      children.push_back(std::make_unique<Child>([&, rank] {
        ::alarm(120);
        ProcessGroupOptions options;
        options.timeout = std::chrono::seconds(60);
        auto place = comm::World::start(rank, kProcesses, options);
        place.store = c10::make_intrusive<c10d::FileStore>(folder.path() + "/store", kProcesses);
        auto transport = comm::make_transport(place);
        results[rank] = train_in_process(ProcessGroup(std::make_shared<ProcessGroup::Impl>(
                                             std::move(place), std::move(transport))),
                                         rank, share);
      }));
    }
    for (auto& child : children) EXPECT_EQ(child->wait(), 0);
  }
  std::array<MeasuredProcess, kProcesses> measured{results[0], results[1]};
  ::munmap(results, kProcesses * sizeof(MeasuredProcess));
  return measured;
}

TEST(ZeroShareProcesses, HaveTheParametersOnceInMemory) {
  // Parameters once, and each rank's gradients. Beside them: what libtorch allocates at its first
  // use, activations, staging buffers.
  constexpr int64_t kFormula = kStackedBytes + kProcesses * kStackedBytes, kRest = 40 * kMebi;
  const auto once = train_processes(true), whole = train_processes(false);
  const int64_t shared = once[0].pss + once[1].pss, copies = whole[0].pss + whole[1].pss;
  std::printf("PSS of both ranks %ld MiB, formula %ld MiB, with whole copies %ld MiB\n",
              shared / kMebi, kFormula / kMebi, copies / kMebi);
  EXPECT_LE(shared, kFormula + kRest);
  EXPECT_GT(copies, kFormula + kRest) << "the test can fail";
  EXPECT_EQ(once[0].counted + once[1].counted, kStackedBytes);
  EXPECT_EQ(whole[0].counted, kStackedBytes);
  for (int rank = 0; rank < kProcesses; ++rank) EXPECT_EQ(once[rank].sum, whole[0].sum);
}

}  // namespace
