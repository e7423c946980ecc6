// The same program as torch_peer.py in C++: the same GPT, sizes, batches and timing, with Tessera's
// strategies.
//
//   tessera run -n RANKS peer_twin STRATEGY [WIDTH LAYERS HEADS TOKENS VOCAB BATCH_PER_RANK STEPS]
//
// With "-cuda" behind STRATEGY the model is on the rank's CUDA device; ranks that share one
// exchange through the host's memory. peer_twin_mpi is the same program inside MPI (mpirun -n
// RANKS), with one more strategy, allreduce: one MPI_Allreduce a gradient after backward, and
// libtorch's Adam, as simulation codes do it by hand. STRATEGY: startup (ends after the first
// all-reduce) | none (no communication) | compute (forward and backward only) | ddp | zero |
// zero-shared (one copy of the parameters a host) | fsdp (one unit per block), each optionally with
// "-gloo". Rank 0 prints one JSON line of medians.
//
// GPT_ATTENTION=fused: libtorch's kernel instead of products and a softmax. GPT_DTYPE=bfloat16:
// autocast, with fsdp MixedPrecision. GPT_CHECKPOINT=1: activation checkpointing of each block.
// GPT_OFFLOAD=1: fsdp keeps its shards on the host. TUNE_PROCESS=0: ProcessGroupOptions's
// tune_process is off.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "tessera/detail/torch_compat.h"
#include "tessera/tessera.h"
#include "tessera/train/devices.h"
#ifdef PEER_TWIN_MPI
#include "tessera/mpi.h"
#endif

#if TESSERA_TORCH_AT_LEAST(2, 9)
#include <ATen/DeviceAccelerator.h>
#endif

namespace {

using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;
using torch::nn::LinearOptions;

/// Whether the environment sets `variable` to `value`.
bool chosen(const char* variable, const char* value) {
  const char* text = std::getenv(variable);
  return text && std::string(text) == value;
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads_) : heads(heads_) {
    ln1 = register_module("ln1", LayerNorm(LayerNormOptions({width})));
    ln2 = register_module("ln2", LayerNorm(LayerNormOptions({width})));
    qkv = register_module("qkv", Linear(width, 3 * width));
    proj = register_module("proj", Linear(width, width));
    fc = register_module("fc", Linear(width, 4 * width));
    out = register_module("out", Linear(4 * width, width));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto b = x.size(0), t = x.size(1), c = x.size(2);
    auto parts = qkv(ln1(x)).split(c, 2);
    for (auto& part : parts) part = part.view({b, t, heads, c / heads}).transpose(1, 2);
    x = x + proj(attend(parts[0], parts[1], parts[2]).transpose(1, 2).reshape({b, t, c}));
    return x + out(torch::gelu(fc(ln2(x))));
  }

  /// Causal attention of [b, heads, t, width] tensors.
  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v) const {
#if TESSERA_TORCH_AT_LEAST(2, 2)
    if (fused) return at::scaled_dot_product_attention(q, k, v, {}, 0, true);
#endif
    const auto scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
    const auto mask = torch::ones({q.size(2), q.size(2)}, q.options().dtype(torch::kBool)).triu(1);
    return scores.masked_fill(mask, -std::numeric_limits<float>::infinity()).softmax(-1).matmul(v);
  }

  int64_t heads;
  bool fused = chosen("GPT_ATTENTION", "fused");
  LayerNorm ln1{nullptr}, ln2{nullptr};
  Linear qkv{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl(int64_t width, int64_t layers, int64_t heads, int64_t tokens, int64_t vocab) {
    te = register_module("te", Embedding(vocab, width));
    pe = register_module("pe", Embedding(tokens, width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width, heads));
    ln = register_module("ln", LayerNorm(LayerNormOptions({width})));
    head = register_module("head", Linear(LinearOptions(width, vocab).bias(false)));
  }

  torch::Tensor forward(torch::Tensor x) {
    auto y = te(x) + pe(torch::arange(x.size(1), x.device()));
    for (const auto& block : *blocks) {
      const auto run = [&](const torch::Tensor& h) { return block->as<BlockImpl>()->forward(h); };
      y = checkpointing ? tessera::checkpoint(run, y) : run(y);
    }
    return head(ln(y));
  }

  bool checkpointing = chosen("GPT_CHECKPOINT", "1");
  Embedding te{nullptr}, pe{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  LayerNorm ln{nullptr};
  Linear head{nullptr};
};
TORCH_MODULE(Gpt);

/// An environment variable of the launcher.
int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

int device_count(at::DeviceType type) { return c10::impl::VirtualGuardImpl(type).deviceCount(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double pss_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    if (word == "Pss:") {
      double kib;
      file >> kib;
      return kib / 1024;
    }
  }
  return 0;
}

/// The most that the allocator of a device has handed out, where libtorch tells it.
double peak_device_mib([[maybe_unused]] at::Device device) {
#if TESSERA_TORCH_AT_LEAST(2, 9)
  if (!device.is_cpu())
    return static_cast<double>(
               at::accelerator::getDeviceStats(device.index()).allocated_bytes[0].peak) /
           (1 << 20);
#endif
  return 0;
}

#ifdef PEER_TWIN_MPI
struct Mpi {
  Mpi() { MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level); }
  ~Mpi() { MPI_Finalize(); }
  int level = 0;
};

