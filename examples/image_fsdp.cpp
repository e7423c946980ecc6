// An image network of your own with FullyShardedDataParallel: data in MNIST's format, batch norms
// over the batch of all ranks, evaluation, weights that a plain network reads.
//   tessera run -n 2 image_fsdp FOLDER
#include <tessera/tessera.h>

struct StageImpl : torch::nn::Module {
  StageImpl(int64_t in, int64_t out) {
    using namespace torch::nn;
    layers = Sequential(Conv2d(Conv2dOptions(in, out, 3).padding(1).bias(false)), BatchNorm2d(out),
                        ReLU(), MaxPool2d(2));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) { return layers->forward(x); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Stage);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t classes)
      : first(register_module("first", Stage(1, 16))),
        second(register_module("second", Stage(16, 32))),
        head(register_module("head", torch::nn::Linear(32, classes))) {}
  torch::Tensor forward(torch::Tensor x) {
    return head(second->forward(first->forward(x)).mean({2, 3}));
  }
  Stage first, second;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

/// The part of right answers, over rounds of 50 images for each rank. Collective.
template <class Model>
double accuracy(Model&& model, const tessera::Dataset& images, tessera::ProcessGroup world) {
  torch::NoGradGuard no_grad;
  auto right = torch::zeros(1);
  const int64_t round = 50 * world.size(), count = images.size() / round * round;
  for (int64_t first = 0; first < count; first += round) {
    std::vector<int64_t> samples(50);
    std::iota(samples.begin(), samples.end(), first + 50 * world.rank());
    const auto batch = images.get(samples);
    right += model(batch.inputs).argmax(1).eq(batch.targets).sum();
  }
  world.all_reduce(right);
  return right.item<double>() / double(count);
}

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "images";
  auto world = tessera::init_process_group();
  const auto open = [&](const std::string& part) {
    return std::make_shared<tessera::IdxDataset>(
        tessera::IdxOptions{.images = folder + "/" + part + "-images-idx3-ubyte",
                            .labels = folder + "/" + part + "-labels-idx1-ubyte"});
  };
  const auto images = open("train"), test_images = open("t10k");

  torch::manual_seed(0);
  Net net(images->classes());
  tessera::convert_sync_batch_norm(*net, world);  // before the wrapper
  tessera::FullyShardedDataParallel fsdp(net, world,
                                         {.wrap_policy = tessera::wrap_by_type<StageImpl>()});
  torch::optim::Adam optimizer(fsdp.parameters(), 1e-2);
  fsdp.check_optimizer(optimizer);

  const int64_t batch = 60, own = batch / world.size(), steps = 3 * images->size() / batch;
  const tessera::Sampler sampler(images->size(), tessera::SampleOrder::shuffled, /*seed=*/1);
  const auto samples_of = [&](int64_t step) {
    return sampler.samples(step * batch + world.rank() * own, own);
  };
  tessera::BatchLoader loader(images, samples_of, 0, steps);
  while (loader.iteration() < steps) {
    const auto data = loader.next();
    auto loss = torch::nn::functional::cross_entropy(fsdp(data.inputs), data.targets);
    optimizer.zero_grad();
    loss.backward();
    fsdp.clip_grad_norm_(1.0);
    optimizer.step();
    if (world.rank() == 0 && loader.iteration() % 10 == 0)
      std::cout << "step " << loader.iteration() << ", loss " << loss.item<float>() << std::endl;
  }
  net->eval();
  const double sharded = accuracy(fsdp, *test_images, world);
  fsdp.save_state_dict("image_fsdp.safetensors");

  Net plain(images->classes());  // with ordinary batch norms
  tessera::load_state_dict(*plain, "image_fsdp.safetensors");
  plain->eval();
  const double loaded =
      accuracy([&](const auto& x) { return plain->forward(x); }, *test_images, world);
  if (world.rank() == 0)
    std::cout << "accuracy " << sharded << ", of the loaded weights " << loaded << std::endl;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
