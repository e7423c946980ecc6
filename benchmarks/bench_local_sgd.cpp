// Trains the job of a config of `tessera train` with rare synchronisation, each rank as a group of
// its own, and reports the bytes between the groups.
//
//   tessera run -n RANKS bench_local_sgd CONFIG.yaml MODE SYNC_EVERY WIRE BACKGROUND STEPS SEED
//
// MODE: ddp (gradients in every step) | average | nesterov. WIRE: float32 | int8. BACKGROUND: 0
// | 1. SEED: of the initial weights and of the order of the data. The last line that rank 0 prints
// is one JSON object: bytes that a rank sent for each token that it trained on, and the loss on the
// evaluation data. benchmarks/local_sgd.py prints a table.

#include <exception>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>

#include <nlohmann/json.hpp>

#include "tessera/tessera.h"

namespace {

using tessera::Batch;

/// A module whose forward is the loss.
struct LossModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const Batch&)> loss;

  torch::nn::Module& operator*() const { return *module; }
  const LossModule* operator->() const { return this; }
  at::Tensor forward(const Batch& batch) const { return loss(batch); }
};

double evaluate(const LossModule& model, const tessera::Dataset& data) {
  const torch::NoGradGuard no_grad;
  constexpr int64_t kSamples = 32;
  std::vector<int64_t> samples(static_cast<size_t>(std::min(kSamples, data.size())));
  std::iota(samples.begin(), samples.end(), 0);
  return model.loss(tessera::load_batch(data, samples)).item<double>();
}

nlohmann::json run(char** argv) {
  const std::string seed = argv[7];
  const auto config = tessera::load_config(argv[1], {"model.seed=" + seed, "data.seed=" + seed});
  const std::string mode = argv[2];
  tessera::LocalSgdOptions options;
  options.sync_every = std::stoll(argv[3]);
  options.wire =
      std::string(argv[4]) == "int8" ? tessera::OuterWire::int8 : tessera::OuterWire::float32;
  if (std::string(argv[5]) == "1") options.overlap = tessera::Overlap::background;
  options.outer =
      mode == "average" ? tessera::OuterOptimizer::average : tessera::OuterOptimizer::nesterov;
  const int64_t steps = std::stoll(argv[6]);

  auto group = tessera::init_process_group(config.parallel.group);
  const auto data = config.data.plan.load();
  const tessera::Sampler sampler(data.train->size(), config.data.order, config.data.seed);
  torch::manual_seed(config.model.seed);
  const auto made = config.model.plan.make({group, config.model.seed});
  const LossModule model{made.module, [made](const Batch& batch) {
                           return tessera::parse_losses(made.loss(batch)).total;
                         }};
  const auto named = tessera::named_parameters(*made.module);
  std::unique_ptr<tessera::DistributedDataParallel<LossModule>> ddp;
  std::unique_ptr<tessera::LocalSgd> local;
  if (mode == "ddp")
    ddp = std::make_unique<tessera::DistributedDataParallel<LossModule>>(model, group);
  else
    local = std::make_unique<tessera::LocalSgd>(group, tessera::parameter_shards(named), options);
  const auto optimizer =
      config.optimizer.factory()({torch::optim::OptimizerParamGroup(made.module->parameters())});
  const double lr = optimizer->param_groups()[0].options().get_lr();
  const int64_t each = config.train.global_batch / group.size();
  group.reset_stats();
  for (int64_t step = 0; step < steps; ++step) {
    tessera::Progress now;
    now.step = step;
    now.steps = steps;
    optimizer->param_groups()[0].options().set_lr(config.scheduler(now, lr));
    const auto batch = tessera::load_batch(
        *data.train, sampler.samples((step * group.size() + group.rank()) * each, each));
    optimizer->zero_grad();
    (ddp ? (*ddp)(batch) : model.loss(batch)).backward();
    optimizer->step();
    if (local) local->step();
  }
  const auto bytes = static_cast<double>(group.stats().payload_sent());
  if (local) local->synchronize();
  return {{"rank", group.rank()},
          {"ranks", group.size()},
          {"parameters", std::accumulate(named.begin(), named.end(), int64_t{0},
                                         [](int64_t sum, const auto& entry) {
                                           return sum + entry.second.numel();
                                         })},
          {"bytes_per_token",
           bytes / static_cast<double>(steps * each * data.train->tokens_per_sample())},
          {"eval_loss", evaluate(model, *data.val)}};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 8) {
      throw std::runtime_error(
          "usage: bench_local_sgd CONFIG.yaml MODE SYNC_EVERY WIRE BACKGROUND STEPS SEED");
    }
    const auto line = run(argv);
    if (line.at("rank") == 0) std::cout << line.dump() << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_local_sgd: " << error.what() << std::endl;
    return 1;
  }
}