void average_by_hand(const torch::nn::Module& model, int size) {
  for (auto& p : model.parameters()) {
    MPI_Allreduce(MPI_IN_PLACE, p.grad().data_ptr<float>(), static_cast<int>(p.numel()), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
    p.mutable_grad() /= size;
  }
}
#else
void average_by_hand(const torch::nn::Module&, int) {}
#endif

/// The median time of one comparison of all parameters.
double check_replicas_ms(const torch::nn::Module& model, const tessera::ProcessGroup& world) {
  std::vector<std::pair<std::string, torch::Tensor>> replicas;
  for (const auto& p : model.named_parameters()) replicas.emplace_back(p.key(), p.value());
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    const auto start = std::chrono::steady_clock::now();
    tessera::check_replicas(replicas, world);
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
  }
  return median(times);
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  std::string strategy = argc > 1 ? argv[1] : "zero";
  int64_t size[7] = {384, 6, 6, 128, 256, 4, 12};
  for (int i = 2; i < argc && i < 9; ++i) size[i - 2] = std::atoll(argv[i]);
  const auto [width, layers, heads, tokens, vocab, batch, steps] =
      std::tuple(size[0], size[1], size[2], size[3], size[4], size[5], size[6]);

  tessera::ProcessGroupOptions options;
  at::Device device = at::kCPU;
  if (strategy.ends_with("-cuda")) {
    device = tessera::device_of("cuda", number_from("LOCAL_RANK", 0));
    const bool own = device_count(device.type()) >= number_from("WORLD_SIZE", 1);
    if (own) options.backend = tessera::Backend::NCCL;
    else options.staged_device = at::kCUDA;
    strategy.resize(strategy.size() - 5);
  }
  if (strategy.ends_with("-gloo")) {
    options.backend = tessera::Backend::Gloo;
    strategy.resize(strategy.size() - 5);
  }
  // "ddp-int8": gradients travel so between hosts; of the others the parameters too.
  tessera::WireOptions wire;
  for (const auto format : {tessera::WireFormat::bfloat16, tessera::WireFormat::int8}) {
    const auto suffix = "-" + to_string(format);
    if (!strategy.ends_with(suffix)) continue;
    strategy.resize(strategy.size() - suffix.size());
    wire.gradients = format;
    if (strategy != "ddp") wire.parameters = format;
  }
  const c10::DeviceGuard own_device(device);
  options.tune_process = !chosen("TUNE_PROCESS", "0");  // as the trainer does
#ifdef PEER_TWIN_MPI
  const Mpi mpi;
  auto world = tessera::init_process_group(MPI_COMM_WORLD, options);
#else
  auto world = tessera::init_process_group(options);
#endif
  if (strategy == "startup") {
    world.all_reduce(torch::ones({1}));
    std::cout << "done" << std::endl;
    return 0;
  }
  torch::set_num_threads(1);
  torch::manual_seed(0);
  Gpt model(width, layers, heads, tokens, vocab);
  model->to(device);
  const bool bfloat16 = chosen("GPT_DTYPE", "bfloat16");
  const auto adam = tessera::default_optimizers().factory("Adam", {{"lr", 1e-3}});
  std::unique_ptr<tessera::DistributedDataParallel<Gpt>> ddp;
  std::unique_ptr<tessera::FullyShardedDataParallel<Gpt>> fsdp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  int64_t parameters = 0;
  for (const auto& p : model->parameters()) parameters += p.numel();
  // As the trainer chooses it.
  const auto overlap =
      world.messages_between_hosts() ? tessera::Overlap::background : tessera::Overlap::backward;
  if (strategy == "fsdp") {
    fsdp = std::make_unique<tessera::FullyShardedDataParallel<Gpt>>(
        model, world,
        tessera::FullyShardedDataParallelOptions{
            .wrap_policy = tessera::wrap_by_type<BlockImpl>(),
            // On one host a gather is a barrier, and there is nothing to prefetch.
            .backward_prefetch = world.same_host() ? tessera::BackwardPrefetch::none
                                                   : tessera::BackwardPrefetch::pre,
            .mixed_precision = {.param_dtype =
                                    bfloat16 ? std::optional(at::kBFloat16) : std::nullopt},
            .cpu_offload = chosen("GPT_OFFLOAD", "1"),
            .wire = wire});
    optimizer = adam({torch::optim::OptimizerParamGroup(fsdp->parameters())});
  } else if (strategy.starts_with("zero")) {
    optimizer = std::make_unique<tessera::ZeroRedundancyOptimizer>(
        *model, world, adam,
        tessera::ZeroRedundancyOptimizerOptions{
            .overlap = overlap, .share_parameters = strategy == "zero-shared", .wire = wire});
  } else {
    if (strategy == "ddp")
      ddp = std::make_unique<tessera::DistributedDataParallel<Gpt>>(
          model, world, tessera::DistributedDataParallelOptions{.overlap = overlap, .wire = wire});
    if (strategy == "allreduce")
      optimizer = std::make_unique<torch::optim::Adam>(model->parameters(), 1e-3);
    else optimizer = adam({torch::optim::OptimizerParamGroup(model->parameters())});
  }

  auto precision = tessera::compat::AutocastState::current();
  if (bfloat16 && !fsdp) precision.cpu = precision.cuda = {true, at::kBFloat16};
  auto data = at::make_generator<at::CPUGeneratorImpl>(world.rank());
  std::vector<double> step_ms, optimizer_ms;
  torch::Tensor loss;
  std::optional<Clock::time_point> previous;
  // A step is measured from its start to the next start, because a gather may go on after step().
  const auto begin_step = [&] {
    if (!device.is_cpu()) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      guard.synchronizeStream(guard.getStream(device));
    }
    world.barrier();
    const auto now = Clock::now();
    if (previous)
      step_ms.push_back(std::chrono::duration<double, std::milli>(now - *previous).count());
    previous = now;
  };
  for (int64_t step = 0; step < steps; ++step) {
    const auto x = torch::randint(0, vocab, {batch, tokens + 1}, data, torch::kLong).to(device);
    begin_step();
    const auto input = x.narrow(1, 0, tokens);
    {
      const tessera::compat::AutocastState::Scope scope(precision);
      const auto y = ddp ? (*ddp)(input) : fsdp ? (*fsdp)(input) : model(input);
      loss = torch::nn::functional::cross_entropy(y.reshape({-1, vocab}),
                                                  x.narrow(1, 1, tokens).reshape({-1}));
    }
    at::autocast::clear_cache();
    loss.backward();
    if (strategy == "allreduce") average_by_hand(*model, world.size());
    const auto middle = Clock::now();
    if (strategy != "compute") optimizer->step();
    const auto end = Clock::now();
    for (auto& p : model->parameters()) p.mutable_grad() = torch::Tensor();
    if (fsdp)
      for (auto& p : fsdp->parameters()) p.mutable_grad() = torch::Tensor();
    optimizer_ms.push_back(std::chrono::duration<double, std::milli>(end - middle).count());
  }
  begin_step();
  // The memory of the steps, before the comparison of replicas takes some.
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double pss = pss_mib();
  const auto replicas_ms = fsdp ? 0 : check_replicas_ms(*model, world);  // FSDP has no replicas
  if (world.rank() != 0) return 0;
  const auto kept = [&](const std::vector<double>& all) {
    return median({all.begin() + 2, all.end()});
  };
  std::cout << nlohmann::json{{"strategy", strategy},
                              {"backend", world.backend_name()},
                              {"ranks", world.size()},
                              {"parameters", parameters},
                              {"step_ms", kept(step_ms)},
                              {"optimizer_ms", kept(optimizer_ms)},
                              {"peak_rss_mib", usage.ru_maxrss / 1024},
                              {"pss_mib", pss},
                              {"peak_device_mib", std::round(peak_device_mib(device))},
                              {"check_replicas_ms", replicas_ms},
                              {"loss", loss.item<float>()}}
                   .dump()
            << std::endl;
}
