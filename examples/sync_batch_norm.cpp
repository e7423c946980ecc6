// A network with batch norms whose statistics are those of the batch of all ranks. One rank and two
// ranks compute the same: each step takes 32 images over all ranks.
#include <tessera/tessera.h>

struct NetImpl : torch::nn::Module {
  explicit NetImpl(tessera::ProcessGroup norms)
      : features(register_module(
            "features",
            torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).bias(false)),
                                  torch::nn::BatchNorm2d(8), torch::nn::ReLU()))),
        norm(register_module("norm", tessera::SyncBatchNorm(8, norms))),
        head(register_module("head", torch::nn::Linear(8, 4))) {}
  torch::Tensor forward(torch::Tensor x) { return head(norm(features->forward(x).mean({2, 3}))); }

  torch::nn::Sequential features;
  tessera::SyncBatchNorm norm;  // a member: declared as SyncBatchNorm
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : "sync_batch_norm.safetensors";
  auto world = tessera::init_process_group();
  torch::manual_seed(0);
  Net net(*world.split(0));  // layers that are made by hand need a group of their own
  for (const auto& name : tessera::convert_sync_batch_norm(*net, world))  // elements of Sequentials
    if (world.rank() == 0) std::cout << "converted " << name << std::endl;
  const auto x = torch::randn({32, 1, 12, 12});
  const auto y = torch::randint(4, {32}, torch::kLong);

  tessera::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const int64_t own = 32 / world.size();
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto output = ddp(x.narrow(0, world.rank() * own, own));
    torch::nn::functional::cross_entropy(output, y.narrow(0, world.rank() * own, own)).backward();
    optimizer.step();
  }
  net->eval();  // local from here on: the running statistics are used
  if (world.rank() == 0) tessera::save_safetensors(path, tessera::state_dict(*net));
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
