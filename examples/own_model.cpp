// Trains a model, a loss and a dataset of your own with all options of `tessera train`.
// On one rank:  own_model own_model.yaml
// On two ranks: own_model -n 2 own_model.yaml parallel.type=FullyShardedDataParallel
#include <tessera/tessera.h>

struct SpiralNetImpl : torch::nn::Module {
  struct Options {
    int64_t width = 32;
    void read(tessera::OptionReader& options) {
      options.read("width", width, "hidden units", tessera::kAtLeastOne);
    }
  };
  explicit SpiralNetImpl(const Options& options)
      : layers(register_module(
            "layers",
            torch::nn::Sequential(torch::nn::Linear(2, options.width), torch::nn::Tanh(),
                                  torch::nn::Linear(options.width, options.width),
                                  torch::nn::Tanh(), torch::nn::Linear(options.width, 2)))) {}
  torch::Tensor forward(torch::Tensor points) { return layers->forward(points); }

  torch::nn::Sequential layers;
};
TORCH_MODULE(SpiralNet);

/// Points on two spirals. The target of a sample is the number of its spiral.
struct Spirals : tessera::Dataset {
  int64_t size() const override { return 1000; }
  std::string describe() const override { return "two spirals"; }
  tessera::Batch get(const std::vector<int64_t>& samples) const override {
    const auto i = torch::tensor(samples, torch::kLong) % size();
    const auto spiral = i % 2, angle = i / 100.0;
    return {
        torch::stack({angle.cos(), angle.sin()}, 1) * (angle * (1 - 2 * spiral)).unsqueeze(1) / 2,
        spiral};
  }
  std::shared_ptr<const tessera::Dataset> validation() const { return std::make_shared<Spirals>(); }
};

int main(int argc, char** argv) {
  tessera::registry::models().add<SpiralNet>("SpiralNet");
  tessera::registry::datasets().add<Spirals>("Spirals");
  tessera::registry::losses().add(
      "margin", [](const at::Tensor& output, const at::Tensor& targets) {
        return torch::nn::functional::multi_margin_loss(output, targets);
      });
  tessera::registry::metrics().add_plan(
      "confidence",
      {.figures = {"confidence"},
       .accumulate =
           [](const at::Tensor& output, const tessera::Batch& batch) {
             const auto right = output.softmax(1).gather(1, batch.targets.view({-1, 1}));
             return torch::stack({right.sum(), torch::ones_like(right).sum()});
           },
       .result =
           [](const at::Tensor& total) {
             return std::vector<double>{(total[0] / total[1]).item<double>()};
           }});
  return tessera::train_main(argc, argv);
}
