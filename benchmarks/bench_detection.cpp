// Runs forward and backward of a model in which all units stay gathered, plain or sharded. Counting
// instructions under callgrind then shows the cost of detecting the use of parameters.
//
//   bench_detection plain|sharded mlp|gpt STEPS
//
// The sharded model keeps shards in double and computes in float, so that pages exist in a world of
// one rank. All parameters are frozen, so that nothing is gathered after the first step, except the
// GPT's position embedding, so that its backward has a gradient to compute.

#include <cstdlib>
#include <iostream>
#include <string>

#include "tessera/models/gpt2.h"
#include "tessera/tessera.h"

namespace {

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(16, 16));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Mlp);

template <class Net>
void run(Net net, const std::string& mode, int steps,
         const std::function<at::Tensor(const std::function<at::Tensor(at::Tensor)>&)>& loss) {
  for (auto& item : net->named_parameters())
    item.value().requires_grad_(item.key().find("wpe") != std::string::npos);
  if (mode == "plain") {
    for (int i = 0; i < steps; ++i) loss([&](at::Tensor x) { return net(x); }).backward();
    return;
  }
  net->to(torch::kDouble);
  tessera::FullyShardedDataParallelOptions options;
  options.wrap_policy = tessera::wrap_leaves();
  options.sharding_strategy = tessera::ShardingStrategy::shard_grad_op;
  options.mixed_precision.param_dtype = torch::kFloat;
  tessera::FullyShardedDataParallel fsdp(net, tessera::ProcessGroup(), options);
  for (int i = 0; i < steps; ++i) loss([&](at::Tensor x) { return fsdp(x); }).backward();
  std::cout << "gathers " << fsdp.stats().gathers_forward << " + " << fsdp.stats().gathers_backward
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "plain", model = argc > 2 ? argv[2] : "mlp";
  const int steps = argc > 3 ? std::atoi(argv[3]) : 10;
  torch::set_num_threads(1);
  if (model == "mlp") {
    const auto x = torch::randn({4, 16}).requires_grad_();
    run(Mlp(), mode, steps, [&](const auto& net) { return net(x).square().mean(); });
    return 0;
  }
  tessera::GPT2Options gpt;
  gpt.vocab_size = 256;
  gpt.n_positions = 128;
  gpt.n_embd = 384;
  gpt.n_layer = 6;
  gpt.n_head = 6;
  const auto tokens = torch::randint(0, 256, {1, 128});
  run(tessera::GPT2(gpt), mode, steps,
      [&](const auto& net) { return net(tokens).square().mean(); });
}
